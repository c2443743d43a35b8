"""Try the user's own code that a run file names, in separate processes, before a run needs it.

    data.task          judges the first record: the reference as an answer, and an empty one; both together if the
                       function is batched; both a second time, and, if they have the same reward, the reference in
                       formats that functions usually expect
    data.environment   begins with the first record, and takes one turn, after which more may follow, and then none;
                       all of it a second time
    agent.function     imported, by the process that would start agents, and its parameters are counted
    algorithm.loss, algorithm.advantage   imported and tried as when a run starts

Input: Config.  Output: lines for people, with warnings about legal but seldom intended behaviour (rewards that change,
are always the same, huge, or slow); a ConfigError with the key, the record, and the exception or returned value.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from launch.common.text import counted
from rlhpc.agents.host import AgentProcesses
from rlhpc.algorithms.estimators import has_reward_variance
from rlhpc.base.processes import child_command, child_environment
from rlhpc.base.user_code import is_import_path
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT, OWN_REWARD, WHOLE_RECORD, DataConfig
from rlhpc.config.tables_services import LIBRARIES, is_code
from rlhpc.data.files import dataset_files, read_rows
from rlhpc.data.prompt_form import PromptForm, task_of
from rlhpc.data.prompts import dialogue_template
from rlhpc.data.record_source import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.environment import tool_name
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.outcomes import INVALID, DialogueRequest, Turn
from rlhpc.rewards.pool import Judgement, RewardPool, open_pool
from rlhpc.rewards.registry import BUILT_IN

# --------------------------------------------------------------------------------------------------------- own formulas
#
# Try a user's own loss or advantage estimator, as a run does when it starts.
#
# `python -m launch.checks.own_code KEY PATH GROUP_SIZE ARGUMENTS`, which own_code.py starts: torch and the user's
# module are imported here and nowhere else.  ARGUMENTS: JSON.  Prints {"doubts": [warnings]}, or {"refused": why} and
# returns 1 for a function that a run would refuse.


def main(key: str, path: str, group_size: int, arguments: Mapping[str, object]) -> int:
    """Return the exit status."""
    try:
        doubts = _doubts(key, path, group_size, arguments)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    print(json.dumps({"doubts": doubts}))
    return 0


def _doubts(key: str, path: str, group_size: int, arguments: Mapping[str, object]) -> list[str]:
    """Warnings about a function.  Raises ConfigError if a run would refuse it."""
    if key == "algorithm.loss":
        from rlhpc.algorithms import objectives as own_loss

        return own_loss.doubts_of_loss(own_loss.load_own_loss(path, tuple(arguments.items())))
    from rlhpc.algorithms import estimators as own_advantage

    return own_advantage.doubts_of_advantage(own_advantage.load_own_estimator(path, group_size, arguments), group_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])))


# ------------------------------------------------------------------------------------------------------------- own code

NO_ANSWER = "I do not know."
_MOST_RECORDS = 1000  # that are searched for the first one of each task
_MOST_S = 120.0  # for the imports of a formula
_PATIENCE_S = 5.0  # of judging; after that, trials that can only warn are skipped
_HUGE = 1e4  # larger rewards are seldom intended
_MOST_LEAVES = 8  # of a record, which may be its answer
_FORMS = ("#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "Answer: {}", "{}")  # usual formats of answers
_LEGAL = (
    "legal: f(completion, reference) that returns a number, a bool, a dict with a reward or a RewardOutcome; or "
    "f(completions, references) that returns a list of these"
)
_KEYWORDS = re.compile(r"missing \d+ required keyword-only arguments?: .*")
_OF_A_CALL = re.compile(  # no line of the function's own was reached
    r"TypeError: (?!.*:\d+\)$).*(missing \d+ required|takes .* arguments?\b|multiple values for)"
)
_OF_NUMBERS = (
    "and 'str'", "'str' and 'int'", "'str' and 'float'", "must be real number, not str", "can only concatenate str"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Trial:
    """A task, the first record that it judges, and the reference in it."""

    task: str
    record: Record
    reference: str
    is_whole: bool = False  # the reference is the whole record, as JSON


def try_own_code(config: Config) -> list[str]:
    """A line for each trial.  Raises ConfigError for code that would fail in a run."""
    said = []
    for key, path in config.algorithm.own_formulas:
        doubts = _try_formula(key, path, config)
        said += [f"{key.partition('.')[2]:<11} {path}, tried on a few numbers", *doubts]
    agent = config.agent
    if (agent.function or agent.preload) and any(dataset.environment == AGENT for dataset in config.data):
        _try_agent(config)
        what = f"{agent.function}: its process starts, and it takes a record"
        said.append(f"agent       {what if agent.function else ', '.join(agent.preload) + ': imported once, for all'}")
    trials = list(_trials(config))
    has_environment = any(_is_theirs(config, dataset.environment) for dataset in config.data)
    if not trials and not has_environment:
        return said
    try:
        return [*said, *asyncio.run(_judge(config, trials, with_environments=has_environment))]
    except RoleFailed as error:
        raise ConfigError(_cause(str(error))) from error


def untried_code(config: Config) -> list[str]:
    """A line for each reward function that is not tried, in a check for another machine."""
    return [
        f"reward      {trial.task}: not tried, since --site is about another machine; without it `check` tries it"
        for trial in _trials(config)
    ]


# -------------------------------------------------------------------------------------------------------------- rewards


def _trials(config: Config) -> Iterator[_Trial]:
    """Trials of the user's own tasks, composites with one, and other tasks whose parts have weights."""
    seen = set[str]()
    for dataset in config.data:
        wanted = [task for task in dataset.all_tasks if task not in seen and _is_tried(config, task)]
        for task, record in _first_records(dataset, wanted):
            seen.add(task)
            is_whole = dataset.reference_field == WHOLE_RECORD
            yield _Trial(task, record, record.reference(dataset.reference_field), is_whole)


