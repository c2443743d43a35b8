"""Busy and waiting time of every process over the run's lifetime: timeline.jsonl, for `rlhpc report`.

Input: what the registry says of every process, twice a second.  Output: a line for each interval with the share of it
that each process worked or waited, and a line for each arrival and loss.  Intervals grow with the number of processes
and with the age of the run, which its first line tells, so that a month of a large run stays megabytes, however often
it is requeued.  A full disk delays lines, and the file says for how long.  No decision is made from this.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rlhpc.buffer.line_file import LineFile
from rlhpc.ownership import Fence

WORKS = "works"  # instead of what a process waits for
SILENT = "silent"  # it has given no sign of life for SILENT_S: paused, hung, or dead and not yet given up
SILENT_S = 3.0
SHORTEST_S = 5.0  # of an interval
RETRY_S = 5.0  # between two tries to write to a full disk: each logs a warning
_INTERVALS_AT_AGE = 1000  # a run of age t has intervals of t / 1000
_PROCESSES_PER_S = 16
_MOST_FIRST_LINES = 100  # empty, or damaged by a crash
_MOST_PENDING = 10_000  # lines, while the disk is full


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A line: of an interval that ends then, or of something that happened."""

    unix_time_s: float
    attempt: int
    step: int
    phase: str  # of the run: starting, training, …
    seconds: float = 0.0  # length of the interval; 0: something happened
    work: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # process → WORKS, SILENT or what it waits for → share
    event: str = ""  # joined, lost, left, disk
    name: str = ""  # process
    text: str = ""  # for people


@dataclass(slots=True)
class _Watched:
    """A process in the interval that goes on."""

    row: Mapping[str, Any]  # as last reported
    looks: Counter[str] = field(default_factory=Counter)
    busy_s: float | None = None  # its counter when the interval began


class Timeline:
    """Watches, and writes.  One thread may call `look` while another one calls `write`."""

    def __init__(self, path: Path, fence: Fence | None = None) -> None:
        self._lines = LineFile(path, TimelineEntry, fence)
        self._news: SimpleQueue[TimelineEntry] = SimpleQueue()  # from one to the other
        self._pending: deque[TimelineEntry] = deque(maxlen=_MOST_PENDING)  # of the one that writes
        self._watched: dict[str, _Watched] = {}
        self._first_s = _first_line_s(path)  # of an earlier attempt, if there was one
        self._since_s = 0.0
        self._failed_since_s: float | None = None
        self._tried_s = 0.0

    def look(self, now_s: float, rows: Sequence[Mapping[str, Any]], *, attempt: int, step: int, phase: str) -> None:
        """Take in what is reported of all processes; now_s: the wall clock."""
        self._first_s = self._first_s or now_s
        self._since_s = self._since_s or now_s
        where = {"attempt": attempt, "step": step, "phase": phase}
        self._arrivals_and_losses(now_s, rows, where)
        for row in rows:
            what = SILENT if row["silent_s"] > SILENT_S else row["waits_for"] or WORKS
            self._watched[row["name"]].looks[what] += 1
        if now_s - self._since_s >= self._interval_s(now_s, len(rows)):
            self._close_interval(now_s, where)

    def write(self, now_s: float) -> None:
        """Append what is pending; it stays if that fails.  Raises OwnershipLost."""
        while not self._news.empty():
            self._pending.append(self._news.get())
        if not self._pending or now_s - self._tried_s < (RETRY_S if self._failed_since_s is not None else 0.0):
            return
        self._tried_s = now_s
        entries = [*self._pending]
        if self._failed_since_s is not None:
            text = f"the run directory could not be written for {now_s - self._failed_since_s:.0f} s"
            last = entries[-1]
            entries.append(TimelineEntry(now_s, last.attempt, last.step, last.phase, event="disk", text=text))
        if self._lines.append(entries):
            self._pending.clear()
            self._failed_since_s = None
        elif self._failed_since_s is None:
            self._failed_since_s = now_s

    def _arrivals_and_losses(self, now_s: float, rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> None:
        present = {row["name"]: row for row in rows}
        for name, watched in [*self._watched.items()]:
            row, known = present.get(name), watched.row
            if row is None or row["pid"] != known["pid"] or row["host"] != known["host"]:
                self._news.put(TimelineEntry(now_s, **where, **_loss(known)))
                del self._watched[name]
        for name, row in present.items():
            if name not in self._watched:
                text = f"pid {row['pid']} on {row['host']}"
                self._news.put(TimelineEntry(now_s, **where, event="joined", name=name, text=text))
                self._watched[name] = _Watched(row, busy_s=row["metrics"].get("busy_s"))
            self._watched[name].row = row

    def _interval_s(self, now_s: float, num_processes: int) -> float:
        return max(SHORTEST_S, num_processes / _PROCESSES_PER_S, (now_s - self._first_s) / _INTERVALS_AT_AGE)

    def _close_interval(self, now_s: float, where: Mapping[str, Any]) -> None:
        seconds = now_s - self._since_s
        work = {name: _shares(watched, seconds) for name, watched in self._watched.items() if watched.looks}
        self._news.put(TimelineEntry(now_s, **where, seconds=round(seconds, 3), work=work))
        self._since_s = now_s
        for watched in self._watched.values():
            watched.looks.clear()
            watched.busy_s = watched.row["metrics"].get("busy_s")


def _first_line_s(path: Path) -> float:
    """When the first whole line was written; 0: there is none."""
    with suppress(OSError), path.open("rb") as file:
        for line in islice(file, _MOST_FIRST_LINES):
            with suppress(ValueError, KeyError, TypeError):
                return float(json.loads(line)["unix_time_s"])
    return 0.0


def _loss(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["state"] == "draining":
        return {"event": "left", "name": row["name"], "text": "it had said that it leaves"}
    was = f"waited for {row['waits_for']}" if row["waits_for"] else f"was {row['state']}"
    running = row["metrics"].get("running", 0.0)
    held = f" with {running:.0f} rollouts" if running else ""
    text = f"no sign of life for {row['silent_s']:.1f} s; it {was}{held}"
    return {"event": "lost", "name": row["name"], "text": text}


def _shares(watched: _Watched, seconds: float) -> dict[str, float]:
    """Of an interval.  An engine counts its own busy time, which looks at its state only sample."""
    total = watched.looks.total()
    shares = {what: count / total for what, count in watched.looks.items()}
    busy_s = watched.row["metrics"].get("busy_s")
    if busy_s is not None and watched.busy_s is not None and busy_s >= watched.busy_s:
        works = min(1.0, (busy_s - watched.busy_s) / seconds)
        waits = {what: share for what, share in shares.items() if what != WORKS} or {"leases": 1.0}
        rest = (1.0 - works) / sum(waits.values())
        shares = {WORKS: works, **{what: share * rest for what, share in waits.items()}}
    return {what: round(share, 3) for what, share in shares.items() if share >= 0.0005}
