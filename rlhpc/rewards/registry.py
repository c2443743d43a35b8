"""Find a reward function by the name of its task: a built-in one, the user's own, or several together.

In this file: functions as other systems call them; the registry; tasks that combine others.

Input: a task name.  Output: a RewardFunction.  A name is one of the table below, or "package.module:function" of the
user.  The table has import paths, so that it can be read without importing the functions' dependencies.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from rlhpc.base.near_names import near_hint
from rlhpc.base.user_code import (
    did_you_mean,
    is_import_path,
    load,
    look_up,
    parameters,
    place_of,
    refuse_unknown,
    required_parameters,
)
from rlhpc.config.tables_models import RewardModelConfig
from rlhpc.config.tables_services import CODE_TASKS, CompositeConfig, JudgeConfig, SandboxConfig
from rlhpc.protocol.contracts import RewardFunction, RewardOutcome
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.outcomes import (
    OF_BATCHES,
    PARAMETER,
    PLACE,
    BatchedFunction,
    JudgedOutcome,
    as_outcome,
    asks_for_fields,
    given_its_record,
    is_batched,
)
from rlhpc.rewards.task_settings import ARGUMENTS, task_settings

# ------------------------------------------------------------------------------------------------------ foreign rewards
#
# Reward functions written for other systems: recognised by the names of their parameters; advice on a wrapper.
#
# Input: the names of a function and of its parameters.  Output: the system, and the line of a wrapper that makes it a
# reward function of ours, "" if none is needed; docs/coming_from.md has the table, which a test compares.

PAGE = "docs/coming_from.md, Reward functions"


@dataclass(frozen=True, slots=True)
class Foreign:
    """The calling convention of one system's reward functions."""

    system: str
    named: tuple[str, ...]  # parameters by which it is recognised
    ours: str  # parameters of the wrapper, "": it cannot be wrapped
    arguments: Mapping[str, str] = field(default_factory=dict)  # its parameters → expressions of ours
    note: str = ""


_VERIFIERS = {
    "prompt": 'record["prompt"]',
    "completion": "completion",
    "answer": 'record["answer"]',
    "info": 'record.get("info", {})',
    "task": 'record.get("task", "default")',
    "state": "{}",
    "parser": "parser",
}
_TEXT = "a completion is a text here, never a list of messages"

FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "verl, in batches",
        ("solution_strs", "ground_truths"),
        "completions, records",
        {
            "data_sources": '[each["data_source"] for each in records]',
            "solution_strs": "completions",
            "ground_truths": '[each["reward_model"]["ground_truth"] for each in records]',
            "extra_infos": '[each.get("extra_info") for each in records]',
        },
    ),
    Foreign(
        "verl",
        ("solution_str", "ground_truth"),
        "completion, record",
        {
            "data_source": 'record["data_source"]',
            "solution_str": "completion",
            "ground_truth": 'record["reward_model"]["ground_truth"]',
            "extra_info": 'record.get("extra_info")',
        },
    ),
    Foreign(
        "prime-rl",
        ("completion", "verification_info"),
        "completion, record",
        {"completion": "completion", "verification_info": 'record["verification_info"]'},
        "json.loads(…) of the field where it is a text",
    ),
    *(
        Foreign("prime-rl's verifiers", ("completion", name), "completion, record", _VERIFIERS, _TEXT)
        for name in ("state", "parser", "info", "prompt")
    ),
    Foreign(
        "AReaL",
        ("prompt", "completions", "prompt_ids"),
        "completion, record",
        {
            "prompt": 'record["prompt"]',
            "completions": "completion",
            "prompt_ids": "None",
            "completion_ids": "None",
            "answer": 'record["answer"]',
        },
    ),
    *(
        Foreign(
            "TRL",
            ("completions", name),
            "",
            note=f"completions, prompts, and fields of the record by their names, without {name}: rewards are of texts",
        )
        for name in ("completion_ids", "trainer_state")
    ),
    Foreign(
        "OpenRLHF",
        ("queries", "prompts", "labels"),
        "completions, records",
        {
            "queries": '[each["prompt"] + text for each, text in zip(records, completions)]',
            "prompts": '[each["prompt"] for each in records]',
            "labels": '[each["answer"] for each in records]',
        },
    ),
    Foreign(
        "slime",
        ("args", "sample"),
        "",
        note="f(completion, reference): sample.response is the first, sample.label the second",
    ),
)
_BY_NAME = ("verification_info", "sample")  # second parameters that are no reference
_ASKED = ("prompt", "question", "query")  # first parameters that are neither completion nor reference
_COMPLETIONS = ("completion", "response", "solution_str", "model_output", "generation", "prediction")
_REFERENCES = ("reference", "ground_truth", "gold", "target", "label", "expected")


