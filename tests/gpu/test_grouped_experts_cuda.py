"""Experts at once on a GPU that has the kernel: the same numbers, no wait for the device, zeros for idle experts."""

from __future__ import annotations

import statistics

import pytest
import torch
from transformers import Qwen3MoeConfig

from bench.experts import ROUTINGS, Sizes, measure
from rlhpc.config.tables import TrainerConfig
from rlhpc.training.layer_functions import KERNEL_CAPABILITY
from rlhpc.training.megatron.model_config import GroupedExperts, transformer_config
from tests.unit.training.megatron.policy_ranks import draw_tokens, expert_pair, through
from tests.unit.training.rank_processes import run_ranks

has_cuda = torch.cuda.is_available()
capability = torch.cuda.get_device_capability() if has_cuda else None
needs_kernel = pytest.mark.skipif(capability != KERNEL_CAPABILITY, reason="needs a GPU of compute capability 9.0")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not has_cuda, reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
HIDDEN, WIDTH = 256, 136  # multiples of 8, not of a tile
ROUTINGS_SEEN = {
    "even": [64] * 16,
    "of any length": [1, 2, 3, 5, 7, 11, 13, 129, 257, 64, 9, 1, 1, 31, 8, 100],
    "idle ones first, last and between": [0, 0, 40, 3, 0, 17, 0, 0, 1, 0, 200, 0, 5, 0, 0, 0],
    "one has all": [0] * 9 + [333] + [0] * 6,
    "one token": [0, 1] + [0] * 14,
    "no token": [0] * 16,
}


def test_the_trainer_groups_experts_where_the_kernel_is_and_in_bfloat16_alone():
    model = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=16)
    trainer = TrainerConfig(backend="megatron", token_budget=4096)
    chosen = {
        dtype: transformer_config(model, trainer, dtype).moe_grouped_gemm for dtype in (torch.bfloat16, torch.float32)
    }
    assert chosen == {torch.bfloat16: capability == KERNEL_CAPABILITY, torch.float32: False}


def distances(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """By routing and name: largest difference from one expert after the other, over the largest number."""
    torch.manual_seed(0)
    one_by_one, at_once = expert_pair(CUDA, torch.bfloat16, num_experts=16, hidden=HIDDEN, width=WIDTH)
    found: dict[str, dict[str, float]] = {}
    for routing, counts in ROUTINGS_SEEN.items():
        inputs = draw_tokens(counts, HIDDEN, CUDA, torch.bfloat16)
        wanted = through(one_by_one, counts, *inputs)
        soiled = torch.full((64 << 20,), torch.nan, device=CUDA)  # what the kernel does not write is not a number
        del soiled
        seen = through(at_once, counts, *inputs)
        assert seen.keys() == wanted.keys()
        found[routing] = {
            name: float((seen[name].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp(min=1e-6))
            for name, tensor in wanted.items()
            if tensor.numel()
        }
    return found


@needs_kernel
def test_output_and_gradients_are_those_of_one_expert_after_the_other(tmp_path):
    """Within two roundings of bfloat16; the gradient of an idle expert is zero in both, so nothing may differ."""
    (found,) = run_ranks(1, distances, tmp_path, timeout_s=200)
    assert found.keys() == ROUTINGS_SEEN.keys()
    wrong = {
        (routing, name): distance
        for routing, names in found.items()
        for name, distance in names.items()
        if not distance <= 1.6e-2
    }
    assert wrong == {}


def run_unsynchronised(rank: int, world_size: int) -> bool:
    """One pass in which torch raises where it would wait for the device.  Returns whether it came to the end."""
    torch.manual_seed(0)
    _, experts = expert_pair(CUDA, torch.bfloat16, num_experts=16, hidden=HIDDEN, width=WIDTH)
    assert type(experts) is GroupedExperts
    routing = ROUTINGS_SEEN["of any length"]
    counts = torch.tensor(routing).pin_memory()  # as the dispatcher leaves them
    tokens, probabilities = draw_tokens(routing, HIDDEN, CUDA, torch.bfloat16)
    gradient = torch.randn_like(tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = experts(tokens, counts, probabilities)
        output.backward(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return all(parameter.grad is not None for parameter in experts.parameters())


@needs_kernel
def test_no_pass_waits_for_the_device(tmp_path):
    assert run_ranks(1, run_unsynchronised, tmp_path, timeout_s=200) == [True]


def time_both(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """By routing: median milliseconds of one expert after the other, and at once; forward and backward."""
    sizes = Sizes(experts=32, hidden=2048, width=768, tokens=8192)
    torch.manual_seed(0)
    return {
        routing: tuple(map(statistics.median, measure(sizes, exponent, CUDA, torch.bfloat16, repeats=7)[:2]))
        for routing, exponent in ROUTINGS.items()
    }


@needs_kernel
def test_experts_at_once_are_the_faster_ones(tmp_path, capsys):
    """A layer of Qwen3-30B-A3B, a quarter of its experts, 8,192 tokens."""
    (found,) = run_ranks(1, time_both, tmp_path, timeout_s=200)
    with capsys.disabled():
        for routing, (one_by_one, at_once) in found.items():
            print(f"\n{routing}: {one_by_one:.2f} ms one after the other, {at_once:.2f} ms at once")
    assert found.keys() == ROUTINGS.keys()
    assert all(at_once < one_by_one for one_by_one, at_once in found.values())
