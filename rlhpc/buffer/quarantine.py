"""Keep groups that may kill their generator away from others, without keeping them from being sampled.

Half of the lease book, which alone uses it.  A suspect group says in whose company it may be (`GroupRecord.company`).
Generators are full as a rule, so that one would never be free for it by itself: for every suspect that waits, one
generator is kept free of other work until the suspect has been granted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhpc.buffer.group_record import GroupRecord
from rlhpc.buffer.lost_leases import ANY_COMPANY


class Quarantine:
    """The suspect groups in flight, and the generators that are kept free for them."""

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self._suspects: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """True if no group in flight is a suspect."""
        return not self._suspects

    def take(self, group: GroupRecord, company: int) -> None:
        """Set which company this group may be in."""
        group.company = company
        if company != ANY_COMPANY and not group.is_finished:
            self._suspects.add(group.group_id)

    def forget(self, group: GroupRecord) -> None:
        """It is finished or dropped."""
        self._suspects.discard(group.group_id)
        if not self._suspects:
            self.holders.clear()

    def is_kept_free(self, holder: str, held: Mapping[int, GroupRecord], waiting: Sequence[GroupRecord]) -> bool:
        """Whether this generator, which holds these groups, may be granted only waiting suspects."""
        if not waiting:
            self.holders.clear()
            return False
        if any(may_share(held, group) for group in waiting):
            return True
        if len(self.holders) < len(waiting):
            self.holders.add(holder)
        return holder in self.holders


def may_share(held: Mapping[int, GroupRecord], group: GroupRecord) -> bool:
    """True if a generator that holds these groups may be given members of this one."""
    together = {**held, group.group_id: group}
    limits = [other.company for other in together.values() if other.company != ANY_COMPANY]
    return not limits or group.group_id in held or len(together) <= min(limits)
