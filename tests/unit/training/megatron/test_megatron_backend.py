"""What the trainer contract does not ask of every backend, on ranks; and what lets Megatron run without CUDA."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.config.rules import Config
from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.factory import open_backend
from rlhpc.training.megatron.backend import Schedule, Work, close_groups, open_groups
from rlhpc.training.megatron.cpu import prepare_cpu
from rlhpc.training.megatron.model import HeadRequest, build_chunks
from rlhpc.training.megatron.model_config import transformer_config
from rlhpc.training.megatron.optimizer import MegatronAdamW, OptimizerSettings, wrap_chunks
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import STATE_KINDS
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.megatron.policy_ranks import give_weights
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config
from tests.unit.training.rank_processes import run_ranks

# --------------------- What the trainer contract does not ask of every backend: main weights, refusals, short messages

TP2 = {"backend": "megatron", "num_ranks": 2, "tensor_parallel": 2}
DP2 = {"backend": "megatron", "num_ranks": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), family="qwen2", hidden=32, layers=2, tied=True)


@pytest.fixture(scope="module")
def two_ranks():
    processes = RankProcesses(2)
    yield processes
    processes.close()


def save_at_once(rank: Rank, *, model: Path, directory: Path) -> Any:
    backend = rank.open(model, dtype="bfloat16")
    files = backend.save(directory).result()
    weights = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.close()
    return files, weights


@pytest.mark.starts
@pytest.mark.parametrize("layout", [TP2, DP2, DP2 | {"distributed_optimizer": False}], ids=["tp2", "dp2", "replicated"])
def test_a_bfloat16_model_starts_from_the_checkpoint_in_float32(two_ranks, model, layout, tmp_path):
    answers = two_ranks.run(save_at_once, layout, tmp_path, model=model, directory=tmp_path / "ckpt")
    files, weights = answers[0]
    expected = load_file(model / "model.safetensors")
    found = {}
    for name in files:
        if name.startswith("weights-"):
            found |= load_file(tmp_path / "ckpt" / name)
        elif name.startswith("exp_avg"):
            assert not any(tensor.any() for tensor in load_file(tmp_path / "ckpt" / name).values())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert found.keys() == weights.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in weights.items())


def refuse(rank: Rank, *, model: Path) -> str:
    """Refused after groups were opened; then opened with what is legal, in the same processes."""
    with pytest.raises(ConfigError) as refusal:
        rank.open(model, expert_parallel=2)
    config: Config = tiny_config(model, **rank.layout)
    address = f"file://{rank.scratch / 'second'}"
    open_backend(config, RankContext(rank.rank, rank.world_size, address)).close()
    return str(refusal.value)


@pytest.mark.starts
def test_a_refused_model_leaves_the_processes_usable(two_ranks, model, tmp_path):
    messages = two_ranks.run(refuse, DP2, tmp_path, model=model)
    assert all("trainer.expert_parallel=2" in message for message in messages)


@pytest.mark.starts
def test_offload_is_refused_without_a_gpu(two_ranks, model, tmp_path):
    messages = two_ranks.run(refuse_offload, DP2, tmp_path, model=model)
    assert all("trainer.optimizer_offload=true" in message and "legal" in message for message in messages)


def refuse_offload(rank: Rank, *, model: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        rank.open(model, optimizer_offload=True, dtype="bfloat16")
    return str(refusal.value)


def exchange(rank: int, world_size: int) -> Any:
    from rlhpc.training.ranks import Exchange

    messages = Exchange()
    heard = messages.from_rank(1, {"rank": rank, "tenth": 0.1, "odd": [math.inf, math.nan]})
    return heard, messages.of_all(["x" * 10 * rank, rank])


@pytest.mark.starts
def test_messages_arrive_whole_on_every_rank(tmp_path):
    for heard, of_all in run_ranks(2, exchange, tmp_path):
        assert heard["rank"] == 1
        assert heard["tenth"] == 0.1
        assert heard["odd"][0] == math.inf
        assert math.isnan(heard["odd"][1])
        assert of_all == [["", 0], ["x" * 10, 1]]


# ------------------------------------------------------------------------- Megatron's optimiser as the backend steps it

DENSE: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-replicated": {"distributed_optimizer": False},
    "dp2-overlapped": {"overlap_grad_reduce": True},
    "tp2": {"tensor_parallel": 2},
    "sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2": {"expert_parallel": 2},
    "ep2-replicated": {"expert_parallel": 2, "distributed_optimizer": False},
}
ROWS = [pack_row(draw_samples(lengths, seed=seed)) for seed, lengths in enumerate([(5, 9), (12,), (3, 4, 8), (16,)])]
EVERYTHING = [*DENSE, *EXPERTS, "bfloat16"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tied, so that two pipeline stages hold one weight; and a mixture."""
    make = tmp_path_factory.mktemp
    return {
        "dense": make_tiny_checkpoint(make("dense"), family="qwen3", hidden=32, layers=2, tied=True),
        "experts": make_tiny_checkpoint(make("experts"), family="qwen3_moe", hidden=32, layers=2, tied=False),
    }


