"""The log of what happens to groups: admitted, taken for a step, trained, dropped.

    rollouts/events_000000.jsonl      one file an attempt; a line is the CRC32 of its JSON, a space, the JSON

Input: events.  Output: lines that are on disk.  With the journal this is the whole history of a run: the state of its
ledger at any instant can be derived from both.
Guarantees: an event that `commit` has covered survives the death of this process, and of its machine.  A failed write
is repeated in the same place by the next commit.  A damaged line costs that line, and is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlhpc.buffer.journal_files import make_file, write_at
from rlhpc.buffer.resolved import DropReason
from rlhpc.crc import crc32
from rlhpc.errors import JournalError
from rlhpc.files import numbered_files
from rlhpc.ownership import Fence

_NAME = re.compile(r"events_(\d{6,})\.jsonl")


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt begins."""

    word: ClassVar[str] = "began"
    step: int  # the step that its trainer begins with
    num_rollouts: int  # rollouts of earlier attempts that count: those with higher numbers in their files do not
    goes_on: bool  # False: it starts over, and earlier events do not count
    timeline: int = -1  # the first attempt whose published versions are all repeated up to here; -1: this one


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt got a slot."""

    word: ClassVar[str] = "admitted"
    group: int
    prompt: int
    version: int  # the live one
    size: int = 0  # rollouts wanted for it, if more than admission.group_size


@dataclass(frozen=True, slots=True)
class Taken:
    """The batch of a step is chosen; on disk before the resulting weights are published."""

    word: ClassVar[str] = "taken"
    step: int
    groups: Sequence[int]  # in the order of the batch


@dataclass(frozen=True, slots=True)
class Trained:
    """The step was done."""

    word: ClassVar[str] = "trained"
    step: int
    version: int  # the one that was trained
    applied: bool  # False: skipped on all ranks, the version stayed
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the trainer
    refused: str = ""  # metrics because of which the guard skipped it, or some of its optimiser steps
    skipped: tuple[int, ...] = ()  # indices of the skipped optimiser steps
    began_s: float = 0.0  # seconds that the run had trained before this step


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group is not trained on."""

    word: ClassVar[str] = "dropped"
    group: int
    reason: DropReason


Event = Began | Admitted | Taken | Trained | Dropped
_KINDS: Mapping[str, type[Event]] = {kind.word: kind for kind in (Began, Admitted, Taken, Trained, Dropped)}


@dataclass(frozen=True, slots=True)
class EventFile:
    """Content of a file."""

    path: Path
    attempt: int
    events: dict[int, Event]  # by line, from 1
    damaged_lines: list[int]  # from 1
    is_torn: bool  # whether the only damaged line is the last one: it was being written when the writer died


def event_paths(directory: Path) -> list[Path]:
    """The event files of a rollouts directory, in the order of attempts.  Raises OSError."""
    return [path for _, path in numbered_files(directory, _NAME)]


def attempt_of(path: Path) -> int:
    """The attempt that wrote a file.  Raises JournalError if it is not an event file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise JournalError(f"{path} is not an event file")
    return int(match[1])


def read_events(path: Path) -> EventFile:
    """Every whole line of a file.  Raises JournalError: it cannot be read, or a whole line is of another version."""
    attempt = attempt_of(path)
    try:
        *lines, rest = path.read_bytes().rstrip(b"\0").split(b"\n")  # zeros: the length was on disk before the bytes
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error
    lines += [rest] if rest else []
    events, damaged = dict[int, Event](), list[int]()
    for number, line in enumerate(lines, 1):
        document = document_of(line)
        if document is None:
            damaged.append(number)
        else:
            events[number] = _decode(path, number, document)
    return EventFile(path, attempt, events, damaged, damaged == [len(lines)])


def document_of(line: bytes) -> bytes | None:
    """The JSON of a line, without its newline; None: the checksum does not hold."""
    return line[9:] if line[:9] == f"{crc32(line[9:]):08x} ".encode() else None


class GroupEventLog:
    """The only writer of an attempt's events.  `add` may be called by one thread while another one commits."""

    def __init__(self, directory: Path, attempt: int, fence: Fence | None = None) -> None:
        """Creates no file until there is something to write."""
        self._path, self._fence = directory / f"events_{attempt:06d}.jsonl", fence
        self._descriptor: int | None = None
        self._num_bytes = 0  # on disk
        self._pending: list[bytes] = []
        self.num_added = 0  # lines of the file, once all are written

    @property
    def num_pending(self) -> int:
        """Events that are only in memory."""
        return len(self._pending)

    def add(self, event: Event) -> None:
        """Keep an event for the next commit."""
        line = json.dumps({"event": event.word, **asdict(event)}).encode()
        self._pending.append(f"{crc32(line):08x} ".encode() + line + b"\n")
        self.num_added += 1

    def commit(self, num_events: int) -> None:
        """Write the num_events oldest pending events and return once they are on disk.

        Raises JournalError, and everything stays in memory; OwnershipLost.
        """
        lines = self._pending[:num_events]
        if not lines:
            return
        try:
            if self._descriptor is None:
                if self._fence is not None:
                    self._fence.check()
                self._descriptor = make_file(self._path, 0, (), self._fence)
            data = b"".join(lines)
            write_at(self._descriptor, self._num_bytes, [memoryview(data)], len(data))
            os.fdatasync(self._descriptor)
            if self._fence is not None:
                self._fence.check()  # after the write: a later owner will find it
        except OSError as error:
            if self._fence is not None:
                with contextlib.suppress(OSError):  # the same disk may refuse this, too
                    self._fence.check()  # the usual reason, where the staging directory is gone
            raise JournalError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._num_bytes += sum(map(len, lines))
        del self._pending[: len(lines)]

    def close(self) -> None:
        """Close the file.  Idempotent."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _decode(path: Path, number: int, line: bytes) -> Event:
    try:
        facts: dict[str, Any] = json.loads(line)
        kind = _KINDS[facts.pop("event")]
        if kind is Dropped:
            facts["reason"] = DropReason(facts["reason"])
        if kind is Trained:
            facts["skipped"] = tuple(facts["skipped"])
        return kind(**facts)
    except (ValueError, TypeError, KeyError) as error:
        raise JournalError(
            f"{path}, line {number}: unknown here: {error!r}; is it of another version of rlhpc?"
        ) from error
