"""DPPO: a bound on how far the probability of the sampled token moves, and not on its ratio.

    u · A, or 0 where A > 0 and π_current − π_anchor > clip_high, or A < 0 and π_current − π_anchor < −clip_low

Qi et al. 2026 (arXiv:2602.04879), with the binary approximation of total variation.  A ratio holds back rare tokens,
which hardly change the distribution, and lets likely ones go far.  The paper's anchor is the sampler: that is
algorithm.proximal = "behaviour".  prime-rl's default loss is this with 0.2 and 0.2, and a penalty of 1e-3 on the square
of log(π_current / π_anchor), which is not there here.
Differs from verl's: u is not truncated at 20.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class DivergenceMask:
    """An Objective; bounds are differences of probabilities."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Tokens without gradient are those that have gone far enough the way that their advantage shows."""
        ratio = log_ratio(current, anchor).exp()
        change = current.detach().exp() - anchor.exp()
        at_low = (row.advantages < 0) & (change < -self.clip_low)
        at_high = (row.advantages > 0) & (change > self.clip_high)
        return TokenObjective(
            torch.where(at_low | at_high, 0.0, ratio * row.advantages), ratio.detach(), at_low, at_high
        )
