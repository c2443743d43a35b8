"""Pass@k as the objective: a sample is worth what it adds to sets of k of its group.

A set of k members is rewarded with its best one.  Over all sets, R and σ are mean and standard deviation of that; the
advantage of a member is the mean over the sets that it is in:

    A_i = (E[max r of a set | i is in it] − R) / σ

"Pass@k training", Chen et al. 2025 (arXiv:2508.10751), who have a closed form for rewards of 0 and 1.  Written with
order statistics, as Walder & Karkhanis 2025 (arXiv:2505.15201) do for their estimators, it holds for any rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

from rlhpc.algorithms.advantages.spread import has_reward_variance
from rlhpc.types import Float32, Int32


@dataclass(frozen=True, slots=True)
class PassAtK:
    """An AdvantageEstimator; k is 2 or more (with 1 it would be GRPO).  A group of k members would have one set."""

    k: int

    def __call__(self, rewards: Float32, lengths: Int32) -> Float32:
        """Float32 [G]; all zero also where every set has the same best one (fewer than k at the bottom)."""
        if not has_reward_variance(rewards) or len(rewards) <= self.k:
            return np.zeros_like(rewards)
        size, values = len(rewards), rewards.astype(np.float64)
        ordered = np.sort(values)
        # The j-th smallest is the best of C(j, k − 1) sets, counted from 0.
        shares = np.array([comb(j, self.k - 1) for j in range(size)]) / comb(size, self.k)
        mean = float(shares @ ordered)
        variance = float(shares @ (ordered - mean) ** 2)
        if not has_reward_variance(ordered[self.k - 1 :].astype(np.float32)):
            return np.zeros_like(rewards)
        return np.array([(self._with(values, i) - mean) / variance**0.5 for i in range(size)], np.float32)

    def _with(self, values: np.ndarray, member: int) -> float:
        """Mean best one of the sets that a member is in."""
        others = np.sort(np.delete(values, member))
        shares = np.array([comb(j, self.k - 2) for j in range(len(others))]) / comb(len(others), self.k - 1)
        return float(shares @ np.maximum(others, values[member]))