def foreign_reward(name: str, required: Sequence[str], names: Sequence[str]) -> str:
    """Return advice for a reward function of another system, "" for ours or an unknown one.

    required: its parameters without a default; names: all positional ones.
    """
    if "completions" not in names and len(required) <= 2 <= len(names) and {*required} <= {*names}:
        first, second = names[:2]
        if first in _REFERENCES and second in _COMPLETIONS:
            turned = f"def judge(completion, reference): return {name}({first}=reference, {second}=completion)"
            return f"it takes {first!r} first, and is called with the completion first; legal: {turned} ({PAGE})"
        if first not in _ASKED and second not in _BY_NAME:
            return ""
    if known := next((each for each in FOREIGN if {*each.named} <= {*required}), None):
        named = tuple(dict.fromkeys((*names, *required)))
        legal = _legal(name, known, named)
        return f"it has the parameters of {known.system} ({', '.join(named)}); legal: {legal} ({PAGE})"
    if len(required) == len(names) == 1 and names[0] != "completions":
        return f"it has one parameter; legal: def judge(completion, reference): return {name}(completion) ({PAGE})"
    return ""


def wrapper(name: str, foreign: Foreign, names: Sequence[str]) -> str:
    """Return the function of ours that calls theirs with these parameters, as source on one line."""
    values = ", ".join(f"{each}={foreign.arguments[each]}" for each in names if each in foreign.arguments)
    return f"def judge({foreign.ours}): return {name}({values})"


def _legal(name: str, foreign: Foreign, names: Sequence[str]) -> str:
    if not foreign.ours:
        return foreign.note
    whole = ', with data.reference_field = "*"' if "record" in foreign.ours else ""
    return f"{wrapper(name, foreign, names)}{whole}{f'; {foreign.note}' if foreign.note else ''}"


# ------------------------------------------------------------------------------------------------------------- registry

KEY = "data.task"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "code_functions": "rlhpc.rewards.code_tests:code_functions",
        "code_stdin": "rlhpc.rewards.code_tests:code_stdin",
        "exact_match": "rlhpc.rewards.text_answer:exact_match",
        "instruction_following": "rlhpc.rewards.instructions:instruction_following",
        "integer_arithmetic": "rlhpc.rewards.math_answer:integer_arithmetic",
        "json_schema": "rlhpc.rewards.json_schema:json_schema",
        "llm_judge": "rlhpc.rewards.llm_judge:llm_judge",
        "math_answer": "rlhpc.rewards.math_answer:math_answer",
        "multiple_choice": "rlhpc.rewards.text_answer:multiple_choice",
        "reasoning_gym": "rlhpc.rewards.reasoning_gym:reasoning_gym",
        "regex": "rlhpc.rewards.text_answer:regex",
        "reward_model": "rlhpc.rewards.reward_model:reward_model",
        "token_f1": "rlhpc.rewards.text_answer:token_f1",
    }
)


# Benchmarks, in small letters, and the tasks that judge their answers.
_JUDGED_BY = {
    "gsm8k": "math_answer", "math": "math_answer", "math500": "math_answer", "aime": "math_answer",
    "mmlu": "multiple_choice", "gpqa": "multiple_choice", "arc": "multiple_choice", "ifeval": "instruction_following",
    "humaneval": "code_functions", "mbpp": "code_functions",
}  # fmt: skip

# Tasks that read text before an answer, or might take it for the answer: thoughts are cut off for them.
JUDGE_EVERYTHING = frozenset(
    (
        "exact_match",
        "instruction_following",
        "json_schema",
        "llm_judge",
        "multiple_choice",
        "regex",
        "reward_model",
        "token_f1",
    )
)
ASK_SERVICES = ("llm_judge", "reward_model")  # their check needs settings of the run file: composite_reference_check

