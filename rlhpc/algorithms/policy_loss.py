"""The policy loss of a run: an objective around an anchor, times an importance weight, summed over loss tokens.

    L = − Σ_t  a_t · w_t · f_t          the caller divides by the loss tokens of the whole batch

f   objective   algorithm.loss      objectives.py; u, the ratio that it bounds, starts at the anchor
w   importance  below               corrects the distance of the sampler from the anchor
a   share       samples.py          1 for a mean over tokens

In this file: importance weights; figures of a loss; KL and entropy terms; the proximal policy by interpolation; the
policy loss.

The anchor is what algorithm.proximal names: the policy at the start of the batch, the sampler, or one between them.

Differs from decoupled PPO in AReaL's paper: (1) w is truncated; (2) a is 1 by default (DAPO's token-level mean) and not
each sequence's length first; (3) logarithms of ratios are clamped to ±20 before they are exponentiated, so that one
absurd token gives a huge number and not infinity; beyond the clamp its gradient is 0.
Differs from GRPO (arXiv:2402.03300, eq. 3) in (2).  A KL term and an entropy bonus are added to L.

Not finite: if any log-probability or advantage of a loss token is nan or infinite, loss and gradient are nan on that
rank.  Nothing is raised: the ranks' vote then skips the step everywhere (contracts.TrainerBackend.step), where an
exception on one rank would leave the others waiting in a collective.  Masked tokens may hold anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhpc.algorithms.objectives import (
    MAX_LOG_RATIO,
    ClippedSurrogate,
    ClippedWeight,
    DivergenceMask,
    GeometricMean,
    Objective,
    PreferenceLoss,
    SequenceSurrogate,
    SoftGate,
    TokenObjective,
    load_own_loss,
    log_ratio,
    one_if_finite,
    reinforce,
    sequence_mean,
    sequence_sum,
    supervised_loss,
)
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import LOSSES, AlgorithmConfig
from rlhpc.protocol.contracts import PolicyLoss, TokenRow

# ----------------------------------------------------------------------------------------------------------- importance  # noqa: ERA001
#
# Importance weights of tokens, from the ratio of anchor to behaviour policy.
#
#   w = min(π_anchor / π_behaviour, cap)    of a token, of its whole sequence, or that one's geometric mean per token
#   w = 0                                   where the ratio is outside [low, high], where any token of the sequence is
#                                           less likely than veto times what it was, where the advantage is negative and
#                                           the mean of log π_behaviour / π_anchor over the sequence is above drift, and
#                                           for tokens that are too old
#
# No gradient flows through w.  Truncated weights: Ionides 2008, "Truncated importance sampling"; between a trainer and
# its engine: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".  Decoupling
# the anchor from the behaviour policy: Hilton et al. 2022 (arXiv:2110.00641), for language models AReaL, Fu et al.
# 2025 (arXiv:2505.24298).  Masking in place of truncating, with bounds on both sides: IcePop, Ling Team 2025
# (arXiv:2510.18855). Sequence and geometric ratios, and the veto of sequences with a catastrophic token: Liu et al.
# 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".  Drift: off-policy
# sequence masking, DeepSeek-V3.2, eq. 9 (arXiv:2512.02556).
#
# Differs from these: (1) masked tokens stay in the loss's denominator, as zeros, so that the others do not count more;
# the ratio of a whole sequence (gspo, gmpo) leaves them out; (2) logarithms of ratios are clamped to ±20, per token and
# per sequence; (3) drift is measured from the anchor and not from the current policy; with one optimiser step on a
# batch both are the same.


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of every token [T], without gradient."""

    used: Tensor  # factor of the objective
    capped: Tensor  # w before masking
    uncapped: Tensor  # the ratio
    masked: Tensor  # bool

    @property
    def is_capped(self) -> Tensor:
        """Bool [T]."""
        return self.uncapped > self.capped


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Rule of the importance weights.  cap None: w = 1 for unmasked tokens; the figures are those without a cap."""

    level: str  # "token", "sequence", "geometric"
    cap: float | None
    low: float = 0.0
    high: float = math.inf
    veto: float = 0.0
    drift: float = math.inf  # nats per token
    max_age: int | None = None  # versions

    @classmethod
    def of(cls, config: AlgorithmConfig) -> ImportanceWeight:
        """Return the rule that the run file asks for."""
        return cls(
            level=config.importance_level,
            cap=None if config.importance_cap == "off" else config.importance_cap,
            low=config.mask_below,
            high=math.inf if config.mask_above == "off" else config.mask_above,
            veto=config.veto_below,
            drift=math.inf if config.veto_drift_above == "off" else config.veto_drift_above,
            max_age=None if config.max_token_age == "off" else config.max_token_age,
        )

    def __call__(self, anchor: Tensor, row: TokenRow, policy_version: int) -> Weights:
        """anchor: log-probabilities [T], 0 off the mask.  policy_version: the version being trained."""
        per_token = log_ratio(anchor, row.behaviour)
        uncapped = self._level(per_token, row).exp()
        capped = uncapped if self.cap is None else uncapped.clamp(max=self.cap)
        masked = (uncapped < self.low) | (uncapped > self.high)
        if self.veto > 0:
            is_catastrophe = (per_token < math.log(self.veto)) & row.loss_mask
            masked |= sequence_sum(is_catastrophe.to(anchor.dtype), row) > 0
        if self.drift < math.inf:
            masked |= (row.advantages < 0) & (-sequence_mean(per_token, row) > self.drift)
        if self.max_age is not None:
            masked |= policy_version - row.versions > self.max_age
        weight = torch.ones_like(capped) if self.cap is None else capped
        return Weights(torch.where(masked, 0.0, weight), capped, uncapped, masked)

    def _level(self, per_token: Tensor, row: TokenRow) -> Tensor:
        match self.level:
            case "sequence":
                return sequence_sum(per_token, row).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            case "geometric":
                return sequence_mean(per_token, row)
            case _:
                return per_token


# -------------------------------------------------------------------------------------------------------------- figures
#
# Metrics of a policy loss: sums over loss tokens, and the same by age of the tokens.
#
# Input: log-probabilities, weights, objective.  Output: scalars under names that the metrics of a run know.
#
# k1, k2 and k3 estimate KL(π_behaviour ‖ ·) as in Schulman's note "Approximating KL divergence" (2020).
# drift: from the sampler to the trained policy.  mismatch: from the sampler to the anchor; with proximal = "recompute"
# or "current" it is caused by the engine's arithmetic and the rollout's age; with "behaviour" it is 0 by definition.

NUM_AGES = 5  # 0, 1, 2, 3 and all above
BY_AGE = ("tokens", "importance_weight", "importance_weight_squared", "mismatch_kl", "kl_k3", "clipped")


@torch.no_grad()
def loss_figures(
    current: Tensor, anchor: Tensor, row: TokenRow, weights: Weights, objective: TokenObjective, policy_version: int
) -> dict[str, Tensor]:
    """Scalars float32, summed over loss tokens; the names "age_FIGURE/AGE" are sums over tokens of that age."""
    drift, mismatch = log_ratio(current, row.behaviour), log_ratio(anchor, row.behaviour)
    per_token = {
        "ratio": objective.ratio,
        "clip_low": objective.at_low,
        "clip_high": objective.at_high,
        "importance_weight": weights.capped,
        "importance_weight_squared": weights.capped**2,
        "importance_capped": weights.is_capped,
        "importance_masked": weights.masked,
        "kl_k1": -drift,
        "kl_k2": 0.5 * drift**2,
        "kl_k3": torch.expm1(drift) - drift,
        "mismatch_abs": mismatch.abs(),
        "mismatch_k1": -mismatch,
        "mismatch_kl": torch.expm1(mismatch) - mismatch,
        "mismatch_chi2": torch.expm1(mismatch) ** 2,
        "mismatch_log_perplexity": sequence_mean(mismatch, row).abs(),
    }
    per_token = {name: torch.where(row.loss_mask, values, 0).float() for name, values in per_token.items()}
    sums = {name: values.sum() for name, values in per_token.items()}
    per_token |= {"tokens": row.loss_mask.float(), "clipped": per_token["clip_low"] + per_token["clip_high"]}
    ages = torch.where(row.loss_mask, policy_version - row.versions, 0).clamp(0, NUM_AGES - 1).long()
    table = torch.zeros(NUM_AGES, len(BY_AGE), device=ages.device)
    table = table.index_add(0, ages, torch.stack([per_token[name] for name in BY_AGE], dim=1))
    return sums | {f"age_{name}/{age}": table[age, i] for i, name in enumerate(BY_AGE) for age in range(NUM_AGES)}


# ---------------------------------------------------------------------------------------------------------- regularised
#
# Terms added to any policy loss: KL divergence from a reference policy, an entropy bonus, and the KL divergence of a
# teacher from the policy.
#
#     L + Σ_t a_t · (β · v_t · k(x_t) − η · H_t + φ · D_t)    x = log π_reference − log π_current of the sampled token
#
# β   algorithm.kl_coefficient        k   algorithm.kl_estimator: k1 = −x, k2 = x² / 2, k3 = eˣ − 1 − x
# v   1, or with algorithm.kl_importance π_current / π_behaviour, truncated, without gradient
# η   algorithm.entropy_coefficient   H   entropy of the current policy's distribution for the token
# φ   algorithm.forward_kl_coefficient
# D   Σ_k π_teacher(k) · (log π_teacher(k) − log π_current(k)) in the place of the token, over the tokens k that the
#     teacher finds most likely, algorithm.teacher_top_k of them, whose probabilities are not made to sum to 1
# a   share                           as in the loss: algorithm.aggregation
#
# Estimators: Schulman 2020, "Approximating KL divergence"; k3 in the loss: GRPO (arXiv:2402.03300, eq. 4).  Meaning of
# their gradients: docs/algorithms.md.  Bonus: Mnih et al. 2016 (arXiv:1602.01783, §4).
#
# Differs from GRPO: (1) beyond x = 20 eˣ goes on as its tangent, so that an absurd token gives a huge number and not
# infinity; (2) tokens that the importance weight masks are pulled like the others.  As in TRL and verl v is 1 by
# default.  With v, k2 has the gradient of DeepSeek-V3.2's estimator (arXiv:2512.02556), k3 with a gradient through
# its weight u = π_current / π_behaviour: ∇(u · k3) = −u · x · ∇log π = u · ∇k2.
# A reference or an entropy that is not finite on a loss token makes loss and gradient nan (policy_loss.py).


@dataclass(frozen=True, slots=True)
class Regularised:
    """A PolicyLoss around another one."""

    loss: PolicyLoss
    has_reference: bool
    kl_coefficient: float
    kl_estimator: str
    entropy_coefficient: float
    kl_importance_cap: float | None = None  # of v; None: v is 1
    forward_kl_coefficient: float = 0.0

    def __call__(self, current: Tensor, row: TokenRow) -> tuple[Tensor, dict[str, Tensor]]:
        """See PolicyLoss; row.entropy counts only with a coefficient.  Without kl_coefficient KL is only measured."""
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
        if self.forward_kl_coefficient:
            given = row.teacher_divergence
            divergences = torch.where(row.loss_mask, weights.new_zeros(()) if given is None else given, 0.0)
            term = (weights * divergences).sum()
            loss = (loss + self.forward_kl_coefficient * term) * one_if_finite(divergences)
            metrics = metrics | {"forward_kl": divergences.detach().sum()}
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


# ------------------------------------------------------------------------------------------------------------- proximal
#
# The proximal policy by interpolation: A-3PO, without a forward pass.
#
# log π_proximal ≈ log π_behaviour + α · (log π_current − log π_behaviour),
# α = (v_proximal − v_behaviour) / (v_current − v_behaviour), clamped to [0, 1]   (Li et al. 2025, arXiv:2512.06547)
#
# v_behaviour is the version that sampled the token, v_current the version being trained, v_proximal = v_current − 1.
# So a token one version old has α = 0 (its sampler is the proximal policy), one d versions old α = 1 − 1/d.  For a
# token that the trained version itself sampled the quotient is undefined; α = 0 then, as in AReaL: its sampler is the
# policy at the start of the batch.  With α = 1 the ratio would be 1 in every optimiser step on the batch, and nothing
# would clip it.


def current_share(versions: Tensor, policy_version: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """α of every token in [0, 1]; versions int [T], −1 off the loss mask, where α is 0."""
    ages = torch.where(versions < 0, 0, policy_version - versions).to(dtype)
    return 1.0 - 1.0 / ages.clamp(min=1.0)


def loglinear_anchor(behaviour: Tensor, current: Tensor, versions: Tensor, policy_version: int) -> Tensor:
    """Interpolated proximal log-probabilities [T], without gradient."""
    return behaviour.lerp(current.detach(), current_share(versions, policy_version, current.dtype))


# ---------------------------------------------------------------------------------------------------------- policy loss


def loss_of_run(config: Config, policy_version: int) -> PolicyLoss:
    """Return the loss of a run for a batch that is trained at policy_version.  Raises as make_policy_loss."""
    if not config.is_supervised:
        return make_policy_loss(config.algorithm, policy_version)
    return PreferenceLoss(config.sft.beta) if config.sft.loss == "dpo" else supervised_loss


def make_policy_loss(config: AlgorithmConfig, policy_version: int) -> PolicyLoss:
    """Return the loss of [algorithm] for a batch that is trained at policy_version.

    Raises ConfigError for a user-defined loss that is missing, or breaks the contract.
    """
    loss: PolicyLoss
    if config.loss in LOSSES:
        loss = AnchoredLoss(make_objective(config), ImportanceWeight.of(config), config.proximal, policy_version)
    else:
        loss = load_own_loss(config.loss, tuple(config.loss_arguments.items()))
    if not config.kl_coefficient and not config.entropy_coefficient and not config.forward_kl_coefficient:
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
        forward_kl_coefficient=config.forward_kl_coefficient,
    )


def make_objective(config: AlgorithmConfig) -> Objective:
    """Return the objective of algorithm.loss."""
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
        # First: a nan off the mask must reach neither the sums nor, as 0 · nan, the gradient.
        current, row = torch.where(row.loss_mask, current, 0.0), _without_masked(row)
        anchor = self._anchor(current, row)
        weights = self.importance(anchor, row, self.policy_version)
        # A masked token is no part of its sequence either: the ratio of a whole sequence (gspo, gmpo) would train it.
        objective = self.objective(current, anchor, replace(row, loss_mask=row.loss_mask & ~weights.masked))
        # Tokens without weight are cut out, not multiplied by zero: absurd values stay out of the sum.
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
