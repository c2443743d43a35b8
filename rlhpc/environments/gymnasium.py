"""The environment "gymnasium": any text environment of Gymnasium, by environment.id (its registry's name).

Input: a record, whose `seed` and `options` reset() gets; a missing seed is derived from the record, so that a dialogue
can be replayed.  Observations are messages of the user, a turn of the policy is an action, as it is.  Observations
and actions have to be gymnasium.spaces.Text: another environment needs a wrapper that puts it into words.
Extra `gymnasium`; sources: Gymnasium's Env.reset and Env.step (gymnasium.farama.org/api/env).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import gymnasium

from rlhpc.base.user_code import try_out
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.protocol.environment import Environment, Message, Step
from rlhpc.protocol.errors import ConfigError

SUCCESS = "is_success"  # optional key of `info`: whether the game was won


class GymnasiumEnvironment(Environment):
    """One game of a text environment."""

    def __init__(self, game: gymnasium.Env[str, str]) -> None:
        self._game = game

    @classmethod
    def open(cls, settings: EnvironmentConfig) -> Self:
        """Make the game.  Raises ConfigError if that fails, or if its spaces are not Text."""
        where = f"environment.id={settings.id!r}"
        game = try_out(
            "environment.id",
            settings.id,
            f"environment.arguments={settings.arguments}",
            lambda: gymnasium.make(settings.id, disable_env_checker=True, **settings.arguments),
        )
        for what, space in (("observations", game.observation_space), ("actions", game.action_space)):
            if not isinstance(space, gymnasium.spaces.Text):
                game.close()
                raise ConfigError(
                    f"{where}: its {what} are {type(space).__name__}; legal: Text, which a wrapper of yours may make"
                )
        return cls(game)

    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """The first observation."""
        seed = record.get("seed")
        if seed is None:
            seed = zlib.crc32(json.dumps(record, sort_keys=True).encode())
        observation, _info = self._game.reset(seed=int(seed), options=record.get("options"))
        return _said(observation)

    async def step(self, completion: str) -> Step:
        """The next observation; the game is over if it has ended or was cut off."""
        observation, reward, has_ended, was_cut, info = self._game.step(completion)
        is_correct = bool(info[SUCCESS]) if SUCCESS in info else None
        return Step(_said(observation), float(reward), is_done=has_ended or was_cut, is_correct=is_correct)

    async def close(self) -> None:
        """See Environment."""
        self._game.close()


def _said(observation: str) -> Sequence[Message]:
    return ({"role": "user", "content": observation},) if observation else ()
