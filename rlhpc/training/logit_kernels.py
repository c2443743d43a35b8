"""Fused GPU kernels on a chunk of logits, one pass forward and one backward; torch's own operations take a dozen.

Input: float32 logits [C, V] from the product with the head.  Output: sums over the vocabulary, and the gradient of the
logits.  Their meaning, and the same on CPU, is in logprob.py.  Triton comes with torch's CUDA builds; kernels are
compiled when first used.  Each row is summed by one program in a fixed order: the same bits every time.
Legend: C tokens of a chunk, V rows of the head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a row at once
LOWEST = torch.finfo(torch.float32).min


@triton.jit
def _statistics_kernel(
    logits, targets, maximum, sums, num_rows, vocabulary, temperature, lowest,
    has_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    highest, total, weighted = lowest, 0.0, 0.0
    for first in range(0, vocabulary, block):
        columns = first + tl.arange(0, block)
        values = tl.load(start + columns, mask=columns < vocabulary, other=float("-inf")) / temperature
        higher = tl.maximum(highest, tl.max(values, 0))
        scale = tl.exp(highest - higher)
        shifted = values - higher
        exponentials = tl.exp(shifted)
        if has_entropy:
            # A logit of −inf adds nothing, but −inf · 0 would be nan.
            part = tl.sum(tl.where(exponentials == 0.0, 0.0, shifted * exponentials), 0)
            weighted = (weighted + total * (highest - higher)) * scale + part
        total = total * scale + tl.sum(exponentials, 0)
        highest = higher
    target = tl.load(targets + row)
    is_here = (target >= 0) & (target < vocabulary)
    value = tl.load(start + tl.where(is_here, target, 0)) / temperature
    tl.store(maximum + row, highest)
    tl.store(sums + row, total)
    tl.store(sums + num_rows + row, tl.where(is_here, value, 0.0))
    tl.store(sums + 2 * num_rows + row, is_here.to(tl.float32))
    if has_entropy:
        tl.store(sums + 3 * num_rows + row, weighted)


@triton.jit
def _gradient_kernel(
    logits, targets, log_partition, row_factors, entropy, entropy_factors, gradient, vocabulary, temperature,
    has_entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = columns < vocabulary
    values = tl.load(logits + row * vocabulary + columns, mask=is_inside, other=0.0) / temperature
    log_probability = values - tl.load(log_partition + row)
    probability = tl.exp(log_probability)
    chosen = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    result = (chosen - probability) * tl.load(row_factors + row)
    if has_entropy:
        # A token of probability 0 adds nothing, but −inf · 0 would be nan.
        slope = tl.where(probability == 0.0, 0.0, probability * (log_probability + tl.load(entropy + row)))
        result -= slope * tl.load(entropy_factors + row)
    tl.store(gradient + row * vocabulary + columns, result.to(gradient.dtype.element_ty), mask=is_inside)


def logit_statistics(
    logits: Tensor, targets: Tensor, temperature: float, *, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the maximum [C] and the sums [3 or 4, C] of contiguous logits [C, V > 0]; see logprob._row_statistics."""
    rows, vocabulary = logits.shape
    maximum, sums = logits.new_empty(rows), logits.new_empty(3 + want_entropy, rows)
    if rows:
        _statistics_kernel[(rows,)](
            logits, targets.contiguous(), maximum, sums, rows, vocabulary, temperature, LOWEST,
            has_entropy=want_entropy, block=BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return maximum, sums


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    log_partition: Tensor,
    row_factors: Tensor,
    dtype: torch.dtype,
    entropy: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See logprob._logit_gradient; of contiguous logits [C, V > 0], rounded to dtype; float32 overwrites them."""
    rows, vocabulary = logits.shape
    gradient = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    of_entropy, entropy_factors = entropy or (log_partition, row_factors)  # not read without entropy
    if rows:
        _gradient_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits, targets.contiguous(), log_partition.contiguous(), row_factors.contiguous(),
            of_entropy.contiguous(), entropy_factors.contiguous(), gradient, vocabulary, temperature,
            has_entropy=entropy is not None, block=BLOCK, num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return gradient


def try_out(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels for this device; raises whatever Triton raises.

    dtype: of the logits, float32.
    """
    one = torch.ones(1, 1, device=device, dtype=dtype)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    logit_statistics(one, target, 1.0, want_entropy=True)
    for entropy in (None, (one[0], one[0])):
        logit_gradient(one, target, 1.0, one[0], one[0], torch.bfloat16, entropy)
