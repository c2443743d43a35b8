"""Dialogues in a worker process: keeps environments between turns, and replays a dialogue if it is not here.

Input: Dialogue, all turns so far.  Output: Turn, the answer to the last one.  A dialogue that was here for the turns
before takes one step; one that was not (another worker had it, or it went on from a prefix) is begun and takes all of
them.  So a request may be repeated, and sent to any worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhpc.config_data import OWN_REWARD
from rlhpc.config_environment import EnvironmentConfig
from rlhpc.contracts import RewardOutcome
from rlhpc.environment import Environment, Message, Step
from rlhpc.rewards.environments.registry import resolve_environment
from rlhpc.rewards.frames import Dialogue, Turn
from rlhpc.rewards.returned import JudgedOutcome

log = logging.getLogger("rlhpc.environments")

MOST_KEPT = 1024  # dialogues; the one that was longest without a turn is forgotten first
CORRECT_FROM = 1.0
Judge = Callable[[str, str, str], RewardOutcome]  # task, completion, reference


@dataclass(slots=True)
class _Kept:
    """A dialogue between two turns."""

    began_with: tuple[str, str]  # environment, record
    environment: Environment
    opening: Sequence[Message]
    turns: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class EnvironmentHost:
    """The dialogues of a worker."""

    def __init__(self, settings: EnvironmentConfig, judge: Judge) -> None:
        """judge: scores the last turn, in dialogues whose task is not the environment's own reward."""
        self._settings, self._judge = settings, judge
        self._runner = asyncio.Runner()  # one loop for all: an environment may hold connections
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._classes: dict[str, type[Environment]] = {}

    def answer(self, dialogue: Dialogue) -> Turn:
        """Take the last turn of a dialogue, or begin it.

        Raises what an environment raises; then it is closed and forgotten.
        """
        kept = self._runner.run(self._played(dialogue))
        try:
            turn = self._turn(dialogue, kept)  # outside of the loop: a reward function that is async has one of its own
        except BaseException:
            self._runner.run(_close(kept.environment))
            raise
        self._runner.run(kept.environment.close() if turn.is_over else self._keep(dialogue.key, kept))
        return turn

    def preload(self, name: str) -> None:
        """Import an environment and make one, which may read large files.  Raises ConfigError, or what it raises."""
        self._classes[name] = resolve_environment(name, self._settings.arguments)
        self._runner.run(self._classes[name].open(self._settings).close())

    def close(self) -> None:
        """Close all dialogues and forget them."""
        for kept in self._kept.values():
            self._runner.run(_close(kept.environment))
        self._kept.clear()
        self._runner.close()

    async def _played(self, dialogue: Dialogue) -> _Kept:
        """The dialogue with all its turns taken."""
        kept = self._kept.pop(dialogue.key, None)
        if kept is None or not _continues(dialogue, kept):
            if kept is not None:
                await _close(kept.environment)
            kept = await self._begun(dialogue)
        try:
            await self._play(dialogue, kept)
        except BaseException:
            await _close(kept.environment)
            raise
        return kept

    async def _play(self, dialogue: Dialogue, kept: _Kept) -> None:
        """Take the turns that it has not taken."""
        for completion in dialogue.turns[len(kept.turns) :]:
            if kept.steps and kept.steps[-1].is_done:
                raise ValueError(f"the dialogue was over after {len(kept.turns)} turns, and has {len(dialogue.turns)}")
            kept.steps.append(await kept.environment.step(completion))
            kept.turns.append(completion)
        if dialogue.is_last and kept.steps and not kept.steps[-1].is_done:
            last, more = kept.steps[-1], await kept.environment.finish()
            kept.steps.append(replace(more, detail=more.detail or last.detail, is_done=False))

    async def _begun(self, dialogue: Dialogue) -> _Kept:
        if dialogue.environment not in self._classes:
            arguments = self._settings.arguments
            self._classes[dialogue.environment] = resolve_environment(dialogue.environment, arguments)
        environment = self._classes[dialogue.environment].open(self._settings)
        try:
            opening = await environment.reset(json.loads(dialogue.record))
        except BaseException:
            await _close(environment)
            raise
        return _Kept((dialogue.environment, dialogue.record), environment, opening)

    async def _keep(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        if len(self._kept) > MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            await _close(oldest.environment)

    def _turn(self, dialogue: Dialogue, kept: _Kept) -> Turn:
        if not kept.steps:
            return Turn(messages=_checked(kept.opening))
        last = kept.steps[-1]
        is_over = last.is_done or dialogue.is_last
        parts, costs = dict[str, float](), dict[str, float]()
        for step in kept.steps:
            for name, value in step.parts.items():
                parts[name] = parts.get(name, 0.0) + value
        reward, detail, is_correct = sum(step.reward for step in kept.steps), last.detail, last.is_correct
        if is_over and dialogue.task != OWN_REWARD:
            judged = self._judge(dialogue.task, dialogue.answer, dialogue.reference)
            reward, is_correct = reward + judged.reward, judged.is_correct
            parts |= judged.parts
            detail = "; ".join(filter(None, (detail, judged.detail)))
            costs = judged.costs if isinstance(judged, JudgedOutcome) else {}
        return Turn(
            messages=() if is_over else _checked(last.messages),
            reward=reward,
            is_correct=reward >= CORRECT_FROM if is_correct is None else is_correct,
            parts=parts,
            detail=detail,
            is_done=last.is_done,
            is_over=is_over,
            costs=costs,
        )


async def _close(environment: Environment) -> None:
    """Of a dialogue that nobody goes on with; what it raises would hide why."""
    try:
        await environment.close()
    except Exception as error:  # noqa: BLE001  of the user's own: what comes after it counts
        log.warning("an environment cannot be closed: %r", error)


def _continues(dialogue: Dialogue, kept: _Kept) -> bool:
    """Whether a dialogue is the kept one, with the same turns and perhaps more."""
    began_with = (dialogue.environment, dialogue.record)
    return kept.began_with == began_with and list(dialogue.turns[: len(kept.turns)]) == kept.turns


def _checked(messages: Sequence[Message]) -> tuple[dict[str, str], ...]:
    """Raises TypeError for what is no list of messages, naming it."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"a list of messages is wanted, () for none, not {type(messages).__name__}")
    checked: list[dict[str, str]] = []
    for message in messages:
        is_plain = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not is_plain or not all(isinstance(text, str) for text in _texts(message)):
            raise TypeError(f'a message is {{"role": …, "content": …}} with texts, not {str(message)[:80]}')
        checked.append(dict(message))
    return tuple(checked)


def _texts(message: Mapping[str, Any]) -> list[Any]:
    return [*message.keys(), *message.values()]
