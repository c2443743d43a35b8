"""The journal and the events of a run: every row and line by its checksum, no number missing, no step that cannot be.

    rollouts/journal_NNNNNN.h5, rollouts/events_NNNNNN.jsonl ─▶ rows of `rlhpc check RUN_DIR`

Also the work that a resume would repeat: the steps after the checkpoint that it starts from.
Guarantees: a run that is going on, or was killed, is sound: the end of a file may be half written, and the oldest files
are deleted once checkpoints hold what they say.  One file is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.checks.audit.events import EventEvidence
from launch.checks.run_rows import Progress, Row, Verdict, from_to, listed
from launch.common.counted import counted, numbered
from launch.common.paths import quoted
from rlhpc.buffer.event_log import Began, EventFile, Trained, event_paths, read_events
from rlhpc.buffer.journal_files import journal_paths
from rlhpc.buffer.journal_reader import JournalContent, read_first_sequence, read_journal
from rlhpc.errors import CheckpointError, JournalError
from rlhpc.roles.controller.saved_state import read_saved_state
from rlhpc.run_layout import RunLayout

MOST_CONTRADICTIONS = 10
_HALF_WRITTEN = "at its end: half written when its process ended, or being written now"


def journal_rows(layout: RunLayout, progress: Progress) -> Iterator[Row]:
    """Read every rollout of the journal."""
    paths = _found(journal_paths, layout)
    before: _Numbers | None = None  # None: nothing is known of the file before
    num_rollouts, is_sound = 0, True
    for number, path in enumerate(paths, start=1):
        progress(f"{path.name} ({number} of {len(paths)})")
        try:
            content = read_settled_journal(path)
            rows = [*_journal_damage(content), *_not_in_sequence(before, content)]
        except (JournalError, OSError) as error:
            if not path.exists():  # deleted meanwhile, and all before it
                before = None
                continue
            rows = [Row("journal", path.name, Verdict.DAMAGED, str(error))]
        else:
            num_rollouts += len(content.records)
            before = _Numbers.of(content)
        is_sound &= all(row.verdict is not Verdict.DAMAGED for row in rows)
        yield from rows
    if paths and is_sound:
        text = f"{counted(num_rollouts, 'rollout')}, all checksums right"
        yield Row("journal", from_to(paths), Verdict.SOUND, text)


def event_rows(layout: RunLayout, progress: Progress) -> Iterator[Row]:
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
            rows = [Row("events", path.name, Verdict.DAMAGED, str(error))]
        else:
            num_events += len(file.events)
            rows = [*_event_damage(file)]
        is_sound &= all(row.verdict is not Verdict.DAMAGED for row in rows)
        yield from rows
    rows = [*_contradictions(layout)]
    yield from rows
    if paths and is_sound and not rows:
        text = f"{counted(num_events, 'event')}, all checksums right"
        yield Row("events", from_to(paths), Verdict.SOUND, text)


def first_rollout(layout: RunLayout) -> int | None:
    """Number of the first rollout that the journal begins with; None: it has none, or that cannot be read.

    To be asked before a checkpoint is chosen: a live run deletes what the newest one makes superfluous.
    """
    try:
        return next((read_first_sequence(path) for path in _found(journal_paths, layout)), None)
    except JournalError:
        return None  # its row says so


def beginning_that_is_needed(layout: RunLayout, step: int | None, first: int | None) -> Iterator[Row]:
    """The rollouts just after the chosen checkpoint, which a journal without its beginning would not miss."""
    if first is None:
        return
    try:
        known = _known_to(layout, step)
    except (CheckpointError, JournalError, KeyError, TypeError, ValueError):
        return  # it was pruned meanwhile, or is not of this version, or its row stands above
    if first > known + 1:
        since = f"the checkpoint of step {step} was taken" if step is not None else "the beginning"
        text = f"{layout.rollouts}: missing: {numbered('rollout', known + 1, first - 1)}, the first since {since}"
        yield Row("journal", layout.rollouts.name, Verdict.DAMAGED, text)


def replay_cost(layout: RunLayout, step: int | None) -> Iterator[Row]:
    """How many recorded steps follow the chosen checkpoint (None: the beginning), and how long their training took."""
    seconds = dict[int, float]()
    try:
        for event in _events(layout):
            if isinstance(event, Began) and not event.goes_on:
                seconds.clear()
            elif isinstance(event, Trained):
                seconds[event.step] = event.metrics.get("step_s", 0.0)
    except (JournalError, OSError):
        return  # its row stands above
    again = sorted(done for done in seconds if done >= (step or 0))
    if again:
        since = f"the checkpoint of step {step}" if step else "the beginning"
        took_s = sum(seconds[done] for done in again)
        text = f"since {since}, {numbered('step', again[0], again[-1])} would be trained again, from the journal"
        yield Row(
            "replay", layout.rollouts.name, Verdict.NOTE, f"{text}: {took_s:.1f} s of training; nothing is sampled"
        )


def _known_to(layout: RunLayout, step: int | None) -> int:
    """Number of the last rollout before the point that a resume goes on from."""
    if step is not None:
        return int(read_saved_state(layout, step).buffer["journal"]["num_rollouts"])
    begun = (event for event in _events(layout) if isinstance(event, Began) and not event.goes_on)
    return max((event.num_rollouts for event in begun), default=0)


def _events(layout: RunLayout) -> Iterator[object]:
    """Of all files.  Raises JournalError, OSError."""
    return (event for path in _found(event_paths, layout) for event in read_events(path).events.values())


def _found(paths_in: Callable[[Path], list[Path]], layout: RunLayout) -> list[Path]:
    return paths_in(layout.rollouts) if layout.rollouts.is_dir() else []


# ------------------------------------------------------------------------------------------------------ journal files


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Of the rollouts of one file."""

    path: Path
    attempt: int
    last: int

    @classmethod
    def of(cls, content: JournalContent) -> _Numbers:
        """If it has none: the number before its first."""
        last = content.records[-1].sequence if content.records else content.layout.first_sequence - 1
        return cls(content.path, content.layout.attempt, last)


