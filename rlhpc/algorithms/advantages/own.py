"""An estimator of the user's own: algorithm.advantage = "package.module:function".

Tried on small groups when it is loaded, equal rewards and members without loss tokens among them, and checked each time
that it is used: what does not fit would end in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from rlhpc.contracts import AdvantageEstimator
from rlhpc.errors import ConfigError
from rlhpc.types import Float32, Int32
from rlhpc.user_code import bound, load, try_out

KEY = "algorithm.advantage"
_PAGE = "docs/algorithms.md, An advantage of your own"
_REWARDS, _LENGTHS = (1.0, 0.0, 0.5), (3, 1, 2)  # of the first members; those of a larger group repeat them
NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})
_SHOWN = 4  # members of a group that a message names
_NOTHING = 1e-3  # an advantage below it is one of rounding


def load_own_estimator(
    path: str, group_size: int | None = None, arguments: Mapping[str, object] = NO_ARGUMENTS
) -> OwnEstimator:
    """Import it and try it.  Raises ConfigError if it cannot be imported, raises, or returns what does not fit.

    group_size: members of the groups on which it is tried; None: a few.  arguments: algorithm.advantage_arguments.
    """
    function = bound(KEY, path, load(KEY, path), ("rewards", "lengths"), arguments)
    rewards, lengths = _group(group_size or len(_REWARDS))
    only_first = np.where(np.arange(len(rewards)) == 0, lengths, np.int32(0))
    for group in (
        (rewards, lengths),
        (np.zeros_like(rewards), lengths),
        (np.ones_like(rewards), lengths),
        (rewards, only_first),  # completions that were cut off have no loss tokens with shaping.truncated = "masked"
        (rewards, np.zeros_like(lengths)),
    ):
        on = _described(*group)
        with np.errstate(all="ignore"):
            problem = try_out(KEY, path, on, partial(_problem, function, *group))
        if problem:
            raise ConfigError(f"{KEY}={path!r}, tried on {on}: it {problem} ({_PAGE})")
    return OwnEstimator(path, function)


def doubts_of(estimator: OwnEstimator, group_size: int) -> list[str]:
    """Return warnings of an estimator that has passed its trial: what is legal and seldom meant."""
    rewards, lengths = _group(group_size)
    first, again = (_called(estimator.function, rewards.copy(), lengths.copy()) for _ in range(2))
    where = f"{KEY}={estimator.path!r}, tried on {_described(rewards, lengths)}"
    if not np.array_equal(first, again):
        return [f"{where} twice: {_shown(first)} and {_shown(again)}; usual: the same advantages for the same rewards"]
    if np.abs(first).max() <= _NOTHING and group_size > 1:
        return [f"{where}: {_shown(first)}, no advantage though rewards differ: nothing would be learnt from it"]
    if np.dot(first, rewards - rewards.mean()) < 0:
        return [f"{where}: {_shown(first)}, the lower the higher the reward: better answers would become rarer"]
    return []


@dataclass(frozen=True, slots=True)
class OwnEstimator:
    """An AdvantageEstimator."""

    path: str
    function: AdvantageEstimator

    def __call__(self, rewards: Float32, lengths: Int32) -> Float32:
        """Raises ConfigError: the function raises, or returns something else than a finite number for each member."""
        on = f"{len(rewards)} rewards of a run"
        advantages = try_out(KEY, self.path, on, partial(_called, self.function, rewards, lengths))
        if problem := _misfit(advantages, rewards):
            raise ConfigError(f"{KEY}={self.path!r} {problem} ({_PAGE})")
        return advantages


def _group(size: int) -> tuple[Float32, Int32]:
    return np.resize(np.array(_REWARDS, np.float32), size), np.resize(np.array(_LENGTHS, np.int32), size)


def _shown(advantages: Float32) -> str:
    return np.array2string(advantages, threshold=8)


def _called(function: AdvantageEstimator, rewards: Float32, lengths: Int32) -> Float32:
    return np.asarray(function(rewards, lengths), np.float32)


def _misfit(advantages: Float32, rewards: Float32) -> str:
    """Return what is wrong with these advantages, "" if nothing."""
    if advantages.shape == rewards.shape and np.isfinite(advantages).all():
        return ""
    return (
        f"returned {_shown(advantages)} for {len(rewards)} rewards; legal: one finite number for "
        "each, and zeros where all rewards are equal"
    )


def _problem(function: AdvantageEstimator, rewards: Float32, lengths: Int32) -> str:
    """Return what this group shows to be wrong with the function, "" if nothing."""
    given: tuple[Float32, Int32] = rewards.copy(), lengths.copy()
    advantages = _called(function, *given)
    if problem := _misfit(advantages, rewards):
        return problem
    for name, before, after in zip(("rewards", "lengths"), (rewards, lengths), given, strict=True):
        if not np.array_equal(before, after):
            return f"changes {name} in place; legal: to leave its arguments as they are"
    if rewards.min() == rewards.max() and np.abs(advantages).max() > _NOTHING:
        return (
            f"returned {_shown(advantages)} where all rewards are equal, so that a group without "
            "a better answer would be learnt from; legal: zeros there"
        )
    return ""


def _described(rewards: Float32, lengths: Int32) -> str:
    more = ", …" if len(rewards) > _SHOWN else ""
    shown, tokens = (", ".join(f"{each:g}" for each in values[:_SHOWN]) for values in (rewards, lengths))
    return f"rewards {shown}{more} of {tokens}{more} tokens"
