"""Choose the groups of a batch so that all others can still be trained in time.

Input: GroupRecord, in order of admission.  Output: ids of a batch, or that none can be formed yet.  Pure.

Each group has a last batch that it may be in (`GroupRecord.due`).  A batch takes finished groups, those due first.  It
may skip an unfinished one while that has batches left with room for all groups that need them: for each k, at most
k · groups_per_step groups that are due within the next k batches are left.  That is Hall's condition: if it holds,
taking the earliest due groups first meets every due date.  docs/staleness.md has the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlhpc.buffer.group_record import GroupRecord


def choose_batch(
    groups: Sequence[GroupRecord], num_groups: int, num_taken: int, groups_per_step: int, window_groups: int
) -> list[int] | None:
    """Ids of num_groups finished groups, ascending; None: there are too few, or others would miss their due date.

    groups: all that no batch has taken, in order of admission.  num_taken: groups taken before.  window_groups: only
    groups less than this many ids after the oldest unfinished one are chosen.
    """
    # How many batches may still come before a group's own; groups that came back after a restart go in order.
    spare = {
        group.group_id: max(0, (group.due - num_taken) // groups_per_step)
        if group.due >= 0
        else rank // groups_per_step
        for rank, group in enumerate(groups)
    }
    anchor = next((group.group_id for group in groups if not group.is_finished), None)
    inside = (g.group_id for g in groups if g.is_finished and (anchor is None or g.group_id < anchor + window_groups))
    chosen = sorted(inside, key=lambda group_id: (spare[group_id], group_id))[:num_groups]
    if len(chosen) < num_groups or _is_short_of_room(spare, chosen, groups_per_step):
        return None
    return sorted(chosen)


def _is_short_of_room(spare: dict[int, int], chosen: Sequence[int], groups_per_step: int) -> bool:
    """Whether some group left behind would miss its due date, though another choice would save it."""
    left = Counter(spare.values())
    left.subtract(Counter(spare[group_id] for group_id in chosen))
    num_due = 0
    for later in range(spare[chosen[-1]]):  # beyond that, all chosen groups are among the most urgent
        num_due += left[later]
        if num_due > later * groups_per_step:
            return True
    return False
