"""What the guard did, line by line, in the run directory: `rlhpc audit` and `rlhpc status` read it.

    guard.jsonl      {"attempt": 0, "step": 12, "action": "skip", "figures": {"grad_norm": [35.1, null, 4.2]}, …}

Input: entries.  Output: lines that are on disk.  It belongs to the run: no resume undoes it, so that a step that
was done again after `--step` may have two lines, of different attempts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.buffer.line_file import LineFile
from rlhpc.ownership import Fence


@dataclass(frozen=True, slots=True)
class GuardEntry:
    """One action."""

    attempt: int
    step: int
    version: int  # that the step began with
    action: str  # "warn", "tighten", "skip", "stop"
    figures: dict[str, Sequence[float | None]]  # out of bounds: value, lowest and highest that is legal
    groups: Sequence[int]  # of the step's batch
    text: str  # for people
    unix_time_s: float = field(default_factory=time.time)


def read_guard_file(path: Path) -> list[GuardEntry]:
    """All entries, oldest first; none without a file.  A line that a crash cut off is skipped.  Raises OSError."""
    return LineFile(path, GuardEntry).read()


class GuardFile:
    """Appends entries; one thread at a time."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        """fence: checked before each change."""
        self._lines = LineFile(path, GuardEntry, fence)
        self._unwritten: list[GuardEntry] = []

    def append(self, entry: GuardEntry) -> None:
        """Write an entry, and those that could not be written before, to disk.

        A failed write is a warning: the next call tries again.  Raises OwnershipLost.
        """
        self._unwritten.append(entry)
        if self._lines.append(self._unwritten):
            self._unwritten.clear()
