"""The policy loss: PPO's clipped surrogate around a proximal policy, weighted by how far the sampler was from it.

Input: log-probabilities of the sampled tokens.  Output: sums over loss tokens, of the loss and of its metrics.

    L = − Σ_t  w_t · min(u_t · A_t, clip(u_t, 1 − clip_low, 1 + clip_high) · A_t)
    u_t = π_current / π_proximal      w_t = min(π_proximal / π_behaviour, importance_cap), no gradient through w_t

Clipped surrogate: Schulman et al. 2017, eq. 7 (arXiv:1707.06347).  Two bounds, the upper one wider ("clip-higher"):
DAPO, Yu et al. 2025, §3.1 (arXiv:2503.14476).  Decoupling the proximal from the behaviour policy: Hilton et al. 2022
(arXiv:2110.00641), for language models AReaL, Fu et al. 2025 (arXiv:2505.24298).  Truncated weights: Ionides
2008, "Truncated importance sampling"; between a trainer and its inference engine: Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training".

Differs from decoupled PPO in AReaL's paper: (1) w_t is truncated; (2) summed over tokens for the caller to divide by
the loss tokens of the whole batch (DAPO's token-level mean), not by each sequence's length first; (3) no KL term and no
entropy bonus; (4) logarithms of ratios are clamped to ±20 before they are exponentiated, so that one absurd token gives
a huge number and not infinity; beyond the clamp its gradient is 0.
Differs from GRPO (arXiv:2402.03300, eq. 3) in (2) and (3).

Not finite: if any log-probability or advantage of a loss token is nan or infinite, loss and gradient are nan on that
rank.  Nothing is raised: the ranks' vote then skips the step everywhere (contracts.TrainerBackend.step), where an
exception on one rank would leave the others waiting in a collective.  Masked tokens may hold anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.proximal import loglinear_proximal
from rlhpc.config_sections import AlgorithmConfig
from rlhpc.contracts import PolicyLoss

MAX_LOG_RATIO = 20.0  # e²⁰ ≈ 5·10⁸: far beyond any sensible ratio, and its square still fits a float32


def make_policy_loss(config: AlgorithmConfig) -> PolicyLoss:
    """Return the loss of [algorithm].

    With proximal = "behaviour" or "recompute" the loss takes log-probabilities as `proximal`; with "loglinear" it takes
    the share α of the current policy in the proximal one (proximal.current_share); with "current" it ignores
    `proximal`.
    """
    cap = None if config.importance_cap == "off" else config.importance_cap
    loss = DecoupledLoss(config.clip_low, config.clip_high, cap)
    match config.proximal:
        case "loglinear":
            return LoglinearLoss(loss)
        case "current":
            return CurrentLoss(loss)
        case _:
            return loss


@dataclass(frozen=True, slots=True)
class DecoupledLoss:
    """Clipped surrogate times truncated importance weight.  A PolicyLoss."""

    clip_low: float
    clip_high: float
    importance_cap: float | None  # None: w_t = 1

    def __call__(
        self, current: Tensor, *, behaviour: Tensor, proximal: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """All float32 [T] (loss_mask bool [T]) → loss and metrics, both summed over loss tokens."""
        # Before anything else: a nan behind the mask must reach neither the sums nor, as 0 · nan, the gradient.
        current, behaviour, proximal, advantages = (
            torch.where(loss_mask, values, 0.0) for values in (current, behaviour, proximal, advantages)
        )
        behaviour, proximal, advantages = behaviour.detach(), proximal.detach(), advantages.detach()
        ratio = _ratio(current, proximal)
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        uncapped = _ratio(proximal, behaviour)
        weight = uncapped if self.importance_cap is None else uncapped.clamp(max=self.importance_cap)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if self.importance_cap is not None:
            surrogate = weight * surrogate
        loss = -surrogate.sum() * _one_if_finite(current, behaviour, proximal, advantages)
        with torch.no_grad():
            per_token = _metrics(current, behaviour, proximal, ratio, weight) | {
                "clip_low": (ratio < 1.0 - self.clip_low) & (advantages < 0),
                "clip_high": (ratio > 1.0 + self.clip_high) & (advantages > 0),
                "importance_capped": uncapped > weight,
            }
            return loss, {name: torch.where(loss_mask, values, 0).float().sum() for name, values in per_token.items()}


@dataclass(frozen=True, slots=True)
class LoglinearLoss:
    """A PolicyLoss whose `proximal` argument is A-3PO's α instead of log-probabilities."""

    loss: PolicyLoss

    def __call__(
        self, current: Tensor, *, behaviour: Tensor, proximal: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As DecoupledLoss; `proximal`: α float32 [T] in [0, 1]."""
        anchor = loglinear_proximal(behaviour, current, share=proximal)
        return self.loss(current, behaviour=behaviour, proximal=anchor, advantages=advantages, loss_mask=loss_mask)


@dataclass(frozen=True, slots=True)
class CurrentLoss:
    """A PolicyLoss whose proximal policy is the current one: decoupled PPO with one optimiser step a batch.

    The log-probabilities at the start of the step are then those of its own forward pass, so that no other is needed.
    The ratio is 1 and carries the gradient; what the policy has moved since sampling is in the importance weight.
    """

    loss: PolicyLoss

    def __call__(
        self, current: Tensor, *, behaviour: Tensor, proximal: Tensor, advantages: Tensor, loss_mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As DecoupledLoss; `proximal` is ignored."""
        return self.loss(
            current, behaviour=behaviour, proximal=current.detach(), advantages=advantages, loss_mask=loss_mask
        )


def _metrics(current: Tensor, behaviour: Tensor, proximal: Tensor, ratio: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Per token; k1 and k3 estimate KL(π_behaviour ‖ ·) as in Schulman's note "Approximating KL divergence" (2020).

    mismatch_*: between sampler and proximal policy.  With proximal = "recompute" that is what separates the engine's
    arithmetic and the rollout's age from the trainer; with "behaviour" it is 0 by definition.
    """
    drift = (current - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mismatch = (proximal - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "ratio": ratio,
        "importance_weight": weight,
        "importance_weight_squared": weight**2,
        "kl_k1": -drift,
        "kl_k3": torch.expm1(drift) - drift,
        "mismatch_abs": mismatch.abs(),
        "mismatch_kl": torch.expm1(mismatch) - mismatch,
    }


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _one_if_finite(*tensors: Tensor) -> Tensor:
    """1, or nan if any element is not finite.  A factor and not an addend: it has to reach the gradient, too."""
    return 1.0 + torch.stack([(values.detach() * 0.0).sum() for values in tensors]).sum()
