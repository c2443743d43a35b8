"""Damage what a vLLM worker of one generator has just loaded, once for each time that a test asks for it.

A test names the folder of this file's copy, called sitecustomize.py, in PYTHONPATH: python imports it before anything
else, in every process of the run; only the engine of that one generator ever loads weights and finds the file there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ORDER = "RLHPC_TEST_DAMAGE"  # names a file with a replica: what it loads next is damaged, and the file is deleted
RELOADING = "rlhpc.generation.reload_plan"


class DamagedReload(MetaPathFinder):
    """Wraps the one method through which versions get into vLLM that have come whole."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != RELOADING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            reload = vars(module)["WeightReload"]
            reload.load = _damaged(reload.load)

        spec.loader.exec_module = execute_and_wrap
        return spec


def _damaged(load: Any) -> Any:
    def load_and_damage(reload: Any, weights: Any) -> None:
        load(reload, weights)
        order = Path(os.environ[ORDER])
        if order.exists() and _replica() == order.read_text():
            reload._model.model.norm.weight.data.mul_(3)
            order.unlink()

    return load_and_damage


def _replica() -> str:
    """The replica that this engine belongs to: its core is a thread of the generator or a child of it."""
    for pid in (os.getpid(), os.getppid()):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--replica" in words:
            return words[words.index("--replica") + 1]
    raise AssertionError("neither this process nor its parent is a generator")


if ORDER in os.environ:
    sys.meta_path.insert(0, DamagedReload())