# Import paths of checks of references before a run; each raises ValueError with the legal values.
CHECKS: Mapping[str, str] = MappingProxyType(
    {name: f"{path.partition(':')[0]}:check_{name}" for name, path in BUILT_IN.items() if name not in ASK_SERVICES}
    | {
        "exact_match": "rlhpc.rewards.text_answer:check_text_match",
        "reasoning_gym": "rlhpc.rewards.reasoning_gym_reference:check_reasoning_gym",
        "token_f1": "rlhpc.rewards.text_answer:check_text_match",
    }
)


def task_names() -> tuple[str, ...]:
    """Names of built-in tasks, sorted."""
    return tuple(sorted(BUILT_IN))


def validate_task(task: str, arguments: Collection[str] = ()) -> None:
    """Check a task name without importing user code.

    arguments: names of its arguments in the run file.
    Raises ConfigError if the name is neither in the table nor an import path, as user_code.look_up, or if the function
    is written for another system.
    """
    path = _import_path(task)
    look_up(KEY, path, repr(task))
    if said := foreign_reward(
        task.partition(":")[2], *(_without(arguments, names(path)) for names in (required_parameters, parameters))
    ):
        raise ConfigError(f"{KEY}={task!r}: {said}")


def asks_for_record(task: str, arguments: Collection[str] = ()) -> bool:
    """True if a task's function needs the whole record, by the source of its module; nothing is imported.

    arguments: as of validate_task.
    """
    names = _without(arguments, parameters(_import_path(task)))
    return asks_for_fields(names) if is_batched(names) else names[PLACE : PLACE + 1] == (PARAMETER,)


def resolve(task: str) -> RewardFunction:
    """Import the task's function, wrapped if it takes the record; a batched one becomes a BatchedFunction.

    Raises ConfigError if the name is illegal, or as user_code.load and BatchedFunction.
    """
    function = load(KEY, _import_path(task), repr(task))
    if inspect.isclass(function):
        called = function.__name__
        raise ConfigError(
            f"{KEY}={task!r} is a class{place_of(function)}; legal: a function, or an object that can be called: in "
            f"the module `judge = {called}()`, and {function.__module__}:judge here"
        )
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # perhaps written in C
        names = ()
    arguments = json.loads(os.environ.get(ARGUMENTS, "{}")).get(task, {})
    given = OF_BATCHES if is_batched(names) else names[: PLACE + 1]
    refuse_unknown(f'rewards.task_arguments."{task}"', function, arguments, given)
    if is_batched(names):
        return BatchedFunction(f"{KEY}={task!r}", function, arguments)
    return given_its_record(partial(function, **arguments) if arguments else function, names)


def reference_check(task: str) -> Callable[..., str | None] | None:
    """A function that raises ValueError for a reference that the task cannot read; None for a user's task.

    It may return a doubt about one that it reads.

    User code is not imported before a run: a login node may lack its dependencies.
    """
    path = CHECKS.get(task)
    return None if path is None else cast(Callable[..., str | None], load(KEY, path, repr(task)))


