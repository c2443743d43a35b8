"""Language, limits and tolerance in the reference of a code task, beside its tests.

    {"inputs": […], "outputs": […], "language": "cpp", "time_limit_s": 2.0, "memory_limit_bytes": 268435456,
     "tolerance": 1e-4}

Limits of a record are below those of the run ([sandbox]), by which its memory and time are planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from rlhpc.config_sandbox import Language

if TYPE_CHECKING:
    from rlhpc.config_sandbox import SandboxConfig

_LANGUAGES: tuple[Language, ...] = get_args(Language)


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """What one record says for itself; empty where it says nothing."""

    language: Language | None = None
    cpu_s: float = 0.0  # of one test
    memory_bytes: int = 0
    tolerance: float | None = None  # of numbers, relative where they are above 1; 0: none

    def languages(self, of_run: tuple[Language, ...]) -> tuple[Language, ...]:
        """The languages in which its programs may be written."""
        return of_run if self.language is None else (self.language,)


def own_limits(reference: Mapping[str, Any], task: str) -> OwnLimits:
    """Read a record's own limits.  Raises ValueError for an illegal value."""
    language, cpu_s, memory = (reference.get(key) for key in ("language", "time_limit_s", "memory_limit_bytes"))
    if language is not None and language not in _LANGUAGES:
        raise ValueError(f"the reference of {task}: language={language!r}; legal: {', '.join(map(repr, _LANGUAGES))}")
    if cpu_s is not None and (isinstance(cpu_s, bool) or not isinstance(cpu_s, int | float) or not 0 < cpu_s < 1e6):
        raise ValueError(f"the reference of {task}: time_limit_s={cpu_s!r}; legal: seconds above 0")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0):
        raise ValueError(f"the reference of {task}: memory_limit_bytes={memory!r}; legal: a whole number above 0")
    if (tolerance := reference.get("tolerance")) is not None:
        is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
        if not is_number or not 0 <= tolerance < 1:
            raise ValueError(
                f"the reference of {task}: tolerance={tolerance!r}; legal: 0, for none, or a number below 1"
            )
        tolerance = float(tolerance)
    return OwnLimits(language, float(cpu_s or 0.0), memory or 0, tolerance)


def refuse_above(own: OwnLimits, sandbox: SandboxConfig, task: str) -> None:
    """Raises ValueError for a record that wants more than the run gives."""
    if own.language is not None and own.language not in sandbox.languages:
        raise ValueError(
            f"the reference of {task}: language={own.language!r} is not in sandbox.languages={list(sandbox.languages)}"
        )
    if own.cpu_s > sandbox.cpu_s:
        raise ValueError(
            f"the reference of {task}: time_limit_s={own.cpu_s:g} is above sandbox.cpu_s={sandbox.cpu_s:g}; legal: at "
            "most that, or a larger sandbox.cpu_s"
        )
    if own.memory_bytes > sandbox.memory_bytes:
        raise ValueError(
            f"the reference of {task}: memory_limit_bytes={own.memory_bytes} is above sandbox.memory_bytes="
            f"{sandbox.memory_bytes}; legal: at most that, or a larger sandbox.memory_bytes"
        )
