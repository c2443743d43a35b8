"""Norms, gate and heads by torch's operations: against autograd of the same written plainly, and what they keep."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from rlhpc.training.layer_functions import gated_silu, rms_norm, rotated_heads, rotation_of, weighted_gated_silu
from tests.unit.training.layer_inputs import EPS, SHAPES, draw_heads, draw_hidden, plain_heads
from tests.unit.training.live_bytes import LiveBytes

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounds_as_transformers_does(dtype):
    hidden, weight, _ = draw_hidden(dtype)
    theirs = Qwen3RMSNorm(len(weight), EPS)
    theirs.weight.data = weight.detach()
    torch.testing.assert_close(rms_norm(hidden, weight, EPS), theirs(hidden), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_norm(dtype):
    hidden, weight, gradient = draw_hidden(dtype)
    rms_norm(hidden, weight, EPS).backward(gradient)
    wanted = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    (wanted[1] * functional.rms_norm(wanted[0], wanted[0].shape[-1:], None, EPS)).backward(gradient)
    for leaf, autograds in zip((hidden, weight), wanted, strict=True):
        assert leaf.grad.dtype == dtype
        torch.testing.assert_close(leaf.grad, autograds.grad, **TOLERANCES[dtype])


def test_gradients_of_a_norm_are_as_exact_as_autograds():
    hidden, weight, gradient = draw_hidden(torch.float32)
    rms_norm(hidden, weight, EPS).backward(gradient)
    errors = []
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    autograds = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    for leaves in (exact, autograds):
        normed = functional.rms_norm(leaves[0], leaves[0].shape[-1:], None, EPS)
        (leaves[1] * normed).backward(gradient.to(normed.dtype))
    for found in ((hidden, weight), autograds):
        errors.append([float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in zip(found, exact, strict=True)])
    assert max(errors[0]) <= 1.5 * max(errors[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_and_its_gradient(dtype):
    both, _, _ = draw_hidden(dtype)
    gradient = torch.randn(*both.shape[:-1], both.shape[-1] // 2).to(dtype)
    found = gated_silu(both)
    found.backward(gradient)
    wanted = both.detach().requires_grad_()
    gate, up = wanted.chunk(2, -1)
    product = functional.silu(gate) * up
    product.backward(gradient)
    assert torch.equal(found, product)
    assert torch.equal(both.grad, wanted.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_gate_is_that_of_single_operations_and_keeps_its_inputs_alone(dtype):
    torch.manual_seed(0)
    gate_and_up = torch.randn(50, 24).to(dtype).requires_grad_()
    probabilities, gradient = torch.rand(50).requires_grad_(), torch.randn(50, 12).to(dtype)
    before = gradient.clone()
    with LiveBytes(gate_and_up, probabilities) as live:
        product = weighted_gated_silu(gate_and_up, probabilities)
    assert live.live == product.nbytes
    found = torch.autograd.grad(product, [gate_and_up, probabilities], gradient)
    gate, up = gate_and_up.chunk(2, -1)
    plain = (functional.silu(gate) * up * probabilities[:, None]).to(dtype)
    assert torch.equal(product, plain)
    for seen, wanted in zip(found, torch.autograd.grad(plain, [gate_and_up, probabilities], gradient), strict=True):
        assert seen.dtype == wanted.dtype
        torch.testing.assert_close(seen, wanted, rtol=1e-6 if seen.dtype == torch.float32 else 1e-2, atol=1e-6)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_split_normed_and_rotated_as_in_transformers(shape, has_norm, dtype):
    mixed, angles, weights = draw_heads(shape, dtype, has_norm=has_norm)
    found = rotated_heads(mixed, rotation_of(angles, dtype), weights, EPS)
    leaves = [leaf.detach().requires_grad_() for leaf in (mixed, *(weights or ()))]
    query, key, value = plain_heads(leaves[0], tuple(leaves[1:]) or None)
    both = torch.cat([angles, angles], -1)
    query, key = apply_rotary_pos_emb(query, key, both.cos().to(dtype), both.sin().to(dtype), unsqueeze_dim=1)
    gradients = [torch.randn(part.shape).to(dtype) for part in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward((query, key, value), gradients)
    assert all(map(torch.equal, found, (query, key, value)))
    exactly = {} if has_norm else {"rtol": 0, "atol": 0}
    for leaf, wanted in zip((mixed, *(weights or ())), leaves, strict=True):
        torch.testing.assert_close(leaf.grad, wanted.grad, **(TOLERANCES[dtype] | exactly))


@pytest.mark.parametrize(("has_norm", "is_kept"), [(True, True), (False, False)])
def test_heads_are_kept_only_for_their_norms(has_norm, is_kept):
    mixed, angles, weights = draw_heads((5, 2, 2, 16), torch.float32, has_norm=has_norm)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.data_ptr()) or each, lambda each: each):
        rotated_heads(mixed, rotation_of(angles, torch.float32), weights, EPS)
    assert (mixed.data_ptr() in kept) == is_kept
