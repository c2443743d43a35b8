"""Megatron's packed attention on a GPU: flash kernels beside a dense softmax, also where keys outnumber queries."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhpc.training.megatron.attention import PackedCoreAttention, RowPlan, chunk_attention, held_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS, SCALING = 8, 64**-0.5
# A long segment over both cuts, borders on a cut, single tokens, one segment only; 480 tokens each.
ROWS = [(480,), (100, 1, 250, 1, 128), (120, 120, 120, 120), (119, 2, 239, 120), (1,) * 480]


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def draw(device, key_heads, num_tokens=480):
    """Queries [T, heads, D] and keys and values [T, 2, key heads, D], rounded to bfloat16, as float32 leaves."""
    generator = torch.Generator(device).manual_seed(key_heads)
    shapes = (num_tokens, HEADS, 64), (num_tokens, 2, key_heads, 64)
    return [
        torch.randn(shape, device=device, generator=generator).bfloat16().float().requires_grad_() for shape in shapes
    ]


def in_half(tensors):
    return [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]


def dense_attention(query, keys_and_values, borders):
    """By a mask of the whole row, which the trainer never makes."""
    segment = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    allowed = torch.from_numpy(segment[:, None] == segment[None]).tril().to(query.device)
    key, value = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in keys_and_values.unbind(1))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALING
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value)


def assert_near(found, wanted):
    """The error of bfloat16, over the whole and in the worst number; a gradient may be zero but for rounding."""
    apart = found.float() - wanted
    assert apart.norm() <= 1e-2 * max(wanted.norm(), 0.02 * wanted.numel() ** 0.5)
    assert apart.abs().max() <= 3e-2 * max(wanted.abs().max(), 0.1)


def assert_same_attention(found, wanted, half, full):
    assert_near(found, wanted)
    slope = torch.randn(wanted.shape, device=wanted.device, generator=torch.Generator(wanted.device).manual_seed(9))
    wanted.backward(slope.bfloat16().float())
    found.backward(slope.bfloat16())
    for left, right in zip(half, full, strict=True):
        assert_near(left.grad, right.grad)


@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("lengths", ROWS, ids=lambda lengths: f"{len(lengths)}_segments")
def test_a_whole_row_attends_as_a_dense_mask_would_have_it(lengths, key_heads, device):
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    full = draw(device, key_heads)
    half = in_half(full)
    row = RowPlan.of(borders, 1, 0, device)
    attention = PackedCoreAttention(SimpleNamespace(kv_channels=64), SimpleNamespace(cp=None))
    key, value = (part[:, None] for part in half[1].unbind(1))
    found = attention(half[0][:, None], key, value, packed_seq_params=row)
    assert found.shape == (480, 1, HEADS * 64)
    assert_same_attention(found.view(480, HEADS, 64), dense_attention(*full, borders), half, full)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("key_heads", [2, 8])
@pytest.mark.parametrize("lengths", ROWS, ids=lambda lengths: f"{len(lengths)}_segments")
def test_all_context_ranks_together_attend_as_a_dense_mask_would_have_it(lengths, key_heads, num_ranks, device):
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    full = draw(device, key_heads)
    half = in_half(full)
    parts, places = [], []
    for rank in range(num_ranks):
        plan = RowPlan.of(borders, num_ranks, rank, device)
        tokens = torch.from_numpy(held_tokens(480, num_ranks, rank)).to(device)
        queries = half[0].index_select(0, tokens).chunk(2)
        parts += [chunk_attention(q, half[1], chunk, SCALING) for q, chunk in zip(queries, plan.chunks, strict=True)]
        places.append(tokens)
    found = torch.cat(parts).index_select(0, torch.cat(places).argsort())
    assert_same_attention(found, dense_attention(*full, borders), half, full)


def test_a_long_row_needs_no_memory_for_a_mask(device):
    tokens = 32_768
    query, keys_and_values = in_half(draw(device, 2, tokens))
    row = RowPlan.of(np.array([0, tokens // 2, tokens], dtype=np.int32), 1, 0, device)
    attention = PackedCoreAttention(SimpleNamespace(kv_channels=64), SimpleNamespace(cp=None))
    key, value = (part[:, None] for part in keys_and_values.unbind(1))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(query[:, None], key, value, packed_seq_params=row).float().sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * tokens // 2  # of a mask of bytes, causal half


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("lengths", ROWS, ids=lambda lengths: f"{len(lengths)}_segments")
def test_in_float32_a_row_attends_as_a_dense_mask_would_have_it(lengths, num_ranks, device):
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    full = draw(device, 2)
    wanted = dense_attention(*full, borders)
    parts, places = [], []
    for rank in range(num_ranks):
        plan = RowPlan.of(borders, num_ranks, rank, device)
        tokens = torch.from_numpy(held_tokens(480, num_ranks, rank)).to(device)
        if plan.whole is not None:
            attention = PackedCoreAttention(SimpleNamespace(kv_channels=64), SimpleNamespace(cp=None))
            key, value = (part[:, None] for part in full[1].unbind(1))
            parts.append(attention(full[0][:, None], key, value, packed_seq_params=plan).view(480, HEADS, 64))
        else:
            pairs = zip(full[0].index_select(0, tokens).chunk(2), plan.chunks, strict=True)
            parts += [chunk_attention(query, full[1], chunk, SCALING) for query, chunk in pairs]
        places.append(tokens)
    found = torch.cat(parts).index_select(0, torch.cat(places).argsort())
    slope = torch.randn(wanted.shape, device=device, generator=torch.Generator(device).manual_seed(9))
    gradients = [torch.autograd.grad(output, full, slope) for output in (found, wanted)]
    for left, right in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        torch.testing.assert_close(left, right, atol=5e-3, rtol=5e-3)  # TF32, where a kernel takes it


def test_in_float32_a_long_row_needs_no_memory_for_scores(device):
    tokens = 16_384
    query, keys_and_values = draw(device, 2, tokens)
    row = RowPlan.of(np.array([0, tokens], dtype=np.int32), 1, 0, device)
    attention = PackedCoreAttention(SimpleNamespace(kv_channels=64), SimpleNamespace(cp=None))
    key, value = (part[:, None] for part in keys_and_values.unbind(1))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(query[:, None], key, value, packed_seq_params=row).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 * tokens * tokens  # of one head's scores
