"""What journal and events say has happened since a checkpoint, or since the start of a run.

Input: the files of a rollouts directory, and the position up to which a checkpoint knows everything.  Output: History.
An attempt that went on from an earlier step repeats steps: the batch of a step that was chosen last is the one that
counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.buffer.event_log import Admitted, Began, Dropped, Event, Taken, Trained, attempt_of, event_paths, read_events
from rlhpc.buffer.journal_files import journal_paths
from rlhpc.buffer.journal_reader import read_first_sequence, read_journal
from rlhpc.buffer.journal_rows import JournalRecord
from rlhpc.buffer.resolved import DropReason, ResolvedGroup
from rlhpc.errors import JournalError

log = logging.getLogger("rlhpc.journal")


@dataclass(frozen=True, slots=True)
class Position:
    """A moment of a run, between two of its events."""

    attempt: int = 0
    num_events: int = 0  # of this attempt
    num_rollouts: int = 0  # of the run


START = Position()


@dataclass(slots=True)
class History:
    """What was recorded after a position."""

    rollouts: list[JournalRecord] = field(default_factory=list)  # in the order of arrival
    admitted: dict[int, Admitted] = field(default_factory=dict)  # by group
    dropped: dict[int, DropReason] = field(default_factory=dict)
    batches: dict[int, Taken] = field(default_factory=dict)  # by step
    trained: dict[int, Trained] = field(default_factory=dict)  # by step
    num_rollouts: int = 0  # the highest number that counts
    first_attempt: int = 0  # of those that count: an attempt that starts over is the first
    lacks_beginning: bool = False  # whether the rollouts just after the position are missing
    problems: list[str] = field(default_factory=list)  # what is damaged or missing, in words


def read_history(directory: Path, position: Position) -> History:
    """All that counts after a position.  Damage is reported in `problems`.  Raises JournalError, OSError."""
    history = History(num_rollouts=position.num_rollouts)
    limits = dict[int, int]()  # attempt → rollouts of it and of those before it that count
    for path in event_paths(directory):
        if attempt_of(path) < position.attempt:
            continue
        file = read_events(path)
        if file.damaged_lines and not file.is_torn:
            history.problems.append(f"{path}: lines {file.damaged_lines} are damaged")
        known = position.num_events if file.attempt == position.attempt else 0
        for line, event in file.events.items():
            if isinstance(event, Began):
                limits[file.attempt] = event.num_rollouts
                if not event.goes_on:
                    history.first_attempt = file.attempt
                if not event.goes_on and line > known:
                    _forget(history)
                    position = Position(num_rollouts=event.num_rollouts)
                    history.num_rollouts = event.num_rollouts
            elif line > known:
                _add(history, event)
    history.rollouts = list(_rollouts(directory, position, limits, history))
    history.num_rollouts = max([history.num_rollouts, *(record.sequence for record in history.rollouts)])
    return history


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step whose batch was chosen: it is done again with the same groups."""

    step: int
    groups: tuple[int, ...]
    trained: Trained | None  # how it went; None: that was not recorded any more


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps after the checkpoint, and the groups that came back from the journal."""

    steps: tuple[RecordedStep, ...] = ()
    restored: Sequence[ResolvedGroup] = ()  # finished or dropped since the checkpoint, in order of admission


def recorded_steps(history: History, first: int, is_finished: Callable[[int], bool]) -> tuple[RecordedStep, ...]:
    """The steps that can be done again, from `first` on: without a gap, and all their groups are whole."""
    steps, seen = list[RecordedStep](), set[int]()
    while (taken := history.batches.get(first + len(steps))) is not None:
        if not all(map(is_finished, taken.groups)) or seen & set(taken.groups):
            log.warning("step %d and later ones are not repeated: some of their rollouts are lost", taken.step)
            break
        seen.update(taken.groups)
        steps.append(RecordedStep(taken.step, tuple(taken.groups), history.trained.get(taken.step)))
    return tuple(steps)


def version_after(steps: Sequence[RecordedStep], version: int) -> int:
    """The policy version that repeating these steps leads to; at least that, where a step's outcome is not known."""
    for step in steps:
        if step.trained is not None:
            version = step.trained.version + int(step.trained.applied)
    return version


def delete_old_journals(directory: Path, position: Position) -> int:
    """Delete the files of which a checkpoint at that position, and all later ones, need nothing; return their number.

    Raises JournalError, OSError.
    """
    paths = journal_paths(directory)
    firsts = [read_first_sequence(path) for path in paths]
    old = [path for path, after in zip(paths, firsts[1:], strict=False) if after <= position.num_rollouts + 1]
    for path in old:
        path.unlink()
    return len(old)


def _forget(history: History) -> None:
    for known in (history.admitted, history.dropped, history.batches, history.trained):
        known.clear()


def _add(history: History, event: Event) -> None:
    match event:
        case Admitted():
            history.admitted[event.group] = event
        case Dropped():
            history.dropped[event.group] = event.reason
        case Taken():
            _take(history, event)
        case Trained():
            history.trained[event.step] = event


def _take(history: History, taken: Taken) -> None:
    known = history.batches.get(taken.step)
    if known is not None and list(known.groups) != list(taken.groups):  # what came after it, came of other weights
        for later in [step for step in history.batches if step > taken.step]:
            del history.batches[later]
            history.trained.pop(later, None)
    history.batches[taken.step] = taken
    history.trained.pop(taken.step, None)


def _rollouts(directory: Path, position: Position, limits: dict[int, int], history: History) -> Iterator[JournalRecord]:
    paths = journal_paths(directory)
    expected = position.num_rollouts + 1
    for path in paths:
        try:
            content = read_journal(path)
        except JournalError as error:
            history.problems.append(str(error))
            continue
        if content.damaged_rows and not content.is_torn:
            history.problems.append(f"{path}: rows {content.damaged_rows} are damaged")
        later = [limit for attempt, limit in limits.items() if attempt > content.layout.attempt]
        last = min(later, default=None)
        for record in content.records:
            if record.sequence > position.num_rollouts and (last is None or record.sequence <= last):
                if record.sequence > expected:
                    history.lacks_beginning |= expected == position.num_rollouts + 1
                    history.problems.append(f"rollouts {expected} to {record.sequence - 1} of the run are missing")
                expected = record.sequence + 1
                yield record
