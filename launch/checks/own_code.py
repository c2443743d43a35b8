"""Try the user's own code that a run file names, in separate processes, before a run needs it.

    data.task          judges the first record: the reference as an answer, and one that says nothing; both together
                       where the function is batched
    data.environment   begins with the first record, and takes one turn, after which more may follow, and then none
    agent.function     imported, by the process that would start agents, and its parameters are counted
    algorithm.loss, algorithm.advantage   imported and tried as when a run starts (own_formulas.py)

Input: Config.  Output: lines for people; a ConfigError with the key, the record, and what was raised or returned.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launch.common.counted import counted
from rlhpc.config import Config
from rlhpc.config_data import AGENT, OWN_REWARD, WHOLE_RECORD, DataConfig
from rlhpc.config_environment import LIBRARIES
from rlhpc.config_sandbox import is_code
from rlhpc.data.dataset_files import dataset_files
from rlhpc.data.prompt_form import task_of
from rlhpc.data.records import Record
from rlhpc.data.row_formats import read_rows
from rlhpc.errors import ConfigError, RoleFailed
from rlhpc.python_child import child_command, child_environment
from rlhpc.rewards.frames import Dialogue, Turn
from rlhpc.rewards.open_pool import open_pool
from rlhpc.rewards.pool import Judgement, RewardPool
from rlhpc.rewards.registry import BUILT_IN
from rlhpc.roles.generator.agents.processes import AgentProcesses
from rlhpc.types import Verdict

NO_ANSWER = "I do not know."
_MOST_RECORDS = 1000  # among which the first of each task is looked for
_MOST_S = 120.0  # for the imports of a formula
_LEGAL = (
    "legal: f(completion, reference) that returns a number, a bool, a dict with a reward or a RewardOutcome; or "
    "f(completions, references) that returns a list of these"
)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A task, the first record that it judges, and the reference in it."""

    task: str
    record: Record
    reference: str


def try_own_code(config: Config) -> list[str]:
    """A line for each thing that was tried.  Raises ConfigError for whatever would fail in a run."""
    said = []
    for key, path in config.algorithm.own_formulas:
        _try_formula(key, path)
        said.append(f"{key.partition('.')[2]:<11} {path}, tried on a few numbers")
    if config.agent.function and any(dataset.environment == AGENT for dataset in config.data):
        _try_agent(config)
        said.append(f"agent       {config.agent.function}: its process starts, and it takes a record")
    trials = list(_trials(config))
    has_environment = any(_is_theirs(dataset.environment) for dataset in config.data)
    if not trials and not has_environment:
        return said
    try:
        return [*said, *asyncio.run(_judge(config, trials, with_environments=has_environment))]
    except RoleFailed as error:
        raise ConfigError(_cause(str(error))) from error


def untried_code(config: Config) -> list[str]:
    """A line for each reward function that a check for another machine does not try."""
    return [
        f"reward      {trial.task}: not tried, since --site is about another machine; without it `check` tries it"
        for trial in _trials(config)
    ]


# -------------------------------------------------------------------------------------------------------------- rewards


def _trials(config: Config) -> Iterator[_Trial]:
    """Of tasks that are of the user's own, or have such a part; of others too where their parts have weights."""
    seen = set[str]()
    for dataset in config.data:
        wanted = [task for task in dataset.all_tasks if task not in seen and _is_tried(config, task)]
        for task, record in _first_records(dataset, wanted):
            seen.add(task)
            yield _Trial(task, record, record.reference(dataset.reference_field))


def _is_tried(config: Config, task: str) -> bool:
    if task == OWN_REWARD or is_code(config, task):
        return False
    parts = config.parts_of(task)
    return any(part not in BUILT_IN for part in parts) or bool(config.shaping.part_weights and "llm_judge" not in parts)


def _first_records(dataset: DataConfig, wanted: Iterable[str]) -> Iterator[tuple[str, Record]]:
    """The first record of each task, as far as it is near the beginning."""
    left = {*wanted}
    for number, record in enumerate(_records(dataset) if left else ()):
        task = task_of(record, dataset)
        if task in left:
            left.discard(task)
            yield task, record
        if not left or number == _MOST_RECORDS:
            return


def _records(dataset: DataConfig) -> Iterator[Record]:
    for file in dataset_files(dataset.path, dataset.split) if dataset.path is not None else ():
        yield from (Record(fields, f"{file}:{number}") for fields, number in read_rows(file))


async def _judge(config: Config, trials: list[_Trial], *, with_environments: bool) -> list[str]:
    tasks = [trial.task for trial in trials]
    with _unheard():
        async with open_pool(config, tasks, 1, with_environments=with_environments) as pool:
            said = [await _tried(config, pool, trial) for trial in trials]
            return said + [await _played(pool, trial) for trial in _dialogues(config)]


def _is_theirs(environment: str) -> bool:
    return ":" in environment or environment in LIBRARIES


