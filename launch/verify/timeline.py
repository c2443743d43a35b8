"""Read the event logs of a run, continue later where the last reading ended, and check each event.

Input: rollouts/events_*.log.  Output: the state after the events (rlhpc/buffer/history.py: EventFold), and
contradictions: each event is compared with the state before it.  Unknown kinds of events are counted.  Memory: an
object per step, a few numbers per group.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.common.text import counted, numbered, quoted
from launch.verify.report import FileVerdict, Offence, ReadProgress, Row, from_to
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.history import (
    EVENTS,
    Admitted,
    Began,
    Dropped,
    Event,
    EventFold,
    Taken,
    Trained,
    event_paths,
    fold_events,
    read_events,
)
from rlhpc.buffer.journal import JournalContent, journal_paths, read_first_sequence, read_journal
from rlhpc.buffer.log import LogContent, damage_in_words, read_log
from rlhpc.protocol.errors import CheckpointError, JournalError, ProtocolError
from rlhpc.roles.controller.state import read_saved_state

# -------------------------------------------------------------------------------------------------------------- columns


def column(numbers: Mapping[int, Any], length: int, read: Callable[[Any], int] = int) -> NDArray[np.int64]:
    """Column of a value of each group from 0 to length − 1; -1 for missing groups."""
    groups = np.fromiter(numbers, np.int64, len(numbers))
    values = np.fromiter(map(read, numbers.values()), np.int64, len(numbers))
    found, is_within = np.full(length, -1, np.int64), (groups >= 0) & (groups < length)
    found[groups[is_within]] = values[is_within]
    return found


def joined(parts: list[NDArray[Any]], kind: Any = np.int64) -> NDArray[Any]:
    """Arrays end to end; an empty one of that kind if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, kind)


def reduced(ufunc: Any, values: NDArray[Any], offsets: NDArray[Any], empty: int) -> NDArray[np.int64]:
    """A ufunc over each piece values[offsets[i]:offsets[i + 1]]; `empty` for pieces without values."""
    result = np.full(len(offsets) - 1, empty, np.int64)
    is_filled = offsets[1:] > offsets[:-1]
    if is_filled.any():
        result[is_filled] = ufunc.reduceat(values, offsets[:-1][is_filled])
    return result


# --------------------------------------------------------------------------------------------------------------- events


@dataclass(slots=True)
class AttemptEvents:
    """Events of one attempt."""

    path: Path
    num_events: int = 0  # by number, the damaged ones too
    damage: list[tuple[int, int]] = field(default_factory=list)  # (first byte, end)
    is_torn: bool = False  # its end is half written
    order: array[int] = field(default_factory=lambda: array("q"))  # groups as they were resolved
    fates: array[int] = field(default_factory=lambda: array("q"))  # of those: the step, or -2 for dropped
    dropped: set[int] = field(default_factory=set)  # groups
    offset: int = 0  # bytes read
    expected_step: int = -1  # to be taken next; -1: not known
    untrained: int = -1  # the step that was taken and not trained
    version: int = -1  # before the next step; -1: not known


