"""What an objective of a token is: its contract, and what several of them are made of.

Input: log-probabilities of the sampled tokens.  Output: a number per token, which grows when the policy does better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhpc.contracts import TokenRow

MAX_LOG_RATIO = 20.0  # e²⁰ ≈ 5·10⁸: far beyond any sensible ratio, and its square still fits a float32


@dataclass(frozen=True, slots=True)
class TokenObjective:
    """Of every token of a row, [T] each.  Whatever stands off the loss mask counts for nothing."""

    values: Tensor  # to be maximised; carries the gradient
    ratio: Tensor  # that was held against the bounds, without gradient
    at_low: Tensor  # bool: the lower bound was reached; where it cuts the gradient off, only if it did
    at_high: Tensor  # bool


class Objective(Protocol):
    """Policy → numbers.  Knows nothing of the sampler: how far that was from the anchor is the weight's matter."""

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """current, anchor: log-probabilities [T] by the policy that is trained and by that where its ratio starts.

        All of them 0 off the loss mask, as in `row`.  Only `current` carries a gradient.
        """


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of log-probabilities, clamped: one absurd token gives a huge ratio, not infinity, and no gradient."""
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def one_if_finite(*tensors: Tensor) -> Tensor:
    """1, or nan if any element is not finite.  A factor and not an addend: it has to reach the gradient, too."""
    return 1.0 + torch.stack([(values.detach() * 0.0).sum() for values in tensors]).sum()


def sequence_sum(values: Tensor, row: TokenRow) -> Tensor:
    """Sum over the loss tokens of its sequence, for every token [T]; differentiable."""
    return _sums(torch.where(row.loss_mask, values, 0.0), row).index_select(0, row.sequence)


def sequence_mean(values: Tensor, row: TokenRow) -> Tensor:
    """Mean over the loss tokens of its sequence, for every token [T]; differentiable.  0 where there is none."""
    lengths = _sums(row.loss_mask.to(values.dtype), row).clamp(min=1.0)
    return (_sums(torch.where(row.loss_mask, values, 0.0), row) / lengths).index_select(0, row.sequence)


def _sums(values: Tensor, row: TokenRow) -> Tensor:
    return values.new_zeros(row.num_sequences).index_add(0, row.sequence, values)
