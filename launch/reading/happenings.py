"""The events of a run in order of time, from the records of supervisors, controllers, launchers and the guard.

Input: jobs/*.events.jsonl, timeline.jsonl, attempts.jsonl, guard.jsonl, jobs/*.json of a run directory.
Output: Happening, oldest first, and what each process did when (spells.py).  Lines that cannot be read are
skipped: this is for viewing only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from launch.common.paths import written_unix_s
from launch.reading.spells import Spell, is_time, read_timeline
from launch.run_directory.owner import may_live
from launch.run_files.events import read_document
from launch.run_files.outcome import Cause
from rlhpc.buffer.line_file import LineFile
from rlhpc.metrics.curves import Curve
from rlhpc.roles.controller.guard_file import GuardEntry
from rlhpc.roles.controller.metrics.timeline import TimelineEntry
from rlhpc.run_layout import RunLayout

# Events of supervisors and controllers that are not faults and follow from one that is shown.
_AS_PLANNED = {"life", "part_left", "part_end", "start", "sbatch", "end", "submit"}
_LONGEST, _HEAD = 240, 170  # characters of a text that is shown, and of its beginning
# Counters whose growth is an event, with its text in the singular.
_COUNTERS = {
    "checkpoint/failed_total": ("checkpoint", "checkpoint could not be written"),
    "trainer/skipped_steps": ("skipped", "step was skipped: not finite, or refused by the guard"),
    "weights/canary_failed_total": ("canary", "generator had other weights than the trainer, and was quarantined"),
    "transport/denied_total": ("denied", "connection with a key that is not of this run was refused"),
}
_ASKED_FOR = (Cause.STOP, Cause.ABORT, Cause.INTERRUPTED)
_WELL = (Cause.COMPLETE, *_ASKED_FOR, Cause.TIME, Cause.YIELD)
_GOOD_ENDS = {cause.name.lower() for cause in _WELL}
_FAULTS = {
    *(kind for kind, _ in _COUNTERS.values()),
    "restart",
    "retry",
    "kill",
    "lost",
    "disk",
    "left_away",
    "killed",
    "not_submitted",
    "not_loaded",
    "guard",
    "part_missed",
}


@dataclass(frozen=True, slots=True)
class Happening:
    """One event."""

    unix_time_s: float
    who: str  # a process, a job, or "run"
    kind: str  # one word
    text: str
    attempt: int = -1

    @property
    def brief(self) -> str:
        """The text, without its middle if it is long: a process's last error may be a page, and the end matters."""
        text = " ".join(self.text.split())
        return text if len(text) <= _LONGEST else f"{text[:_HEAD]} … {text[_HEAD - _LONGEST :]}"

    @property
    def is_fault(self) -> bool:
        """Something went wrong, or was undone."""
        if self.kind == "verdict":
            return self.text.partition(":")[0] not in _GOOD_ENDS
        if self.kind == "guard":
            return not self.text.startswith("warn:")  # a figure was out of bounds, and nothing was done about it
        return self.kind in _FAULTS

    @property
    def is_planned(self) -> bool:
        """True if it is routine."""
        return self.kind in _AS_PLANNED


@dataclass(slots=True)
class Story:
    """All events of a run, and what its processes did when."""

    happenings: list[Happening] = field(default_factory=list)  # oldest first
    spells: list[Spell] = field(default_factory=list)
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def processes(self) -> list[str]:
        """Names of the processes, by role and number."""
        return sorted({spell.process for spell in self.spells}, key=place_of)

    @property
    def faults(self) -> list[Happening]:
        """What went wrong."""
        return [each for each in self.happenings if each.is_fault]


def place_of(process: str) -> tuple[int, int]:
    """Order in which people look at processes: trainers, generators, reward services."""
    role, _, number = process.rpartition("-")
    order = {"controller": 0, "trainer": 1, "generator": 2, "reward": 3}
    return order.get(role, 9), int(number) if number.isdigit() else 0


def read_story(layout: RunLayout, curves: Mapping[str, Curve] = MappingProxyType({})) -> Story:
    """Read all events.  curves: of the run, whose counters show faults too.  Raises OSError."""
    recorded = read_timeline(layout.timeline)
    found = [
        *_of_killed_launchers(layout),
        *_of_supervisors(layout),
        *_of_attempts(layout),
        *_of_guard(layout),
        *_of_jobs(layout),
        *_of_counters(curves),
    ]
    found += [_of_controller(each) for each in recorded.events]
    story = Story(sorted(found, key=lambda each: each.unix_time_s), recorded.spells)
    times = [each.unix_time_s for each in found] + recorded.times
    times += [spell.begin_s for spell in story.spells]
    if times:
        story.begin_s, story.end_s = min(times), max(*times, _last_status_s(layout))
    return story


