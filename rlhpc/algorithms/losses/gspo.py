"""GSPO: one ratio for a whole sequence, the geometric mean of those of its tokens.

    min(s · A, clip(s, 1 − clip_low, 1 + clip_high) · A)            s = (π_current(y) / π_anchor(y))^(1 / |y|)

Zheng et al. 2025 (arXiv:2507.18071).  Every token of a sequence has its value, so that with algorithm.aggregation =
"sequence" the loss is the paper's; with "token" long sequences count more.  Bounds are some 1e-4: theirs are 3e-4 and
4e-4.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhpc.algorithms.losses.objective import TokenObjective, log_ratio, sequence_mean
from rlhpc.algorithms.losses.ppo import clipped
from rlhpc.contracts import TokenRow


@dataclass(frozen=True, slots=True)
class SequenceSurrogate:
    """An Objective."""

    clip_low: float
    clip_high: float

    def __call__(self, current: Tensor, anchor: Tensor, row: TokenRow) -> TokenObjective:
        """Sequences without gradient are those that have gone far enough."""
        ratio = sequence_mean(log_ratio(current, anchor), row).exp()
        return clipped(ratio, row.advantages, self.clip_low, self.clip_high, None)