def _is_tried(config: Config, task: str) -> bool:
    if task == OWN_REWARD or is_code(config, task):
        return False
    if any(service.path is not None for service in config.services_asked_by(task)):
        return False  # they start with the run
    parts = config.parts_of(task)
    return any(part not in BUILT_IN for part in parts) or bool(config.shaping.part_weights and "llm_judge" not in parts)


def _first_records(dataset: DataConfig, wanted: Iterable[str]) -> Iterator[tuple[str, Record]]:
    """The first record of each task among the first _MOST_RECORDS."""
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
            said = [line for trial in trials for line in await _tried(config, pool, trial)]
            return said + [line for trial in _dialogues(config) for line in await _played(config, pool, trial)]


def _is_theirs(config: Config, environment: str) -> bool:
    has_own_tools = environment == "tools" and any(map(is_import_path, config.environment.tools))
    return is_import_path(environment) or environment in LIBRARIES or has_own_tools


def _dialogues(config: Config) -> Iterator[_Trial]:
    """The first record of each environment of the user, of a library, or with tools of the user.

    `task` is the environment.
    """
    seen = set[str]()
    for dataset in config.data:
        name = dataset.environment
        if name not in seen and _is_theirs(config, name):
            seen.add(name)
            for record in _records(dataset):
                yield _Trial(name, record, record.reference(WHOLE_RECORD))
                break


async def _played(config: Config, pool: RewardPool, trial: _Trial) -> list[str]:
    """Return an environment's answers to a record, and to one turn.  Raises ConfigError for fatal faults."""
    said = "legal: async step(completion) that returns a Step"
    asked: tuple[tuple[str, list[str], bool, str], ...] = (
        ("reset(record)", [], False, "legal: async reset(record) that returns a list of messages"),
        (f"step({NO_ANSWER!r})", [NO_ANSWER], False, said),  # its messages count only if more turns may follow
        (f"step({NO_ANSWER!r}), and then finish()", [NO_ANSWER], True, said),
    )
    rounds: list[list[Turn]] = []
    doubts, spent_s = [], 0.0
    while len(rounds) < 2 and spent_s <= _PATIENCE_S:
        rounds.append([])
        for what, turns, is_last, legal in asked:
            began = time.monotonic()
            key = f"check {len(rounds)}"
            dialogue = DialogueRequest(key, trial.task, trial.reference, turns, OWN_REWARD, "", "", is_last)
            turn = await pool.answer(dialogue)
            took_s = time.monotonic() - began
            spent_s += took_s
            _refuse_failed_turn(trial, turn, what, legal)
            if turns and not is_last:
                _refuse_empty_turn(trial, turn, what)
            rounds[-1].append(turn)
            where = f"data.environment={trial.task!r}, {what} of {trial.record.source}"
            if len(rounds) == 1:
                doubts += [_slow(where, took_s, OWN_REWARD, config), _huge(where, turn.reward)]
    opening, answer, last = rounds[0]
    doubts += _untold_tools(config, trial, pool.tools.get(trial.task, ()))
    doubts += _long_observations(config, trial, opening, answer)
    begins = f"begins with {counted(len(opening.messages), 'message')}"
    line = f"environment {trial.task}, tried on {trial.record.source}: {begins}, {last.reward:g} for {NO_ANSWER!r}"
    return [line, *filter(None, [*doubts, *_other_turns(trial, rounds)])]


