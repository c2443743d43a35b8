"""The kernels between a layer's matrix products, beside the same in float64 and by torch's own operations."""

from __future__ import annotations

import pytest
import torch

from rlhpc.training import layer_functions
from rlhpc.training.layer_functions import gated_silu, rms_norm, rotated_heads, rotation_of, weighted_gated_silu
from rlhpc.training.triton_kernels import compiled_kernels
from tests.unit.training.packed_rows import EPS, SHAPES, draw_heads, draw_hidden

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Of the L2 distance to float64, over the length.  Results in bfloat16 are rounded three times, gradients once.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = list(TOLERANCES)
REAL_SHAPES = [*SHAPES, (1000, 8, 2, 128), (257, 4, 7, 128), (33, 8, 8, 64), (20, 32, 1, 80)]


def distance(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


def both(function, leaves, others, gradients):
    """Results and gradients of the leaves in their own dtype, by kernels, and in float64, by torch's operations."""
    answers = []
    for dtype in (leaves[0].dtype, torch.float64):
        own = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        results = function(*own, *(other.to(dtype) for other in others))
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [gradient.to(dtype) for gradient in gradients])
        answers.append([*results, *(leaf.grad for leaf in own)])
    return zip(*answers, strict=True)


@pytest.fixture(autouse=True)
def wide_by_torch(monkeypatch):
    """There are kernels for every dtype: float64 is to be computed without them."""
    for name in ("_kernels_for", "_head_kernels_for"):
        kernels_for = getattr(layer_functions, name)
        monkeypatch.setattr(
            layer_functions,
            name,
            lambda each, kernels_for=kernels_for: each.dtype != torch.float64 and kernels_for(each),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", ["layer_kernels", "head_kernels"])
def test_the_kernels_compile_here(module, dtype):
    assert compiled_kernels(module, torch.device("cuda", 0), dtype) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rows"), [(48, 7), (128, 5000), (1024, 3000), (5120, 33), (1, 1)])
def test_norms(size, rows, dtype):
    hidden, weight, gradient = draw_hidden(dtype, size, rows, "cuda")
    answers = both(lambda hidden, weight: rms_norm(hidden, weight, EPS), (hidden, weight), (), [gradient])
    for found, wanted in answers:
        assert found.dtype == dtype
        if size > 1:  # the norm of one number is its sign: its gradient is 0 but for EPS
            assert distance(found, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rows"), [(48, 7), (6144, 500), (2, 1), (3000, 2)])
def test_gates(size, rows, dtype):
    gate_and_up, _, gradient = draw_hidden(dtype, size, rows, "cuda")
    for found, wanted in both(gated_silu, (gate_and_up,), (), [gradient[..., : size // 2]]):
        assert distance(found, wanted) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rows"), [(48, 7), (1536, 5000), (2, 1), (3000, 2)])
def test_weighted_gates(size, rows, dtype):
    gate_and_up, _, gradient = draw_hidden(dtype, size, rows, "cuda")
    gate_and_up, gradient = gate_and_up.detach()[:, 0], gradient[:, 0, : size // 2]
    factors = torch.linspace(0, 1, rows, device="cuda")
    for found, wanted in both(weighted_gated_silu, (gate_and_up, factors), (), [gradient]):
        assert distance(found, wanted) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_heads(shape, has_norm, dtype):
    mixed, angles, weights = draw_heads(shape, dtype, has_norm=has_norm, device="cuda")
    rotation = rotation_of(angles, dtype)

    def function(mixed, *others):
        return rotated_heads(mixed, others[-1], others[:-1] or None, EPS)

    gradients = [torch.randn_like(part) for part in function(mixed, *(weights or ()), rotation)]
    for found, wanted in both(function, (mixed, *(weights or ())), (rotation,), gradients):
        if shape[-1] > 2 or not has_norm:
            assert distance(found, wanted) < TOLERANCES[dtype]


def test_results_are_rounded_where_torch_rounds(monkeypatch):
    """The same bits in bfloat16; but a norm's sum may differ in its last bit, and with it a rounding or two."""
    dtype = torch.bfloat16
    mixed, angles, weights = draw_heads((500, 8, 2, 128), dtype, has_norm=True, device="cuda")
    gate_and_up, weight, _ = draw_hidden(dtype, 2048, 500, "cuda")

    def work():
        return [
            *rotated_heads(mixed, rotation_of(angles, dtype), None, EPS),
            gated_silu(gate_and_up),
            rms_norm(gate_and_up, weight, EPS),
            *rotated_heads(mixed, rotation_of(angles, dtype), weights, EPS),
        ]

    by_kernels = work()
    monkeypatch.setattr(layer_functions, "_kernels_for", lambda _: None)
    monkeypatch.setattr(layer_functions, "_head_kernels_for", lambda _: None)
    differing = [float((found != wanted).float().mean()) for found, wanted in zip(by_kernels, work(), strict=True)]
    assert max(differing[:4]) == 0.0, differing
    assert max(differing[4:]) < 1e-3, differing


def test_gradients_are_the_same_bits_every_time():
    mixed, angles, weights = draw_heads((3000, 8, 2, 128), torch.bfloat16, has_norm=True, device="cuda")
    gradients = None
    seen = []
    for _ in range(3):
        heads = rotated_heads(mixed, rotation_of(angles, torch.bfloat16), weights, EPS)
        gradients = gradients or [torch.randn_like(part) for part in heads]
        seen.append(torch.autograd.grad(heads, (mixed, *weights), gradients))
    assert all(torch.equal(*pair) for other in seen[1:] for pair in zip(seen[0], other, strict=True))


def test_no_tokens_are_allowed():
    mixed, angles, weights = draw_heads((3, 2, 2, 16), torch.bfloat16, has_norm=True, device="cuda")
    heads = rotated_heads(mixed[:0], rotation_of(angles[:0], torch.bfloat16), weights, EPS)
    sum(part.sum() for part in heads).backward()
    assert mixed.grad.abs().sum() == 0
    assert weights[0].grad.abs().sum() == 0
