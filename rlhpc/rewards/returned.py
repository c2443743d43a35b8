"""What a reward function of a user's own may return, besides a RewardOutcome.

    True, False                        reward 1.0 or 0.0
    a number                           the reward; correct from 1.0 on
    {"reward": 0.5, "is_correct": …}   "score" is another name of the reward, "acc" of is_correct; "detail", "answer"
                                       and "rewards_at" as in a RewardOutcome; every other number is a part
    a coroutine (async def)            what it returns

Input: what was returned.  Output: a RewardOutcome, whose numbers the worker checks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rlhpc.contracts import RewardOutcome

CORRECT_FROM = 1.0
_REWARD, _IS_CORRECT, _KEPT = ("reward", "score"), ("is_correct", "acc"), ("detail", "answer", "rewards_at")


@dataclass(frozen=True, slots=True)
class JudgedOutcome(RewardOutcome):
    """An outcome with its costs, by names of failures.COSTS."""

    costs: dict[str, float] = field(default_factory=dict)


class NoReward(TypeError):
    """What was returned is none of the above."""


def as_outcome(returned: object) -> RewardOutcome:
    """The outcome that was returned.  Raises NoReward for anything else, naming it; what a coroutine raises."""
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    match returned:
        case RewardOutcome():
            return returned
        case bool():
            return RewardOutcome(float(returned), is_correct=returned)
        case Real():
            return RewardOutcome(float(returned), is_correct=float(returned) >= CORRECT_FROM)
        case Mapping():
            return _of_mapping(returned)
    raise NoReward(
        f"a reward function returns a RewardOutcome, a number, True or False, or a dict with a reward, "
        f"not {type(returned).__name__}"
    )


def _of_mapping(returned: Mapping[Any, Any]) -> RewardOutcome:
    named = [key for key in _REWARD if key in returned]
    if len(named) != 1:
        raise NoReward(
            f"a dict that a reward function returns has 'reward' or 'score', not {sorted(map(str, returned))}"
        )
    reward = returned[named[0]]
    outcome = as_outcome(reward) if isinstance(reward, Real) else RewardOutcome(reward, is_correct=False)
    is_correct = next((bool(returned[key]) for key in _IS_CORRECT if key in returned), outcome.is_correct)
    known = {*_REWARD, *_IS_CORRECT, *_KEPT}
    parts = {str(key): _number(value) for key, value in returned.items() if key not in known}
    return RewardOutcome(outcome.reward, is_correct, parts, **{key: returned[key] for key in _KEPT if key in returned})


def _number(value: object) -> Any:
    """A float; what is none stays as it is, for the worker to name it."""
    return float(value) if isinstance(value, Real) else value
