"""GMPO: the geometric mean of a sequence's clipped ratios.

    A · (Π_t v_t)^(1 / |y|)     v = min(u, 1 + clip_high) where A > 0, max(u, 1 − clip_low) where A < 0

Zhao et al. 2025 (arXiv:2507.20673), whose min(u·A, clip(u)·A) is |A| times that v for tokens of one advantage; their
bounds e^±0.4 are clip_low = 0.33, clip_high = 0.49.  Every token of a sequence has its value: algorithm.aggregation =
"sequence" gives the paper's loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio, sequence_mean
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class GeometricMean:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """A token at its bound has no gradient; the others of its sequence keep theirs."""
        ratios, is_good = log_ratio(current, anchor), row.advantages > 0
        low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        high = math.log1p(self.clip_high)
        bounded = torch.where(is_good, ratios.clamp(max=high), ratios.clamp(min=low))
        fixed = ratios.detach()
        return TokenObjective(
            sequence_mean(bounded, row).exp() * row.advantages,
            fixed.exp(),
            (fixed < low) & (row.advantages < 0),
            (fixed > high) & is_good,
        )
