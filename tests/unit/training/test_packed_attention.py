from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode

from rlhpc.training.packed_attention import (
    MIN_FILL,
    SHORT_TOKENS,
    SegmentPlan,
    group_by_group,
    grouped_attention,
    packed_attention,
)

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


class Calls(TorchFunctionMode):
    """Notes what torch's attention is called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is functional.scaled_dot_product_attention:
            self.calls.append((*args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def test_on_cuda_in_float32_torch_is_asked_for_no_groups_and_gets_no_copies_of_keys():
    """Its kernel for groups keeps all scores there.  Fake tensors have a device and shapes, and no numbers."""
    with FakeTensorMode(), Calls() as noted:
        q, k, v = (torch.empty(1, heads, 30, SIZE, device="cuda") for heads in (6, 2, 2))
        found, _ = packed_attention(None, q, k, v, None, segments=plan([30]))
    assert found.shape == (1, 30, 6, SIZE)
    ((query, key, value, options),) = noted.calls
    assert not options.get("enable_gqa")
    assert query.shape[:2] == key.shape[:2] == value.shape[:2]
    assert key.stride(1) == value.stride(1) == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_groups_attend_as_torchs_do(num_rows):
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, 17, heads, SIZE) for heads in (6, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes)
    mask = torch.ones(17, 17, dtype=torch.bool).tril(2)
    for options in ({"is_causal": True}, {"attn_mask": mask, "scale": 0.2}):
        expected, found = grouped_attention(q, k, v, **options), group_by_group(q, k, v, **options)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        factors = torch.randn(expected.shape, generator=generator)
        wanted = torch.autograd.grad((expected * factors).sum(), (q, k, v))
        for gradient, want in zip(torch.autograd.grad((found * factors).sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(gradient, want, atol=5e-6, rtol=0)
