"""Choose the groups of a batch so that all others can still be trained in time.

Input: GroupRecord, in order of admission.  Output: ids of a batch, or that none can be formed yet; ids of a part of
one, with which a step may begin.  Pure.

Each group has a last batch that it may be in (`GroupRecord.due`).  A batch takes finished groups, those due first.  It
may skip an unfinished one while that has batches left with room for all groups that need them: for each k, at most
k · groups_per_step groups that are due within the next k batches are left.  That is Hall's condition: if it holds,
taking the earliest due groups first meets every due date.  A part of a batch leaves places in it, which count as room.
docs/staleness.md has the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rlhpc.buffer.group_record import GroupRecord
from rlhpc.errors import LedgerError


class BatchChoice:
    """The choices of one ledger; remembers the groups with which the next batch has begun."""

    def __init__(self, groups_per_step: int, window_groups: int) -> None:
        self._rules = groups_per_step, window_groups
        self.begun: list[int] = []

    def batch(self, groups: Sequence[GroupRecord], num_groups: int, num_taken: int) -> list[int] | None:
        """The next batch, what has begun included (choose_batch)."""
        return choose_batch(groups, num_groups, num_taken, *self._rules, self.begun)

    def part(self, groups: Sequence[GroupRecord], num_groups: int, num_taken: int) -> list[int]:
        """What the next batch could begin with, or go on with (choose_part)."""
        return choose_part(groups, num_groups, num_taken, *self._rules, self.begun)

    def complete(self, group_ids: Collection[int]) -> None:
        """The batch consists of these.  Raises LedgerError if one is left out with which it has begun."""
        if left_out := set(self.begun).difference(group_ids):
            raise LedgerError(f"a batch without groups {sorted(left_out)}, with which its step has begun")
        self.begun.clear()


def choose_batch(
    groups: Sequence[GroupRecord],
    num_groups: int,
    num_taken: int,
    groups_per_step: int,
    window_groups: int,
    begun: Collection[int] = (),
) -> list[int] | None:
    """Ids of num_groups finished groups, ascending; None: there are too few, or others would miss their due date.

    groups: all that no batch has taken, in order of admission.  num_taken: groups taken before.  window_groups: only
    groups less than this many ids after the oldest unfinished one are chosen.  begun: parts of this batch, which are
    among those chosen.
    """
    spare = _spare(groups, num_taken, groups_per_step)
    chosen = [*begun, *_most_urgent(groups, spare, window_groups, begun)][:num_groups]
    if len(chosen) < num_groups or _is_short_of_room(spare, chosen, groups_per_step):
        return None
    return sorted(chosen)


def choose_part(
    groups: Sequence[GroupRecord],
    num_groups: int,
    num_taken: int,
    groups_per_step: int,
    window_groups: int,
    begun: Collection[int] = (),
) -> list[int]:
    """Ids of as many finished groups as a batch of num_groups can begin with, or go on with, ascending.

    Whatever of the others is finished next, the batch can be completed, and all that are left behind meet their due
    dates.  One group at least is left for the end of the batch.  Arguments as in choose_batch.
    """
    spare = _spare(groups, num_taken, groups_per_step)
    left = Counter(spare.values())
    left.subtract(Counter(spare[group_id] for group_id in begun))
    chosen, num_places = list[int](), num_groups - len(begun)
    for group_id in _most_urgent(groups, spare, window_groups, begun)[: num_places - 1]:
        num_due = 0
        for later in range(spare[group_id]):  # those as urgent as this one lose a place and one that needs it
            num_due += left[later]
            if num_due > num_places - len(chosen) - 1 + later * groups_per_step:
                return sorted(chosen)
        left[spare[group_id]] -= 1
        chosen.append(group_id)
    return sorted(chosen)


def _spare(groups: Sequence[GroupRecord], num_taken: int, groups_per_step: int) -> dict[int, int]:
    """How many batches may still come before a group's own; groups that came back after a restart go in order."""
    return {
        group.group_id: max(0, (group.due - num_taken) // groups_per_step)
        if group.due >= 0
        else rank // groups_per_step
        for rank, group in enumerate(groups)
    }


def _most_urgent(
    groups: Sequence[GroupRecord], spare: dict[int, int], window_groups: int, begun: Collection[int]
) -> list[int]:
    """Finished groups within the window that are not begun, those due first."""
    anchor = next((group.group_id for group in groups if not group.is_finished), None)
    inside = (g.group_id for g in groups if g.is_finished and (anchor is None or g.group_id < anchor + window_groups))
    return sorted(set(inside).difference(begun), key=lambda group_id: (spare[group_id], group_id))


def _is_short_of_room(spare: dict[int, int], chosen: Sequence[int], groups_per_step: int) -> bool:
    """Whether some group left behind would miss its due date, though another choice would save it."""
    left = Counter(spare.values())
    left.subtract(Counter(spare[group_id] for group_id in chosen))
    num_due = 0
    for later in range(max(spare[group_id] for group_id in chosen)):  # beyond, all chosen are among the most urgent
        num_due += left[later]
        if num_due > later * groups_per_step:
            return True
    return False
