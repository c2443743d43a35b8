"""Which loaders a plan of copies can stand in for, and which experts are loaded as stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhpc.generation.reload_plan import Copied, Cut, ExpertStacks, LoadTrace, NoPlan, part_of_rank, with_corrections
from rlhpc.protocol.errors import GroupFailed

# ---------------------------------------------------------------------------------------------------- loaders, observed
#
# What counts as plain data movement, shown on loaders that move tensors, and on loaders that do more.


Load = Callable[[nn.Module, dict[str, Tensor]], object]
SHAPES = {"q": (4, 3), "k": (2, 3), "turned": (3, 6), "bias": (6,)}


def layer() -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.empty(6, 3, device="meta"))
    made.bias = nn.Parameter(torch.ones(6))  # vLLM leaves it where it is
    made.register_buffer("scale", torch.empty(6, device="meta"))
    return made


def trace_of(load: Load, onto: nn.Module) -> LoadTrace:
    sources = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    parameters = {(onto, name): parameter for name, parameter in onto.named_parameters()}
    with LoadTrace(parameters, list(onto.buffers()), sources) as trace:
        load(onto, sources)
    return trace


def carried_out(copies: list[Copied], onto: nn.Module, version: dict[str, Tensor]) -> dict[str, Tensor]:
    made = {name: torch.zeros(parameter.shape) for name, parameter in onto.named_parameters()}
    for source, (_, name), place, part in copies:
        place.from_(made[name]).copy_(part.from_(version[source]))
    return made


def merged(onto: nn.Module, version: dict[str, Tensor]) -> None:
    onto.weight.data.narrow(0, 0, 4).copy_(version["q"])
    onto.weight.data[4:] = version["k"]
    onto.bias.data.copy_(version["bias"])


def turned(onto: nn.Module, version: dict[str, Tensor]) -> None:
    onto.weight.data.copy_(version["turned"].t())
    onto.bias.data.copy_(version["bias"].view(2, 3).flatten())


def of_one_rank(onto: nn.Module, version: dict[str, Tensor]) -> None:
    onto.weight.data[:4].copy_(version["q"])
    onto.weight.data[4:5].copy_(version["k"].narrow(0, 1, 1))
    onto.weight.data[5:].fill_(0)


@pytest.mark.parametrize("load", [merged, turned, of_one_rank])
def test_the_copies_alone_make_what_the_loader_makes(load: Load) -> None:
    onto = layer()
    trace = trace_of(load, onto)
    version = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    real = nn.Module()
    real.weight, real.bias = nn.Parameter(torch.zeros(6, 3)), nn.Parameter(torch.zeros(6))
    load(real, version)
    for name, made in carried_out(trace.copies, onto, version).items():
        assert torch.equal(made, dict(real.named_parameters())[name])
    has_zeros = {name: filled for (_, name), filled in trace.filled()}
    assert has_zeros["weight"] is (load is of_one_rank)
    assert torch.equal(onto.bias, torch.ones(6)), "nothing is carried out while loaders are observed"


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda onto, version: onto.weight.data[:4].copy_(version["q"] + 1), "aten.add.Tensor of q"),
        (lambda onto, version: onto.weight.data[:4].copy_(version["q"].clone()), "aten.clone.default of q"),
        (lambda onto, version: onto.weight.data.mul_(2), "aten.mul_.Tensor of weight of Module"),
        (lambda onto, version: onto.weight.data.fill_(1), "aten.fill_.Scalar of weight of Module"),
        (lambda onto, version: onto.scale.copy_(version["bias"]), "something is written to a buffer"),
        (lambda onto, version: onto.bias.data.copy_(torch.ones(6)), "no part of a tensor of the version"),
        (lambda onto, version: onto.bias.data.view(2, 3).copy_(version["bias"][:3]), r"\[3\] is copied to \[2, 3\]"),
        (lambda onto, version: version["q"].sum(), "aten.sum.default of q"),
        (lambda onto, version: version["bias"].copy_(version["bias"]), "something is written to bias"),
    ],
)
def test_a_loader_that_does_more_than_to_move_tensors_is_seen(load: Load, why: str) -> None:
    with pytest.raises(NoPlan, match=why):
        trace_of(load, layer())


def twice(onto: nn.Module, version: dict[str, Tensor]) -> None:
    merged(onto, version)
    onto.weight.data[:1].copy_(version["k"][:1])


def half(onto: nn.Module, version: dict[str, Tensor]) -> None:
    onto.weight.data[:4].copy_(version["q"])


def not_from_the_first(onto: nn.Module, version: dict[str, Tensor]) -> None:
    onto.weight.data[2:].copy_(version["q"])


def across(onto: nn.Module, version: dict[str, Tensor]) -> None:
    for column in range(3):
        onto.weight.data[:, column].copy_(version["turned"][column])


@pytest.mark.parametrize("load", [twice, half, not_from_the_first, across])
def test_a_parameter_must_be_filled_piece_by_piece(load: Load) -> None:
    """Columns would do; no loader of vLLM's fills them one by one."""
    with pytest.raises(NoPlan, match="weight of Module is not filled piece by piece"):
        dict(trace_of(load, layer()).filled())