def read_settled_journal(path: Path) -> JournalContent:
    """What is damaged is read again: a reader that a writer overtakes misses a row, and finds the next ones whole.

    Raises JournalError, OSError.
    """
    content = read_journal(path)
    return read_journal(path) if content.damaged_rows else content


def _journal_damage(content: JournalContent) -> Iterator[Row]:
    path, rows = content.path, content.damaged_rows
    num_bytes, expected = path.stat().st_size, content.layout.file_bytes
    if num_bytes < expected:  # files have their full size before they have their names
        text = f"{path} is cut off: it has {num_bytes:,} of {expected:,} bytes"
        yield Row("journal", path.name, Verdict.DAMAGED, text)
    if content.is_torn:
        yield Row("journal", path.name, Verdict.NOTE, f"rows {listed(rows)} of `rollouts` {_HALF_WRITTEN}")
    elif rows:
        text = (
            f"{path}: rows {listed(rows)} of `rollouts`, or the data they refer to, are damaged: the checksums differ"
        )
        yield Row("journal", path.name, Verdict.DAMAGED, text)


def _not_in_sequence(before: _Numbers | None, content: JournalContent) -> Iterator[Row]:
    """A later attempt goes on where it found the end; what an older one wrote after that does not count."""
    if before is None:
        return
    first, expected = content.layout.first_sequence, before.last + 1
    if first > expected:
        text = f"missing between {before.path} and {content.path.name}: {numbered('rollout', expected, first - 1)}"
        yield Row("journal", before.path.name, Verdict.DAMAGED, text)
    elif first < expected and content.layout.attempt == before.attempt:
        text = f"{content.path}: also in {before.path.name}: {numbered('rollout', first, before.last)}"
        yield Row("journal", content.path.name, Verdict.DAMAGED, text)


# -------------------------------------------------------------------------------------------------------- event files


def _event_damage(file: EventFile) -> Iterator[Row]:
    lines = listed(file.damaged_lines)
    if file.is_torn:
        yield Row("events", file.path.name, Verdict.NOTE, f"line {lines} {_HALF_WRITTEN}")
    elif file.damaged_lines:
        text = f"{file.path}: lines {lines} are damaged: the checksums differ"
        yield Row("events", file.path.name, Verdict.DAMAGED, text)


def _contradictions(layout: RunLayout) -> Iterator[Row]:
    """What cannot have happened, by the rules of `rlhpc audit`; nothing is said that a damaged line may explain."""
    evidence = EventEvidence(layout.rollouts)
    with suppress(OSError, JournalError):  # a row above says so, or it was deleted meanwhile
        evidence.look()
    for offence in evidence.offences[:MOST_CONTRADICTIONS]:
        text = f"{layout.root / offence.file}: {offence.text}"
        yield Row("events", Path(offence.file).name, Verdict.DAMAGED, text)
    if len(evidence.offences) > MOST_CONTRADICTIONS:
        text = f"{len(evidence.offences) - MOST_CONTRADICTIONS} more contradictions"
        yield Row(
            "events", layout.rollouts.name, Verdict.DAMAGED, f"{text}: `rlhpc audit {quoted(layout.root)}` lists them"
        )