def _of_counters(curves: Mapping[str, Curve]) -> Iterator[Happening]:
    """One event for each step in which a counter grew; an attempt may reset it."""
    for name, (kind, words) in _COUNTERS.items():
        if (curve := curves.get(name)) is not None:
            growth = np.diff(np.nan_to_num(curve.values), prepend=0.0)
            for place in np.flatnonzero(growth > 0).tolist():
                count = f"{growth[place]:.0f} times: " if growth[place] > 1 else ""
                text = f"{count}{words} (step {curve.steps[place]})"
                yield Happening(float(curve.unix_times_s[place]), "run", kind, text)


def _of_controller(entry: TimelineEntry) -> Happening:
    words = {"joined": "has joined: ", "lost": "is lost: ", "left": "has left: "}.get(entry.event, "")
    return Happening(entry.unix_time_s, entry.name or "run", entry.event, words + entry.text, entry.attempt)


def _of_supervisors(layout: RunLayout) -> Iterator[Happening]:
    for path in layout.jobs.glob("*.events.jsonl"):
        name = path.name.removesuffix(".events.jsonl")
        for line in _lines(path):
            who = "run" if name == "local" else f"job {name}"
            if {"event", "text"} <= line.keys() and line["event"] != "attempt":  # of attempts.jsonl
                yield Happening(line["unix_time_s"], who, str(line["event"]), str(line["text"]), _attempt(line))


def _of_killed_launchers(layout: RunLayout) -> Iterator[Happening]:
    """Attempts on this machine that begin and never end: their supervisor could not tell any more.

    Their time is that of the next attempt, which found out, or else of the last sign of life.
    """
    open_attempts: dict[int, float] = {}
    for line in _lines(layout.job_events("local")):
        if line.get("event") == "attempt":
            open_attempts[_attempt(line)] = line["unix_time_s"]
        elif line.get("event") in ("attempt_end", "retry", "verdict"):  # of one that could not start, only the latter
            open_attempts.pop(_attempt(line), None)
    begun = {_attempt(line, "index"): line["unix_time_s"] for line in _lines(layout.attempts)}
    for attempt, began_s in open_attempts.items():
        later = [unix_time_s for index, unix_time_s in begun.items() if index > attempt]
        if later or not may_live(layout):
            alive_s = max(began_s, written_unix_s(layout.launcher), _last_status_s(layout))
            when = min(later, default=alive_s)
            text = f"attempt {attempt} ended without a word: its launcher was killed, or the machine went down"
            yield Happening(when, "run", "killed", text, attempt)


def _last_status_s(layout: RunLayout) -> float:
    """When the controller last wrote its status; 0: never."""
    written_s = read_document(layout.status).get("unix_time_s", 0.0)
    return float(written_s) if is_time(written_s) else 0.0


def _of_attempts(layout: RunLayout) -> Iterator[Happening]:
    for line in _lines(layout.attempts):
        if "index" not in line:
            continue
        step = line.get("resume_step")
        begins = "from the beginning" if step is None else f"from the checkpoint of step {step}"
        text = f"attempt {line['index']} begins {begins}"
        yield Happening(line["unix_time_s"], "run", "attempt", text, _attempt(line, "index"))


def _of_guard(layout: RunLayout) -> Iterator[Happening]:
    for entry in LineFile(layout.guard, GuardEntry).each():
        if is_time(entry.unix_time_s) and isinstance(entry.attempt, int):
            yield Happening(entry.unix_time_s, "run", "guard", f"{entry.action}: {entry.text}", entry.attempt)


def _of_jobs(layout: RunLayout) -> Iterator[Happening]:
    for path in layout.jobs.glob("[0-9]*.json"):
        try:
            record = json.loads(path.read_bytes())
            text = f"{record['name']} submitted"
            if is_time(record["submitted_unix_s"]):
                yield Happening(record["submitted_unix_s"], f"job {record['job_id']}", "submitted", text)
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that have a time."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and is_time(document.get("unix_time_s")):
            yield document


def _attempt(line: Mapping[str, Any], key: str = "attempt") -> int:
    number = line.get(key)
    return number if isinstance(number, int) else -1
