"""Rewards of one group into advantages: GRPO and RLOO.

Input: the rewards of all members of a group.  Output: one advantage per member.  Loads without torch.

Differs from GRPO (arXiv:2402.03300, §4.1.2): (1) the standard deviation divides by G, not G − 1, so that advantages
of a group have mean square 1 whatever G is; the paper does not say which, and code that takes torch.std gets values
smaller by √((G−1)/G); (2) nothing is added to the standard deviation: a zero-variance group is recognised as such
instead of being divided by a small number.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rlhpc.contracts import AdvantageEstimator
from rlhpc.errors import ConfigError
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


def grpo(rewards: Float32) -> Float32:
    """(r_i − mean r) / std r: group-relative advantage (Shao et al. 2024, arXiv:2402.03300, §4.1.2).

    rewards [G] → [G], all zero in a zero-variance group.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    centred = _centred(rewards)
    deviation = np.sqrt(np.mean(centred**2))
    return np.asarray(centred / deviation, np.float32)


def grpo_no_std(rewards: Float32) -> Float32:
    """r_i − mean r: without the bias towards groups of small variance (Liu et al. 2025, arXiv:2503.20783).

    rewards [G] → [G], all zero in a zero-variance group.  Raises ValueError as has_reward_variance.
    """
    return _centred(rewards).astype(np.float32) if has_reward_variance(rewards) else np.zeros_like(rewards)


def rloo(rewards: Float32) -> Float32:
    """r_i − mean of the others' rewards: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    Equals grpo_no_std times G / (G − 1); the baseline does not depend on the member, so that the gradient has no bias.
    rewards [G] → [G], all zero in a zero-variance group.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    size = len(rewards)
    return (_centred(rewards) * (size / (size - 1))).astype(np.float32)


def make_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator that algorithm.advantage names.  Raises ConfigError for an unknown name."""
    try:
        return ESTIMATORS[name]
    except KeyError:
        raise ConfigError(f"algorithm.advantage={name!r}; legal: {', '.join(ESTIMATORS)}") from None


def _centred(rewards: Float32) -> NDArray[np.float64]:
    return np.asarray(rewards - rewards.mean(dtype=np.float64), np.float64)


ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {"grpo": grpo, "grpo_no_std": grpo_no_std, "rloo": rloo}
)
