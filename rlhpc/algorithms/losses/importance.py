"""Importance weights: how much a token counts, given the ratio of anchor to behaviour policy.

    w = min(π_anchor / π_behaviour, cap)    of a token, of its whole sequence, or that one's geometric mean per token
    w = 0                                   where the ratio is outside [low, high], where any token of the sequence is
                                            less likely than veto times what it was, where the advantage is negative and
                                            the mean of log π_behaviour / π_anchor over the sequence is above drift, and
                                            for tokens that are too old

No gradient flows through w.  Truncated weights: Ionides 2008, "Truncated importance sampling"; between a trainer and
its engine: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".  Decoupling the
anchor from the behaviour policy: Hilton et al. 2022 (arXiv:2110.00641), for language models AReaL, Fu et al. 2025
(arXiv:2505.24298).  Masking in place of truncating, with bounds on both sides: IcePop, Ling Team 2025
(arXiv:2510.18855). Sequence and geometric ratios, and the veto of sequences with a catastrophic token: Liu et al. 2025,
"When speed kills stability: demystifying RL collapse from the training-inference mismatch".  Drift: off-policy sequence
masking, DeepSeek-V3.2, eq. 9 (arXiv:2512.02556).

Differs from these: (1) what is masked stays in the loss's denominator, so that a masked token is a zero and does not
make the others count more; in a ratio of a whole sequence (gspo, gmpo) it has no part; (2) logarithms of ratios are
clamped to ±20, per token and per sequence; (3) drift is that of the anchor and not of the current policy, which is the
same with one optimiser step on a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import MAX_LOG_RATIO, log_ratio, sequence_mean, sequence_sum
from rlhpc.config_algorithm import AlgorithmConfig
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class Weights:
    """Of every token [T], without gradient."""

    used: Tensor  # what the objective is multiplied with
    capped: Tensor  # w before anything is masked
    uncapped: Tensor  # the ratio
    masked: Tensor  # bool

    @property
    def is_capped(self) -> Tensor:
        """Bool [T]."""
        return self.uncapped > self.capped


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """The rule.  cap None: w = 1 where nothing masks the token; the figures are those without a cap."""

    level: str  # "token", "sequence", "geometric"
    cap: float | None
    low: float = 0.0
    high: float = math.inf
    veto: float = 0.0
    drift: float = math.inf  # nats per token
    max_age: int | None = None  # versions

    @classmethod
    def of(cls, config: AlgorithmConfig) -> ImportanceWeight:
        """As the run file says."""
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
        """anchor: log-probabilities [T], 0 off the mask.  policy_version: that is trained."""
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
