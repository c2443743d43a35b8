"""PPO's clipped surrogate.

    min(u · A, clip(u, 1 − clip_low, 1 + clip_high) · A)            u = π_current / π_anchor
    where A < 0, with dual_clip = c:  max(that, c · A)

Schulman et al. 2017, eq. 7 (arXiv:1707.06347).  Two bounds, the upper one wider ("clip-higher"): DAPO, Yu et al. 2025,
§3.1 (arXiv:2503.14476).  Dual clip, c > 1: Ye et al. 2020 (arXiv:1912.09729).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class ClippedSurrogate:
    """An Objective."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens without gradient are those that have gone far enough the way that their advantage shows."""
        ratio = log_ratio(current, anchor).exp()
        return clipped(ratio, row.advantages, self.clip_low, self.clip_high, self.dual_clip)


def clipped(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenObjective:
    """The surrogate of ratios, whatever they are ratios of; all [T]."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    values = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    fixed, is_bad = ratio.detach(), advantages < 0
    at_high = (fixed > high) & (advantages > 0)
    if dual_clip is not None:
        values = torch.where(is_bad, torch.maximum(values, dual_clip * advantages), values)
        at_high = at_high | ((fixed > dual_clip) & is_bad)
    return TokenObjective(values, fixed, (fixed < low) & is_bad, at_high)
