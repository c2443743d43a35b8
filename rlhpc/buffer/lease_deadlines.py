"""When to check which lease: the oldest that may be overdue first, in memory proportional to the current leases.

Input: leases, by group and number.  Output: those due for a check.  Pure; time is passed in.  A check, an end and a
begin cost O(log n) for n current leases.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from rlhpc.buffer.group_record import GroupRecord

SPARE = 64  # entries of ended leases that are tolerated in any case

LeaseKey = tuple[int, int]  # group, number of the lease within the group


@dataclass(slots=True)
class RunningLease:
    """A lease whose holder still has some member."""

    holder: str
    group: GroupRecord
    num_members: int


class LeaseDeadlines:
    """The current leases, and a heap of when to check them: one entry each, renewals add none."""

    def __init__(self) -> None:
        self._running: dict[LeaseKey, RunningLease] = {}
        # Entries of ended leases are skipped, and deleted together once they outnumber the others: kept until the
        # deadline, minutes away, each would take about a hundred bytes.
        self._looks: list[tuple[float, LeaseKey]] = []

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_entries(self) -> int:
        """Entries in memory, including those of leases that are over."""
        return len(self._looks)

    def begin(self, key: LeaseKey, holder: str, group: GroupRecord, num_members: int) -> None:
        """A generator holds these members from now on; `look_at` sets when to check the lease."""
        self._running[key] = RunningLease(holder, group, num_members)

    def look_at(self, key: LeaseKey, at_s: float) -> None:
        """Have `due` return this lease then."""
        heapq.heappush(self._looks, (at_s, key))

    def let_go(self, key: LeaseKey) -> None:
        """A member has left its lease; with the last one the lease ends."""
        lease = self._running[key]
        lease.num_members -= 1
        if not lease.num_members:
            del self._running[key]
            if len(self._looks) > 2 * len(self._running) + SPARE:
                self._looks = [look for look in self._looks if look[1] in self._running]
                heapq.heapify(self._looks)

    def due(self, now_s: float) -> Iterator[tuple[LeaseKey, RunningLease]]:
        """Leases that are due for a check, oldest first; each once, unless `look_at` asks for another."""
        while self._looks and self._looks[0][0] <= now_s:
            key = heapq.heappop(self._looks)[1]
            if (lease := self._running.get(key)) is not None:
                yield key, lease
