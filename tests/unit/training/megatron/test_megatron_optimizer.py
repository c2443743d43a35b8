"""Megatron's optimiser as the backend steps it: norms, decay, counters, and weights that are there at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.megatron.optimizer_ranks import LEARNING_RATE, WEIGHT_DECAY, Case, Seen, watch
from tests.unit.training.packed_rows import draw_samples, pack_row
from tests.unit.training.rank_processes import run_ranks

pytestmark = pytest.mark.starts

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


@pytest.mark.parametrize("layout", [*DENSE, *EXPERTS])
def test_the_norm_counts_every_parameter_of_the_model_once(seen, checkpoints, layout):
    expected = hf_norm(checkpoints["experts" if layout in EXPERTS else "dense"])
    assert [rank.norm for rank in seen[layout]] == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("layout", EVERYTHING)
def test_matrices_decay_and_norms_do_not(seen, layout):
    for rank in seen[layout]:
        assert any("router" in name for name in rank.before) == (layout in EXPERTS)
        for name, before in rank.before.items():
            factor = 1 - LEARNING_RATE * WEIGHT_DECAY if before.ndim >= 2 else 1.0
            torch.testing.assert_close(rank.after_decay[name], (before.float() * factor).to(before.dtype), msg=name)


@pytest.mark.parametrize("layout", EVERYTHING)
def test_new_weights_are_in_the_model_right_after_the_step(seen, layout):
    for rank in seen[layout]:
        assert rank.mains_are_published
        assert not all(torch.equal(rank.after_gradient[name], rank.after_decay[name]) for name in rank.before)
    if layout.startswith(("dp2", "bfloat16")):
        first, second = (rank.after_gradient for rank in seen[layout])
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("layout", EVERYTHING)
def test_every_parameter_counts_its_own_steps(seen, layout):
    assert all(set(rank.steps) == {8.0} for rank in seen[layout])


@pytest.mark.parametrize("layout", EVERYTHING)
def test_moments_exist_from_the_start(seen, layout):
    assert all(rank.starts_from_zeros for rank in seen[layout])


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


def test_overlapping_the_sum_with_backward_changes_nothing(seen):
    plain, overlapped = (seen[layout][0].after_gradient for layout in ("dp2", "dp2-overlapped"))
    assert all(torch.equal(plain[name], overlapped[name]) for name in plain)
