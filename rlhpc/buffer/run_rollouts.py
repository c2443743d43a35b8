"""All groups of a run, for people: sealed segments first, then groups that so far are only in the journal.

Input: a rollouts directory of a run that is running, was killed, or is complete.  Output: FoundGroup.
Order of reading: events and journal before segments, so that groups sealed meanwhile are seen in at least one of them;
for a group in both, the segment counts.  Damage costs the file or the row; it is reported, and reading continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rlhpc.buffer.history import START, History, read_history
from rlhpc.buffer.journal_rows import JournalRecord
from rlhpc.buffer.resolved import ResolvedGroup
from rlhpc.buffer.segment_files import segments_that_are_left
from rlhpc.buffer.segment_reader import read_columns, read_segment
from rlhpc.errors import JournalError, SegmentError
from rlhpc.types import RolloutGroup

Tell = Callable[[str], None]  # receives descriptions of what cannot be shown


class Standing(StrEnum):
    """What has become of a group."""

    TRAINED = "trained"
    SKIPPED = "skipped"  # its step was not applied: not finite, or refused by the guard
    DROPPED = "dropped"
    TAKEN = "taken"  # for a step that is not recorded as done
    WAITING = "waiting"  # not in a batch yet; members may be missing


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A group, perhaps not whole, and how far it has come."""

    resolved: ResolvedGroup  # consumed_step also for a group that is only taken
    standing: Standing


def found_groups(directory: Path, tell: Tell, steps: tuple[int, int] | None = None) -> Iterator[FoundGroup]:
    """Every group on disk: those in segments, in order of resolution, then those of batches by step, then the others.

    steps: (first, last); segments without a group of these steps are skipped after reading two of their columns.
    Arrays are views of one block per column: copy what outlives the rest.
    """
    pending = _pending(directory, tell)
    sealed = set[int]()
    for path in segments_that_are_left(directory, tell):
        try:
            if steps is not None and (others := _if_of_other_steps(path, *steps)) is not None:
                sealed |= others
                continue
            groups = read_segment(path)
        except SegmentError as error:
            tell(f"{error}; its groups are not shown")
            continue
        for resolved in groups:
            sealed.add(resolved.group.group_id)
            yield FoundGroup(resolved, standing_of(resolved))
    for group_id, found in sorted(pending.items(), key=_by_batch):
        if group_id not in sealed:
            yield found


def _by_batch(each: tuple[int, FoundGroup]) -> tuple[bool, int, int]:
    """A batch has whichever groups were finished first, so that numbers of one step lie between those of others."""
    group_id, found = each
    step = found.resolved.consumed_step
    return step < 0, step, group_id


def standing_of(resolved: ResolvedGroup) -> Standing:
    """What has become of a group in a segment."""
    if resolved.drop_reason is not None:
        return Standing.DROPPED
    if resolved.consumed_step < 0:
        return Standing.WAITING
    return Standing.SKIPPED if resolved.applied is False else Standing.TRAINED


def _if_of_other_steps(path: Path, first: int, last: int) -> set[int] | None:
    """The groups of a segment that has none of these steps; None: it has some.  Raises SegmentError."""
    columns = read_columns(path, ["groups/group_id", "groups/consumed_step"])
    step = columns["groups/consumed_step"]
    is_wanted = bool(((step >= first) & (step <= last)).any())
    return None if is_wanted else {*columns["groups/group_id"].tolist()}


def _pending(directory: Path, tell: Tell) -> dict[int, FoundGroup]:
    """The groups of the journal."""
    try:
        history = read_history(directory, START)
    except (JournalError, OSError) as error:
        tell(f"{error}; what is in no segment yet is not shown")
        return {}
    # The beginning of a long run's journal is deleted: rollouts missing there are no damage.
    for problem in history.problems:
        if problem != history.lost_beginning:
            tell(problem)
    members = dict[int, dict[int, JournalRecord]]()
    for record in history.rollouts:
        rollout = record.scored.rollout
        members.setdefault(rollout.group_id, {})[rollout.sample_index] = record
    step_of = {group: taken.step for taken in history.batches.values() for group in taken.groups}
    return {group_id: _found(history, step_of.get(group_id, -1), of_group) for group_id, of_group in members.items()}


def _found(history: History, step: int, records: dict[int, JournalRecord]) -> FoundGroup:
    ordered = [record for _, record in sorted(records.items())]
    first = ordered[0].scored.rollout
    members = tuple(record.scored for record in ordered)
    group = RolloutGroup(first.group_id, first.prompt, ordered[0].admitted_version, members)
    reason, trained = history.dropped.get(first.group_id), history.trained.get(step)
    resolved = ResolvedGroup(
        group=group,
        consumed_step=step,
        drop_reason=reason,
        trained_version=-1 if trained is None else trained.version,
        applied=None if trained is None else trained.applied,
    )
    is_open = reason is None and step >= 0 and trained is None
    return FoundGroup(resolved, Standing.TAKEN if is_open else standing_of(resolved))
