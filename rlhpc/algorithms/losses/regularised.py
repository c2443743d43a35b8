"""Terms added to any policy loss: KL divergence from a reference policy, and an entropy bonus.

    L + Σ_t a_t · (β · v_t · k(x_t) − η · H_t)  x = log π_reference − log π_current of the sampled token

β   algorithm.kl_coefficient        k   algorithm.kl_estimator: k1 = −x, k2 = x² / 2, k3 = eˣ − 1 − x
v   1, or with algorithm.kl_importance π_current / π_behaviour, truncated, without gradient
η   algorithm.entropy_coefficient   H   entropy of the current policy's distribution for the token
a   share                           as in the loss: algorithm.aggregation

Estimators: Schulman 2020, "Approximating KL divergence"; k3 in the loss: GRPO (arXiv:2402.03300, eq. 4).  What their
gradients are gradients of: docs/algorithms.md.  Bonus: Mnih et al. 2016 (arXiv:1602.01783, §4).

Differs from GRPO: (1) beyond x = 20 eˣ goes on as its tangent, so that an absurd token gives a huge number and not
infinity; (2) tokens that the importance weight masks are pulled like the others.  As in TRL and verl v is 1 by
default.  With v, k2 has the gradient of DeepSeek-V3.2's estimator (arXiv:2512.02556), k3 with a gradient through
its weight u = π_current / π_behaviour: ∇(u · k3) = −u · x · ∇log π = u · ∇k2.
A reference or an entropy that is not finite on a loss token makes loss and gradient nan (policy_loss.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import MAX_LOG_RATIO, one_if_finite
from rlhpc.contracts import PolicyLoss, TokenRow


@dataclass(frozen=True, slots=True)
class Regularised:
    """A PolicyLoss around another one."""

    loss: PolicyLoss
    has_reference: bool
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    kl_importance_cap: float | None = None  # of v; None: v is 1

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; row.entropy counts only with a coefficient.  A reference without one is only measured."""
        loss, metrics = self.loss(current, row)
        current, reference, entropy, weights = (
            torch.where(row.loss_mask, values, 0.0) for values in (current, row.reference, row.entropy, row.weights)
        )
        if self.has_reference:
            log_ratio = reference.detach() - current
            metrics = metrics | {"kl_reference": divergence(log_ratio.detach(), "k3").sum()}
        if self.kl_coefficient:
            if self.kl_importance_cap is not None:
                drift = torch.where(row.loss_mask, current - row.behaviour, 0.0).detach()
                shares = weights * drift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=self.kl_importance_cap)
            else:
                shares = weights
            term = (shares * divergence(log_ratio, self.kl_estimator)).sum()
            loss = (loss + self.kl_coefficient * term) * one_if_finite(reference, log_ratio)
        if self.entropy_coefficient:
            loss = (loss - self.entropy_coefficient * (weights * entropy).sum()) * one_if_finite(entropy)
        return loss, metrics


def divergence(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(π ‖ ρ) from tokens that π has sampled, [T]; log_ratio: log ρ − log π; differentiable."""
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case _:
            beyond = (log_ratio - MAX_LOG_RATIO).clamp(min=0)
            return torch.expm1(log_ratio.clamp(max=MAX_LOG_RATIO)) + math.exp(MAX_LOG_RATIO) * beyond - log_ratio
