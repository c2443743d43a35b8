"""Find a reward function by the name of its task.

Input: a task name.  Output: a RewardFunction.  A name is one of the table below, or "package.module:function" of the
user's own.  Functions are named as text, so that the table can be read without importing what the functions need.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from rlhpc.contracts import RewardFunction
from rlhpc.errors import ConfigError

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "integer_arithmetic": "rlhpc.rewards.integer_arithmetic:judge",
        "math_answer": "rlhpc.rewards.math_answer:judge",
    }
)

_IMPORT_PATH = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")


def task_names() -> tuple[str, ...]:
    """Names that need no import path, sorted."""
    return tuple(sorted(BUILT_IN))


def validate_task(task: str) -> None:
    """Check a task name without importing anything of the user's; cheap enough for a login node.

    Raises ConfigError if the name is neither in the table nor an import path, or its top-level package is not found.
    """
    module, _ = _import_path(task)
    package = module.partition(".")[0]
    # Only the top-level package: looking up "a.b" would import "a".
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"data.task={task!r}: there is no module {package!r} here; install it or put its directory on PYTHONPATH"
        )


def resolve(task: str) -> RewardFunction:
    """Import the task's function.

    Raises ConfigError if the name is illegal, the module cannot be imported, or the attribute is not callable.
    """
    module_name, function_name = _import_path(task)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"data.task={task!r}: cannot import {module_name}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"data.task={task!r}: {module_name} has no function {function_name!r}")
    return cast(RewardFunction, function)


def _import_path(task: str) -> tuple[str, str]:
    match = _IMPORT_PATH.fullmatch(BUILT_IN.get(task, task))
    if match is None:
        raise ConfigError(
            f"data.task={task!r} is not a task; legal: {', '.join(task_names())}, or package.module:function"
        )
    return match["module"], match["function"]
