"""Advantages relative to the rewards of the same group: GRPO, with and without its standard deviation, and RLOO.

Differs from GRPO (arXiv:2402.03300, §4.1.2): (1) the standard deviation divides by G, not G − 1, so that advantages
of a group have mean square 1 whatever G is; the paper does not say which, and code that takes torch.std gets values
smaller by √((G−1)/G); (2) nothing is added to the standard deviation: a zero-variance group is recognised as such
instead of being divided by a small number.
"""

from __future__ import annotations

import numpy as np

from rlhpc.algorithms.advantages.spread import centred, has_reward_variance
from rlhpc.types import Float32, Int32


def grpo(rewards: Float32, lengths: Int32) -> Float32:
    """(r_i − mean r) / std r: group-relative advantage (Shao et al. 2024, arXiv:2402.03300, §4.1.2).

    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    values = centred(rewards)
    return np.asarray(values / np.sqrt(np.mean(values**2)), np.float32)


def grpo_no_std(rewards: Float32, lengths: Int32) -> Float32:
    """r_i − mean r: without the bias towards groups of small variance (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    return centred(rewards).astype(np.float32) if has_reward_variance(rewards) else np.zeros_like(rewards)


def rloo(rewards: Float32, lengths: Int32) -> Float32:
    """r_i − mean of the others' rewards: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    Equals grpo_no_std times G / (G − 1); the baseline does not depend on the member, so that the gradient has no bias.
    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    size = len(rewards)
    return (centred(rewards) * (size / (size - 1))).astype(np.float32)
