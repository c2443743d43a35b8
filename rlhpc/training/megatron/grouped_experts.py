"""All experts of a rank by two grouped matrix products, where Megatron's SequentialMLP makes two for each expert.

Input: tokens sorted by expert, as the dispatcher hands them over.  Output: the same tokens, through their experts.
Guarantees: parameters, their names and their order are those of SequentialMLP, and so is everything that is made of
them (checkpoints, optimiser, HF names); every parameter gets a gradient, zeros where its expert saw no token.  Nothing
here waits for the device (Megatron's dispatcher does before it, once a layer).  Matrices of all experts are laid side
by side for as long as a product takes, and not kept for backward.
Legend: T tokens of all experts of this rank, E experts, K inputs and N outputs of a matrix.

Megatron's own grouped layers need the package grouped_gemm or TransformerEngine; this one needs torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import functional

from rlhpc.training.layer_functions import weighted_gated_silu

# torch 2.11 to 2.14 has a kernel for compute capabilities 9.x and 10.x; elsewhere it copies the borders to the host and
# multiplies expert by expert.  10.x is left out: there gradients of experts without tokens were reported to be wrong
# (pytorch/pytorch#172439), and gradients of all experts not to be numbers (pytorch/pytorch#193633).
KERNEL_CAPABILITY = (9, 0)
KERNEL_DTYPE = torch.bfloat16
ALIGNED_ELEMENTS = 8  # rows must begin at multiples of 16 bytes
LAYERS = ("linear_fc1", "linear_fc2")  # of an expert


def has_grouped_kernel(capability: tuple[int, int] | None, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    """True where torch multiplies groups of rows in one kernel.

    capability: of the GPU, None without one; sizes: inputs and outputs of the experts' matrices.
    """
    is_aligned = all(size % ALIGNED_ELEMENTS == 0 for size in sizes)
    return capability == KERNEL_CAPABILITY and dtype == KERNEL_DTYPE and is_aligned


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core is untyped
    """SequentialMLP with SwiGLU, computed at once.  Experts must be whole on their rank, and have no biases."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        """Signature given by Megatron."""
        super().__init__(num_local_experts, config, submodules, pg_collection)
        assert config.gated_linear_unit, "computed here: SwiGLU"
        assert config.activation_func is functional.silu, "computed here: SwiGLU"
        assert config.expert_tensor_parallel_size == 1, "an expert that is cut up needs sums over ranks"
        assert not config.add_bias_linear, "experts' biases are not added here"
        assert not config.moe_apply_probs_on_input, "probabilities are applied between the two products"

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [T, H] and no bias.  tokens: [T, H]; tokens_per_expert: [E], on any device; probabilities: [T]."""
        if self.num_local_experts == 1:
            alone: tuple[Tensor, Tensor | None] = super().forward(tokens, tokens_per_expert, probabilities)
            return alone
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        inner, outer = ([getattr(each, name).weight for each in self.local_experts] for name in LAYERS)
        gate_and_up = grouped_linear(tokens, ends, inner)
        return grouped_linear(weighted_gated_silu(gate_and_up, probabilities), ends, outer), None


def grouped_linear(tokens: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """[T, N]: every token [K] times the matrix [N, K] of its expert, transposed.

    ends: int32 [E], on the device of the tokens: where each expert's tokens end.  K and N are multiples of 16 bytes.
    """
    product: Tensor = _GroupedLinear.apply(tokens, ends, *weights)  # type: ignore[no-untyped-call]
    return product


class _GroupedLinear(torch.autograd.Function):
    """torch's own derivative would keep the matrices laid side by side, once more, until backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        tokens = _plain_rows(tokens)
        ctx.save_for_backward(tokens, ends, *weights)
        if not len(tokens):
            return tokens.new_zeros(0, len(weights[0]))
        return functional.grouped_mm(tokens, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        of_tokens = of_weights = None
        if not len(tokens):
            return torch.zeros_like(tokens), None, *map(torch.zeros_like, weights)
        gradient = _plain_rows(gradient)
        if ctx.needs_input_grad[0]:
            of_tokens = functional.grouped_mm(gradient, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            # The left factor by columns, the right one by rows: the only order of the two in which the kernel accepts
            # groups of any length, and writes zeros for one without tokens.
            of_weights = functional.grouped_mm(gradient.mT, tokens, offs=ends).unbind()
        return of_tokens, None, *(of_weights or [None] * len(weights))


def _plain_rows(matrix: Tensor) -> Tensor:
    """The kernel checks strides: it takes neither an expanded gradient nor the odd strides of a single row."""
    is_plain = matrix.stride() == (matrix.shape[1], 1)
    return matrix if is_plain else matrix.clone(memory_format=torch.contiguous_format)
