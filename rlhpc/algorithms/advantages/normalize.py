"""Advantages of a whole batch to mean 0 and standard deviation 1.

Over loss tokens, not over rollouts: a long completion counts as often as its advantage is used.  REINFORCE++ (Hu 2025,
arXiv:2501.03262) normalises so over the batch, its "baseline" variant after the mean of the group has been taken off.

Differs from it: (1) divided by N, and nothing is added to the variance; what has no spread is zero; (2) no KL cost in
the rewards of REINFORCE++, whose KL term is that of the loss (losses/regularised.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhpc.algorithms.advantages.spread import has_reward_variance
from rlhpc.types import Float32


def normalize(
    advantages: Sequence[Float32], num_tokens: Sequence[NDArray[np.integer]], tasks: Sequence[str]
) -> list[Float32]:
    """Advantages [G] of every group, the loss tokens of its members [G], and its task: one scale for each task."""
    results = list(advantages)
    for task in set(tasks):
        members = [i for i, of_group in enumerate(tasks) if of_group == task]
        scaled = _normalized(
            np.concatenate([advantages[i] for i in members]), np.concatenate([num_tokens[i] for i in members])
        )
        ends = np.cumsum([len(advantages[i]) for i in members])
        for i, values in zip(members, np.split(scaled, ends[:-1]), strict=True):
            results[i] = values
    return results


def _normalized(advantages: Float32, num_tokens: NDArray[np.integer]) -> Float32:
    if not num_tokens.any() or not has_reward_variance(advantages[num_tokens > 0]):
        return np.zeros_like(advantages)
    values = advantages - np.average(advantages.astype(np.float64), weights=num_tokens)
    return np.asarray(values / np.sqrt(np.average(values**2, weights=num_tokens)), np.float32)
