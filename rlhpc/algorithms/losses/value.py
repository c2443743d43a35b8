"""The critic's loss: the squared error of its values, clipped around those at the start of the batch.

    L = ½ · Σ_t a_t · max((V_t − R_t)², (V_t^clip − R_t)²)      V^clip = V_old + clip(V − V_old, −c, c)

Clipping as in the PPO of Schulman's baselines (Andrychowicz et al. 2020, arXiv:2006.05990, §B.1); without: ½ (V − R)².
a is the share of the token in the loss, 1 for a mean over tokens; the caller divides by the number of loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A PolicyLoss of values [T] in the place of log-probabilities; row.advantages are returns, row.proximal V_old."""

    clip: float | None

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; not finite: as there."""
        values, returns, old = (
            torch.where(row.loss_mask, each, 0.0) for each in (current, row.advantages, row.proximal.detach())
        )
        errors = (values - returns).square()
        is_clipped = torch.zeros_like(row.loss_mask)
        if self.clip is not None:
            change = values - old
            bounded = (old + change.clamp(-self.clip, self.clip) - returns).square()
            # Inside the bounds both are the same, but for a last bit that must not count.
            is_clipped = (change.abs() > self.clip) & (bounded > errors)
            errors = torch.where(is_clipped, bounded, errors)
        weights = torch.where(row.loss_mask, row.weights, 0.0)
        return 0.5 * (weights * errors).sum(), {"clipped": is_clipped.detach().float().sum()}