def _other_turns(trial: _Trial, rounds: Sequence[Sequence[Turn]]) -> Iterator[str]:
    """Warn of an environment that is not deterministic: a dialogue that moves to another worker is replayed."""
    where = f"warning     data.environment={trial.task!r} twice with {trial.record.source} and the same turn"
    rule = "an environment has to be deterministic, since its dialogues are played again (docs/environments.md)"
    for before, after in zip(*rounds, strict=True) if len(rounds) > 1 else ():
        if before.messages != after.messages:
            pair = " and ".join(
                f"{[each.get('content', '') for each in turn.messages]!r:.60}" for turn in (before, after)
            )
            yield f"{where}: messages {pair}: {rule}"
            return
        if before.reward != after.reward:
            yield f"{where}: rewards {before.reward:.9g} and {after.reward:.9g}: {rule}"
            return


def _refuse_failed_turn(trial: _Trial, turn: Turn, what: str, legal: str) -> None:
    if turn.error:
        why = _cause(turn.error).removeprefix(f"{trial.task}: ")
        limit = " (rewards.timeout_s)" if "no answer within" in why else ""
        raise ConfigError(
            f"data.environment={trial.task!r}, tried on {trial.record.source}, {what}: {why}{limit}; {legal}"
        )


def _refuse_empty_turn(trial: _Trial, turn: Turn, what: str) -> None:
    """Raise ConfigError for a step without any content: a forgotten return value."""
    if not (turn.messages or turn.is_done or turn.reward or turn.parts or turn.detail):
        raise ConfigError(
            f"data.environment={trial.task!r}, tried on {trial.record.source}, {what}: a Step with no message, no "
            "reward and no end: the policy would go on as if it had said nothing; legal: messages for its next turn, "
            "or is_done=True"
        )


def _untold_tools(config: Config, trial: _Trial, offered: Sequence[str]) -> Iterator[str]:
    """Warn of tools that an environment offers, and its prompts do not name."""
    place = next(place for place, each in enumerate(config.data) if each.environment == trial.task)
    unnamed = [name for name in offered if name not in map(tool_name, config.environment.tools)]
    if unnamed:
        tokenizer = PromptTokenizer.of(config.model)
        limits = {"max_prompt_tokens": config.generation.max_tokens, "max_completion_tokens": 1}
        form = PromptForm(config.data[place], tokenizer, **limits, dialogue=dialogue_template(config, tokenizer))
        prompt, _ = form.text(trial.record)
        unnamed = [name for name in unnamed if name not in prompt]
    if unnamed:
        yield (
            f"warning     data.environment={trial.task!r}: the prompt names no {', '.join(unnamed)}, of its tools, and "
            "the model learns of them from nobody; usual: environment.tools names their functions, as module:function, "
            "for the chat template, or a system_prompt tells of them"
        )


def _long_observations(config: Config, trial: _Trial, opening: Turn, answer: Turn) -> Iterator[str]:
    """Warn of messages that leave no room for the turn after them: such dialogues end before it."""
    dataset = next(place for place, each in enumerate(config.data) if each.environment == trial.task)
    room, tokenizer = config.max_completion_tokens(dataset), PromptTokenizer.of(config.model)
    template = dialogue_template(config, tokenizer)
    begun = len(template.opening(opening.messages))
    read = begun if answer.is_over else begun + len(template.observation(answer.messages, last_token=-1))
    if read >= room:
        what = "reset(record)" if begun >= room else f"step({NO_ANSWER!r})"
        yield (
            f"warning     data.environment={trial.task!r}, {what} of {trial.record.source}: its messages have "
            f"{read} tokens, and generation.max_completion_tokens={room} is for all turns and messages of a dialogue: "
            "it would end before the policy's next turn"
        )


@contextmanager
def _unheard() -> Iterator[None]:
    """Silence the pool's warnings, which are errors here and reported as such."""
    log = logging.getLogger("rlhpc.rewards")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


