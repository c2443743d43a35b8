"""Asynchronous RL post-training of language models, native to Slurm: what notebooks and sweeps use of it.

    rlhpc.Run        a run: figures, rollouts, checkpoints, evaluations; stop it
    rlhpc.run        do a run on this machine, to its end
    rlhpc.start      begin one, and return at once
    rlhpc.submit     submit one to Slurm
    rlhpc.check      look for mistakes in a run file
    rlhpc.evaluate   sample a dataset with a model
    rlhpc.compare    compare two evaluations
    rlhpc.export     write the trained model as an HF checkpoint

help(rlhpc.run) explains one of them, docs/python.md all; errors are in rlhpc.protocol.errors, what own rewards,
advantages and losses take in rlhpc.protocol.contracts.  The other modules run inside a job, and may change.  `import
rlhpc` loads nothing: these names belong to the launcher, which is layered above this package, and are loaded on first
access.
"""

from __future__ import annotations

import importlib as _importlib

__version__ = "0.1.0"
__all__ = ["Run", "check", "compare", "evaluate", "export", "run", "start", "submit"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(_importlib.import_module("launch.api"), name)
    is_error = not name.startswith("_") and hasattr(_importlib.import_module("rlhpc.protocol.errors"), name)
    where = "it is in rlhpc.protocol.errors" if is_error else f"legal: {', '.join(__all__)}"
    raise AttributeError(f"module 'rlhpc' has no attribute {name!r}; {where}")


def __dir__() -> list[str]:
    of_modules = {name for name in globals() if name.startswith("__")} - {"__dir__", "__getattr__"}
    return [*__all__, *of_modules]