@pytest.fixture(scope="module")
def seen(checkpoints, tmp_path_factory) -> dict[str, list[Seen]]:
    """What both ranks saw, by layout: all in the same two processes, which load Megatron once."""
    cases = {name: Case(checkpoints["dense"], keys) for name, keys in DENSE.items()}
    cases |= {name: Case(checkpoints["experts"], keys) for name, keys in EXPERTS.items()}
    cases["bfloat16"] = Case(checkpoints["dense"], {}, torch.bfloat16)
    ranks = run_ranks(2, watch, tmp_path_factory.mktemp("ranks"), list(cases.values()), ROWS, timeout_s=240)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}


def hf_norm(checkpoint) -> float:
    """Of the gradient of the sum of log-probabilities of loss tokens, from full logits, sample by sample."""
    hf = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for row in ROWS:
        tokens, mask = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)
        for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            logits = hf(tokens[None, start:end], use_cache=False).logits[0]
            chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[start + 1 : end, None])[:, 0]
            chosen[mask[start + 1 : end]].sum().backward()
    return math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in hf.parameters()))


@pytest.mark.starts
@pytest.mark.parametrize("layout", [*DENSE, *EXPERTS])
def test_the_norm_counts_every_parameter_of_the_model_once(seen, checkpoints, layout):
    expected = hf_norm(checkpoints["experts" if layout in EXPERTS else "dense"])
    assert [rank.norm for rank in seen[layout]] == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.starts
@pytest.mark.parametrize("layout", EVERYTHING)
def test_matrices_decay_and_norms_do_not(seen, layout):
    for rank in seen[layout]:
        assert any("router" in name for name in rank.before) == (layout in EXPERTS)
        for name, before in rank.before.items():
            factor = 1 - LEARNING_RATE * WEIGHT_DECAY if before.ndim >= 2 else 1.0
            torch.testing.assert_close(rank.after_decay[name], (before.float() * factor).to(before.dtype), msg=name)


@pytest.mark.starts
@pytest.mark.parametrize("layout", EVERYTHING)
def test_steps_start_from_zero_moments_count_by_parameter_and_put_new_weights_into_the_model(seen, layout):
    for rank in seen[layout]:
        assert rank.mains_are_published
        assert not all(torch.equal(rank.after_gradient[name], rank.after_decay[name]) for name in rank.before)
    if layout.startswith(("dp2", "bfloat16")):
        first, second = (rank.after_gradient for rank in seen[layout])
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(set(rank.steps) == {8.0} for rank in seen[layout])
    assert all(rank.starts_from_zeros for rank in seen[layout])


@pytest.mark.starts
@pytest.mark.parametrize("layout", ["dp2", "dp2-overlapped", "bfloat16"])
def test_replicas_share_the_state_out_without_gap_or_overlap(seen, layout):
    held = sorted(place for rank in seen[layout] for place in rank.ranges)
    for name, weight in seen[layout][0].before.items():
        ends = [0]
        for start, end in [(start, end) for owner, start, end in held if owner == name]:
            assert start == ends[-1], name
            ends.append(end)
        assert ends[-1] == weight.numel(), name
    assert all(rank.ranges != held for rank in seen[layout])


@pytest.mark.starts
def test_overlapping_the_sum_with_backward_changes_nothing(seen):
    plain, overlapped = (seen[layout][0].after_gradient for layout in ("dp2", "dp2-overlapped"))
    assert all(torch.equal(plain[name], overlapped[name]) for name in plain)


# ----------------------------------------- What one rank of a small Megatron trainer does in the tests of the optimiser

CPU = torch.device("cpu")
REQUEST = HeadRequest(temperature=1.0, chunk_tokens=16, want_entropy=False)
LEARNING_RATE, WEIGHT_DECAY = 0.1, 0.5


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    checkpoint: Path
    trainer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Seen:
    """What one rank saw.  Tensors by the parameter's name."""

    norm: float
    before: dict[str, Tensor]
    after_decay: dict[str, Tensor]  # a step with gradients of zero
    after_gradient: dict[str, Tensor]  # and one with real ones, right after it
    ranges: list[tuple[str, int, int]]  # what this rank's optimiser keeps
    starts_from_zeros: bool  # moments, before the first step
    mains_are_published: bool  # after the last step every kept range equals the parameter, rounded
    steps: list[float]  # after setting them to 7 and one step


def watch(rank: int, world_size: int, cases: list[Case], rows: list[PackedMicrobatch]) -> list[Seen]:
    """One case after the other, groups closed and opened in between."""
    return [_watch_case(rank, world_size, case, rows) for case in cases]


