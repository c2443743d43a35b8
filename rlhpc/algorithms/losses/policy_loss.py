"""The policy loss of a run: an objective around an anchor, times an importance weight, summed over loss tokens.

    L = − Σ_t  a_t · w_t · f_t          divided by the loss tokens of the whole batch, which is the caller's part

f   objective   algorithm.loss      a file each beside this one; u, the ratio that it bounds, starts at the anchor
w   importance  importance.py       how far the sampler was from the anchor
a   share       aggregation.py      1 for a mean over tokens

The anchor is what algorithm.proximal names: the policy at the start of the batch, the sampler, or one between them.

Differs from decoupled PPO in AReaL's paper: (1) w is truncated; (2) a is 1 by default (DAPO's token-level mean) and not
each sequence's length first; (3) logarithms of ratios are clamped to ±20 before they are exponentiated, so that one
absurd token gives a huge number and not infinity; beyond the clamp its gradient is 0.
Differs from GRPO (arXiv:2402.03300, eq. 3) in (2).  A KL term and an entropy bonus are in regularised.py.

Not finite: if any log-probability or advantage of a loss token is nan or infinite, loss and gradient are nan on that
rank.  Nothing is raised: the ranks' vote then skips the step everywhere (contracts.TrainerBackend.step), where an
exception on one rank would leave the others waiting in a collective.  Masked tokens may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhpc.algorithms.losses.cispo import ClippedWeight
from rlhpc.algorithms.losses.dppo import DivergenceMask
from rlhpc.algorithms.losses.figures import loss_figures
from rlhpc.algorithms.losses.gmpo import GeometricMean
from rlhpc.algorithms.losses.gspo import SequenceSurrogate
from rlhpc.algorithms.losses.importance import ImportanceWeight
from rlhpc.algorithms.losses.objective import Objective, one_if_finite
from rlhpc.algorithms.losses.own import load_own_loss
from rlhpc.algorithms.losses.ppo import ClippedSurrogate
from rlhpc.algorithms.losses.regularised import Regularised
from rlhpc.algorithms.losses.reinforce import reinforce
from rlhpc.algorithms.losses.sapo import SoftGate
from rlhpc.algorithms.proximal import loglinear_anchor
from rlhpc.config_algorithm import LOSSES, AlgorithmConfig
from rlhpc.contracts import PolicyLoss, TokenRow


def make_policy_loss(config: AlgorithmConfig, policy_version: int) -> PolicyLoss:
    """Return the loss of [algorithm] for a batch that is trained at policy_version.

    Raises ConfigError for a loss of the user's own that is not there, or breaks the contract.
    """
    loss: PolicyLoss
    if config.loss in LOSSES:
        loss = AnchoredLoss(make_objective(config), ImportanceWeight.of(config), config.proximal, policy_version)
    else:
        loss = load_own_loss(config.loss, tuple(config.loss_arguments.items()))
    if not config.kl_coefficient and not config.entropy_coefficient:
        return loss
    in_loss = config.kl_coefficient if config.kl_in == "loss" else 0.0
    cap = math.inf if config.importance_cap == "off" else config.importance_cap
    return Regularised(
        loss,
        has_reference=config.kl_coefficient > 0,
        kl_coefficient=in_loss,
        kl_estimator=config.kl_estimator,
        entropy_coefficient=config.entropy_coefficient,
        kl_importance_cap=cap if config.kl_importance else None,
    )


def make_objective(config: AlgorithmConfig) -> Objective:
    """Return what algorithm.loss names."""
    match config.loss:
        case "reinforce":
            return reinforce
        case "gspo":
            return SequenceSurrogate(config.clip_low, config.clip_high)
        case "cispo":
            return ClippedWeight(config.clip_low, config.clip_high)
        case "dppo":
            return DivergenceMask(config.clip_low, config.clip_high)
        case "sapo":
            return SoftGate(config.sapo_tau_positive, config.sapo_tau_negative)
        case "gmpo":
            return GeometricMean(config.clip_low, config.clip_high)
        case _:
            return ClippedSurrogate(
                config.clip_low, config.clip_high, None if config.dual_clip == "off" else config.dual_clip
            )


@dataclass(frozen=True, slots=True)
class AnchoredLoss:
    """A PolicyLoss."""

    objective: Objective
    importance: ImportanceWeight
    proximal: str  # algorithm.proximal
    policy_version: int

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; row.proximal counts with proximal = "recompute" only."""
        # Before anything else: a nan behind the mask must reach neither the sums nor, as 0 · nan, the gradient.
        current, row = torch.where(row.loss_mask, current, 0.0), _without_masked(row)
        anchor = self._anchor(current, row)
        weights = self.importance(anchor, row, self.policy_version)
        # A masked token is no part of its sequence either: a ratio of the whole one (gspo, gmpo) would push it.
        objective = self.objective(current, anchor, replace(row, loss_mask=row.loss_mask & ~weights.masked))
        # What counts nothing is cut out, not multiplied by zero: an absurd value there stays out of the sum.
        values = torch.where(row.loss_mask, row.weights * weights.used * objective.values, 0.0)
        loss = -values.sum() * one_if_finite(current, row.behaviour, anchor, row.advantages)
        return loss, loss_figures(current.detach(), anchor, row, weights, objective, self.policy_version)

    def _anchor(self, current: Tensor, row: TokenRow) -> Tensor:
        """Log-probabilities [T], without gradient."""
        match self.proximal:
            case "current":
                return current.detach()
            case "behaviour":
                return row.behaviour
            case "loglinear":
                return loglinear_anchor(row.behaviour, current, row.versions, self.policy_version)
            case _:
                return row.proximal


def _without_masked(row: TokenRow) -> TokenRow:
    behaviour, proximal, advantages, weights = (
        torch.where(row.loss_mask, values, 0.0).detach()
        for values in (row.behaviour, row.proximal, row.advantages, row.weights)
    )
    return replace(row, behaviour=behaviour, proximal=proximal, advantages=advantages, weights=weights)
