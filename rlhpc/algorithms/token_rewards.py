"""Token-level rewards: the reward earned with each token of a completion, and the return from it on.

A reward function may say which part of the reward of a completion was earned earlier than at its end (RewardOutcome);
what is left of the reward stands on the last loss token, so that the sum is the reward whatever [shaping] makes of it.
A part that stands on a token the policy did not choose was earned by its last choice before that, or by its first one.

Input: ScoredRollout.  Output: a number per loss token.  float64.  Loads without torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlhpc.types import ScoredRollout


def earned(member: ScoredRollout, reward: float) -> NDArray[np.float64]:
    """What each of the n loss tokens has earned, [n], with the sum `reward` if there are any."""
    mask = member.rollout.loss_mask
    found = np.zeros(np.count_nonzero(mask))
    if len(found):
        num_chosen = np.cumsum(mask)  # loss tokens up to each token
        for place, value in member.token_rewards.items():
            found[max(0, num_chosen[place] - 1)] += value
        found[-1] += reward - found.sum()
    return found


def still_to_come(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The return of each token [n]: its own reward and all later ones, undiscounted."""
    return np.cumsum(rewards[::-1])[::-1]
