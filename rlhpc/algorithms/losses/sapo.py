"""SAPO: a soft gate in the place of a clip.

    f(u) · A        f(u) = 4/τ · sigmoid(τ · (u − 1))        τ = τ_positive where A > 0, else τ_negative

Gao et al. 2025 (arXiv:2511.20347).  The gradient is sech²(τ/2 · (u − 1)) of that of u · A: all of it at u = 1, less to
both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class SoftGate:
    """An Objective without bounds."""

    tau_positive: float
    tau_negative: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Both temperatures in units of 1 / ratio."""
        ratio = log_ratio(current, anchor).exp()
        positive, negative = (ratio.new_full((), tau) for tau in (self.tau_positive, self.tau_negative))
        tau = torch.where(row.advantages > 0, positive, negative)
        gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
        nothing = torch.zeros_like(row.loss_mask)
        return TokenObjective(gate * row.advantages, ratio.detach(), nothing, nothing)