def _watch_case(rank: int, world_size: int, case: Case, rows: list[PackedMicrobatch]) -> Seen:
    trainer = TrainerConfig(backend="megatron", token_budget=4096, num_ranks=world_size, **case.trainer)
    layout = ParallelLayout.of(trainer)
    open_groups(layout, rank=rank, device=CPU)
    model = AutoConfig.from_pretrained(case.checkpoint)
    chunks = build_chunks(model, transformer_config(model, trainer, case.dtype), trainer, CPU)
    reference = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=case.dtype)
    for chunk in chunks:
        give_weights(chunk, dict(reference.state_dict()))
    settings = OptimizerSettings(
        dtype=case.dtype,
        betas=(0.9, 0.95),
        eps=1e-3,
        is_distributed=trainer.distributed_optimizer,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
        is_offloaded=False,
    )
    wrapped = wrap_chunks(chunks, settings)
    optimizer = MegatronAdamW(wrapped, settings)
    schedule = Schedule(wrapped, layout, CPU)
    mine = [Work(row, row.loss_mask) for row in rows[parallel_state.get_data_parallel_rank() :: layout.data]]
    names = {id(parameter): name for chunk in chunks for name, parameter in chunk.named_parameters()}

    def accumulate() -> float:
        optimizer.zero_gradients()
        schedule.forward_backward(mine, REQUEST, lambda index, row, entropy: row.sum())
        return optimizer.gradient_norm()

    def copied() -> dict[str, Tensor]:
        return {name: p.detach().clone() for chunk in chunks for name, p in chunk.named_parameters()}

    norm, before = accumulate(), copied()
    starts_from_zeros = not any(shard.tensor(kind).any() for shard in optimizer.shards for kind in STATE_KINDS[1:])
    optimizer.zero_gradients()
    assert optimizer.gradient_norm() == 0.0
    optimizer.step(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    after_decay = copied()
    optimizer.clip(accumulate(), 1.0)
    optimizer.num_steps_applied = 7
    optimizer.step(learning_rate=LEARNING_RATE, weight_decay=0.0)
    assert optimizer.num_steps_applied == 8
    seen = Seen(
        norm=norm,
        before=before,
        after_decay=after_decay,
        after_gradient=copied(),
        ranges=[(names[id(shard.parameter)], shard.start, shard.end) for shard in optimizer.shards],
        starts_from_zeros=starts_from_zeros,
        mains_are_published=all(
            torch.equal(
                shard.parameter.detach().view(-1)[shard.start : shard.end], shard.tensor("weights").to(case.dtype)
            )
            for shard in optimizer.shards
        ),
        steps=[float(shard.state["step"]) for shard in optimizer.shards],
    )
    close_groups()
    return seen


# --------------------------- What lets Megatron run without CUDA: Megatron sees the CPU, nobody else sees a difference


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_torch_itself_stays_as_it_is():
    before = dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))
    prepare_cpu()
    assert (dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))) == before
    assert _get_current_function_mode_stack() == []
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_megatron_allocates_on_the_cpu_in_any_thread():
    prepare_cpu()
    with ThreadPoolExecutor(1) as thread:
        buffer = thread.submit(megatron_utils.GlobalMemoryBuffer().get_tensor, [3], torch.float32, "test").result()
    assert buffer.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_preparing_twice_changes_nothing_more():
    prepare_cpu()
    once = megatron_utils.torch, megatron_optimizer.clip_grad_by_total_norm_fp32
    prepare_cpu()
    assert (megatron_utils.torch, megatron_optimizer.clip_grad_by_total_norm_fp32) == once


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_gradients_on_the_cpu_pass_megatrons_check_of_their_type():
    prepare_cpu()
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.full((4,), 2.0)
    megatron_optimizer.clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=4.0)
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5), atol=1e-5, rtol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_recomputation_leaves_nothing_queued_for_a_gpu_that_never_comes():
    prepare_cpu()
    queued = len(torch.cuda._queued_calls)
    weight = torch.ones(3, requires_grad=True)
    megatron_random.model_parallel_cuda_manual_seed(
        1, inference_rng_tracker=True, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True
    )
    megatron_random.checkpoint(torch.square, False, weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 3
    assert len(torch.cuda._queued_calls) == queued


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
def test_where_there_is_cuda_megatron_keeps_the_torch_it_imported(monkeypatch):
    prepare_cpu()
    monkeypatch.setattr(megatron_utils, "torch", torch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare_cpu()
    assert megatron_utils.torch is torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is to be prepared where there is CUDA")
@pytest.mark.starts
def test_functions_that_megatron_hands_to_a_compiler_stay_as_written_and_none_is_loaded():
    code = (
        "import sys, torch\n"
        "compiler = torch.compile\n"
        "import rlhpc.training.megatron.backend\n"
        "assert torch.compile is compiler\n"
        "from megatron.core.jit import jit_fuser\n"
        "assert jit_fuser(len) is jit_fuser(dynamic=True)(len) is len\n"
        "sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
