"""A layer's operations between its matrix products: norms, the gate, heads that are normed and rotated; and products
with the matrices of experts.

Input: activations of the model.  Output: the same, differentiable once.  By layer_kernels.py and head_kernels.py on a
GPU where Triton works, elsewhere by torch's own operations, as transformers does it, rounded as it rounds.  Either way
only inputs of forward are kept for backward; torch's operations would keep a copy of most intermediate results.
Legend: L tokens, H hidden size, F inner size, G key heads, R query heads of each key head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from rlhpc.training.triton_kernels import kernels_for

_kernels_for = partial(kernels_for, "layer_kernels")
_head_kernels_for = partial(kernels_for, "head_kernels")


@dataclass(frozen=True, slots=True)
class NormStyle:
    """Way of multiplying by a norm's weight; the kernels know PLAIN_NORM alone."""

    is_in_float32: bool = False  # rounded after it is multiplied, not before
    offset: int = 0  # added to the weight, in float32


PLAIN_NORM = NormStyle()


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, style: NormStyle = PLAIN_NORM) -> Tensor:
    """Normalise the last dimension in float32, round, then multiply by weight [H], or as style has it."""
    normed: Tensor = _RmsNorm.apply(hidden, weight, eps, style)
    return normed


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
        hidden = hidden.contiguous()
        ctx.save_for_backward(hidden, weight)
        ctx.eps, ctx.style = eps, style
        kernels = _kernels_for(hidden) if style == PLAIN_NORM else None
        return kernels.rms_norm(hidden, weight, eps) if kernels else _norm_by_torch(hidden, weight, eps, style)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), gradient = ctx.saved_tensors, gradients[0].contiguous()
        kernels = _kernels_for(hidden) if ctx.style == PLAIN_NORM else None
        if kernels:
            return *kernels.rms_norm_gradient(hidden, weight, ctx.eps, gradient), None, None
        return *_norm_gradient_by_torch(hidden, weight, ctx.eps, gradient, ctx.style), None, None


def _norm_by_torch(hidden: Tensor, weight: Tensor, eps: float, style: NormStyle = PLAIN_NORM) -> Tensor:
    if style == PLAIN_NORM:
        return weight * functional.rms_norm(hidden, hidden.shape[-1:], None, eps)
    return functional.rms_norm(hidden.float(), hidden.shape[-1:], style.offset + weight.float(), eps).to(hidden.dtype)


def _norm_gradient_by_torch(
    hidden: Tensor, weight: Tensor, eps: float, gradient: Tensor, style: NormStyle = PLAIN_NORM
) -> tuple[Tensor, Tensor]:
    """Return in float32, x̂ = x / rms(x) and g = gradient · weight: (g − x̂ · mean(g · x̂)) / rms(x), Σ gradient · x̂.

    Autograd of _norm_by_torch takes three times as long on a CPU: it computes forward again, an operation a pass.
    """
    wide = hidden.float()
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
    over_rms = mean_square.add_(eps).rsqrt_()
    normed = wide * over_rms
    if style != PLAIN_NORM:
        gradient, weight, dtype = gradient.float(), style.offset + weight.float(), weight.dtype
        of_weight = (gradient * normed).flatten(0, -2).sum(0).to(dtype)
    else:
        of_weight = (gradient * normed.to(hidden.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
    of_normed = (gradient * weight).float()
    mean = torch.linalg.vecdot(of_normed, normed)[..., None].div_(hidden.shape[-1])
    of_hidden = of_normed.addcmul_(normed, mean, value=-1).mul_(over_rms)
    return of_hidden.to(hidden.dtype), of_weight


def gated_silu(gate_and_up: Tensor) -> Tensor:
    """[..., 2·F] → [..., F]: silu of the first half, rounded, times the second."""
    product: Tensor = _GatedSilu.apply(gate_and_up)
    return product


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        gate_and_up = gate_and_up.contiguous()
        ctx.save_for_backward(gate_and_up)
        if kernels := _kernels_for(gate_and_up):
            product: Tensor = kernels.gated_silu(gate_and_up)
            return product
        gate, up = gate_and_up.chunk(2, -1)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_and_up,), gradient = ctx.saved_tensors, gradients[0].contiguous()
        if kernels := _kernels_for(gate_and_up):
            of_both: Tensor = kernels.gated_silu_gradient(gate_and_up, gradient)
            return of_both
        gate, up = gate_and_up.chunk(2, -1)
        of_both = torch.empty_like(gate_and_up)
        of_gate, of_up = of_both.chunk(2, -1)
        torch.mul(gradient, functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward(gradient * up, gate, grad_input=of_gate)
        return of_both


def gated_gelu(gate_and_up: Tensor) -> Tensor:
    """[..., 2·F] → [..., F]: gelu of the first half by its approximation with tanh, times the second."""
    product: Tensor = _GatedGelu.apply(gate_and_up)
    return product


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh") * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ((gate_and_up,), gradient) = ctx.saved_tensors, gradients[0]
        gate, up = gate_and_up.chunk(2, -1)
        of_up = gradient * functional.gelu(gate, approximate="tanh")
        of_gate = torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh")
        return torch.cat([of_gate, of_up], -1)


def weighted_gated_silu(gate_and_up: Tensor, factors: Tensor) -> Tensor:
    """[T, 2·F], [T] → [T, F]: gated_silu times float32 factors, rounded where Megatron's SequentialMLP rounds."""
    product: Tensor = _WeightedGatedSilu.apply(gate_and_up, factors)
    return product


class _WeightedGatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, factors: Tensor) -> Tensor:
        gate_and_up, factors = gate_and_up.contiguous(), factors.contiguous()
        ctx.save_for_backward(gate_and_up, factors)
        if kernels := _kernels_for(gate_and_up):
            product: Tensor = kernels.gated_silu(gate_and_up, factors)
            return product
        gate, up = gate_and_up.chunk(2, -1)
        return (functional.silu(gate) * up * factors[:, None]).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gate_and_up, factors), gradient = ctx.saved_tensors, gradients[0].contiguous()
        kernels = _kernels_for(gate_and_up)
        differentiate = kernels.weighted_gated_silu_gradient if kernels else _weighted_gradient_by_torch
        of_both, of_factors = differentiate(gate_and_up, factors, gradient)
        return of_both, of_factors


