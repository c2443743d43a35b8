"""Fused GPU kernels between the matrix products of a layer, one pass each; torch's own operations take up to twenty.

Input and output: contiguous tensors on the GPU, of the dtype of the model.  Their meaning, and the same by torch's
operations, is in layer_functions.py.  Forward rounds where torch's operations round; sums and backward are float32.
Each row is summed by one program in a fixed order, and the weights' gradients over a fixed number of programs: the same
bits every time.  Every launch says whether a product and a sum become one operation: Triton's default changes with its
versions.  Triton comes with torch's CUDA builds; kernels are compiled when first used.
Legend: L tokens, H hidden size, F inner size, G key heads, R query heads of each key head, D head size.
"""

from __future__ import annotations

from subprocess import SubprocessError

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

BLOCK = 1024  # elements of a row at once, where rows are not summed
NUM_PROGRAMS = 1024  # that share rows whose contributions to a weight's gradient they add up


@triton.jit
def _rounded(numbers, like):
    """Float32, rounded to the dtype of the pointer `like`."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm_kernel(
    hidden, weight, normed, size, eps, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < size
    values = tl.load(hidden + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    rounded = _rounded(values * scale, normed)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + columns, (rounded * factors).to(normed.dtype.element_ty), mask=is_inside)


@triton.jit
def _norm_gradient_kernel(
    hidden, weight, gradient, of_hidden, of_weight, num_rows, size, eps, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < size
    factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for passed in range(0, num_rows - program, tl.num_programs(0)):
        place = (program + passed) * size + columns
        values = tl.load(hidden + place, mask=is_inside, other=0.0).to(tl.float32)
        arriving = tl.load(gradient + place, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        exact = values * scale
        total += arriving * _rounded(exact, of_hidden)
        arriving = arriving * factors
        result = (arriving - exact * (tl.sum(arriving * exact, 0) / size)) * scale
        tl.store(of_hidden + place, result.to(of_hidden.dtype.element_ty), mask=is_inside)
    tl.store(of_weight + program * size + columns, total, mask=is_inside)


@triton.jit
def _gate_kernel(
    gate_and_up, product, size, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    gate = tl.load(gate_and_up + row * 2 * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * size + size + columns, mask=is_inside, other=0.0).to(tl.float32)
    silu = _rounded(gate / (1.0 + tl.exp(-gate)), product)
    tl.store(product + row * size + columns, (silu * up).to(product.dtype.element_ty), mask=is_inside)


@triton.jit
def _gate_gradient_kernel(
    gate_and_up, gradient, of_both, size, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    place = row * 2 * size + columns
    gate = tl.load(gate_and_up + place, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + place + size, mask=is_inside, other=0.0).to(tl.float32)
    arriving = tl.load(gradient + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = arriving * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(of_both + place, of_gate.to(of_both.dtype.element_ty), mask=is_inside)
    tl.store(of_both + place + size, (arriving * gate * sigmoid).to(of_both.dtype.element_ty), mask=is_inside)


@triton.jit
def _load_halves(heads, place, half, mask):
    """Float32: a head's numbers at `place`, and those `half` behind them, with which they are rotated."""
    low = tl.load(heads + place, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(heads + place + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(heads, place, half, low, high, mask):
    tl.store(heads + place, low.to(heads.dtype.element_ty), mask=mask)
    tl.store(heads + place + half, high.to(heads.dtype.element_ty), mask=mask)


@triton.jit
def _weights_of(query_weight, key_weight, columns, half, is_query, is_inside):
    """Of each slot's norm, in halves; what the value's slot gets is not used."""
    query_low, query_high = _load_halves(query_weight, columns, half, is_inside & is_query)
    key_low, key_high = _load_halves(key_weight, columns, half, is_inside & ~is_query)
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
    low, high = _load_halves(mixed, (pair * (queries + 2) + slot) * head_size + columns, half, is_inside)
    place = pair * head_size + columns + slot * 0
    _store_halves(value, place, half, low, high, is_inside & is_value)
    if has_norm:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / head_size + eps)[:, None]
        weight_low, weight_high = _weights_of(query_weight, key_weight, columns, half, is_query, is_inside)
        low = _rounded(_rounded(low * scale, query) * weight_low, query)
        high = _rounded(_rounded(high * scale, query) * weight_high, query)
    cosine = tl.load(cosines + token * half + columns, mask=columns < half, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * half + columns, mask=columns < half, other=0.0).to(tl.float32)
    turned_low = _rounded(low * cosine, query) - _rounded(high * sine, query)
    turned_high = _rounded(high * cosine, query) + _rounded(low * sine, query)
    query_place = (pair * queries + slot) * head_size + columns
    _store_halves(query, query_place, half, turned_low, turned_high, is_inside & is_query)
    _store_halves(key, place, half, turned_low, turned_high, is_inside & is_key)


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
        low, high = _load_halves(of_query, (pair * queries + slot) * head_size + columns, half, is_query)
        key_low, key_high = _load_halves(of_key, key_place, half, is_key)
        low, high = low + key_low, high + key_high
        angle = (pair // groups) * half + columns
        cosine = tl.load(cosines + angle, mask=columns < half, other=0.0).to(tl.float32)
        sine = tl.load(sines + angle, mask=columns < half, other=0.0).to(tl.float32)
        back_low, back_high = low * cosine + high * sine, high * cosine - low * sine
        if has_norm:
            low, high = _load_halves(mixed, place, half, is_inside)
            scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / head_size + eps)[:, None]
            low, high = low * scale, high * scale
            total_low += back_low * _rounded(low, of_mixed)
            total_high += back_high * _rounded(high, of_mixed)
            back_low, back_high = back_low * weight_low, back_high * weight_high
            along = (tl.sum(back_low * low + back_high * high, 1) / head_size)[:, None]
            back_low, back_high = (back_low - low * along) * scale, (back_high - high * along) * scale
        value_low, value_high = _load_halves(of_value, key_place, half, is_value)
        back_low, back_high = tl.where(is_value, value_low, back_low), tl.where(is_value, value_high, back_high)
        _store_halves(of_mixed, place, half, back_low, back_high, is_inside)
    if has_norm:
        column = tl.arange(0, half_block)
        for_query, for_key = of_weights + program * 2 * head_size, of_weights + (program * 2 + 1) * head_size
        low, high = tl.sum(tl.where(is_query, total_low, 0.0), 0), tl.sum(tl.where(is_query, total_high, 0.0), 0)
        _store_halves(for_query, column, half, low, high, column < half)
        low, high = tl.sum(tl.where(is_key, total_low, 0.0), 0), tl.sum(tl.where(is_key, total_high, 0.0), 0)
        _store_halves(for_key, column, half, low, high, column < half)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Like hidden: weight [H] times the last dimension of `hidden` over its root mean square."""
    normed, size = torch.empty_like(hidden), hidden.shape[-1]
    if hidden.numel():
        block = triton.next_power_of_2(size)
        _norm_kernel[(hidden.numel() // size,)](
            hidden, weight, normed, size, eps, block=block, num_warps=_num_warps(block), enable_fp_fusion=True
        )
    return normed


def rms_norm_gradient(hidden: Tensor, weight: Tensor, eps: float, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Of `hidden` and of the weight, from that of rms_norm's result."""
    of_hidden, size = torch.empty_like(hidden), hidden.shape[-1]
    num_rows = hidden.numel() // size
    if not num_rows:
        return of_hidden, torch.zeros_like(weight)
    block = triton.next_power_of_2(size)
    sums = torch.empty(min(num_rows, NUM_PROGRAMS), size, dtype=torch.float32, device=hidden.device)
    _norm_gradient_kernel[(len(sums),)](
        hidden, weight, gradient, of_hidden, sums, num_rows, size, eps,
        block=block, num_warps=_num_warps(block), enable_fp_fusion=True,
    )  # fmt: skip
    return of_hidden, sums.sum(0).to(weight.dtype)


def gated_silu(gate_and_up: Tensor) -> Tensor:
    """[..., 2·F] → [..., F]: silu of the first half times the second."""
    size = gate_and_up.shape[-1] // 2
    product = gate_and_up.new_empty(*gate_and_up.shape[:-1], size)
    if product.numel():
        grid = (product.numel() // size, triton.cdiv(size, BLOCK))
        _gate_kernel[grid](gate_and_up, product, size, block=BLOCK, num_warps=4, enable_fp_fusion=True)
    return product


def gated_silu_gradient(gate_and_up: Tensor, gradient: Tensor) -> Tensor:
    """Like gate_and_up, from the gradient [..., F] of gated_silu's result."""
    of_both, size = torch.empty_like(gate_and_up), gate_and_up.shape[-1] // 2
    if of_both.numel():
        grid = (gradient.numel() // size, triton.cdiv(size, BLOCK))
        _gate_gradient_kernel[grid](
            gate_and_up, gradient, of_both, size, block=BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return of_both


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
    """Of mixed and of the two weights.  mixed: None without weights, where it is not needed."""
    of_query, of_key, of_value = gradients
    tokens, groups, head_size = of_key.shape
    slots = of_query.shape[1] // groups + 2
    of_mixed = of_query.new_empty(tokens, groups, slots, head_size)
    num_programs = min(max(tokens * groups, 1), 2 * NUM_PROGRAMS)
    sums = of_query.new_zeros(num_programs if weights else 1, 2, head_size, dtype=torch.float32)
    if of_mixed.numel():
        query_weight, key_weight = weights or (rotation, rotation)  # not read without a norm
        _heads_gradient_kernel[(num_programs if weights else tokens * groups,)](
            rotation if mixed is None else mixed, rotation[0], rotation[1], query_weight, key_weight,
            of_query, of_key, of_value, of_mixed, sums, tokens * groups, groups, slots - 2, head_size, eps,
            has_norm=weights is not None, **_heads_block(slots, head_size, 2 if weights else 1), enable_fp_fusion=True,
        )  # fmt: skip
    if weights is None:
        return of_mixed, None, None
    of_weights = sums.sum(0)
    return of_mixed, of_weights[0].to(weights[0].dtype), of_weights[1].to(weights[1].dtype)


def _heads_block(slots: int, head_size: int, num_kept: int = 1) -> dict[str, int]:
    """num_kept: tiles of sums that a program keeps in its registers, over one."""
    rows, half = triton.next_power_of_2(slots), triton.next_power_of_2(max(head_size // 2, 1))
    return {"slots": rows, "half_block": half, "num_warps": 4 if rows * half * num_kept > 512 else num_kept}


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for this device and dtype; raises RuntimeError or OSError if that does not work here."""
    one = torch.ones(1, 2, device=device, dtype=dtype)
    mixed, rotation = one.expand(1, 1, 3, 2).contiguous(), torch.ones(2, 1, 1, device=device, dtype=dtype)
    try:
        rms_norm_gradient(one, one[0], 1.0, rms_norm(one, one[0], 1.0))
        gated_silu_gradient(one, gated_silu(one))
        for weights in (None, (one[0], one[0])):
            rotated_heads_gradient(mixed, rotation, weights, 1.0, rotated_heads(mixed, rotation, weights, 1.0))
    except (TritonError, SubprocessError) as error:  # a kernel, a compiler
        raise RuntimeError(str(error)) from error
