"""Find an environment by its name: one of the table below, or "package.module:Class" of the user.

Input: a name.  Output: a class with the methods of Environment.  Named as text, as in rewards/registry.py.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from rlhpc.base.own_tools import schemas_of_servers
from rlhpc.base.user_code import did_you_mean, is_import_path, load, look_up, place_of, takes
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT, CONTAINER, OWN_REWARD
from rlhpc.config.tables_services import ContainerConfig, EnvironmentConfig
from rlhpc.config.tables_tools import McpConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.environment import MOST_KEPT, ROLES, Environment, Message, Step
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.outcomes import DialogueRequest, JudgedOutcome, NoReward, Turn

# ------------------------------------------------------------------------------------------------------------- registry

KEY = "data.environment"
VARIABLE = "RLHPC_ENVIRONMENTS"  # of a reward worker: the environments of its run

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "container": "rlhpc.environments.container:ContainerEnvironment",
        "gymnasium": "rlhpc.environments.gymnasium:GymnasiumEnvironment",
        "tools": "rlhpc.environments.tools:ToolEnvironment",
        "verifiers": "rlhpc.environments.verifiers:VerifiersEnvironment",
    }
)


_METHODS = "async reset(record) that returns a list of messages, and async step(completion) that returns a Step"


def validate_environment(name: str) -> None:
    """Check a name without importing user code.  Raises ConfigError."""
    look_up(KEY, _import_path(name), repr(name), is_class=True)


def resolve_environment(name: str, arguments: Mapping[str, object] = MappingProxyType({})) -> type[Environment]:
    """Import an environment.  Raises ConfigError, also if it is no subclass of Environment, or abstract.

    arguments: environment.arguments, which its constructor has to accept, unless it overrides open().
    """
    found: Any = load(KEY, _import_path(name), repr(name))
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise ConfigError(
            f"{KEY}={name!r} is not a subclass of rlhpc.protocol.environment.Environment{place_of(found)}; "
            f"legal: class {name.partition(':')[2]}(Environment) with {_METHODS}"
        )
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{KEY}={name!r} lacks {', '.join(missing)}{place_of(found)}; legal: {_METHODS}")
    is_default = getattr(found.open, "__func__", None) is Environment.open.__func__  # type: ignore[attr-defined]
    if is_default and (why := takes("environment.arguments", found, arguments)):
        raise ConfigError(
            f"{KEY}={name!r}: {found.__name__}{inspect.signature(found)}: {why}; legal: a constructor whose parameters "
            "have a default or a value in environment.arguments"
        )
    return found


def _import_path(name: str) -> str:
    path = BUILT_IN.get(name, name)
    if not is_import_path(path):
        raise ConfigError(
            f"{KEY}={name!r} is not an environment; legal: agent, {', '.join(sorted(BUILT_IN))}, package.module:Class"
            f"{did_you_mean(name, BUILT_IN, is_class=True)}"
        )
    return path


# ----------------------------------------------------------------------------------------------------------------- host
#
# Dialogues in a worker process: environments are kept between turns; an unknown dialogue is replayed.
#
# Input: Dialogue, all turns so far.  Output: Turn, the answer to the last one.  A kept dialogue takes one step; any
# other (another worker had it, or it continues from a prefix) is begun and takes all turns.  So a request may be
# repeated, and sent to any worker.

log = logging.getLogger("rlhpc.environments")

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
        self.tools: dict[str, tuple[str, ...]] = {}  # by environment that was preloaded: names of those that it offers

    def answer(self, dialogue: DialogueRequest) -> Turn:
        """Take the last turn of a dialogue, or begin it.

        Raises the environment's exceptions; the dialogue is then closed and dropped.
        """
        kept = self._runner.run(self._played(dialogue))
        try:
            turn = self._turn(dialogue, kept)  # outside of the loop: an async reward function runs its own
        except BaseException:
            self._runner.run(_close(kept.environment))
            raise
        self._runner.run(kept.environment.close() if turn.is_over else self._keep(dialogue.key, kept))
        return turn

    def preload(self, name: str) -> None:
        """Import an environment and make one, which may read large files.  Raises ConfigError, or its exceptions."""
        self._classes[name] = resolve_environment(name, self._settings.arguments)
        environment = self._classes[name].open(self._settings)
        self.tools[name] = environment.offered_tools()
        self._runner.run(environment.close())

    def close(self) -> None:
        """Close and drop all dialogues."""
        for kept in self._kept.values():
            self._runner.run(_close(kept.environment))
        self._kept.clear()
        self._runner.close()

    async def _played(self, dialogue: DialogueRequest) -> _Kept:
        """The dialogue, after all its turns."""
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

    async def _play(self, dialogue: DialogueRequest, kept: _Kept) -> None:
        """Take the remaining turns."""
        for completion in dialogue.turns[len(kept.turns) :]:
            if kept.steps and kept.steps[-1].is_done:
                raise ValueError(f"the dialogue was over after {len(kept.turns)} turns, and has {len(dialogue.turns)}")
            kept.steps.append(_step("step", await kept.environment.step(completion)))
            kept.turns.append(completion)
        if dialogue.is_last and kept.steps and not kept.steps[-1].is_done:
            last, more = kept.steps[-1], _step("finish", await kept.environment.finish())
            kept.steps.append(replace(more, detail=more.detail or last.detail, is_done=False))

    async def _begun(self, dialogue: DialogueRequest) -> _Kept:
        if dialogue.environment not in self._classes:
            arguments = self._settings.arguments
            self._classes[dialogue.environment] = resolve_environment(dialogue.environment, arguments)
        environment = self._classes[dialogue.environment].open(self._settings)
        try:
            _refuse_other_tools(dialogue, environment)
            opening = await environment.reset(json.loads(dialogue.record))
        except BaseException:
            await _close(environment)
            raise
        return _Kept((dialogue.environment, dialogue.record), environment, opening)

    async def _keep(self, key: str, kept: _Kept) -> None:
        self._kept[key] = kept
        if len(self._kept) > min(MOST_KEPT, kept.environment.most_kept):
            _, oldest = self._kept.popitem(last=False)
            await _close(oldest.environment)

    def _turn(self, dialogue: DialogueRequest, kept: _Kept) -> Turn:
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
    """Close an abandoned dialogue; its exceptions are ignored, since they would hide the reason."""
    try:
        await environment.close()
    except Exception as error:  # noqa: BLE001  of the user's own: what comes after it counts
        log.warning("an environment cannot be closed: %r", error)


def _refuse_other_tools(dialogue: DialogueRequest, environment: Environment) -> None:
    """Raise NoReward if the prompt tells of other tools of servers than there are here."""
    here = environment.served_tools()
    if here and dialogue.tools and dialogue.tools != here:
        raise NoReward(
            "prompts of this run tell of other tools of [mcp.NAME] than the reward service was told when it started "
            f"({', '.join(environment.offered_tools())}): a server was changed meanwhile, or is another one on this "
            "node; the run has to be started again with one and the same"
        )


def _continues(dialogue: DialogueRequest, kept: _Kept) -> bool:
    """True if a dialogue is the kept one, with the same turns and perhaps more."""
    began_with = (dialogue.environment, dialogue.record)
    return kept.began_with == began_with and list(dialogue.turns[: len(kept.turns)]) == kept.turns


def _step(method: str, returned: object) -> Step:
    """Return the Step.  Raises NoReward for any other value, naming it."""
    if isinstance(returned, Step):
        return returned
    kind = "tuple (as gymnasium's)" if isinstance(returned, tuple) else type(returned).__name__
    raise NoReward(f"{method} returned a {kind}, not a Step")


def _checked(messages: Sequence[Message]) -> tuple[dict[str, str], ...]:
    """Return a list of messages as dicts.  Raises TypeError for any other value, naming it."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"a list of messages is wanted, () for none, not {type(messages).__name__}")
    checked: list[dict[str, str]] = []
    for message in messages:
        is_plain = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        if not is_plain or not all(isinstance(text, str) for text in _texts(message)):
            raise TypeError(f'a message is {{"role": …, "content": …}} with texts, not {str(message)[:80]}')
        if message["role"] not in ROLES:
            raise ValueError(f"a message has the role {message['role']!r}; legal: {', '.join(map(repr, ROLES))}")
        checked.append(dict(message))
    return tuple(checked)


