"""Whether the rewards of a group tell its members apart.  Loads without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhpc.types import Float32

RELATIVE_TOLERANCE = 1e-6
"""Rewards closer than this, relative to the largest (or to 1), are one reward.

Exact equality would be a trap with rewards that are sums of parts: 0.1 + 0.2 and 0.3 differ in the last bit, and
dividing by the standard deviation blows that bit up to advantages of ±1.  About eight units in the last place of a
float32; verifiable rewards are coarser by far.
"""


def has_reward_variance(rewards: Float32) -> bool:
    """Whether a group [G] teaches anything.  Raises ValueError if there is no reward or one is not finite."""
    if rewards.ndim != 1 or len(rewards) == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group: {rewards.tolist()}; legal: one finite number per member")
    scale = max(1.0, float(np.abs(rewards).max()))
    return float(rewards.max()) - float(rewards.min()) > RELATIVE_TOLERANCE * scale


def centred(rewards: Float32) -> NDArray[np.float64]:
    """r_i − mean r, float64."""
    return np.asarray(rewards - rewards.mean(dtype=np.float64), np.float64)
