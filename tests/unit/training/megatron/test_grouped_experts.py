"""Experts computed at once: the same numbers as one after the other, whatever the routing, and nothing more is kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.training.layer_functions import grouped_linear, has_grouped_kernel
from rlhpc.training.megatron.backend import close_groups
from rlhpc.training.megatron.model_config import GroupedExperts
from tests.contracts.trainer_cluster import Rank, RankProcesses
from tests.contracts.trainer_scenarios import STEP, take_steps, train, weights_of
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.megatron.policy_ranks import draw_tokens, expert_pair, through
from tests.unit.training.packed_rows import LiveBytes, draw_samples, pack_row
from tests.unit.training.rank_processes import run_ranks

CPU = torch.device("cpu")
HIDDEN, WIDTH = 32, 24
ROUTINGS = {
    "every expert": [5, 1, 9, 2, 3, 4], "some have none": [0, 7, 0, 0, 3, 0], "one has all": [0, 0, 11, 0, 0, 0],
    "the last has all": [0, 0, 0, 0, 0, 3], "one token": [0, 1, 0, 0, 0, 0], "no token": [0, 0, 0, 0, 0, 0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes", "expected"),
    [
        ((9, 0), torch.bfloat16, (2048, 768), True),
        (None, torch.bfloat16, (2048, 768), False),
        ((8, 0), torch.bfloat16, (2048, 768), False),
        ((8, 9), torch.bfloat16, (2048, 768), False),
        ((10, 0), torch.bfloat16, (2048, 768), False),
        ((12, 0), torch.bfloat16, (2048, 768), False),
        ((9, 0), torch.float32, (2048, 768), False),
        ((9, 0), torch.float16, (2048, 768), False),
        ((9, 0), torch.bfloat16, (2048, 772), False),
        ((9, 0), torch.bfloat16, (2044, 768), False),
    ],
)
def test_experts_are_grouped_where_a_kernel_is_known_to_be_right(capability, dtype, sizes, expected):
    assert has_grouped_kernel(capability, dtype, sizes) is expected


def test_a_card_of_amds_that_calls_itself_9_0_has_no_such_kernel(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not has_grouped_kernel((9, 0), torch.bfloat16, (2048, 768))


def compare(rank: int, world_size: int, dtype: torch.dtype) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """By routing: what the experts one after the other come to, and all at once."""
    torch.manual_seed(0)
    one_by_one, at_once = expert_pair(CPU, dtype, num_experts=6, hidden=HIDDEN, width=WIDTH)
    found = {}
    for name, counts in ROUTINGS.items():
        inputs = draw_tokens(counts, HIDDEN, CPU, dtype)
        found[name] = through(one_by_one, counts, *inputs), through(at_once, counts, *inputs)
    close_groups()
    return found


@pytest.mark.starts
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_output_and_gradients_are_those_of_one_expert_after_the_other(dtype, tolerance, tmp_path):
    """Tolerance: of the largest number; bfloat16 has 8 bits."""
    (found,) = run_ranks(1, compare, tmp_path, dtype)
    assert found.keys() == ROUTINGS.keys()
    for routing, (wanted, seen) in found.items():
        assert seen.keys() == wanted.keys()
        assert len(seen) == 3 + 2 * len(ROUTINGS[routing])
        for name, tensor in wanted.items():
            assert (seen[name].shape, seen[name].dtype) == (tensor.shape, tensor.dtype)
            if tensor.numel():
                limit = tolerance * tensor.abs().max()
                assert (seen[name] - tensor).abs().max() <= limit, (routing, name)
        idle = [index for index, count in enumerate(ROUTINGS[routing]) if not count]
        assert not any(seen[f"local_experts.{index}.linear_fc{part}.weight"].any() for index in idle for part in (1, 2))
        assert routing == "no token" or any(seen[name].any() for name in seen if name.startswith("local_experts"))


class GroupedProducts(TorchDispatchMode):
    """Takes down the factors of every grouped product, as the kernel gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.factors.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def grouped_inputs(num_tokens: int = 40) -> tuple[Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    ends = torch.tensor([num_tokens // 4, num_tokens // 4, num_tokens], dtype=torch.int32)
    weights = [torch.randn(16, 8, dtype=torch.float64).float().requires_grad_() for _ in range(3)]
    return torch.randn(num_tokens, 8).requires_grad_(), ends, weights


def test_matrices_lie_side_by_side_for_as_long_as_a_product_takes():
    tokens, ends, weights = grouped_inputs()
    stacked = sum(weight.nbytes for weight in weights)
    with LiveBytes(tokens, ends, *weights) as forward:
        product = grouped_linear(tokens, ends, weights)
    assert (forward.peak, forward.live) == (stacked + product.nbytes, product.nbytes)
    gradient = torch.ones_like(product)
    with LiveBytes(tokens, ends, product, gradient, *weights) as backward:
        torch.autograd.grad(product, [tokens, *weights], gradient)
    assert backward.peak == stacked + tokens.nbytes  # laid side by side, and then their gradients


def test_an_expanded_gradient_and_one_token_of_odd_strides_are_taken():
    tokens, ends, weights = grouped_inputs()
    grouped_linear(tokens, ends, weights).sum().backward()  # a gradient of strides (0, 0)
    wanted = torch.cat([part @ w.T for part, w in zip(tokens.tensor_split(ends[:-1].tolist()), weights, strict=True)])
    expected = torch.autograd.grad(wanted.sum(), [tokens, *weights])
    for found, gradient in zip([tokens, *weights], expected, strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, gradient)
    single = torch.randn(8, 1).T
    assert single.stride() != (8, 1)
    one = grouped_linear(single, torch.tensor([0, 1, 1], dtype=torch.int32), weights)
    torch.testing.assert_close(one, single @ weights[1].T)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_gradients_that_are_wanted_are_computed(wanted):
    tokens, ends, weights = grouped_inputs()
    tokens.requires_grad_(wanted[0])
    for weight in weights:
        weight.requires_grad_(wanted[1])
    product = grouped_linear(tokens, ends, weights)
    assert product.requires_grad is any(wanted)
    with GroupedProducts() as products:
        if any(wanted):
            product.sum().backward()
    assert len(products.factors) == sum(wanted)
    assert (tokens.grad is not None) is wanted[0]
    assert all((weight.grad is not None) is wanted[1] for weight in weights)


def test_the_sizes_of_a_real_layer_are_taken_and_groups_without_tokens_stay_legal():
    """On torch's meta device, whose checks are those of the kernel.

    CUTLASS multiplies groups that may be empty, or of a length that 8 does not divide, in one order of the two factors
    of a weight's gradient alone: the left one by columns, the right one by rows.  On a CPU every order is right.
    """
    num_experts, hidden, width, num_tokens = 128, 2048, 768, 4099
    with torch.device("meta"):
        tokens = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        ends = torch.empty(num_experts, dtype=torch.int32)
        inner = [torch.empty(2 * width, hidden, dtype=torch.bfloat16, requires_grad=True) for _ in range(num_experts)]
        outer = [torch.empty(hidden, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(num_experts)]
    with GroupedProducts() as products:
        output = grouped_linear(grouped_linear(tokens, ends, inner).chunk(2, -1)[0], ends, outer)
        assert output.shape == tokens.shape
        gradients = torch.autograd.grad(output.sum(), [tokens, *inner, *outer])
    assert [each.shape for each in gradients] == [each.shape for each in (tokens, *inner, *outer)]
    assert len(products.factors) == 6
    of_weights = [(left, right) for left, right in products.factors if right.dim() == 2]
    assert [(left.shape[1], right.shape[0]) for left, right in of_weights] == [(num_tokens, num_tokens)] * 2
    assert all((left.stride(0), right.stride(1)) == (1, 1) for left, right in of_weights)
    assert all(left.stride(1) == 1 for left, right in products.factors if right.dim() == 3)


def take_grouped_steps(rank: Rank, *, model: Path, steps: list[Any], **settings: Any) -> Any:
    """take_steps, with every layer's experts computed at once; the parameters are the ones that were loaded."""
    backend: Any = rank.open(model, **settings)
    layers = [each for chunk in backend._model.chunks for each in chunk.modules() if type(each) is SequentialMLP]
    assert len(layers) == 2
    for experts in layers:
        experts.__class__ = GroupedExperts
    results = [train(rank, backend, rows) for rows in steps]
    weights = weights_of(backend)
    backend.close()
    return results, weights


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe", hidden=32, layers=2, tied=False)


@pytest.fixture(scope="module")
def two_ranks():
    processes = RankProcesses(2)
    yield processes
    processes.close()


CASES: dict[str, dict[str, Any]] = {
    "experts shared out": {"expert_parallel": 2, "dtype": "float32"},
    "gradients summed while others are computed": {"overlap_grad_reduce": True, "dtype": "bfloat16"},
    "layers computed anew": {"recompute_activations": "full", "dtype": "float32"},
    "with adapters": {
        "expert_parallel": 2,
        "dtype": "float32",
        "lora": {"rank": 8, "targets": ["experts"]},
        "form": "merged",
    },
    "with adapters of an odd rank": {
        "dtype": "float32",
        "lora": {"rank": 3, "targets": ["up_proj", "down_proj"]},
        "form": "merged",
    },
}


@pytest.mark.starts
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_takes_the_same_steps(case, two_ranks, mixture, tmp_path):
    """The two ends are no further from one another than a small part of the way to them."""
    rel, part = (1e-5, 1e-4) if CASES[case]["dtype"] == "float32" else (0.05, 0.2)
    steps = [[pack_row(draw_samples((17, 5, 30), seed=seed + row)) for row in range(2)] for seed in (0, 10)]
    layout = {"backend": "megatron", "num_ranks": 2}
    arguments = {"model": mixture, "steps": steps, **CASES[case]}
    (wanted, end), *_ = two_ranks.run(take_steps, layout, tmp_path / "one", **arguments)
    (results, weights), *_ = two_ranks.run(take_grouped_steps, layout, tmp_path / "all", **arguments)
    assert [each.applied for each in results] == [True] * 2
    assert [each.grad_norm for each in results] == pytest.approx([each.grad_norm for each in wanted], rel=rel)
    start = load_file(mixture / "model.safetensors")
    assert start.keys() == end.keys() == weights.keys()
    apart = sum((weights[name] - end[name]).square().sum() for name in end)
    moved = sum((start[name] - end[name]).square().sum() for name in end)
    assert (apart / moved).sqrt() <= part


@pytest.mark.starts
def test_a_rank_whose_experts_get_no_token_takes_its_part_in_the_step(two_ranks, mixture, tmp_path):
    """The first number of every token is large, and routers look at nothing else: experts 0 and 1, both of rank 0."""
    model = tmp_path / "model"
    shutil.copytree(mixture, model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 10
    routers = [tensor for name, tensor in weights.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for router in routers:
        router.zero_()[:, 0] = torch.arange(8, 0, -1)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    layout = {"backend": "megatron", "num_ranks": 2, "expert_parallel": 2}
    arguments = {"model": model, "steps": [[pack_row(draw_samples((17, 5, 30))), pack_row(draw_samples((9,)))]]}
    (wanted, end), *_ = two_ranks.run(take_steps, layout, tmp_path / "one", **arguments)
    (results, found), *_ = two_ranks.run(take_grouped_steps, layout, tmp_path / "all", **arguments)
    assert results[0].grad_norm == pytest.approx(wanted[0].grad_norm, rel=1e-5)
    idle = [name for name in end if any(f".experts.{index}." in name for index in range(2, 8))]
    assert len(idle) == 2 * 6 * 3
    for name, tensor in end.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)
    decayed = 1 - STEP["learning_rate"] * STEP["weight_decay"]
    assert all(torch.allclose(found[name], weights[name] * decayed, atol=1e-6) for name in idle)