def _texts(message: Mapping[str, Any]) -> list[Any]:
    return [*message.keys(), *message.values()]


# ------------------------------------------------------------------------------------------------------------- settings
#
# The environments of a run, passed to reward workers in environment variables, as in code_place.py.


def variables_of(config: Config) -> dict[str, str]:
    """Environment variables that tell a reward worker the environments of its run, and the tools of its servers.

    Raises ConfigError for a server that cannot be asked.
    """
    names = list(dict.fromkeys(each.environment for each in config.data if each.environment not in ("", AGENT)))
    if not names:
        return {}
    told: dict[str, Any] = {"settings": config.environment.model_dump(mode="json"), "names": names}
    if servers := config.tool_servers:
        told |= {"servers": servers, "served": schemas_of_servers(servers)}
    if any(each.environment == CONTAINER for each in config.data):
        told |= {"container": config.container.model_dump(mode="json")}
    return {VARIABLE: json.dumps(told)}


def environments_here() -> tuple[EnvironmentConfig, list[str]]:
    """(settings, names of environments) of this worker's run."""
    read = json.loads(os.environ.get(VARIABLE, "{}"))
    return EnvironmentConfig.model_validate(read.get("settings", {})), read.get("names", [])


@dataclass(frozen=True, slots=True)
class ServedHere:
    """Servers of tools of this worker's run."""

    tables: Mapping[str, McpConfig]  # by name
    schemas: Mapping[str, list[dict[str, Any]]]  # of their tools, as the reward service was told


def servers_here() -> ServedHere:
    """Servers of tools of this worker's run; none outside of a worker."""
    read = json.loads(os.environ.get(VARIABLE, "{}"))
    tables = {name: McpConfig.model_validate(table) for name, table in read.get("servers", {}).items()}
    return ServedHere(tables, read.get("served", {}))


def containers_here() -> ContainerConfig:
    """Settings of the containers of this worker's run."""
    return ContainerConfig.model_validate(json.loads(os.environ.get(VARIABLE, "{}")).get("container", {}))


def judged_tasks(config: Config) -> tuple[str, ...]:
    """Tasks of a run that have a reward function."""
    return tuple(task for task in config.data_tasks if task != OWN_REWARD)
