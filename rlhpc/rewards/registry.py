"""Find a reward function by the name of its task.

Input: a task name.  Output: a RewardFunction.  A name is one of the table below, or "package.module:function" of the
user's own.  Functions are named as text, so that the table can be read without importing what the functions need.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import cast

from rlhpc.contracts import RewardFunction
from rlhpc.errors import ConfigError
from rlhpc.foreign_rewards import foreign_reward
from rlhpc.rewards.batched import OF_BATCHES, BatchedFunction, asks_for_fields, is_batched
from rlhpc.rewards.task_settings import ARGUMENTS
from rlhpc.rewards.whole_record import PARAMETER, PLACE, given_its_record
from rlhpc.user_code import did_you_mean, is_import_path, load, look_up, parameters, refuse_unknown, required_parameters

KEY = "data.task"

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "code_functions": "rlhpc.rewards.code_functions:judge",
        "code_stdin": "rlhpc.rewards.code_stdin:judge",
        "exact_match": "rlhpc.rewards.text_match:exact_match",
        "instruction_following": "rlhpc.rewards.instruction_following:judge",
        "integer_arithmetic": "rlhpc.rewards.integer_arithmetic:judge",
        "json_schema": "rlhpc.rewards.json_schema:judge",
        "llm_judge": "rlhpc.rewards.llm_judge:judge",
        "math_answer": "rlhpc.rewards.math_answer:judge",
        "multiple_choice": "rlhpc.rewards.multiple_choice:judge",
        "reasoning_gym": "rlhpc.rewards.reasoning_gym_task:judge",
        "regex": "rlhpc.rewards.regex:judge",
        "token_f1": "rlhpc.rewards.text_match:token_f1",
    }
)


# Tasks that read what stands before an answer, or take it for one: a thinking model's thoughts are cut off for them.
JUDGE_EVERYTHING = frozenset(
    ("exact_match", "instruction_following", "json_schema", "llm_judge", "multiple_choice", "regex", "token_f1")
)

# The same for checks of a reference before a run; each function raises ValueError, which says what is legal.
CHECKS: Mapping[str, str] = MappingProxyType(
    {name: f"{path.partition(':')[0]}:check_reference" for name, path in BUILT_IN.items() if name != "llm_judge"}
    | {
        "reasoning_gym": "rlhpc.rewards.reasoning_gym_reference:check_reference",
    }
)


def task_names() -> tuple[str, ...]:
    """Names that need no import path, sorted."""
    return tuple(sorted(BUILT_IN))


def validate_task(task: str, arguments: Collection[str] = ()) -> None:
    """Check a task name without importing anything of the user's.

    arguments: names of those that the run file has for it.
    Raises ConfigError if the name is neither in the table nor an import path, as user_code.look_up, or if the function
    is called in the way of another system.
    """
    path = _import_path(task)
    look_up(KEY, path, repr(task))
    if said := foreign_reward(
        task.partition(":")[2], *(_without(arguments, names(path)) for names in (required_parameters, parameters))
    ):
        raise ConfigError(f"{KEY}={task!r}: {said}")


def asks_for_record(task: str, arguments: Collection[str] = ()) -> bool:
    """Whether its function needs the whole record, as far as the text of its module tells; nothing is imported.

    arguments: as of validate_task.
    """
    names = _without(arguments, parameters(_import_path(task)))
    return asks_for_fields(names) if is_batched(names) else names[PLACE : PLACE + 1] == (PARAMETER,)


def resolve(task: str) -> RewardFunction:
    """Import the task's function; one that asks for the record gets it, one that is batched is a BatchedFunction.

    Raises ConfigError if the name is illegal, or as user_code.load and BatchedFunction.
    """
    function = load(KEY, _import_path(task), repr(task))
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of C, perhaps
        names = ()
    arguments = json.loads(os.environ.get(ARGUMENTS, "{}")).get(task, {})
    given = OF_BATCHES if is_batched(names) else names[: PLACE + 1]
    refuse_unknown(f'rewards.task_arguments."{task}"', function, arguments, given)
    if is_batched(names):
        return BatchedFunction(f"{KEY}={task!r}", function, arguments)
    return given_its_record(partial(function, **arguments) if arguments else function, names)


def reference_check(task: str) -> Callable[..., None] | None:
    """A function that raises ValueError for a reference that the task cannot read; None for a task of the user's own.

    Those are not imported before a run: a login node may not have what they need.
    """
    path = CHECKS.get(task)
    return None if path is None else cast(Callable[..., None], load(KEY, path, repr(task)))


def _without(arguments: Collection[str], names: Sequence[str]) -> tuple[str, ...]:
    """Parameters that do not have their values from the run file."""
    return tuple(name for name in names if name not in arguments)


def _import_path(task: str) -> str:
    path = BUILT_IN.get(task, task)
    if not is_import_path(path):
        raise ConfigError(
            f"{KEY}={task!r} is not a task; legal: {', '.join(task_names())}, or package.module:function"
            f"{did_you_mean(task, BUILT_IN)}"
        )
    return path
