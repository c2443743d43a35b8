"""What a reward function of a user's own may return, besides a RewardOutcome.

    True, False                        reward 1.0 or 0.0
    a number                           the reward; correct from 1.0 on
    {"reward": 0.5, "is_correct": …}   "score" is another name of the reward, "acc" of is_correct, "pred" of answer;
                                       "detail", "answer" and "rewards_at" as in a RewardOutcome; every other number is
                                       a part, other texts and None are left out
    a coroutine (async def)            what it returns

Numbers and truths may be numpy's or torch's, as comparisons of arrays give them.

Input: what was returned.  Output: a RewardOutcome, whose numbers the worker checks.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rlhpc.contracts import RewardOutcome

CORRECT_FROM = 1.0
LARGEST = 1e30  # of a reward: float32, in which rewards are kept, has it, and the sum of any batch of it
_REWARD, _IS_CORRECT = ("reward", "score"), ("is_correct", "acc")
_KEPT = {"detail": "detail", "pred": "answer", "answer": "answer", "rewards_at": "rewards_at"}


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
    match returned := _plain(returned):
        case RewardOutcome():
            return returned
        case Real():
            return RewardOutcome(_as_float(returned), _is_true(returned))
        case Mapping():
            return _of_mapping(returned)
    raise NoReward(
        f"a reward function returns a RewardOutcome, a number, True or False, or a dict with a reward, "
        f"not {type(returned).__name__}"
    )


def fault_of(name: str, value: object) -> str:
    """What is wrong with a reward or a part of one; "": nothing."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not -math.inf < value < math.inf:
        return f"{name} must be a finite number, not {type(value).__name__} {str(value)[:40]}"
    shown = f"{value:g}" if abs(value) <= sys.float_info.max else "a number beyond 1.8e308"
    return f"{name} must lie within ±{LARGEST:g}, not {shown}" if abs(value) > LARGEST else ""


def sendable(text: str) -> str:
    """The same; half a surrogate pair, which JSON and programs can spell and no message can have, is spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _of_mapping(returned: Mapping[Any, Any]) -> RewardOutcome:
    named = [key for key in _REWARD if key in returned]
    if len(named) != 1:
        raise NoReward(
            f"a dict that a reward function returns has 'reward' or 'score', not {sorted(map(str, returned))}"
        )
    reward = _plain(returned[named[0]])
    outcome = as_outcome(reward) if isinstance(reward, Real) else RewardOutcome(reward, is_correct=False)
    is_correct = next((_is_true(returned[key]) for key in _IS_CORRECT if key in returned), outcome.is_correct)
    others = {str(key): _plain(value) for key, value in returned.items() if key not in (*_REWARD, *_IS_CORRECT, *_KEPT)}
    parts = {key: _number(value) for key, value in others.items() if not isinstance(value, str | None)}
    kept = {field: returned[key] for key, field in _KEPT.items() if returned.get(key) is not None}
    return RewardOutcome(outcome.reward, is_correct, parts, **kept)


def _plain(value: object) -> Any:
    """Python's own number or truth in place of numpy's or torch's; others as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_true(value: object) -> bool:
    """Raises NoReward for what says neither: "no" would count as true."""
    match value := _plain(value):
        case bool() | None:
            return bool(value)
        case Real():
            return _as_float(value) >= CORRECT_FROM
    raise NoReward(f"is_correct must be True, False or a number, not {type(value).__name__} {value!r:.40}")


def _number(value: object) -> Any:
    """A float; what is none stays as it is, for the worker to name it."""
    return _as_float(value) if isinstance(value, Real) else value


def _as_float(value: Real) -> float:
    """Raises NoReward for a whole number of hundreds of digits, which JSON and Python have and floats have not."""
    try:
        return float(value)
    except OverflowError as error:
        raise NoReward("a reward function returns finite numbers, not one above 1.8e308") from error
