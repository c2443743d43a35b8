from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Module, functional

from rlhpc.training.packed_attention import MIN_FILL, SHORT_TOKENS, SegmentPlan, packed_attention

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 8


def plan(lengths: list[int]) -> SegmentPlan:
    return SegmentPlan.of(np.cumsum([0, *lengths], dtype=np.int32), CPU)


def draw(num_tokens: int, key_heads: int = KEY_HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(1, heads, num_tokens, SIZE) for heads in (HEADS, key_heads, key_heads)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, lengths):
    pieces = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    outputs = [functional.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_padding_segments_together_changes_neither_values_nor_gradients(lengths):
    q, k, v = draw(sum(lengths))
    expected = one_by_one(q, k, v, lengths)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * factors).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200))
def test_padding_costs_at_most_a_quarter_and_every_token_has_one_place(lengths):
    segments = plan(lengths)
    gather, scatter = segments.gather.numpy(), segments.scatter.numpy()
    assert np.array_equal(gather[scatter], np.arange(sum(lengths)))
    assert len(gather) == sum(count * length for count, length in segments.buckets)
    assert len(gather) <= sum(max(length / MIN_FILL, SHORT_TOKENS) for length in lengths)


def test_buckets_are_few():
    assert len(plan(list(range(30, 90))).buckets) <= 6
    assert len(plan([64] * 100).buckets) == 1


def test_another_segment_changes_no_bit_and_gets_no_gradient():
    lengths = [40, 38, 3, 39]
    q, k, v = draw(sum(lengths))
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    disturbed = [tensor.detach().clone() for tensor in (q, k, v)]
    for tensor in disturbed:
        tensor[:, :, 40:78] += 1e3
    other, _ = packed_attention(Module(), *disturbed, None, segments=plan(lengths))
    assert torch.equal(found[:, :40], other[:, :40])
    assert torch.equal(found[:, 78:], other[:, 78:])
    found[:, :40].sum().backward()
    assert not any(tensor.grad[:, :, 40:].any() for tensor in (q, k, v))


def test_a_nan_in_one_segment_stays_there():
    lengths = [20, 17, 19]
    q, k, v = (tensor.detach() for tensor in draw(sum(lengths)))
    v[:, :, 25] = torch.nan
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths))
    assert found[:, 20:37].isnan().any()
    assert not found[:, :20].isnan().any()
    assert not found[:, 37:].isnan().any()


@pytest.mark.parametrize("lengths", [[30], [30, 29]])
def test_scaling_and_equal_head_counts_are_honoured(lengths):
    q, k, v = draw(sum(lengths), key_heads=HEADS)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths), scaling=0.1)
    expected = one_by_one(q * (0.1 * SIZE**0.5), k, v, lengths)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 70))
def test_a_window_hides_what_lies_further_back_and_nothing_else(lengths, window):
    q, k, v = draw(sum(lengths))
    behind = torch.arange(max(lengths))[:, None] - torch.arange(max(lengths))
    sees = (behind >= 0) & (behind < window)
    pieces = zip(lengths, *(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    attend = functional.scaled_dot_product_attention
    outputs = [attend(*piece, attn_mask=sees[:length, :length], enable_gqa=True) for length, *piece in pieces]
    expected = torch.cat(outputs, dim=2).transpose(1, 2)
    found, _ = packed_attention(Module(), q, k, v, None, segments=plan(lengths), sliding_window=window)
    factors = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
    gradients = torch.autograd.grad((found * factors).sum(), (q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)


def test_a_call_without_borders_fails_instead_of_attending_across_samples():
    with pytest.raises(TypeError, match="segments"):
        packed_attention(Module(), *draw(4), None)
