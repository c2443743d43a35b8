"""Find a reward function by the name of its task.

Input: a task name.  Output: a RewardFunction.  A name is one of the table below, or "package.module:function" of the
user's own.  Functions are named as text, so that the table can be read without importing what the functions need.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
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

    Raises ConfigError if the name is neither in the table nor an import path, its top-level package is not found, or
    the source of its module has a syntax error or no such function.
    """
    module, function = _import_path(task)
    package, *inner = module.split(".")
    # Only the top-level package: looking up "a.b" would import "a".
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ConfigError(
            f"data.task={task!r}: there is no module {package!r} here; install it or put its directory on PYTHONPATH"
        )
    source = _source_file(spec, inner)
    if source is None:
        return  # compiled, or a package in several places: the reward service will tell
    try:
        module_text = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"data.task={task!r}: {source}:{error.lineno}: {error.msg}") from error
    if not _may_bind(module_text, function):
        names = [node.name for node in module_text.body if isinstance(node, ast.FunctionDef)]
        functions = [name for name in names if not name.startswith("_")] or ["none"]
        raise ConfigError(f"data.task={task!r}: {source} has no {function!r}; its functions: {', '.join(functions)}")


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


def _source_file(spec: ModuleSpec, inner: Sequence[str]) -> Path | None:
    """The Python file of a module below a top-level package, found by its path alone; None if that finds none."""
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not inner:
        files = [Path(spec.origin or "")]
    else:
        files = [place.joinpath(*inner).with_suffix(".py") for place in places]
        files += [place.joinpath(*inner, "__init__.py") for place in places]
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _may_bind(module_text: ast.Module, name: str) -> bool:
    """False if nothing in the text of a module can make a global variable of this name."""
    for node in ast.walk(module_text):
        match node:
            case ast.FunctionDef(name=bound) | ast.ClassDef(name=bound) | ast.Name(id=bound, ctx=ast.Store()):
                if bound in (name, "__getattr__"):
                    return True
            case ast.alias(name=imported, asname=renamed):
                if imported == "*" or (renamed or imported) == name:
                    return True
            case ast.Name(id="globals" | "exec"):
                return True
    return False
