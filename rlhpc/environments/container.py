"""The environment "container": a task is done by shell commands in a container of its own, and its tests reward it.

    reset ─▶ a container ─▶ a turn's calls of `shell` ─▶ … ─▶ a turn without calls ─▶ tests/test.sh ─▶ reward

Input: a record of a task directory (data/tasks.py).  Files last between commands, processes do not.  A container that
has ended between two commands, as after idle_s, is made anew, and the dialogue's commands are run again in it.

Tests come into the container when the dialogue is over, and no process of the policy is left.  No reward where they
should have written one is a reward of 0, since commands of the policy may have prevented it; `rlhpc check` tries tests
on an untouched root, where they must give one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.config.rules import Config
from rlhpc.config.tables import CONTAINER
from rlhpc.config.tables_services import ContainerConfig, EnvironmentConfig
from rlhpc.data.record_source import read_records
from rlhpc.data.tasks import REWARD_FILES, Task, read_task
from rlhpc.environments.tools import ToolEnvironment
from rlhpc.protocol.environment import Message, Step
from rlhpc.protocol.errors import ConfigError, SandboxError
from rlhpc.rewards.environments import containers_here
from rlhpc.sandbox.container import Container, ContainerGone, Containers, FinishedCommand, Root
from rlhpc.sandbox.container_init import ContainerLimits
from rlhpc.sandbox.images import RootCache, default_base, open_image

_TESTS, _LOGS = "/tests", "/logs/verifier"
_FRAME_CHARACTERS = 80  # of a result, around what was printed
_SHOWN_CHARACTERS = 160
_LEAST_S = 0.05
Result = TypeVar("Result")


class ContainerPlace:
    """Containers of a worker, with the roots that they are made of."""

    def __init__(self, settings: ContainerConfig) -> None:
        """Raises SandboxError if this node has no containers, ConfigError for the cache."""
        self.settings, self.containers = settings, Containers()
        self.cache = RootCache(Path(settings.root_cache) if settings.root_cache else default_base())
        self.containers.start()
        self._roots: dict[Path, Root] = {}

    def task(self, directory: str) -> Task:
        """Raises DataError."""
        return read_task(Path(directory), Path(self.settings.images) if self.settings.images else None)

    def root(self, image: Path) -> Root:
        """The unpacked root of an image, which is looked at once in a process.  Raises ConfigError."""
        if image not in self._roots:
            self._roots[image] = self.cache.root_of(open_image(image))
        return self._roots[image]

    def about(self, image: Path) -> str:
        """An image for people: its name, digest and size."""
        if image not in self._roots:
            return f"{image.name} (not unpacked yet)"
        root = self._roots[image]
        return f"{image.name} ({root.path.parent.name[:12]}, {root.num_bytes:,} bytes in {root.num_files:,} files)"

    def shell(self, image: Path) -> str:
        """The shell that an image has."""
        root = self.root(image).path
        return "bash" if any(os.path.lexists(root / name) for name in ("bin/bash", "usr/bin/bash")) else "sh"

    def limits(self, task: Task) -> ContainerLimits:
        """The run's limits, or the task's where they are lower."""
        own = self.settings
        return ContainerLimits(
            processes=own.processes,
            memory_bytes=min(own.memory_bytes, task.memory_bytes or own.memory_bytes),
            disk_bytes=min(own.disk_bytes, task.disk_bytes or own.disk_bytes),
            idle_s=own.idle_s,
            has_loopback=task.has_loopback,
            keeps_processes=own.keep_processes,
        )


@cache
def place() -> ContainerPlace:
    """That of this process."""
    return ContainerPlace(containers_here())


class ContainerEnvironment(ToolEnvironment):
    """One task.  Its tool `shell` runs commands; other tools of environment.tools may stand beside it."""

    def __init__(self, settings: EnvironmentConfig, own_place: ContainerPlace | None = None) -> None:
        """own_place: where to have the container, other than this process's."""
        super().__init__(settings)
        self._place = own_place or place()
        self._task: Task | None = None
        self._container: Container | None = None
        self._commands: list[tuple[str, float]] = []  # those that were run, and the time that each had
        self._left_s, self._why_lost = 0.0, ""
        self.tools["shell"] = self._shell

    async def reset(self, record: Mapping[str, Any]) -> Sequence[Message]:
        """Make the container.  Raises DataError, ConfigError, SandboxError."""
        if "task" not in record:
            raise ConfigError(
                'data.environment="container" needs data.path with task directories (docs/environments.md)'
            )
        self._task = self._place.task(str(record["task"]))
        self._container = self._opened()
        return ()

    async def step(self, completion: str) -> Step:
        """Results of the calls; of a turn without any, the reward."""
        self._left_s = self._place.settings.command_s
        step = await super().step(completion)
        return self._judged() if step.is_done or self._why_lost else step

    async def finish(self) -> Step:
        """The reward of what was done until a limit ended the dialogue."""
        return self._judged()

    async def close(self) -> None:
        """End the container."""
        if self._container is not None:
            self._container.close()
            self._container = None

    # -------------------------------------------------------------------------------------------------------- commands

    def _opened(self) -> Container:
        """A fresh container of the task, in which nothing was run."""
        assert self._task is not None
        root, limits = self._place.root(self._task.image), self._place.limits(self._task)
        directory = self._task.working_directory or root.working_directory
        container = self._place.containers.open(root, limits, [_TESTS, _LOGS, "/logs/agent", directory])
        if self._task.files and (why := container.put(directory, self._task.files, is_fresh=False)):
            container.close()
            raise SandboxError(f"{self._task.directory}/environment: {why}; legal: a larger container.disk_bytes")
        return container

    def _shell(self, command: str) -> str:
        """The tool."""
        if self._left_s < _LEAST_S:
            raise ValueError("the time of this turn is used up")
        time_s = self._left_s
        try:
            run = self._surviving(lambda: self._run(command, time_s))
        except ContainerGone:
            self._why_lost = "the container ended with a command"
            raise ValueError(self._why_lost) from None
        self._commands.append((command, time_s))
        self._left_s -= run.wall_s
        return _result(run, time_s)

    def _surviving(self, action: Callable[[], Result]) -> Result:
        """The result of an action; if the container has ended, in a new one in which all commands were run again.

        Raises ContainerGone if that one ends, too.
        """
        try:
            return action()
        except ContainerGone:
            self._container = self._opened()
            for command, time_s in self._commands:
                self._run(command, time_s)
            return action()

    def _run(self, command: str, time_s: float) -> FinishedCommand:
        container, task = self._held()
        output_bytes = max(_FRAME_CHARACTERS, self.settings.max_result_characters - 2 * _FRAME_CHARACTERS)
        words = [self._place.shell(task.image), "-c", command]
        return container.run(words, time_s=time_s, directory=task.working_directory, output_bytes=output_bytes)

    def _held(self) -> tuple[Container, Task]:
        assert self._container is not None
        assert self._task is not None
        return self._container, self._task

    # ---------------------------------------------------------------------------------------------------------- reward

    def _judged(self) -> Step:
        """Run the tests in the container as it is, and read their reward."""
        if self._why_lost:
            return Step(is_done=True, is_correct=False, detail=self._why_lost)
        try:
            reward, parts, detail = self._surviving(self.tested)
        except ContainerGone:
            return Step(is_done=True, is_correct=False, detail="the container ended with the tests")
        except ValueError as error:
            return Step(is_done=True, is_correct=False, detail=str(error))
        return Step(reward=reward, is_done=True, parts=parts, detail=detail)

    def tested(self) -> tuple[float, dict[str, float], str]:
        """(reward, named figures beside it, a line for people) of the tests, run now.

        Raises ContainerGone, and ValueError if they give no reward.
        """
        container, task = self._held()
        for at, files in ((_TESTS, task.tests), (_LOGS, {})):
            if why := container.put(at, files):
                raise ValueError(f"the tests could not begin: {why}")
        run = container.run(
            [self._place.shell(task.image), f"{_TESTS}/test.sh"],
            time_s=min(self._place.settings.tests_s, task.tests_s or math.inf),
            environment=task.tests_environment,
            directory=task.working_directory,
        )
        last = run.output.decode(errors="replace").strip().rpartition("\n")[2][-_SHOWN_CHARACTERS:]
        how = f"more than {run.stopped_for} allows" if run.stopped_for else f"exit status {run.status}"
        try:
            reward, parts = _reward_in(container.read(REWARD_FILES))
        except ValueError as error:
            raise ValueError(f"tests: {error}; {how}: {last}") from None
        return reward, parts, f"tests: {how}: {last}" if run.status or run.stopped_for else last