def _without(arguments: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    """Parameters without a value in the run file."""
    return tuple(name for name in names if name not in arguments)


def _import_path(task: str) -> str:
    path = BUILT_IN.get(task, task)
    if not is_import_path(path):
        meant = _JUDGED_BY.get(re.sub(r"[^a-z0-9]", "", task.casefold()))
        raise ConfigError(
            f"{KEY}={task!r} is not a task; legal: {', '.join(task_names())}, or package.module:function"
            f"{did_you_mean(task, BUILT_IN) if meant is None else near_hint(meant, BUILT_IN)}"
        )
    return path


# ------------------------------------------------------------------------------------------------------------ composite
#
# A task that combines others: [composite.NAME] of the run file.
#
# Input: a completion and a reference, which is the same for every part, or a record of which each part gets a field.
# Output: a RewardOutcome: the weighted sum of the parts' rewards, correct if one part is.  If a part cannot judge, the
# whole has no verdict.

_SHOWN_CHARACTERS = 120  # of each part's detail


def resolve_composite(task: str) -> RewardFunction:
    """The function of a task or a composite.  Raises ConfigError as registry.resolve."""
    settings = task_settings().composite.get(task)
    return resolve(task) if settings is None else Composite(settings)


def composite_reference_check(
    task: str,
    composites: Mapping[str, CompositeConfig],
    judge: JudgeConfig,
    sandbox: SandboxConfig | None = None,
    scores: RewardModelConfig | None = None,
) -> Callable[[str], str | None] | None:
    """A check that raises ValueError for a reference that the task, or a part of a composite, cannot read.

    It may return a doubt about one that is read.  scores: [reward_model] of the run file.
    """
    if task == "reward_model":
        # Imported here for the same reason as below.
        from rlhpc.rewards import reward_model

        return partial(reward_model.check_reward_model, settings=scores or RewardModelConfig())
    if task == "llm_judge":
        # Imported here because only this task needs it before a run.
        from rlhpc.rewards import llm_judge

        return partial(llm_judge.check_llm_judge, settings=judge)
    if (settings := composites.get(task)) is None:
        check = reference_check(task)
        if check is None or sandbox is None or task not in CODE_TASKS:
            return check
        return partial(check, settings=sandbox)
    parts = settings.tasks.items()
    checks = {name: composite_reference_check(part, {}, judge, sandbox, scores) for name, part in parts}

    def check_parts(reference: str) -> str | None:
        given = references(settings, reference)
        doubts = [check(given[name]) for name, check in checks.items() if check is not None]
        return next(filter(None, doubts), None)

    return check_parts


def references(settings: CompositeConfig, reference: str) -> dict[str, str]:
    """The reference of each part.  Raises ValueError if the whole is no record, or lacks a field."""
    if not settings.fields:
        return dict.fromkeys(settings.tasks, reference)
    record = json.loads(reference)
    if not isinstance(record, dict):
        raise ValueError(f"reference {reference[:80]!r} is no record; legal: data.reference_field='*'")  # noqa: TRY004
    return {name: _field(record, settings.fields.get(name), reference) for name in settings.tasks}


def _field(record: Mapping[str, Any], name: str | None, whole: str) -> str:
    if name is None:
        return whole
    if record.get(name) is None:
        raise ValueError(f"the record has no field {name!r}, which composite.fields names; it has {', '.join(record)}")
    value = record[name]
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)), "f")  # without an exponent, as in data/record_source.py
    return value if isinstance(value, str) else json.dumps(value)


class Composite:
    """A RewardFunction that combines several."""

    def __init__(self, settings: CompositeConfig) -> None:
        """Import the parts' functions.  Raises ConfigError as registry.resolve."""
        self._settings = settings
        self._functions = {name: resolve(task) for name, task in settings.tasks.items()}

    def __call__(self, completion: str, reference: str) -> RewardOutcome:
        """Parts: each part's reward by its name, and its own parts as NAME.PART.  Raises errors of the parts."""
        given = references(self._settings, reference)
        found = {name: as_outcome(judge(completion, given[name])) for name, judge in self._functions.items()}
        parts: dict[str, float] = {}
        rewards_at: dict[int, float] = {}
        for name, outcome in found.items():
            parts |= {name: outcome.reward} | {f"{name}.{part}": value for part, value in outcome.parts.items()}
            for place, value in outcome.rewards_at.items():
                rewards_at[place] = rewards_at.get(place, 0.0) + self._settings.weight(name) * value
        deciding = found[self._settings.correct]
        return JudgedOutcome(
            sum(self._settings.weight(name) * outcome.reward for name, outcome in found.items()),
            deciding.is_correct,
            parts,
            "; ".join(f"{name}: {outcome.detail[:_SHOWN_CHARACTERS]}" for name, outcome in found.items()),
            deciding.answer,
            rewards_at,
            costs=_sum(outcome.costs for outcome in found.values() if isinstance(outcome, JudgedOutcome)),
        )


def _sum(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in costs:
        for name, amount in each.items():
            total[name] = total.get(name, 0.0) + amount
    return total
