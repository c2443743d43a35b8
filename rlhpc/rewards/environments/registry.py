"""Find an environment by its name: one of the table below, or "package.module:Class" of the user's own.

Input: a name.  Output: a class with the methods of Environment.  Named as text, as in rewards/registry.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from rlhpc.environment import Environment
from rlhpc.errors import ConfigError
from rlhpc.user_code import did_you_mean, is_import_path, load, look_up, takes

KEY = "data.environment"
VARIABLE = "RLHPC_ENVIRONMENTS"  # of a reward worker: those of its run (settings.py)

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": "rlhpc.rewards.environments.gymnasium_games:GymnasiumEnvironment",
        "tools": "rlhpc.rewards.environments.tools:ToolEnvironment",
        "verifiers": "rlhpc.rewards.environments.verifiers_environment:VerifiersEnvironment",
    }
)


def validate_environment(name: str) -> None:
    """Check a name without importing anything of the user's.  Raises ConfigError."""
    look_up(KEY, _import_path(name), repr(name), is_class=True)


def resolve_environment(name: str, arguments: Mapping[str, object] = MappingProxyType({})) -> type[Environment]:
    """Import an environment.  Raises ConfigError, also if it is no subclass of Environment, or an abstract one.

    arguments: environment.arguments, which its constructor has to take, unless it has an open() of its own.
    """
    found: object = load(KEY, _import_path(name), repr(name))
    if not isinstance(found, type) or not issubclass(found, Environment):
        raise ConfigError(f"{KEY}={name!r} is not a subclass of rlhpc.environment.Environment")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{KEY}={name!r} lacks {', '.join(missing)}")
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
            f"{did_you_mean(name, BUILT_IN)}"
        )
    return path