def check_containers(config: Config) -> str:
    """Read all tasks, try a container on this node, and in it the tests of a dataset's first task.

    Returns a line for people, "" if the run has no containers.  Raises ConfigError, DataError, SandboxError.
    """
    datasets = [each.path for each in config.data if each.environment == CONTAINER and each.path is not None]
    if not datasets:
        return ""
    own, said, images = ContainerPlace(config.container), list[str](), set[Path]()
    try:
        for path in datasets:
            records = [record.fields for record in read_records(path, "all")]
            images |= {own.task(str(record.get("task", ""))).image for record in records}
            said.append(f"{len(records):,} tasks in {path}; {_tried(config, own, records[0])}")
        about = ", ".join(sorted(own.about(image) for image in images))
    finally:
        own.containers.close()
    return f"{own.containers.way}; {'; '.join(said)}; {about}"


def _tried(config: Config, own: ContainerPlace, record: Mapping[str, Any]) -> str:
    """Run the tests of a task on an untouched root.  Raises ConfigError if they give no reward."""
    task = ContainerEnvironment(config.environment, own)
    try:
        asyncio.run(task.reset(record))
        reward, _, _ = task.tested()
    except (ContainerGone, ValueError) as error:
        raise ConfigError(
            f"{record['task']}, before anything was done: {error}; legal: tests/test.sh writes a number to "
            f"{' or '.join(REWARD_FILES)}, also if the task is not done"
        ) from error
    finally:
        asyncio.run(task.close())
    return f"the untouched {record['name']} is rewarded with {reward:g}"


