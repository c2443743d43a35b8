"""Tell from counts alone whether a batch, or a part of one, can be formed, so that groups are scanned only if one can.

Input: groups, as they are admitted, finish and leave.  Output: how many more have to end first, and how many a part of
the batch may have meanwhile.  A scan of all groups (batch_choice.py) costs a microsecond per group; with thousands that
finish one by one, it would dominate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from rlhpc.buffer.group_record import GroupRecord


class UntakenTally:
    """The groups that no batch has taken, counted by when they are due: a handful of numbers, however many groups."""

    def __init__(self, groups_per_step: int) -> None:
        """Begins without groups."""
        self._groups_per_step = groups_per_step
        self._all: Counter[int] = Counter()  # due → groups
        self._finished: Counter[int] = Counter()
        self.num_finished = 0

    def add(self, group: GroupRecord) -> None:
        """Count a group that is admitted, or was before the run was interrupted."""
        self._all[group.due] += 1
        self.delivered(group)

    def delivered(self, group: GroupRecord) -> None:
        """A member of this group has arrived: count the group as finished if it was the last."""
        if group.is_finished:
            self._finished[group.due] += 1
            self.num_finished += 1

    def remove(self, group: GroupRecord) -> None:
        """Forget a group that is taken or dropped."""
        _less_one(self._all, group.due)
        if group.is_finished:
            _less_one(self._finished, group.due)
            self.num_finished -= 1

    def num_missing(self, num_groups: int, num_taken: int) -> int:
        """How many more groups have to end, finished or dropped, before there can be a batch; 0: there may be one now.

        num_groups: of a batch.
        num_taken: as in choose_batch, which may refuse for two reasons that are not counted here: the window, and
        groups that came back after a restart, whose turn depends on all others.
        """
        if self.num_finished < num_groups or -1 in self._all:
            return max(0, num_groups - self.num_finished)
        everyone, finished = self._by_spare(self._all, num_taken), self._by_spare(self._finished, num_taken)
        num_left, num_due, most, later = num_groups, 0, 0, 0  # num_left: to be chosen among those due later
        while True:
            chosen = min(finished[later], num_left)
            num_left -= chosen
            if not num_left:  # beyond that, all chosen groups are among the most urgent
                return most
            num_due += everyone[later] - chosen
            # Each group that ends lowers the excess of those left behind, or the number chosen before others due
            # earlier.
            most = max(most, min(num_due - later * self._groups_per_step, num_left))
            later += 1

    def most_in_part(self, num_groups: int, num_taken: int, begun_due: Collection[int]) -> int:
        """How many groups choose_part would choose if there were no window; the counts are those of num_missing.

        begun_due: when the groups are due that are parts of the batch already.
        """
        if -1 in self._all:  # their turn depends on all others
            return self.num_finished - len(begun_due)
        begun = self._by_spare(Counter(begun_due), num_taken)
        everyone, finished = self._by_spare(self._all, num_taken), self._by_spare(self._finished, num_taken)
        most, num_left, num_places = 0, 0, num_groups - len(begun_due)
        room = num_places - 1  # one group is left for the end of the batch
        for later in range(max(finished, default=-1) + 1):
            ready = finished[later] - begun[later]
            if most + ready > room:
                return max(most, room)
            most += ready
            num_left += everyone[later] - finished[later]
            room = min(room, num_places + later * self._groups_per_step - num_left)
        return most

    def _by_spare(self, by_due: Mapping[int, int], num_taken: int) -> Counter[int]:
        """Counts by the number of batches that may still come before a group's own (batch_choice.py)."""
        counts: Counter[int] = Counter()
        for due, count in by_due.items():
            counts[max(0, (due - num_taken) // self._groups_per_step)] += count
        return counts


def _less_one(counts: Counter[int], due: int) -> None:
    counts[due] -= 1
    if not counts[due]:
        del counts[due]