def _dialogues(config: Config) -> Iterator[_Trial]:
    """The first record of each environment of the user's own, or of a library; `task` is the environment."""
    seen = set[str]()
    for dataset in config.data:
        name = dataset.environment
        if name not in seen and _is_theirs(name):
            seen.add(name)
            for record in _records(dataset):
                yield _Trial(name, record, record.reference(WHOLE_RECORD))
                break


async def _played(pool: RewardPool, trial: _Trial) -> str:
    """Return what an environment makes of a record, and of one turn.  Raises ConfigError for what would end a run."""

    def after(turns: list[str], *, is_last: bool) -> Dialogue:
        return Dialogue("check", trial.task, trial.reference, turns, OWN_REWARD, "", "", is_last)

    opening = await pool.answer(after([], is_last=False))
    _refuse_failed_turn(trial, opening, "reset(record)", "legal: async reset(record) that returns a list of messages")
    said = "legal: async step(completion) that returns a Step"
    turn = await pool.answer(after([NO_ANSWER], is_last=False))  # its messages count only if more turns may follow
    _refuse_failed_turn(trial, turn, f"step({NO_ANSWER!r})", said)
    last = await pool.answer(after([NO_ANSWER], is_last=True))
    _refuse_failed_turn(trial, last, f"step({NO_ANSWER!r}), and then finish()", said)
    begins = f"begins with {counted(len(opening.messages), 'message')}"
    return f"environment {trial.task}, tried on {trial.record.source}: {begins}, {last.reward:g} for {NO_ANSWER!r}"


def _refuse_failed_turn(trial: _Trial, turn: Turn, what: str, legal: str) -> None:
    if turn.error:
        why = _cause(turn.error).removeprefix(f"{trial.task}: ")
        limit = " (rewards.timeout_s)" if "no answer within" in why else ""
        raise ConfigError(
            f"data.environment={trial.task!r}, tried on {trial.record.source}, {what}: {why}{limit}; {legal}"
        )


@contextmanager
def _unheard() -> Iterator[None]:
    """What the pool warns of in a run is an error here, and is told as one."""
    log = logging.getLogger("rlhpc.rewards")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


async def _tried(config: Config, pool: RewardPool, trial: _Trial) -> str:
    said, tries = [], {"the reference": trial.reference, repr(NO_ANSWER): NO_ANSWER}
    judgements = await asyncio.gather(*(pool.judge(trial.task, each, trial.reference) for each in tries.values()))
    if (why := pool.failed_batches.get(trial.task)) is not None:
        where = f"data.task={trial.task!r}, tried on {trial.record.source} with two completions at once"
        raise ConfigError(f"{where}: {why}; {_LEGAL}")
    for what, found in zip(tries, judgements, strict=True):
        where = f"data.task={trial.task!r}, tried on {trial.record.source} with {what} as the completion"
        if found.verdict is Verdict.VERIFIER_ERROR:
            limit = (
                f" (rewards.timeout_s, or task_timeout_s of {trial.task!r})"
                if "no answer within" in found.detail
                else ""
            )
            raise ConfigError(f"{where}: {_cause(found.detail).removeprefix(f'{trial.task}: ')}{limit}; {_LEGAL}")
        _refuse_missing_parts(config, found, where)
        said.append(f"{found.reward:g} for {what}")
    return f"reward      {trial.task}, tried on {trial.record.source}: {', '.join(said)}"


def _refuse_missing_parts(config: Config, found: Judgement, where: str) -> None:
    for name in config.shaping.part_weights:
        if name not in found.parts:
            legal = ", ".join(sorted(found.parts)) or "none: its verdict has no parts"
            raise ConfigError(f"shaping.part_weights has a weight for {name!r}; {where}; legal: {legal}")


def _cause(said: str) -> str:
    """Without who was told it by whom."""
    return said.removeprefix("reward pool: ").removeprefix("worker cannot start: ").removeprefix("ConfigError: ")


# --------------------------------------------------------------------------------------------------------------- others


def _try_agent(config: Config) -> None:
    try:
        asyncio.run(AgentProcesses(config.agent.function, ()).try_start())
    except RoleFailed as error:
        raise ConfigError(str(error).removeprefix("no agent can be started: ")) from error


def _try_formula(key: str, path: str) -> None:
    """In a process of its own: it may import torch, and do anything."""
    command = child_command("launch.checks.own_formulas", key, path)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=child_environment(), timeout=_MOST_S, check=False,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{key}={path!r}: its trial has not ended within {_MOST_S:g} s") from error
    if done.returncode == 0:
        return
    try:
        raise ConfigError(json.loads(done.stdout.splitlines()[-1])["refused"])
    except (ValueError, IndexError, KeyError, TypeError):
        raise ConfigError(
            f"{key}={path!r}: its trial ended with status {done.returncode}: {done.stderr[-300:]}"
        ) from None