def test_a_cut_is_found_again_in_another_tensor() -> None:
    whole = torch.arange(20.0).view(4, 5)[1:]
    cut = Cut.of(whole[1:, 2:], whole)
    assert cut == Cut((2, 3), (5, 1), 7)
    other = torch.rand(3, 5)
    assert torch.equal(cut.from_(other), other[1:, 2:])


# ---------------------------------------------------------------------------------------------------- stacks of experts
#
# Which tensors are loaded as stacks, on a layer that copies as vLLM's does; tests/ring has the real engine.


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


# ------------------------------------------------------------------------------------------------------- direct copies


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_gets_its_neurons_of_experts_whose_gate_and_up_take_turns_and_its_heads_of_sinks(num_ranks: int) -> None:
    gate_up, down = torch.rand(NUM_EXPERTS, HIDDEN, 8), torch.rand(NUM_EXPERTS, 4, HIDDEN)
    biases, of_down, sinks = torch.rand(NUM_EXPERTS, 8), torch.rand(NUM_EXPERTS, HIDDEN), torch.rand(4)
    tokens, output = torch.rand(NUM_EXPERTS, 3, HIDDEN), torch.zeros(NUM_EXPERTS, 3, HIDDEN)
    width = 4 // num_ranks
    for rank in range(num_ranks):
        w13 = part_of_rank("w13_weight", gate_up, (NUM_EXPERTS, 2 * width, HIDDEN), rank)
        w2 = part_of_rank("w2_weight", down, (NUM_EXPERTS, HIDDEN, width), rank)
        b13 = part_of_rank("w13_bias", biases, (NUM_EXPERTS, 2 * width), rank)
        b2 = part_of_rank("w2_bias", of_down, (NUM_EXPERTS, HIDDEN), rank)
        inner = tokens @ w13.mT + b13[:, None]
        output += (inner[..., ::2] * inner[..., 1::2]) @ w2.mT + b2[:, None]
        heads = 4 // num_ranks
        assert torch.equal(part_of_rank("sinks", sinks, (heads,), rank), sinks[rank * heads :][:heads])
    inner = tokens @ gate_up + biases[:, None]
    torch.testing.assert_close(output, (inner[..., ::2] * inner[..., 1::2]) @ down + of_down[:, None])


def test_a_version_is_completed_by_the_corrections_that_the_model_had_unless_it_has_its_own() -> None:
    model, name = nn.Module(), "gate.e_score_correction_bias"
    model.gate = nn.Module()
    model.gate.weight, model.gate.e_score_correction_bias = (nn.Parameter(torch.rand(3)) for _ in range(2))
    had = model.gate.e_score_correction_bias.detach().clone()
    version = with_corrections(model, [("gate.weight", torch.ones(3))])
    model.gate.e_score_correction_bias.data.fill_(torch.nan)  # as in a layer that was taken apart
    found = dict(version)
    assert torch.equal(found[name], had)
    assert torch.equal(found["gate.weight"], torch.ones(3))
    own = torch.full((3,), 7.0)
    assert [(each, tensor) for each, tensor in with_corrections(model, [(name, own)])] == [(name, own)]
