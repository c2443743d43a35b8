"""The last event of each supervisor of a run, and other files of the run directory that may not exist yet.

Input: jobs/NAME.events.jsonl (launch/run_files/event_log.py).  A file that is missing or incomplete counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.run_layout import RunLayout

_TAIL_BYTES = 16384  # an event is a line of some hundred bytes


@dataclass(frozen=True)
class Event:
    """What a supervisor has done."""

    name: str  # of its job: JOB, or JOB_TASK
    unix_time_s: float
    event: str  # one word for programs
    text: str


def last_events(layout: RunLayout) -> list[Event]:
    """The last event of each supervisor, newest first."""
    found = [event for path in layout.jobs.glob("*.events.jsonl") if (event := _last_event(path)) is not None]
    return sorted(found, key=lambda event: -event.unix_time_s)


def last_outcome(layout: RunLayout, name: str) -> str:
    """Outcome of the last life of a job, "given_up: …" (launch/run_files/outcome.py); "" if it left none."""
    for line in _lines_from_the_end(layout.job_events(name)):
        try:
            said = json.loads(line)
            if said["event"] in ("verdict", "life"):  # a later life has begun, and has no outcome yet
                return str(said["text"]) if said["event"] == "verdict" else ""
        except (ValueError, KeyError, TypeError):
            continue  # half written
    return ""


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _last_event(path: Path) -> Event | None:
    name = path.name.removesuffix(".events.jsonl")
    for line in _lines_from_the_end(path):
        try:
            said = json.loads(line)
            return Event(name, float(said["unix_time_s"]), str(said["event"]), str(said["text"]))
        except (ValueError, KeyError, TypeError):
            continue  # half written
    return None


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            yield from reversed(file.read().splitlines())
    except OSError:
        return
