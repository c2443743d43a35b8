"""What one step takes of a GPU beside what the planner says, and what a snapshot takes of the host."""

from __future__ import annotations

import json

import numpy as np
import psutil
import pytest
import torch

from launch.checks.memory_plan import fullest, plan_memory
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.background_save import BackgroundSaver
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec
from rlhpc.training.trainer_state import STATE_KINDS, read_checkpoint
from tests.contracts.trainer_cluster import RankProcesses
from tests.gpu.gpu_ranks import make_random_qwen3, peak_of_a_step
from tests.unit.training.packed_rows import draw_samples, pack_row, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

TOKENS = 12_288
LAYOUTS = {
    "megatron": {"backend": "megatron"},
    "megatron_offload": {"backend": "megatron", "optimizer_offload": True},
    "zero2": {"backend": "deepspeed", "zero_stage": 2},
    "reference": {"backend": "reference"},
}
CASES = [
    ("megatron", "none"),
    ("megatron", "selective"),
    ("megatron", "full"),
    ("megatron_offload", "full"),
    ("zero2", "none"),
    ("zero2", "full"),
    ("reference", "full"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """0.35 B parameters."""
    return make_random_qwen3(tmp_path_factory.mktemp("model"), layers=12)


@pytest.fixture
def process():
    """A fresh one for every case: what an earlier backend left behind would count."""
    ranks = RankProcesses(1)
    yield ranks
    ranks.close()


def full_row():
    """Segments of mixed lengths that fill the budget."""
    lengths = (5000, 1, 3000, 287, 2000, 1500, 500)
    assert sum(lengths) == TOKENS
    return pack_row(draw_samples(lengths, vocabulary=151_936))


@pytest.mark.parametrize(("layout", "recompute"), CASES)
def test_a_step_takes_what_the_planner_says(layout, recompute, model, process, tmp_path):
    keys = LAYOUTS[layout] | {
        "num_ranks": 1,
        "device": "cuda",
        "token_budget": TOKENS,
        "recompute_activations": recompute,
    }
    config = tiny_config(model, dtype="bfloat16", **keys)
    plan = fullest(plan_memory(config, ModelShape.of(json.loads((model / "config.json").read_text()))))
    planned = plan.peak - plan.allowance  # the allowance is for what no tensor accounts for
    if torch.cuda.mem_get_info()[0] < 1.3 * plan.peak:
        pytest.skip(f"needs {1.3 * plan.peak / 2**30:.0f} GiB")
    (peak,) = process.run(peak_of_a_step, keys, tmp_path / "step", model=model, rows=[full_row()], dtype="bfloat16")
    print(f"{layout} recompute {recompute}: planned {planned / 2**30:.2f} GiB, measured {peak / 2**30:.2f} GiB")
    assert 0.88 * planned <= peak <= 1.05 * planned  # one that plans too little ends in the first step


def make_saver(num_elements):
    """Of one tensor on the GPU, its masters and moments; (saver, the live tensors by kind)."""
    live = {
        kind: torch.full((num_elements,), float(index), device="cuda")
        for index, kind in enumerate(STATE_KINDS, start=1)
    }
    item = ShardedTensorSpec(
        (TensorSpec("weight", "float32", (num_elements,)),),
        (Shard(0, num_elements),),
        lambda pieces: [pieces[0]],
    )
    return BackgroundSaver([item], lambda kind, _: (live[kind],), device=torch.device("cuda")), live


def test_a_snapshot_from_the_gpu_is_taken_before_save_returns(tmp_path):
    saver, live = make_saver(48 << 20)
    assert all(piece.is_pinned() for copies in saver._copies.values() for pieces in copies.values() for piece in pieces)
    torch.cuda._sleep(10_000_000)  # work under way, behind which the copies must wait
    for index, tensor in enumerate(live.values(), start=1):
        tensor.add_(10 * index)
    future = saver.save(tmp_path, num_steps_applied=1, rng={})
    for tensor in live.values():
        tensor.fill_(-1.0)
    future.result()
    for index, (_, _, tensor) in enumerate(read_checkpoint(tmp_path, None).tensors(*STATE_KINDS), start=1):
        assert np.array_equal(tensor.unique().numpy(), [11.0 * index])
    saver.close()


def test_a_snapshot_takes_twelve_bytes_of_the_host_for_every_parameter():
    small, _ = make_saver(1000)  # the process takes what CUDA's registration itself needs
    small.close()
    num_elements = (16 << 20) + 1000  # right above a power of two, to which torch rounds its own pinned memory up
    process = psutil.Process()
    before = process.memory_info().rss
    saver, _ = make_saver(num_elements)
    taken = process.memory_info().rss - before  # memory that the GPU may copy into is all resident
    copies = [piece for kinds in saver._copies.values() for pieces in kinds.values() for piece in pieces]
    reserved = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in copies}
    is_pinned = [piece.is_pinned() for piece in copies]
    saver.close()
    assert is_pinned
    assert all(is_pinned)
    assert 12 * num_elements <= sum(reserved.values()) <= 1.05 * 12 * num_elements
    assert 0.95 * 12 * num_elements <= taken <= 1.05 * 12 * num_elements + (16 << 20)
