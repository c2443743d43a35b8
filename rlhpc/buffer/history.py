"""The history of a run's groups, written and read back: since a checkpoint or since the start.

In this file: the log of events; the state that events add up to (fold); the history, from journal and events.
rollout_journal.py writes the history of a live run.

Input of the history: the files of a rollouts directory, and the position that a checkpoint covers.  Output: History.
An attempt that continued from an earlier step repeats steps: the batch chosen last for a step counts.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.base.files import sync_directory
from rlhpc.base.ownership import Fence
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.journal import JournalRecord, journal_paths, read_first_sequence, read_journal
from rlhpc.buffer.log import FramedRecord, LogContent, LogEncoder, LogKind, LogWriter, damage_in_words, read_log
from rlhpc.protocol.errors import JournalError

# ------------------------------------------------------------------------------------------------------------ event log
#
# The log of events of groups: admitted, taken for a step, trained, dropped.
#
#     rollouts/events_000000.log      one file an attempt, a record (log.py) each; sequence numbers from 1
#
# Input: events.  Output: records that are on disk.  With the journal this is the whole history of a run: the state of
# its ledger at any instant can be derived from both.
# Guarantees: those of the log.  A damaged record costs that event, and is reported.


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt begins."""

    step: int  # the step that its trainer begins with
    num_rollouts: int  # rollouts of earlier attempts count up to this number
    goes_on: bool  # False: it starts over, and earlier events do not count
    timeline: int = -1  # first attempt whose published versions are all repeated up to here; -1: this attempt


@dataclass(frozen=True, slots=True)
class Admitted:
    """A prompt got a slot."""

    group: int
    prompt: int
    version: int  # the live one
    size: int = 0  # rollouts wanted for it, if more than admission.group_size


@dataclass(frozen=True, slots=True)
class Taken:
    """The batch of a step is chosen; on disk before the resulting weights are published."""

    step: int
    groups: tuple[int, ...]  # in the order of the batch


@dataclass(frozen=True, slots=True)
class Trained:
    """The step was done."""

    step: int
    version: int  # the one that was trained
    applied: bool  # False: skipped on all ranks, the version stayed
    metrics: dict[str, float] = field(default_factory=dict)  # of the trainer
    refused: str = ""  # metrics for which the guard skipped the step, or some of its optimiser steps
    skipped: tuple[int, ...] = ()  # indices of the skipped optimiser steps
    began_s: float = 0.0  # seconds that the run had trained before this step

    @property
    def next_version(self) -> int:
        """Version of the policy after this step."""
        return self.version + self.applied


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group was dropped: it is not trained on."""

    group: int
    reason: DropReason


Event = Began | Admitted | Taken | Trained | Dropped
EVENTS = LogKind("events", "events", (Began, Admitted, Taken, Trained, Dropped))


@dataclass(frozen=True, slots=True)
class EventFile:
    """Content of a file."""

    attempt: int
    events: dict[int, Event]  # by number in the file, from 1
    log: LogContent


def event_paths(directory: Path) -> list[Path]:
    """The event files of a rollouts directory, in the order of attempts.  Raises OSError."""
    return EVENTS.paths(directory)


def read_events(path: Path) -> EventFile:
    """Every undamaged event of a file.  Raises JournalError: the file cannot be read, or is of another version."""
    content = read_log(path, EVENTS)
    return EventFile(content.head.attempt, dict(content.messages()), content)


class GroupEventLog:
    """The only writer of an attempt's events.  `add` may be called by one thread while another one commits."""

    def __init__(self, directory: Path, attempt: int, fence: Fence | None = None, run_name: str = "") -> None:
        """Creates no file until there is something to write."""
        self._writer = LogWriter(EVENTS, directory, run_name=run_name, attempt=attempt, fence=fence)
        self._encoder, self._attempt = LogEncoder(EVENTS, attempt), attempt
        self._pending: list[FramedRecord] = []
        self.num_added = 0  # events of the file, once all are written

    @property
    def num_pending(self) -> int:
        """Events that are only in memory."""
        return len(self._pending)

    def add(self, event: Event) -> None:
        """Keep an event for the next commit."""
        self.num_added += 1
        self._pending.append(self._encoder.encode(event, self.num_added))

    def commit(self, num_events: int) -> None:
        """Write the num_events oldest pending events and return once they are on disk.

        Raises JournalError, and everything stays in memory; OwnershipLost.
        """
        records = self._pending[:num_events]
        if not records:
            return
        if not self._writer.num_bytes:
            self._writer.begin(self._attempt)
        self._writer.append(records)
        del self._pending[: len(records)]

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._writer.close()


