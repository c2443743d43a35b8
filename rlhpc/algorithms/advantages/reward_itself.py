"""The reward as it is: for estimators whose only baseline is that of the batch (REINFORCE++)."""

from __future__ import annotations

from rlhpc.algorithms.advantages.spread import has_reward_variance
from rlhpc.types import Float32, Int32


def reward_itself(rewards: Float32, lengths: Int32) -> Float32:
    """r_i.  The only AdvantageEstimator that is not zero in a zero-variance group.  Raises ValueError as the others."""
    has_reward_variance(rewards)
    return rewards