async def _tried(config: Config, pool: RewardPool, trial: _Trial) -> list[str]:
    what = "the record, as JSON," if trial.is_whole else "the reference"
    said, doubts, tries = [], [], {what: trial.reference, repr(NO_ANSWER): NO_ANSWER}
    verdicts = await _verdicts(pool, trial, [*tries.values()])
    if (why := pool.failed_batches.get(trial.task)) is not None:
        where = f"data.task={trial.task!r}, tried on {trial.record.source} with two completions at once"
        raise ConfigError(f"{where}: {why}{_remedy(trial.task, why)}")
    for what, (found, took_s) in zip(tries, verdicts, strict=True):
        where = f"data.task={trial.task!r}, tried on {trial.record.source} with {what} as the completion"
        if found.verdict is Verdict.VERIFIER_ERROR:
            limit = (
                f" (rewards.timeout_s, or task_timeout_s of {trial.task!r})"
                if "no answer within" in found.detail
                else ""
            )
            why = _own_words(trial, found)
            raise ConfigError(f"{where}: {why}{limit}{_remedy(trial.task, why, found.failure)}")
        _refuse_missing_parts(config, found, where)
        said.append(f"{found.reward:g} for {what}")
        doubts += [_slow(where, took_s, trial.task, config), _huge(where, found.reward)]
    if trial.is_whole:  # a record is no answer
        said[0] = await _best_field(pool, trial, verdicts[-1][0].reward)
    if sum(took_s for _, took_s in verdicts) <= _PATIENCE_S:
        doubts += await _judged_again(pool, trial, tries, [found for found, _ in verdicts])
    return [f"reward      {trial.task}, tried on {trial.record.source}: {', '.join(said)}", *filter(None, doubts)]


async def _best_field(pool: RewardPool, trial: _Trial, otherwise: float) -> str:
    """Describe the field of a record with the highest reward as a completion.

    otherwise: the reward of an empty answer; if no field has another reward, the right answer is unknown.
    """
    record = json.loads(trial.reference)
    fields = {name: str(value) for name, value in record.items() if isinstance(value, str | int | float)}
    names = [*fields][:_MOST_LEAVES]
    verdicts = await _verdicts(pool, trial, [fields[name] for name in names])
    rewards = {
        name: found.reward
        for name, (found, _) in zip(names, verdicts, strict=True)
        if found.verdict is not Verdict.VERIFIER_ERROR
    }
    best = max(rewards, key=lambda name: rewards[name], default="")
    if not best or rewards[best] <= otherwise:
        return "no right answer could be tried, since the reference is the whole record"
    return f"{rewards[best]:g} for its field {best!r}"


async def _verdicts(pool: RewardPool, trial: _Trial, completions: Sequence[str]) -> list[tuple[Judgement, float]]:
    """Judge completions, together if the function is batched; with the seconds that each took."""
    began, found = time.monotonic(), list[tuple[Judgement, float]]()
    if pool.judges_together(trial.task):
        of_all = await asyncio.gather(*(pool.judge(trial.task, each, trial.reference) for each in completions))
        return [(each, time.monotonic() - began) for each in of_all]
    for each in completions:
        began = time.monotonic()
        found.append((await pool.judge(trial.task, each, trial.reference), time.monotonic() - began))
    return found


async def _judged_again(
    pool: RewardPool, trial: _Trial, tries: Mapping[str, str], before: Sequence[Judgement]
) -> list[str]:
    """Warn of a reward that differs the second time, or is the same for all trials."""
    named = f"warning     data.task={trial.task!r}, tried on {trial.record.source}"
    again = [found for found, _ in await _verdicts(pool, trial, [*tries.values()])]
    for what, first, second in zip(tries, before, again, strict=True):
        if second.verdict is Verdict.VERIFIER_ERROR:
            return [f"{named} with {what} twice: {first.reward:.9g}, and then an error: {_own_words(trial, second)}"]
        if _differ([first, second]):
            return [
                f"{named} with {what} twice: {first.reward:.9g} and {second.reward:.9g}; the same completion has to "
                "have the same reward: it may be judged again (docs/rewards.md)"
            ]
    if _differ(before):
        return []
    others = [found for found, _ in await _verdicts(pool, trial, list(_answers(trial.reference)))]
    if any(found.verdict is Verdict.VERIFIER_ERROR for found in others) or _differ([*before, *others]):
        return []
    return [
        f"{named}: {before[0].reward:g} for {NO_ANSWER!r}, for nothing, and for the reference, alone, after ####, in "
        "\\boxed{} and in <answer>: where all rewards are equal nothing is learnt, unless it wants another form"
    ]


def _differ(found: Sequence[Judgement]) -> bool:
    return has_reward_variance(np.array([each.reward for each in found], np.float32))


def _answers(reference: str) -> Iterator[str]:
    """Yield completions that may be right, judging by the reference, and an empty one."""
    try:
        record = json.loads(reference)
    except ValueError:
        record = reference
    yield ""
    for text in [*_leaves(record)][:_MOST_LEAVES]:
        yield from (form.format(text) for form in _FORMS)
        if "####" in text:  # a solution of GSM8K's
            yield text.rpartition("####")[2].strip()