# ----------------------------------------------------------------------------------------------------------------- fold
#
# The state that the events of a run add up to.  Replay, `rlhpc rollouts`, `rlhpc check` and `rlhpc audit` use it.
#
# Input: events, in order.  Output: the state after each.  Pure; checks nothing: the audit compares each event with
# the state before it.


@dataclass(slots=True)
class EventFold:
    """State after the events so far, without the events that no longer count.

    An attempt repeats steps of the one before.  If it takes another batch, the old step and later ones are void, since
    their weights are lost.  An attempt that starts over voids everything before it.
    """

    admitted: dict[int, Admitted] = field(default_factory=dict)  # by group
    admitted_by: dict[int, int] = field(default_factory=dict)  # group → the attempt that admitted it last
    first_version_of: dict[int, int] = field(default_factory=dict)  # of a group that came back → its version before
    dropped: dict[int, DropReason] = field(default_factory=dict)  # by group
    batches: dict[int, Taken] = field(default_factory=dict)  # by step
    trained: dict[int, Trained] = field(default_factory=dict)  # by step
    step_of: dict[int, int] = field(default_factory=dict)  # group → the step whose batch has it
    last_step: int = -1  # the highest of batches and trained
    limits: dict[int, int] = field(default_factory=dict)  # attempt → rollouts of earlier attempts that count
    num_void: int = 0  # rollouts up to this number are from before the run started over
    first_attempt: int = 0  # that counts: one that starts over is the first
    timeline: int = -1  # of the last attempt; -1: there was none
    lost_version: int = -1  # the highest that a void step has made; -1: none has

    def apply(self, attempt: int, event: Event) -> None:
        """Add the next event of an attempt."""
        match event:
            case Began():
                self._begin(attempt, event)
            case Admitted():
                if event.group in self.admitted:
                    self.first_version_of[event.group] = self.admitted[event.group].version
                self.admitted[event.group], self.admitted_by[event.group] = event, attempt
            case Dropped():
                self.dropped[event.group] = event.reason
            case Taken():
                self._take(event)
            case Trained():
                self.trained[event.step] = event
                self.last_step = max(self.last_step, event.step)

    def last_rollout_that_counts(self, attempt: int) -> int | None:
        """Number of an attempt's last rollout before its successor began: later ones do not count; None: all count."""
        later = (limit for other, limit in self.limits.items() if other > attempt)
        return min(later, default=None)

    def _begin(self, attempt: int, event: Began) -> None:
        self.timeline = attempt if event.timeline < 0 else event.timeline
        self.limits[attempt] = event.num_rollouts
        if not event.goes_on:
            self._void_from(0)
            for known in (self.admitted, self.admitted_by, self.first_version_of, self.dropped, self.step_of):
                known.clear()
            self.first_attempt, self.num_void = attempt, event.num_rollouts

    def _take(self, taken: Taken) -> None:
        known = self.batches.get(taken.step)
        if known is None or known.groups != taken.groups:  # else a repeated step, whose outcome is known
            self._void_from(taken.step)
            self.batches[taken.step] = taken
            self.last_step = max(self.last_step, taken.step)
        self.step_of.update(dict.fromkeys(taken.groups, taken.step))

    def _void_from(self, step: int) -> None:
        """Forget a step and later ones: they are sampled or trained again."""
        if step > self.last_step:
            return
        for later in [known for known in self.batches if known >= step]:
            for group in self.batches.pop(later).groups:
                if self.step_of.get(group) == later:
                    del self.step_of[group]
        for later in [known for known in self.trained if known >= step]:
            self.lost_version = max(self.lost_version, self.trained.pop(later).next_version)
        self.last_step = max([-1, *self.batches, *self.trained])


# -------------------------------------------------------------------------------------------------------------- history


log = logging.getLogger("rlhpc.journal")


@dataclass(frozen=True, slots=True)
class Position:
    """A moment of a run, between two of its events."""

    attempt: int = 0
    num_events: int = 0  # of this attempt
    num_rollouts: int = 0  # of the run


START = Position()


@dataclass(slots=True)
class History(EventFold):
    """Everything recorded after a position: events, and the rollouts that count."""

    rollouts: list[JournalRecord] = field(default_factory=list)  # in the order of arrival
    implied: dict[int, Admitted] = field(default_factory=dict)  # admissions whose event is lost, inferred from rollouts
    num_rollouts: int = 0  # the highest number in use
    num_tokens: int = 0  # of completions that a buffer has taken back (RolloutBuffer.restore)
    lost_beginning: str = ""  # problem: the rollouts just after the position are missing; also in `problems`
    unread: JournalError | None = None  # why a file cannot be read at all; also in `problems`
    problems: list[str] = field(default_factory=list)  # descriptions of damaged or missing items


