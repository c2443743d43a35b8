"""Which tensors are loaded as stacks, on a layer that copies as vLLM's does; tests/ring has the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhpc.generation.reload_plan import ExpertStacks
from rlhpc.protocol.errors import GroupFailed

NUM_EXPERTS, WIDTH, HIDDEN = 4, 3, 5
CPU = torch.device("cpu")


class UnquantizedFusedMoEMethod:
    """Known by its name."""


class Fp8MoEMethod:
    """So is this."""


class Experts(nn.Module):
    """A layer of experts as an engine keeps it: gate above up in one matrix, down in another."""

    def __init__(self, method: object, expert_map: Tensor | None = None) -> None:
        super().__init__()
        self.quant_method, self.expert_map, self.global_num_experts = method, expert_map, NUM_EXPERTS
        self.w13_weight = nn.Parameter(torch.zeros(NUM_EXPERTS, 2 * WIDTH, HIDDEN))
        self.w2_weight = nn.Parameter(torch.zeros(NUM_EXPERTS, HIDDEN, WIDTH))
        self.num_calls = 0
        for parameter in (self.w13_weight, self.w2_weight):
            parameter.weight_loader = self.load  # type: ignore[attr-defined]

    def load(
        self, param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, **rest: Any
    ) -> None:
        assert weight_name.endswith("w2_weight" if shard_id == "w2" else "w13_weight")
        assert expert_id == 0
        self.num_calls += 1
        rows = {"w1": slice(0, WIDTH), "w3": slice(WIDTH, 2 * WIDTH), "w2": slice(None)}[shard_id]
        param.data[:, rows].copy_(loaded_weight)


def model_with(experts: Experts, name: str) -> nn.Module:
    layer = nn.Module()
    layer.experts = experts
    if name == "routed_experts":  # as vLLM 0.32 has it
        layer.experts = nn.Module()
        layer.experts.routed_experts = experts
    return nn.ModuleDict({"layer": layer})


def tensors() -> list[tuple[str, Tensor]]:
    made = [("norm.weight", torch.ones(2))]
    for index in range(NUM_EXPERTS):
        for matrix, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            made.append((f"layer.experts.{index}.{matrix}_proj.weight", torch.rand(shape)))
    return [*made, ("head.weight", torch.ones(2))]


def names(stream: Iterator[tuple[str, Tensor]]) -> list[str]:
    return [name for name, _ in stream]


@pytest.mark.parametrize("name", ["experts", "routed_experts"])
def test_a_layer_of_experts_takes_three_calls(name: str) -> None:
    experts, given = Experts(UnquantizedFusedMoEMethod()), tensors()
    assert names(ExpertStacks(model_with(experts, name), CPU).taken_from(iter(given))) == ["norm.weight", "head.weight"]
    assert experts.num_calls == 3
    values = dict(given)
    for index in range(NUM_EXPERTS):
        gate, up, down = (values[f"layer.experts.{index}.{matrix}_proj.weight"] for matrix in ("gate", "up", "down"))
        assert torch.equal(experts.w13_weight[index], torch.cat([gate, up]))
        assert torch.equal(experts.w2_weight[index], down)


@pytest.mark.parametrize(
    "experts", [Experts(Fp8MoEMethod()), Experts(UnquantizedFusedMoEMethod(), torch.zeros(NUM_EXPERTS))]
)
def test_a_layer_that_is_not_as_expected_is_left_to_its_model(experts: Experts) -> None:
    given = tensors()
    assert names(ExpertStacks(model_with(experts, "experts"), CPU).taken_from(iter(given))) == names(iter(given))
    assert experts.num_calls == 0


def test_an_expert_that_does_not_come_is_named() -> None:
    given = [each for each in tensors() if ".2.up" not in each[0]]
    stacks = ExpertStacks(model_with(Experts(UnquantizedFusedMoEMethod()), "experts"), CPU)
    with pytest.raises(GroupFailed, match=r"up_proj of experts \[2\] are missing"):
        names(stacks.taken_from(iter(given)))
