"""Start Python processes that import what this one can: reward workers, agents, trials of the user's own code.

They get this process's import path, so that what was found when the configuration was checked is found again.  They do
not search the current directory (-P): torch would import a script there that is called profile or code in place of the
standard library's module.
"""

from __future__ import annotations

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the words that run this module in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(**settings: str) -> dict[str, str]:
    """Return this process's variables with its import path and one thread for OpenMP; `settings` replace them."""
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return os.environ | own | settings
