"""Fused GPU kernels that split, norm and rotate the heads of a layer, in one pass; torch's own operations take twenty.

Input and output: contiguous tensors on the GPU, of the dtype of the model.  Their meaning, and the same by torch's
operations, is in layer_functions.py; how sums are taken and numbers rounded, in layer_kernels.py.
Legend: L tokens, G key heads, R query heads of each key head, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhpc.training.layer_kernels import NUM_PROGRAMS, load_halves, rounded, store_halves


@triton.jit
def _weights_of(query_weight, key_weight, columns, half, is_query, is_inside):
    """Weights of each slot's norm, in halves; those of the value's slot are not used."""
    query_low, query_high = load_halves(query_weight, columns, half, is_inside & is_query)
    key_low, key_high = load_halves(key_weight, columns, half, is_inside & ~is_query)
    return query_low + key_low, query_high + key_high


@triton.jit
def _heads_kernel(
    mixed, cosines, sines, query_weight, key_weight, query, key, value, groups, queries, head_size, eps,
    has_norm: tl.constexpr, slots: tl.constexpr, half_block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = token * groups + tl.program_id(1)  # one token's heads of one group: queries, key, value
    half = head_size // 2
    slot, columns = tl.arange(0, slots)[:, None], tl.arange(0, half_block)[None, :]
    is_inside = (slot < queries + 2) & (columns < half)
    is_query, is_key, is_value = slot < queries, slot == queries, slot == queries + 1
    low, high = load_halves(mixed, (pair * (queries + 2) + slot) * head_size + columns, half, is_inside)
    place = pair * head_size + columns + slot * 0
    store_halves(value, place, half, low, high, is_inside & is_value)
    if has_norm:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / head_size + eps)[:, None]
        weight_low, weight_high = _weights_of(query_weight, key_weight, columns, half, is_query, is_inside)
        low = rounded(rounded(low * scale, query) * weight_low, query)
        high = rounded(rounded(high * scale, query) * weight_high, query)
    cosine = tl.load(cosines + token * half + columns, mask=columns < half, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * half + columns, mask=columns < half, other=0.0).to(tl.float32)
    turned_low = rounded(low * cosine, query) - rounded(high * sine, query)
    turned_high = rounded(high * cosine, query) + rounded(low * sine, query)
    query_place = (pair * queries + slot) * head_size + columns
    store_halves(query, query_place, half, turned_low, turned_high, is_inside & is_query)
    store_halves(key, place, half, turned_low, turned_high, is_inside & is_key)


@triton.jit
def _heads_gradient_kernel(
    mixed, cosines, sines, query_weight, key_weight, of_query, of_key, of_value, of_mixed, of_weights,
    num_pairs, groups, queries, head_size, eps,
    has_norm: tl.constexpr, slots: tl.constexpr, half_block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    half = head_size // 2
    slot, columns = tl.arange(0, slots)[:, None], tl.arange(0, half_block)[None, :]
    is_inside = (slot < queries + 2) & (columns < half)
    is_query, is_key = is_inside & (slot < queries), is_inside & (slot == queries)
    is_value = is_inside & (slot == queries + 1)
    total_low, total_high = tl.zeros([slots, half_block], tl.float32), tl.zeros([slots, half_block], tl.float32)
    if has_norm:
        weight_low, weight_high = _weights_of(query_weight, key_weight, columns, half, is_query, is_inside)
    for passed in range(0, num_pairs - program, tl.num_programs(0)):
        pair = program + passed  # of a token and a group
        place = (pair * (queries + 2) + slot) * head_size + columns
        key_place = pair * head_size + columns + slot * 0
        low, high = load_halves(of_query, (pair * queries + slot) * head_size + columns, half, is_query)
        key_low, key_high = load_halves(of_key, key_place, half, is_key)
        low, high = low + key_low, high + key_high
        angle = (pair // groups) * half + columns
        cosine = tl.load(cosines + angle, mask=columns < half, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=columns < half, other=0.0).to(tl.float32)
        back_low, back_high = low * cosine + high * sine, high * cosine - low * sine
        if has_norm:
            low, high = load_halves(mixed, place, half, is_inside)
            scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / head_size + eps)[:, None]
            low, high = low * scale, high * scale
            total_low += back_low * rounded(low, of_mixed)
            total_high += back_high * rounded(high, of_mixed)
            back_low, back_high = back_low * weight_low, back_high * weight_high
            along = (tl.sum(back_low * low + back_high * high, 1) / head_size)[:, None]
            back_low, back_high = (back_low - low * along) * scale, (back_high - high * along) * scale
        value_low, value_high = load_halves(of_value, key_place, half, is_value)
        back_low, back_high = tl.where(is_value, value_low, back_low), tl.where(is_value, value_high, back_high)
        store_halves(of_mixed, place, half, back_low, back_high, is_inside)
    if has_norm:
        column = tl.arange(0, half_block)
        for_query, for_key = of_weights + program * 2 * head_size, of_weights + (program * 2 + 1) * head_size
        low, high = tl.sum(tl.where(is_query, total_low, 0.0), 0), tl.sum(tl.where(is_query, total_high, 0.0), 0)
        store_halves(for_query, column, half, low, high, column < half)
        low, high = tl.sum(tl.where(is_key, total_low, 0.0), 0), tl.sum(tl.where(is_key, total_high, 0.0), 0)
        store_halves(for_key, column, half, low, high, column < half)


def rotated_heads(
    mixed: Tensor, rotation: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [L, G·R, D], key [L, G, D] and value [L, G, D] of mixed [L, G, R + 2, D]; see layer_functions."""
    tokens, groups, slots, head_size = mixed.shape
    query = mixed.new_empty(tokens, groups * (slots - 2), head_size)
    key, value = mixed.new_empty(tokens, groups, head_size), mixed.new_empty(tokens, groups, head_size)
    if mixed.numel():
        of_query, of_key = weights or (mixed, mixed)  # not read without a norm
        _heads_kernel[(tokens, groups)](
            mixed, rotation[0], rotation[1], of_query, of_key, query, key, value, groups, slots - 2, head_size, eps,
            has_norm=weights is not None, **_heads_block(slots, head_size),
            enable_fp_fusion=False,  # a product is rounded before it is added
        )  # fmt: skip
    return query, key, value


