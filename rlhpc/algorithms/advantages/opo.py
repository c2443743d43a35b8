"""OPO: the baseline that makes the variance of the gradient smallest, where its square grows with the length.

    A_i = r_i − Σ_j l_j · r_j / Σ_j l_j            l: tokens of a completion

Hao et al. 2025 (arXiv:2505.23585).
"""

from __future__ import annotations

import numpy as np

from rlhpc.algorithms.advantages.spread import has_reward_variance
from rlhpc.types import Float32, Int32


def opo(rewards: Float32, lengths: Int32) -> Float32:
    """Reward less the mean of rewards weighted by lengths.  See AdvantageEstimator; sums to 0 over tokens."""
    if not has_reward_variance(rewards) or not lengths.any():
        return np.zeros_like(rewards)
    baseline = np.average(rewards.astype(np.float64), weights=lengths)
    return (rewards - baseline).astype(np.float32)
