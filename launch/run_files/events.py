"""The events of each supervisor of a run: write and read jobs/NAME.events.jsonl, one JSON line per event.

A file that is missing or incomplete counts as absent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhpc.files import append_lines, is_absent
from rlhpc.run_layout import RunLayout

_TAIL_BYTES = 16384  # an event is a line of some hundred bytes


class Log(Protocol):
    """Receives the events of a supervisor."""

    attempt: int  # the current one

    def say(self, event: str, text: str) -> None:
        """Report one event: one word for programs, a sentence for people."""


class EventLog(Log):
    """Appends to one file, and writes the same to the batch log.

    Each job (or array task) has its own file, so that a file has only one writer.
    """

    def __init__(self, path: Path, restart: int) -> None:
        self._path, self._restart = path, restart
        self.attempt = -1

    def say(self, event: str, text: str) -> None:
        """Log an event."""
        clock = time.strftime("%H:%M:%S")
        with suppress(OSError):  # the batch log lies on the same filesystem, which may be full
            sys.stdout.write(f"{clock} rlhpc supervisor: {text}\n")
            sys.stdout.flush()
        try:
            append_event(self._path, event, text, attempt=self.attempt, restart=self._restart)
        except OSError as error:  # a full disk must not end the run because its log cannot be written
            with suppress(OSError):
                sys.stdout.write(f"{clock} rlhpc supervisor: {self._path} not written: {error.strerror or error}\n")


def append_event(path: Path, event: str, text: str, *, attempt: int, restart: int = 0) -> None:
    """Append one JSON line, whole or not at all.  Raises OSError, also where no run is any more."""
    line = {"unix_time_s": time.time(), "restart": restart, "attempt": attempt, "event": event, "text": text}
    path.parent.mkdir(exist_ok=True)
    append_lines(path, (json.dumps(line) + "\n").encode(), is_synced=False)


@dataclass(frozen=True)
class Event:
    """An event of a supervisor."""

    name: str  # of its job: JOB, or JOB_TASK
    unix_time_s: float
    event: str  # one word for programs
    text: str


def last_events(layout: RunLayout) -> list[Event]:
    """The last event of each supervisor, newest first."""
    found = (next(_newest_first(path), None) for path in layout.jobs.glob("*.events.jsonl"))
    return sorted((event for event in found if event is not None), key=lambda event: -event.unix_time_s)


def last_outcome(layout: RunLayout, name: str) -> str:
    """Outcome of a job's last life, such as "given_up: …" (launch/run_files/outcome.py); "" if it left none."""
    for said in _newest_first(layout.job_events(name)):
        if said.event in ("verdict", "life"):  # a later life has begun, and has no outcome yet
            return said.text if said.event == "verdict" else ""
    return ""


def read_document(path: Path) -> dict[str, Any]:
    """A JSON object; {} if there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def certain_document(path: Path) -> dict[str, Any]:
    """The same for what is decided by: {} only if there is none.  Raises OSError."""
    try:
        document = {} if is_absent(path) else json.loads(path.read_bytes())
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _newest_first(path: Path) -> Iterator[Event]:
    """The last events of one supervisor."""
    name = path.name.removesuffix(".events.jsonl")
    for line in lines_from_the_end(path):
        with suppress(ValueError, KeyError, TypeError):  # half written
            said = json.loads(line)
            yield Event(name, float(said["unix_time_s"]), str(said["event"]), str(said["text"]))


def lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Lines of the last 16 KiB of a file, the last one first, and the first one perhaps cut; none without a file."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            yield from reversed(file.read().splitlines())
    except OSError:
        return
