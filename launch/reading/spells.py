"""What each process of a run did when, from timeline.jsonl; intervals of a long run are merged.

Input: the file, which may still be growing.  Output: Recorded.  A month of 512 generators is 2.8 million shares of
intervals in 150 MB: lines are read one by one, and neighbours merged as a chart would do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from rlhpc.buffer.line_file import LineFile
from rlhpc.roles.controller.metrics.timeline import TimelineEntry

MOST_STRETCHES = 900  # of the file, or few more: twice what a chart has columns for
_END_OF_TIME_S = 1e11  # in the year 5138
_GAP_S = 1.0  # between two intervals: the process was not there


@dataclass(frozen=True, slots=True)
class Spell:
    """What a process did in an interval, or in several consecutive ones."""

    process: str
    begin_s: float
    end_s: float
    shares: dict[str, float]  # "works", or what it waited for → share of the time
    phase: str  # of the run


@dataclass(slots=True)
class Recorded:
    """The content of a timeline."""

    spells: list[Spell] = field(default_factory=list)  # of each process, oldest first
    events: list[TimelineEntry] = field(default_factory=list)  # arrivals and losses, as they stand there
    times: list[float] = field(default_factory=list)  # earliest and latest of all lines; [] without lines


@dataclass(slots=True)
class _Stretch:
    """Intervals of a process that become one spell."""

    number: int  # of the stretch in the file
    phase: str
    begin_s: float
    end_s: float
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def goes_on(self, number: int, entry: TimelineEntry) -> bool:
        """Whether an interval continues this stretch: not across a time when the process was absent."""
        is_next = entry.unix_time_s - entry.seconds - self.end_s <= _GAP_S
        return is_next and number == self.number and entry.phase == self.phase

    def add(self, process: str, entry: TimelineEntry) -> None:
        """Add an interval to the mean over time."""
        of_entry = entry.work[process]
        self.seconds += entry.seconds
        self.end_s = entry.unix_time_s
        weight = entry.seconds / self.seconds
        for what in {**self.shares, **of_entry}:
            share = self.shares.get(what, 0.0)
            self.shares[what] = share + (of_entry.get(what, 0.0) - share) * weight

    def spell(self, process: str) -> Spell:
        return Spell(process, self.begin_s, self.end_s, self.shares, self.phase)


def read_timeline(path: Path) -> Recorded:
    """Read a timeline; lines that cannot be read are skipped.  Raises OSError."""
    recorded, begun, num_intervals = Recorded(), dict[str, _Stretch](), 0
    every = max(1, -(-_num_lines(path) // MOST_STRETCHES))
    for entry in filter(_can_be_read, LineFile(path, TimelineEntry).each()):
        recorded.times = [min([entry.unix_time_s, *recorded.times]), max([entry.unix_time_s, *recorded.times])]
        recorded.events += [entry] if entry.event else []
        if entry.seconds <= 0:
            continue
        number = num_intervals // every
        num_intervals += 1
        for process in entry.work:
            stretch = begun.get(process)
            if stretch is None or not stretch.goes_on(number, entry):
                recorded.spells += [] if stretch is None else [stretch.spell(process)]
                begin_s = entry.unix_time_s - entry.seconds
                stretch = begun[process] = _Stretch(number, entry.phase, begin_s, entry.unix_time_s)
            stretch.add(process, entry)
    recorded.spells += [stretch.spell(process) for process, stretch in begun.items()]
    return recorded


def is_time(value: object) -> bool:
    """Seconds of the Unix clock that a calendar knows."""
    return is_number(value) and 0 <= value < _END_OF_TIME_S


def is_number(value: object) -> TypeGuard[int | float]:
    """Finite, too."""
    return isinstance(value, int | float) and abs(value) < math.inf


def _can_be_read(entry: TimelineEntry) -> bool:
    """Whether what is in a line has the forms that it should have."""
    works = [entry.work, *entry.work.values()] if isinstance(entry.work, dict) else [None]
    return (
        is_time(entry.unix_time_s)
        and is_time(entry.seconds)
        and isinstance(entry.attempt, int)
        and all(isinstance(text, str) for text in (entry.phase, entry.event, entry.name, entry.text))
        and all(isinstance(each, dict) for each in works)
        and all(is_number(share) for shares in entry.work.values() for share in shares.values())
    )


def _num_lines(path: Path) -> int:
    """Number of lines that are not empty."""
    try:
        with path.open("rb") as file:
            return sum(line != b"\n" for line in file)
    except FileNotFoundError:
        return 0