def _result(run: FinishedCommand, time_s: float) -> str:
    """Output of a command, and how it ended if not well."""
    printed = run.output.decode(errors="replace").rstrip("\n")
    ends = {
        "time": f"(stopped after {time_s:.3g} s)",
        "memory": "(stopped: too much memory)",
        "output": "(stopped: too much output)",
        "": f"(signal {-run.status})" if run.status < 0 else f"(exit status {run.status})" if run.status else "",
    }
    return "\n".join(filter(None, (printed, ends[run.stopped_for]))) or "(no output)"


def _reward_in(texts: Sequence[str | None]) -> tuple[float, dict[str, float]]:
    """(reward, other figures) of reward.txt, or of reward.json.  Raises ValueError with what is wrong."""
    plain, structured = texts
    if plain is not None:
        return _finite("reward.txt", plain.strip()), {}
    if structured is None:
        raise ValueError("they wrote no reward")
    figures = json.loads(structured)
    if not isinstance(figures, dict) or not figures:
        raise ValueError(f"reward.json is {structured[:_SHOWN_CHARACTERS]!r}; legal: an object with a number reward")
    found = {str(name): _finite(f"reward.json, {name}", value) for name, value in figures.items()}
    if "reward" not in found and len(found) > 1:
        raise ValueError(f"reward.json has {', '.join(found)}; legal: a number reward among them")
    reward = found.pop("reward") if "reward" in found else found.popitem()[1]
    return reward, found


def _finite(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{where} is {value!r:.80}")  # noqa: TRY004
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{where} is {value!r:.80}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where} is {number}")
    return number