def read_history(directory: Path, position: Position) -> History:
    """The history after a position.  Damage is reported in `problems`.  Raises JournalError, OSError."""
    history = fold_events(directory, position)
    history.rollouts = list(_rollouts(directory, history))
    history.implied = _implied(history)
    return history


def fold_events(directory: Path, position: Position = START) -> History:
    """A history without its rollouts.  Raises JournalError, OSError."""
    history = History(num_void=position.num_rollouts)
    for attempt, path in EVENTS.numbered(directory):
        if attempt < position.attempt:
            continue
        file = read_events(path)
        if file.log.damage and not file.log.is_torn:
            history.problems.append(f"{path}: {damage_in_words(file.log.damage)} are damaged")
        known = position.num_events if attempt == position.attempt else 0
        for number, event in file.events.items():
            if number > known or isinstance(event, Began):  # where the position's attempt began is always needed
                history.apply(attempt, event)
    history.num_void = history.num_rollouts = max(position.num_rollouts, history.num_void)
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
    """Admissions implied by rollouts, which an interrupted commit may have written without their admission."""
    implied = dict[int, Admitted]()
    for record in history.rollouts:
        rollout = record.scored.rollout
        if (group_id := rollout.group_id) not in history.admitted:
            size = max(rollout.sample_index + 1, implied[group_id].size if group_id in implied else 0)
            implied[group_id] = Admitted(group_id, rollout.prompt_id, record.admitted_version, size)
    return implied


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step whose batch was chosen: it is repeated with the same groups."""

    step: int
    groups: tuple[int, ...]
    trained: Trained | None  # result of the step; None: not recorded before the end


@dataclass(slots=True)
class Replay:
    """Steps after the checkpoint, and the groups restored from the journal."""

    steps: tuple[RecordedStep, ...] = ()
    restored: Sequence[ResolvedGroup] = ()  # finished or dropped since the checkpoint, in order of admission
    timeline: int = 0  # tokens count if they were sampled with weights of this timeline (timeline_of)
    version: int = 0  # policy version after these steps
    num_tokens: int = 0  # of restored completions, whatever became of their groups

    def hand_over(self) -> deque[ResolvedGroup]:
        """Give away the restored groups: groups that are trained again must not be kept here, too."""
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
        steps.append(RecordedStep(taken.step, taken.groups, history.trained.get(taken.step)))
    return tuple(steps)


def timeline_of(history: History, attempt: int, first: int, steps: Sequence[RecordedStep]) -> int:
    """The attempt that began this one's timeline; within a timeline, a version is the same weights everywhere.

    The previous attempt's timeline goes on if each of its versions is repeated: weights are published once their step
    is on disk.  first: the step to begin with; steps: the repeated steps.
    """
    repeated = {step.step for step in steps}
    makes_all_again = all(step < first or step in repeated for step in history.trained)
    return history.timeline if history.timeline >= 0 and makes_all_again and not history.problems else attempt


def version_after(steps: Sequence[RecordedStep], version: int) -> int:
    """The policy version after repeating these steps; a lower bound if a step's outcome is not known."""
    for step in steps:
        if step.trained is not None:
            version = step.trained.next_version
    return version


def delete_old_journals(directory: Path, position: Position) -> int:
    """Delete files that neither a checkpoint at that position nor a later one needs; return their number.

    Raises JournalError, OSError.
    """
    paths = journal_paths(directory)
    firsts = [read_first_sequence(path) for path in paths]
    old = [path for path, after in zip(paths, firsts[1:], strict=False) if after <= position.num_rollouts + 1]
    for path in old:
        path.unlink()
    return len(old)


def _rollouts(directory: Path, history: History) -> Iterator[JournalRecord]:
    expected = history.num_void + 1
    for path in journal_paths(directory):
        try:
            content = read_journal(path, is_mapped=True)
        except JournalError as error:
            history.problems.append(str(error))
            history.unread = error
            continue
        if content.log.damage and not content.log.is_torn:
            history.problems.append(f"{path}: {damage_in_words(content.log.damage)} are damaged")
        last = history.last_rollout_that_counts(content.attempt)
        for record in content.records:
            if record.sequence > history.num_void and (last is None or record.sequence <= last):
                if record.sequence > expected:
                    last_lost = record.sequence - 1
                    lost = f"rollout {expected}" if last_lost == expected else f"rollouts {expected} to {last_lost}"
                    history.problems.append(f"missing in the run: {lost}")
                    if expected == history.num_void + 1:
                        history.lost_beginning = history.problems[-1]
                expected = record.sequence + 1
                history.num_rollouts = max(history.num_rollouts, record.sequence)
                yield record