class EventEvidence:
    """All events of a run, their state, and the events that contradict it."""

    def __init__(self, rollouts: Path) -> None:
        self._rollouts = rollouts
        self.fold = EventFold()
        self.attempts: dict[int, AttemptEvents] = {}
        self.taken_at: dict[int, tuple[int, int]] = {}  # step → attempt and event of its last batch
        self.knows_all = False  # it has all events from the first group on
        self.first_admitted = 0  # the first known one
        self.unknown: Counter[str] = Counter()
        self.offences: list[Offence] = []
        self.trained_at_first = -1  # the last step that was trained at the first look
        self.num_looks = 0

    # --------------------------------------------------------------------------------------------------------- reading

    def look(self, *, is_last: bool = False) -> None:
        """Read events added since the last call.  Raises OSError, JournalError."""
        files = EVENTS.numbered(self._rollouts) if self._rollouts.is_dir() else []
        newest = self.newest_attempt
        for number, path in files:
            if number < newest:
                continue
            attempt = self.attempts.setdefault(number, AttemptEvents(path))
            self._read(attempt, number, may_be_written=path == files[-1][1] and not is_last)
        self.num_looks += 1
        if self.num_looks == 1:
            self.trained_at_first = max((step for step, _, _ in self.trained_steps()), default=-1)

    def _read(self, attempt: AttemptEvents, number: int, *, may_be_written: bool) -> None:
        content = read_log(attempt.path, EVENTS, start=attempt.offset)
        gap = next((first for first, _ in content.damage if first), None)  # not the head of the file
        unfinished = gap if may_be_written or content.is_torn else None
        attempt.is_torn = unfinished is not None  # being written, or left so
        for at, end in content.places:
            if unfinished is not None and at >= unfinished:
                break
            attempt.offset = end
            self._apply(attempt, number, content, at, end)
        damage = (each for each in content.damage if unfinished is None or each[0] < unfinished)
        attempt.damage += [each for each in damage if each not in attempt.damage]

    def is_whole(self, attempt: int) -> bool:
        """True if every event of an attempt up to the last one on disk is known."""
        return attempt in self.attempts and not self.attempts[attempt].damage

    @property
    def are_whole(self) -> bool:
        """True if no event is damaged."""
        return not any(attempt.damage for attempt in self.attempts.values())

    # ------------------------------------------------------------------------------------------------------------ laws

    @property
    def num_admitted(self) -> int:
        """Number of admitted groups: one more than the highest id."""
        return max(self.fold.admitted, default=-1) + 1

    @property
    def newest_attempt(self) -> int:
        """The last attempt with events; -1: none."""
        return max(self.attempts, default=-1)

    def trained_steps(self) -> Iterator[tuple[int, Taken, Trained]]:
        """Each trained step with its batch and outcome, in order."""
        taken, trained = self.fold.batches, self.fold.trained
        return ((step, taken[step], trained[step]) for step in sorted(taken.keys() & trained.keys()))

    def _apply(self, attempt: AttemptEvents, number: int, content: LogContent, at: int, end: int) -> None:
        try:
            attempt.num_events, event = content.message(at, end)
        except JournalError as error:
            self.unknown[error.__cause__.field if isinstance(error.__cause__, ProtocolError) else str(error)] += 1
            return
        if isinstance(event, Trained):
            event = replace(event, metrics={})  # gigabytes in a long run
        self._judge(attempt, number, event)
        self.fold.apply(number, event)

    def _judge(self, attempt: AttemptEvents, number: int, event: Event) -> None:
        """Compare an event with the state before it."""
        match event:
            case Began():
                self._began(attempt, event)
            case Admitted():
                self._admitted(attempt, number, event)
            case Taken():
                self._taken(attempt, number, event)
            case Trained():
                self._trained(attempt, number, event)
            case Dropped():
                self._dropped(attempt, number, event)

    def _accuse(self, attempt: AttemptEvents, text: str, group: int = -1, step: int = -1) -> None:
        """Report a violation unless a damaged event of the same attempt may explain it."""
        if not attempt.damage:
            file = f"{self._rollouts.name}/{attempt.path.name}"
            self.offences.append(Offence(text, group=group, step=step, file=file, row=attempt.num_events))

    def _began(self, attempt: AttemptEvents, event: Began) -> None:
        attempt.expected_step = event.step
        if not event.goes_on:
            self.knows_all = True
        elif len(self.attempts) == 1:
            self.knows_all = event.step == 0
        before = self.fold.trained.get(event.step - 1) if event.goes_on else None
        attempt.version = 0 if event.step == 0 else before.next_version if before is not None else -1

    def _admitted(self, attempt: AttemptEvents, number: int, event: Admitted) -> None:
        if not self.fold.admitted:
            self.first_admitted = 0 if self.knows_all else event.group
        if self.fold.admitted_by.get(event.group) == number:
            self._accuse(attempt, f"group {event.group} is admitted a second time", event.group)

    def _taken(self, attempt: AttemptEvents, number: int, event: Taken) -> None:
        step, groups = event.step, event.groups
        if attempt.untrained >= 0:
            text = f"step {step} is taken while step {attempt.untrained} is not trained"
            self._accuse(attempt, text, step=step)
        elif attempt.expected_step not in (-1, step):
            self._accuse(attempt, f"step {step} follows, where step {attempt.expected_step} is due", step=step)
        known = self.fold.batches.get(step)
        is_repeated = known is not None and known.groups == groups
        for group in groups:
            other = self.fold.step_of.get(group, step)
            if other < step or (other > step and is_repeated):  # another batch makes later steps void
                self._accuse(attempt, f"group {group} is trained at step {other} and at step {step}", group, step)
            if self.knows_all and self.are_whole and group not in self.fold.admitted:
                self._accuse(attempt, f"group {group} of step {step} was never admitted", group, step)
            if group in attempt.dropped:
                self._accuse(attempt, f"group {group} was dropped, and is taken for step {step}", group, step)
        if len({*groups}) != len(groups):
            self._accuse(attempt, f"step {step} has a group twice: {sorted(groups)}", step=step)
        self.taken_at[step] = number, attempt.num_events
        attempt.untrained = attempt.expected_step = step

    def _trained(self, attempt: AttemptEvents, number: int, event: Trained) -> None:
        step, known = event.step, self.fold.batches.get(event.step)
        if known is None or self.taken_at[step][0] != number:
            self._accuse(attempt, f"step {step} is trained, and no batch was taken for it", step=step)
            return
        if attempt.untrained != step:
            self._accuse(attempt, f"step {step} is trained a second time", step=step)
            return
        if attempt.version not in (-1, event.version):
            text = f"step {step} trained version {event.version}, and the step before it made {attempt.version}"
            self._accuse(attempt, text, step=step)
        attempt.version, attempt.expected_step, attempt.untrained = event.next_version, step + 1, -1
        attempt.order.extend(known.groups)
        attempt.fates.extend([step] * len(known.groups))

    def _dropped(self, attempt: AttemptEvents, number: int, event: Dropped) -> None:
        group, step = event.group, self.fold.step_of.get(event.group)
        if group in attempt.dropped:
            self._accuse(attempt, f"group {group} is dropped a second time", group)
        if step is not None and self.taken_at[step][0] == number:
            self._accuse(attempt, f"group {group} is dropped, and is of step {step}", group)
        attempt.dropped.add(group)
        attempt.order.append(group)
        attempt.fates.append(-2)


