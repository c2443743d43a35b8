"""What each process of a run did when, from timeline.jsonl; intervals of a long run are merged.

Input: the file, which may still be growing.  Output: Recorded.  A month of 512 generators is 2.8 million shares of
intervals in 150 MB: lines are read one by one, and neighbours merged as a chart would do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.buffer.line_file import LineFile
from rlhpc.roles.controller.metrics.timeline import TimelineEntry

MOST_STRETCHES = 900  # of the file, or few more: twice what a chart has columns for
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
    for entry in LineFile(path, TimelineEntry).each():
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


def _num_lines(path: Path) -> int:
    """Number of lines that are not empty."""
    try:
        with path.open("rb") as file:
            return sum(line != b"\n" for line in file)
    except FileNotFoundError:
        return 0
