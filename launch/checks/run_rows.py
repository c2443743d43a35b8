"""The rows of `rlhpc check RUN_DIR`: the result for one item."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], None]  # is told what is being read


class Verdict(enum.Enum):
    """What a row comes to."""

    SOUND = "sound"
    NOTE = "note"  # nothing is wrong with what counts
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    # settings, inputs, attempts, checkpoints, segments, journal, events, partials, replay, leftovers
    part: str
    name: str
    verdict: Verdict
    text: str


def listed(numbers: list[int]) -> str:
    """The first ten."""
    return f"{', '.join(map(str, numbers[:10]))}{' …' if numbers[10:] else ''}"


def from_to(paths: Sequence[Path]) -> str:
    """The names of files that follow each other: first and last, or the only one."""
    first, last = paths[0].stem, paths[-1].stem
    return first if first == last else f"{first} to {last}"
