"""Zero-variance groups: whether the rewards of a group differ at all.  Loads without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhpc.types import Bool, Float32

RELATIVE_TOLERANCE = 1e-6
"""Rewards closer than this, relative to the largest (or to 1), are one reward.

Exact equality would be a trap with rewards that are sums of parts: 0.1 + 0.2 and 0.3 differ in the last bit, and
dividing by the standard deviation blows that bit up to advantages of ±1.  About eight units in the last place of a
float32; verifiable rewards are coarser by far.
"""


def has_reward_variance(rewards: Float32) -> bool:
    """Whether a group [G] teaches anything.  Raises ValueError if there is no reward or one is not finite."""
    return bool(have_reward_variance(rewards, np.zeros(1, np.int64))[0])


def have_reward_variance(rewards: Float32, starts: NDArray[np.int64]) -> Bool:
    """The same of groups that stand one after the other in rewards [N], each from one of starts [G] on; [G]."""
    if rewards.ndim != 1 or len(rewards) == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group: {rewards.tolist()}; legal: one finite number per member")
    highest = np.maximum.reduceat(rewards, starts).astype(np.float64)
    lowest = np.minimum.reduceat(rewards, starts).astype(np.float64)
    scales = np.maximum(1.0, np.maximum(np.abs(highest), np.abs(lowest)))
    return np.asarray(highest - lowest > RELATIVE_TOLERANCE * scales, np.bool_)


def centred(rewards: Float32) -> NDArray[np.float64]:
    """r_i − mean r, float64."""
    return np.asarray(rewards - rewards.mean(dtype=np.float64), np.float64)
