"""The code that runs inside a job: asynchronous RL post-training of language models.

`rlhpc.Run`, `run`, `submit`, `evaluate` and `compare` are the API for notebooks and sweeps (docs/python.md).  They
belong to the launcher, which is layered above this package, and are loaded on first access: `import rlhpc` loads
nothing.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
_DOOR = ("Run", "compare", "evaluate", "run", "submit")


def __getattr__(name: str) -> object:
    if name in _DOOR:
        return getattr(importlib.import_module("launch.door"), name)
    raise AttributeError(f"module 'rlhpc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_DOOR]
