"""Optional packages: imported where they are used, with an error that says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from rlhpc.errors import ConfigError


def optional_module(name: str, extra: str) -> ModuleType:
    """Import a module of an optional package.  Raises ConfigError naming the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed ({error}): pip install 'rlhpc[{extra}]'") from error