# -------------------------------------------------------------------------------------------------------- journal check
#
# The journal and the events of a run: checksums of every row and event, gaps in numbers, contradictions.
#
#     rollouts/journal_NNNNNN.log, rollouts/events_NNNNNN.log ─▶ rows of `rlhpc check RUN_DIR`
#
# Also the work that a resume would repeat: the steps after its checkpoint.  Guarantees: a running or killed run is
# sound: the end of a file may be half written, and the oldest files are deleted once checkpoints have their content.
# One file is in memory at a time.


MOST_CONTRADICTIONS = 10
_HALF_WRITTEN = "at its end: half written when its process ended, or being written now"


def journal_rows(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    """Read every rollout of the journal."""
    paths = _found(journal_paths, layout)
    before: _Numbers | None = None  # None: the file before is not known
    num_rollouts, is_sound = 0, True
    for number, path in enumerate(paths, start=1):
        progress(f"{path.name} ({number} of {len(paths)})")
        try:
            content = read_settled_journal(path)
            rows = [*_damage("journal", content.log), *_not_in_sequence(before, content)]
        except (JournalError, OSError) as error:
            if not path.exists():  # deleted meanwhile, and all before it
                before = None
                continue
            rows = [Row("journal", path.name, FileVerdict.DAMAGED, str(error))]
        else:
            num_rollouts += len(content.records)
            before = _Numbers.of(content)
        is_sound &= all(row.verdict is not FileVerdict.DAMAGED for row in rows)
        yield from rows
    if paths and is_sound:
        text = f"{counted(num_rollouts, 'rollout')}, all checksums right"
        yield Row("journal", from_to(paths), FileVerdict.SOUND, text)


def event_rows(layout: RunLayout, progress: ReadProgress) -> Iterator[Row]:
    """Read every event, and follow the groups through them."""
    paths = _found(event_paths, layout)
    num_events, is_sound = 0, True
    for number, path in enumerate(paths, start=1):
        progress(f"{path.name} ({number} of {len(paths)})")
        try:
            file = read_events(path)
        except JournalError as error:
            if not path.exists():  # deleted meanwhile
                continue
            rows = [Row("events", path.name, FileVerdict.DAMAGED, str(error))]
        else:
            num_events += len(file.events)
            rows = [*_damage("events", file.log)]
        is_sound &= all(row.verdict is not FileVerdict.DAMAGED for row in rows)
        yield from rows
    rows = [*_contradictions(layout)]
    yield from rows
    if paths and is_sound and not rows:
        text = f"{counted(num_events, 'event')}, all checksums right"
        yield Row("events", from_to(paths), FileVerdict.SOUND, text)


def first_rollout(layout: RunLayout) -> int | None:
    """Number of the journal's first rollout; None: it has none, or cannot be read.

    To be called before a checkpoint is chosen: a live run deletes files that the newest one makes superfluous.
    """
    try:
        return next((read_first_sequence(path) for path in _found(journal_paths, layout)), None)
    except JournalError:
        return None  # its row says so


def beginning_that_is_needed(layout: RunLayout, step: int | None, first: int | None) -> Iterator[Row]:
    """Row on missing rollouts just after the chosen checkpoint, if the journal has lost its beginning."""
    if first is None:
        return
    try:
        known = _known_to(layout, step)
    except (CheckpointError, JournalError, KeyError, TypeError, ValueError):
        return  # it was pruned meanwhile, or is of another version, or reported above
    if first > known + 1:
        since = f"the checkpoint of step {step} was taken" if step is not None else "the beginning"
        text = f"{layout.rollouts}: missing: {numbered('rollout', known + 1, first - 1)}, the first since {since}"
        yield Row("journal", layout.rollouts.name, FileVerdict.DAMAGED, text)


def replay_cost(layout: RunLayout, step: int | None) -> Iterator[Row]:
    """Row with the number and duration of recorded steps after the chosen checkpoint (None: the beginning)."""
    try:
        trained = fold_events(layout.rollouts).trained if layout.rollouts.is_dir() else {}
    except (JournalError, OSError):
        return  # its row stands above
    again = sorted(done for done in trained if done >= (step or 0))
    if again:
        since = f"the checkpoint of step {step}" if step else "the beginning"
        took_s = sum(trained[done].metrics.get("step_s", 0.0) for done in again)
        text = f"since {since}, {numbered('step', again[0], again[-1])} would be trained again, from the journal"
        yield Row(
            "replay", layout.rollouts.name, FileVerdict.NOTE, f"{text}: {took_s:.1f} s of training; nothing is sampled"
        )


def _known_to(layout: RunLayout, step: int | None) -> int:
    """Number of the last rollout before the point that a resume continues from."""
    if step is not None:
        return int(read_saved_state(layout, step).buffer["journal"]["num_rollouts"])
    return fold_events(layout.rollouts).num_void if layout.rollouts.is_dir() else 0


def _damage(part: str, content: LogContent) -> Iterator[Row]:
    path, where = content.path, damage_in_words(content.damage)
    if content.is_torn:
        yield Row(part, path.name, FileVerdict.NOTE, f"{where} {_HALF_WRITTEN}")
    elif content.damage:
        yield Row(part, path.name, FileVerdict.DAMAGED, f"{path}: {where} are damaged: the checksums differ")


def _found(paths_in: Callable[[Path], list[Path]], layout: RunLayout) -> list[Path]:
    return paths_in(layout.rollouts) if layout.rollouts.is_dir() else []


# ------------------------------------------------------------------------------------------------------ journal files


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of the rollouts of one file."""

    path: Path
    attempt: int
    last: int

    @classmethod
    def of(cls, content: JournalContent) -> _Numbers:
        """Numbers of a file; without rollouts, the number before its first."""
        last = content.records[-1].sequence if content.records else content.first_sequence - 1
        return cls(content.log.path, content.attempt, last)


def read_settled_journal(path: Path) -> JournalContent:
    """Read a file, again if it is damaged: a reader that overtakes a writer sees a torn row before whole ones.

    Raises JournalError, OSError.
    """
    content = read_journal(path)
    return read_journal(path) if content.log.damage else content


def _not_in_sequence(before: _Numbers | None, content: JournalContent) -> Iterator[Row]:
    """Report gaps; rollouts that an older attempt wrote after its successor's beginning do not count."""
    if before is None:
        return
    path, first, expected = content.log.path, content.first_sequence, before.last + 1
    if first > expected:
        text = f"missing between {before.path} and {path.name}: {numbered('rollout', expected, first - 1)}"
        yield Row("journal", before.path.name, FileVerdict.DAMAGED, text)
    elif first < expected and content.attempt == before.attempt:
        text = f"{path}: also in {before.path.name}: {numbered('rollout', first, before.last)}"
        yield Row("journal", path.name, FileVerdict.DAMAGED, text)


# -------------------------------------------------------------------------------------------------------- event files


def _contradictions(layout: RunLayout) -> Iterator[Row]:
    """Rows on contradictions by the rules of `rlhpc audit`, without those that a damaged event may explain."""
    evidence = EventEvidence(layout.rollouts)
    with suppress(OSError, JournalError):  # reported above, or deleted meanwhile
        evidence.look()
    for offence in evidence.offences[:MOST_CONTRADICTIONS]:
        text = f"{layout.root / offence.file}: {offence.text}"
        yield Row("events", Path(offence.file).name, FileVerdict.DAMAGED, text)
    if len(evidence.offences) > MOST_CONTRADICTIONS:
        text = f"{len(evidence.offences) - MOST_CONTRADICTIONS} more contradictions"
        yield Row(
            "events",
            layout.rollouts.name,
            FileVerdict.DAMAGED,
            f"{text}: `rlhpc audit {quoted(layout.root)}` lists them",
        )