def _leaves(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a record."""
    if isinstance(value, str | int | float):
        yield str(value)
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)


def _slow(where: str, took_s: float, task: str, config: Config) -> str:
    """Warn of a verdict that took more than half of its time limit; "" for none."""
    limit_s = config.rewards.timeout_of(task)
    if took_s <= limit_s / 2:
        return ""
    key = f"rewards.task_timeout_s of {task!r}" if task in config.rewards.task_timeout_s else "rewards.timeout_s"
    return (
        f"warning     {where}: {took_s:.1f} s, more than half of {key}={limit_s:g}: on a busy node it may take longer, "
        "and what exceeds the limit has no verdict"
    )


def _huge(where: str, reward: float) -> str:
    """Warn of a huge reward; "" for none."""
    if abs(reward) <= _HUGE:
        return ""
    return (
        f"warning     {where}: a reward of {reward:g} is unusual (usual: {-_HUGE:g} to {_HUGE:g}); advantages that are "
        "not divided by a deviation grow with it, and so does each step"
    )


def _remedy(task: str, why: str, failure: str = "") -> str:
    """Return the legal signature or return value if one is wrong, or a hint at a known mistake; or ""."""
    if (lacking := _KEYWORDS.search(why)) is not None:
        names = re.findall(r"'(\w+)'", lacking[0])
        table = f'{{ "{task}" = {{ {", ".join(f"{name} = …" for name in names)} }} }}'
        return f"; legal: a default for {', '.join(names)}, or a value in rewards.task_arguments = {table}"
    is_misfit = failure == INVALID or why.startswith("NoReward") or _OF_A_CALL.match(why) is not None
    return f"{f'; {_LEGAL}' if is_misfit else ''}{_hint(why)}"


def _hint(why: str) -> str:
    """Return a hint for a function that expects messages, as TRL's and verifiers', or numbers; or ""."""
    if "string indices must be" in why or "'str' object has no attribute" in why:
        return (
            "; completions and references are texts, never messages or records: `completion` in place of "
            "completion[0]['content'], a parameter called record for the record (docs/coming_from.md, Reward functions)"
        )
    if any(words in why for words in _OF_NUMBERS):
        return "; completions and references are texts, never numbers: float(reference) in place of reference"
    if repr(NO_ANSWER) in why:
        return "; a completion is whatever the policy writes: what cannot be read needs a reward, too"
    return ""


def _own_words(trial: _Trial, failed: Judgement) -> str:
    return _cause(failed.detail).removeprefix(f"{trial.task}: ")


def _refuse_missing_parts(config: Config, found: Judgement, where: str) -> None:
    for name in config.shaping.part_weights:
        if name not in found.parts:
            legal = ", ".join(sorted(found.parts)) or "none: its verdict has no parts"
            raise ConfigError(f"shaping.part_weights has a weight for {name!r}; {where}; legal: {legal}")


def _cause(said: str) -> str:
    """The last cause alone, without the texts that it is wrapped in."""
    return said.removeprefix("reward pool: ").removeprefix("worker cannot start: ").removeprefix("ConfigError: ")


# --------------------------------------------------------------------------------------------------------------- others


def _try_agent(config: Config) -> None:
    try:
        agent = config.agent
        asyncio.run(AgentProcesses(agent.function, agent.command, agent.preload).try_start())
    except RoleFailed as error:
        raise ConfigError(str(error).removeprefix("no agent can be started: ")) from error


def _try_formula(key: str, path: str, config: Config) -> list[str]:
    """Try a formula in a process of its own, since it may import torch and do anything; return warnings."""
    arguments = config.algorithm.arguments_of(key)
    words = key, path, str(config.admission.group_size), json.dumps(arguments)
    try:
        done = subprocess.run(
            child_command("launch.checks.own_code", *words), capture_output=True, text=True, errors="replace",
            env=child_environment(), timeout=_MOST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{key}={path!r}: its trial has not ended within {_MOST_S:g} s") from error
    try:
        said = json.loads(done.stdout.splitlines()[-1])
        if done.returncode == 0:
            return [f"warning     {doubt}" for doubt in said["doubts"]]
        raise ConfigError(said["refused"])
    except (ValueError, IndexError, KeyError, TypeError):
        raise ConfigError(
            f"{key}={path!r}: its trial ended with status {done.returncode}: {done.stderr[-300:]}"
        ) from None
