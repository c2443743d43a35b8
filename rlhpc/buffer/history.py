"""The history since a checkpoint, or since the start of a run, from journal and events.

Input: the files of a rollouts directory, and the position that a checkpoint covers.  Output: History.
An attempt that continued from an earlier step repeats steps: the batch that was chosen last for a step counts.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.buffer.event_log import (
    Admitted,
    Began,
    Dropped,
    Event,
    Taken,
    Trained,
    attempt_of,
    event_paths,
    read_events,
)
from rlhpc.buffer.journal_files import journal_paths
from rlhpc.buffer.journal_reader import read_first_sequence, read_journal
from rlhpc.buffer.journal_rows import JournalRecord
from rlhpc.buffer.resolved import DropReason, ResolvedGroup
from rlhpc.errors import JournalError
from rlhpc.files import sync_directory

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
    """All that was recorded after a position."""

    rollouts: list[JournalRecord] = field(default_factory=list)  # in the order of arrival
    admitted: dict[int, Admitted] = field(default_factory=dict)  # by group
    implied: dict[int, Admitted] = field(default_factory=dict)  # admissions whose event is lost, inferred from rollouts
    dropped: dict[int, DropReason] = field(default_factory=dict)
    batches: dict[int, Taken] = field(default_factory=dict)  # by step
    trained: dict[int, Trained] = field(default_factory=dict)  # by step
    num_rollouts: int = 0  # the highest number in use
    num_tokens: int = 0  # of completions that a buffer has taken back (RolloutBuffer.restore)
    first_attempt: int = 0  # that counts: one that starts over is the first
    lost_beginning: str = ""  # that the rollouts just after the position are missing; also in `problems`
    unread: JournalError | None = None  # why a file cannot be read at all, if so; also in `problems`
    problems: list[str] = field(default_factory=list)  # descriptions of damaged or missing items
    timeline: int = -1  # of the last attempt; -1: there was none


def read_history(directory: Path, position: Position) -> History:
    """All that counts after a position.  Damage is reported in `problems`.  Raises JournalError, OSError."""
    history = History(num_rollouts=position.num_rollouts)
    limits = dict[int, int]()  # attempt → rollouts of earlier attempts that count
    for path in event_paths(directory):
        if attempt_of(path) < position.attempt:
            continue
        file = read_events(path)
        if file.damaged_lines and not file.is_torn:
            history.problems.append(f"{path}: lines {file.damaged_lines} are damaged")
        known = position.num_events if file.attempt == position.attempt else 0
        for line, event in file.events.items():
            if isinstance(event, Began):
                history.timeline = file.attempt if event.timeline < 0 else event.timeline
                limits[file.attempt] = event.num_rollouts
                if not event.goes_on:
                    position = _start_over(history, event, file.attempt, position, line > known)
            elif line > known:
                _add(history, event)
    history.rollouts = list(_rollouts(directory, position, limits, history))
    history.implied = _implied(history)
    return history


def make_durable(directory: Path) -> None:
    """Return once everything that read_history would read is on disk.

    Writes of a process that was killed before it synced may be only in this machine's memory, and a resume must not
    build on data that a power cut could still lose.  Raises OSError.
    """
    for path in (*journal_paths(directory), *event_paths(directory)):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(directory)


def _implied(history: History) -> dict[int, Admitted]:
    """An interrupted commit may have written a rollout but not its group's admission."""
    implied = dict[int, Admitted]()
    for record in history.rollouts:
        rollout = record.scored.rollout
        if (group_id := rollout.group_id) not in history.admitted:
            size = max(rollout.sample_index + 1, implied[group_id].size if group_id in implied else 0)
            implied[group_id] = Admitted(group_id, rollout.prompt.prompt_id, record.admitted_version, size)
    return implied


def _start_over(history: History, event: Began, attempt: int, position: Position, is_news: bool) -> Position:
    """Discard all earlier history; return the position from which history counts."""
    history.first_attempt = attempt
    if not is_news:
        return position
    _forget(history)
    history.num_rollouts = event.num_rollouts
    return Position(num_rollouts=event.num_rollouts)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step whose batch was chosen: it is repeated with the same groups."""

    step: int
    groups: tuple[int, ...]
    trained: Trained | None  # how it went; None: not recorded before the end


@dataclass(slots=True)
class Replay:
    """Steps after the checkpoint, and the groups that came back from the journal."""

    steps: tuple[RecordedStep, ...] = ()
    restored: Sequence[ResolvedGroup] = ()  # finished or dropped since the checkpoint, in order of admission
    timeline: int = 0  # what generators have sampled counts if the weights were of this timeline (timeline_of)
    version: int = 0  # that these steps lead to
    num_tokens: int = 0  # of completions that came back, whatever became of their groups

    def hand_over(self) -> deque[ResolvedGroup]:
        """Give away the groups that came back: groups that are trained again must not be kept here, too."""
        found, self.restored = deque(self.restored), ()
        return found


def recorded_steps(history: History, first: int, is_finished: Callable[[int], bool]) -> tuple[RecordedStep, ...]:
    """The steps from `first` on that can be repeated: without a gap, with all their groups complete."""
    steps, seen = list[RecordedStep](), set[int]()
    while (taken := history.batches.get(first + len(steps))) is not None:
        if not all(map(is_finished, taken.groups)) or seen & set(taken.groups):
            log.warning("step %d and later ones are not repeated: some of their rollouts are lost", taken.step)
            break
        seen.update(taken.groups)
        steps.append(RecordedStep(taken.step, tuple(taken.groups), history.trained.get(taken.step)))
    return tuple(steps)


def timeline_of(history: History, attempt: int, first: int, steps: Sequence[RecordedStep]) -> int:
    """The attempt that began this one's timeline; within a timeline, a version is the same weights everywhere.

    The previous attempt's timeline goes on if each of its versions is repeated: weights are published once their step
    is on disk.  first: the step to begin with; steps: those that are repeated.
    """
    repeated = {step.step for step in steps}
    makes_all_again = all(step < first or step in repeated for step in history.trained)
    return history.timeline if history.timeline >= 0 and makes_all_again and not history.problems else attempt


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
    if known is not None and list(known.groups) == list(taken.groups):
        return  # it is repeated: how it went is known until it has gone anew
    for steps in (history.batches, history.trained):  # what came after it, came of other weights
        for step in [step for step in steps if step >= taken.step]:
            del steps[step]
    history.batches[taken.step] = taken


def _rollouts(directory: Path, position: Position, limits: dict[int, int], history: History) -> Iterator[JournalRecord]:
    paths = journal_paths(directory)
    expected = position.num_rollouts + 1
    for path in paths:
        try:
            content = read_journal(path, is_mapped=True)
        except JournalError as error:
            history.problems.append(str(error))
            history.unread = error
            continue
        if content.damaged_rows and not content.is_torn:
            history.problems.append(f"{path}: rows {content.damaged_rows} are damaged")
        later = [limit for attempt, limit in limits.items() if attempt > content.layout.attempt]
        last = min(later, default=None)
        for record in content.records:
            if record.sequence > position.num_rollouts and (last is None or record.sequence <= last):
                if record.sequence > expected:
                    last_lost = record.sequence - 1
                    lost = f"rollout {expected}" if last_lost == expected else f"rollouts {expected} to {last_lost}"
                    history.problems.append(f"missing in the run: {lost}")
                    if expected == position.num_rollouts + 1:
                        history.lost_beginning = history.problems[-1]
                expected = record.sequence + 1
                history.num_rollouts = max(history.num_rollouts, record.sequence)
                yield record
