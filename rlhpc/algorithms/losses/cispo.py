"""CISPO: REINFORCE weighted by a clipped ratio, so that every token keeps a gradient.

    sg(clip(u, 1 − clip_low, 1 + clip_high)) · A · log π_current            u = π_current / π_anchor

MiniMax 2025 (arXiv:2506.13585), where only the upper bound is used: clip_low = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class ClippedWeight:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens at a bound have a smaller (upper one) or larger weight, never none."""
        ratio = log_ratio(current.detach(), anchor).exp()
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        return TokenObjective(ratio.clamp(low, high) * row.advantages * current, ratio, ratio < low, ratio > high)
