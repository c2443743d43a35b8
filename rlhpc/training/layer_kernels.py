"""Fused GPU kernels of a layer's norms and gates, one pass each; torch's own operations take up to a dozen.

Input and output: contiguous tensors on the GPU, of the dtype of the model.  Their meaning, and the same by torch's
operations, is in layer_functions.py.  Forward rounds where torch's operations round; sums and backward are float32.
Each row is summed by one program in a fixed order, and the weights' gradients over a fixed number of programs: the same
bits every time.  Every launch sets whether a product and a sum are fused: Triton's default changes with its
versions.  Triton comes with torch's CUDA builds; kernels are compiled when first used.
Legend: T tokens, H hidden size, F inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a row at once, where rows are not summed
NUM_PROGRAMS = 1024  # that share rows whose contributions to a weight's gradient they add up


@triton.jit
def rounded(numbers, like):
    """Float32, rounded to the dtype of the pointer `like`."""
    return numbers.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def load_halves(numbers, place, half, mask):
    """Float32: the numbers at `place`, and those `half` behind them."""
    low = tl.load(numbers + place, mask=mask, other=0.0).to(tl.float32)
    return low, tl.load(numbers + place + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_halves(numbers, place, half, low, high, mask):
    """Round float32 to the dtype of the pointer, and write it where load_halves reads it."""
    tl.store(numbers + place, low.to(numbers.dtype.element_ty), mask=mask)
    tl.store(numbers + place + half, high.to(numbers.dtype.element_ty), mask=mask)


@triton.jit
def _norm_kernel(
    hidden, weight, normed, size, eps, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    is_inside = columns < size
    values = tl.load(hidden + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    unweighted = rounded(values * scale, normed)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(normed + row * size + columns, (unweighted * factors).to(normed.dtype.element_ty), mask=is_inside)


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
        total += arriving * rounded(exact, of_hidden)
        arriving = arriving * factors
        result = (arriving - exact * (tl.sum(arriving * exact, 0) / size)) * scale
        tl.store(of_hidden + place, result.to(of_hidden.dtype.element_ty), mask=is_inside)
    tl.store(of_weight + program * size + columns, total, mask=is_inside)


@triton.jit
def _gated(gate, up, like):
    """Float32 silu(gate), rounded to the dtype of the pointer `like`, times up."""
    return rounded(gate / (1.0 + tl.exp(-gate)), like) * up


@triton.jit
def _gate_gradients(gate, up, arriving):
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return arriving * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), arriving * gate * sigmoid


@triton.jit
def _gate_kernel(
    gate_and_up, factors, product, size, has_factors: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    gate, up = load_halves(gate_and_up, row * 2 * size + columns, size, is_inside)
    result = _gated(gate, up, product)
    if has_factors:
        result = rounded(result, product) * tl.load(factors + row).to(tl.float32)
    tl.store(product + row * size + columns, result.to(product.dtype.element_ty), mask=is_inside)


@triton.jit
def _gate_gradient_kernel(
    gate_and_up, gradient, of_both, size, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < size
    place = row * 2 * size + columns
    gate, up = load_halves(gate_and_up, place, size, is_inside)
    arriving = tl.load(gradient + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    of_gate, of_up = _gate_gradients(gate, up, arriving)
    store_halves(of_both, place, size, of_gate, of_up, is_inside)


@triton.jit
def _weighted_gate_gradient_kernel(
    gate_and_up, factors, gradient, of_both, of_factors, size, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor, total = tl.load(factors + row).to(tl.float32), 0.0
    for first in range(0, size, block):
        columns = first + tl.arange(0, block)
        is_inside = columns < size
        place = row * 2 * size + columns
        gate, up = load_halves(gate_and_up, place, size, is_inside)
        arriving = tl.load(gradient + row * size + columns, mask=is_inside, other=0.0).to(tl.float32)
        total += tl.sum(arriving * rounded(_gated(gate, up, of_both), of_both), 0)
        of_gate, of_up = _gate_gradients(gate, up, rounded(arriving * factor, of_both))
        store_halves(of_both, place, size, of_gate, of_up, is_inside)
    tl.store(of_factors + row, total)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Weight [H] times the last dimension of `hidden` over its root mean square; the shape is that of `hidden`."""
    normed, size = torch.empty_like(hidden), hidden.shape[-1]
    if hidden.numel():
        block = triton.next_power_of_2(size)
        _norm_kernel[(hidden.numel() // size,)](
            hidden, weight, normed, size, eps, block=block, num_warps=_num_warps(block), enable_fp_fusion=True
        )
    return normed


def rms_norm_gradient(hidden: Tensor, weight: Tensor, eps: float, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `hidden` and of the weight, given that of rms_norm's result."""
    of_hidden, size = torch.empty_like(hidden), hidden.shape[-1]
    num_rows = hidden.numel() // size
    sums = torch.empty(min(num_rows, NUM_PROGRAMS), size, dtype=torch.float32, device=hidden.device)
    if num_rows:
        block = triton.next_power_of_2(size)
        _norm_gradient_kernel[(len(sums),)](
            hidden, weight, gradient, of_hidden, sums, num_rows, size, eps,
            block=block, num_warps=_num_warps(block), enable_fp_fusion=True,
        )  # fmt: skip
    return of_hidden, sums.sum(0).to(weight.dtype)


def gated_silu(gate_and_up: Tensor, factors: Tensor | None = None) -> Tensor:
    """[..., 2·F] → [..., F]: silu of the first half times the second; factors [T]: rounded, times the row's factor."""
    size = gate_and_up.shape[-1] // 2
    product = gate_and_up.new_empty(*gate_and_up.shape[:-1], size)
    if product.numel():
        _gate_kernel[(product.numel() // size, triton.cdiv(size, BLOCK))](
            gate_and_up, product if factors is None else factors, product, size,
            has_factors=factors is not None, block=BLOCK, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return product


def gated_silu_gradient(gate_and_up: Tensor, gradient: Tensor) -> Tensor:
    """Gradient of gate_and_up, in its shape, given the gradient [..., F] of gated_silu's result."""
    of_both, size = torch.empty_like(gate_and_up), gate_and_up.shape[-1] // 2
    if of_both.numel():
        grid = (gradient.numel() // size, triton.cdiv(size, BLOCK))
        _gate_gradient_kernel[grid](
            gate_and_up, gradient, of_both, size, block=BLOCK, num_warps=4, enable_fp_fusion=True
        )
    return of_both


def weighted_gated_silu_gradient(gate_and_up: Tensor, factors: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate_and_up and of the factors, given the gradient [T, F] of gated_silu's result with them."""
    of_both, of_factors = torch.empty_like(gate_and_up), torch.zeros_like(factors)
    if of_both.numel():
        _weighted_gate_gradient_kernel[(len(gradient),)](
            gate_and_up, factors, gradient, of_both, of_factors, gradient.shape[1],
            block=BLOCK, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return of_both, of_factors


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for this device and dtype; raises whatever Triton raises."""
    one = torch.ones(1, 2, device=device, dtype=dtype)
    rms_norm_gradient(one, one[0], 1.0, rms_norm(one, one[0], 1.0))
    gated_silu_gradient(one, gated_silu(one))
    factors = torch.ones(1, device=device)
    weighted_gated_silu_gradient(one, factors, gated_silu(one, factors))