def _weighted_gradient_by_torch(gate_and_up: Tensor, factors: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_and_up.chunk(2, -1)
    silu = functional.silu(gate)
    # In place where it can be: these are the largest tensors of a layer, and all experts' live at once.
    of_factors = gradient.to(factors.dtype, copy=True).mul_(silu * up).sum(-1)
    of_product = (gradient * factors[:, None]).to(gate.dtype)
    of_both = torch.empty_like(gate_and_up)
    of_gate, of_up = of_both.chunk(2, -1)
    torch.mul(of_product, silu, out=of_up)
    torch.ops.aten.silu_backward(of_product.mul_(up), gate, grad_input=of_gate)
    return of_both, of_factors


def rotation_of(angles: Tensor, dtype: torch.dtype, factor: Tensor | float = 1.0) -> Tensor:
    """[..., 2, L, D / 2], cosines and sines of float32 angles [..., L, D / 2] times a factor, rounded last."""
    return (torch.stack([angles.cos(), angles.sin()], -3) * factor).to(dtype)


def rotated_heads(
    mixed: Tensor, rotation: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split mixed [L, G, R + 2, D] into query [L, G·R, D], key [L, G, D] and value [L, G, D]; rotate the first two.

    Each group of heads is its R queries, then its key, then its value.  rotation: from rotation_of, without gradient.
    weights: [D] each, of the norms of query and key before they are rotated, None where the model has none.
    """
    query, key, value = _RotatedHeads.apply(mixed, rotation, *(weights or (None, None)), eps)
    return query, key, value


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, rotation: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed.contiguous()
        weights = None if query_weight is None or key_weight is None else (query_weight, key_weight)
        # Without norms the gradient is rotated back without the inputs.
        ctx.save_for_backward(rotation, *((mixed, *weights) if weights else ()))
        ctx.eps = eps
        kernels = _head_kernels_for(mixed)
        rotate = kernels.rotated_heads if kernels else _rotated_by_torch
        heads: tuple[Tensor, Tensor, Tensor] = rotate(mixed, rotation, weights, eps)
        return heads

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rotation, *others = ctx.saved_tensors
        mixed, weights = (others[0], (others[1], others[2])) if others else (None, None)
        of_query, of_key, of_value = (each.contiguous() for each in gradients)
        kernels = _head_kernels_for(of_query)
        differentiate = kernels.rotated_heads_gradient if kernels else _heads_gradient_by_torch
        of_mixed, of_query_weight, of_key_weight = differentiate(
            mixed, rotation, weights, ctx.eps, (of_query, of_key, of_value)
        )
        return of_mixed, None, of_query_weight, of_key_weight, None


def _rotated_by_torch(
    mixed: Tensor, rotation: Tensor, weights: tuple[Tensor, Tensor] | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _three_parts(mixed)
    if weights is not None:
        query, key = _norm_by_torch(query, weights[0], eps), _norm_by_torch(key, weights[1], eps)
    return _turned(query, *rotation), _turned(key, *rotation), value.clone()


def _heads_gradient_by_torch(
    mixed: Tensor | None,
    rotation: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    cosines, sines = rotation
    of_query, of_key = (_turned(each, cosines, -sines) for each in gradients[:2])
    of_weights: tuple[Tensor | None, Tensor | None] = (None, None)
    if mixed is not None and weights is not None:
        query, key, _ = _three_parts(mixed)
        of_query, of_query_weight = _norm_gradient_by_torch(query, weights[0], eps, of_query)
        of_key, of_key_weight = _norm_gradient_by_torch(key, weights[1], eps, of_key)
        of_weights = of_query_weight, of_key_weight
    tokens, groups, size = of_key.shape
    parts = (of_query, of_key, gradients[2])
    return torch.cat([part.view(tokens, groups, -1, size) for part in parts], 2), *of_weights


def _three_parts(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, _, slots, size = mixed.shape
    query, key, value = torch.split(mixed, [slots - 2, 1, 1], 2)
    return query.reshape(tokens, -1, size), key.reshape(tokens, -1, size), value.reshape(tokens, -1, size)


def _turned(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each head's halves as the two coordinates of D / 2 points, turned by the angles of its token."""
    low, high = heads.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)


# ----------------------------------------------------------------------------------------------------- grouped products
#
# Tokens sorted by expert, each times a matrix of its expert.  Matrices of all experts are laid side by side for the
# duration of a product, and not kept for backward.
# Legend: T tokens of all experts of this rank, E experts, K inputs and N outputs of a matrix.


# torch 2.11 to 2.14 has a kernel for compute capabilities 9.x and 10.x; elsewhere it copies the borders to the host and
# multiplies expert by expert.  10.x is left out: there gradients of experts without tokens were reported to be wrong
# (pytorch/pytorch#172439), and gradients of all experts not to be numbers (pytorch/pytorch#193633).
KERNEL_CAPABILITY = (9, 0)
KERNEL_DTYPE = torch.bfloat16
ALIGNED_ELEMENTS = 8  # rows must begin at multiples of 16 bytes


def has_grouped_kernel(capability: tuple[int, int] | None, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """True if torch multiplies groups of rows in one kernel.

    capability: of the GPU, None without one; sizes: inputs and outputs of the experts' matrices.
    """
    is_aligned = all(size % ALIGNED_ELEMENTS == 0 for size in sizes)
    is_nvidias = torch.version.hip is None  # AMD's MI200 calls itself 9.0, too
    return is_nvidias and capability == KERNEL_CAPABILITY and dtype == KERNEL_DTYPE and is_aligned


def expert_linear(tokens: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """grouped_linear where a kernel is known to be right, elsewhere expert by expert.  weights: [E, N, K]."""
    capability = torch.cuda.get_device_capability(tokens.device) if tokens.is_cuda else None
    if has_grouped_kernel(capability, tokens.dtype, weights.shape[1:]):
        return grouped_linear(tokens, ends, weights)
    groups = tokens.tensor_split(ends[:-1].tolist())  # waits for the device
    return torch.cat([functional.linear(*pair) for pair in zip(groups, weights.unbind(), strict=True)])


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Tensor | Sequence[Tensor]) -> Tensor:
    """[T, N]: every token [K] times the matrix [N, K] of its expert, transposed.

    ends: int32 [E], on the device of the tokens: where each expert's tokens end.  weights: E matrices, or [E, N, K].
    K and N are multiples of 16 bytes.
    """
    product: Tensor = _GroupedLinear.apply(tokens, ends, *([weights] if isinstance(weights, Tensor) else weights))
    return product


class _GroupedLinear(torch.autograd.Function):
    """Grouped product; torch's own derivative would keep another copy of the matrices side by side until backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        tokens = _plain_rows(tokens)
        ctx.save_for_backward(tokens, ends, *weights)
        if not len(tokens):
            return tokens.new_zeros(0, weights[0].shape[-2])
        return functional.grouped_mm(tokens, _laid_side_by_side(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        of_tokens, of_weights = None, cast("Sequence[Tensor | None]", [None] * len(weights))
        if not len(tokens):
            return torch.zeros_like(tokens), None, *map(torch.zeros_like, weights)
        gradient = _plain_rows(gradients[0])
        if ctx.needs_input_grad[0]:
            of_tokens = functional.grouped_mm(gradient, _laid_side_by_side(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            # The left factor by columns, the right one by rows: the only order of the two in which the kernel accepts
            # groups of any length, and writes zeros for one without tokens.
            product = functional.grouped_mm(gradient.mT, tokens, offs=ends)
            of_weights = [product] if weights[0].dim() == 3 else product.unbind()
        return of_tokens, None, *of_weights


def _laid_side_by_side(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if weights[0].dim() == 3 else torch.stack(list(weights))


def _plain_rows(matrix: Tensor) -> Tensor:
    """Make rows contiguous: the kernel accepts neither an expanded gradient nor the odd strides of a single row."""
    is_plain = matrix.stride() == (matrix.shape[1], 1)
    return matrix if is_plain else matrix.clone(memory_format=torch.contiguous_format)