def rotated_heads_gradient(
    mixed: Tensor | None,
    rotation: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of mixed and of the two weights.  mixed: None without weights, where it is not needed."""
    of_query, of_key, of_value = gradients
    tokens, groups, head_size = of_key.shape
    slots = of_query.shape[1] // groups + 2
    of_mixed = of_query.new_empty(tokens, groups, slots, head_size)
    num_pairs = tokens * groups
    num_programs = num_pairs if weights is None else min(num_pairs, 2 * NUM_PROGRAMS)
    sums = of_query.new_empty(0 if weights is None else num_programs, 2, head_size, dtype=torch.float32)
    if num_pairs:
        query_weight, key_weight = weights or (rotation, rotation)  # not read without a norm
        _heads_gradient_kernel[(num_programs,)](
            rotation if mixed is None else mixed, rotation[0], rotation[1], query_weight, key_weight,
            of_query, of_key, of_value, of_mixed, sums, num_pairs, groups, slots - 2, head_size, eps,
            has_norm=weights is not None, **_heads_block(slots, head_size, 2 if weights else 1), enable_fp_fusion=True,
        )  # fmt: skip
    if weights is None:
        return of_mixed, None, None
    of_weights = sums.sum(0)
    return of_mixed, of_weights[0].to(weights[0].dtype), of_weights[1].to(weights[1].dtype)


def _heads_block(slots: int, head_size: int, num_kept: int = 1) -> dict[str, int]:
    """Size of a program's block; num_kept: tiles of sums that it keeps in registers, beyond one."""
    rows, half = triton.next_power_of_2(slots), triton.next_power_of_2(max(head_size // 2, 1))
    return {"slots": rows, "half_block": half, "num_warps": 4 if rows * half * num_kept > 512 else num_kept}


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Try the kernels of this file, as layer_kernels.try_out does."""
    mixed, rotation = (
        torch.ones(1, 1, 3, 2, device=device, dtype=dtype),
        torch.ones(2, 1, 1, device=device, dtype=dtype),
    )
    for weights in (None, (mixed[0, 0, 0], mixed[0, 0, 0])):
        rotated_heads_gradient(mixed, rotation, weights, 1.0, rotated_heads(mixed, rotation, weights, 1.0))
