"""Track which members of the groups in flight are free, and which are held, by which generator and until when.

Half of the ledger, its only user.  A member is either delivered, held, or free; a group with a free member is in one of
two queues, `fresh` (never granted whole) or `returned` (lost a lease or had one handed back).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rlhpc.buffer.group_record import GroupRecord
from rlhpc.buffer.lease_deadlines import LeaseDeadlines
from rlhpc.buffer.lost_leases import ANY_COMPANY, LostLeases
from rlhpc.contracts import Clock
from rlhpc.errors import LedgerError
from rlhpc.types import Prefix


class LeaseBook:
    """Holders, deadlines and the order of grants."""

    def __init__(self, lease_deadline_s: float, max_attempts: int, *, clock: Clock, lost_leases: LostLeases) -> None:
        self.lease_deadline_s = lease_deadline_s
        self.max_attempts = max_attempts
        self._lost_leases = lost_leases
        self._quarantine = Quarantine()
        self.num_lost_members = 0
        self._clock = clock
        # Entries of the queues may be out of date; the record says what is true.
        self._fresh: deque[GroupRecord] = deque()  # in order of admission
        self._waiting: deque[GroupRecord] = deque()  # came back after a restart and may not be granted yet
        self._returned: dict[int, GroupRecord] = {}
        self._returned_ids: list[int] = []  # heap, with each id of _queued_ids once
        self._queued_ids: set[int] = set()
        self._held: dict[str, dict[tuple[int, int], GroupRecord]] = {}  # holder → (group_id, sample_index) → group
        self.num_held = 0  # samples that are held by some generator
        self.relieved: set[str] = set()  # generators whose holds have ended; the reader empties it
        self._deadlines = LeaseDeadlines()

    @property
    def is_quarantining(self) -> bool:
        """True while some group in flight is granted only to a generator that holds few others."""
        return not self._quarantine.is_empty

    def outstanding(self, holder: str) -> int:
        """Samples that this generator holds."""
        return len(self._held.get(holder, ()))

    def add(self, group: GroupRecord, *, waits: bool = False) -> None:
        """Queue a group's free members; groups come in order of admission.  waits: not granted before `readmit`."""
        if waits:
            self._waiting.append(group)
            return
        if (suspicion := self._lost_leases.of(group.prompt)) is not None:
            is_quarantined = suspicion.is_quarantined(self.max_attempts)
            group.remember(self.max_attempts if is_quarantined else suspicion.strikes)
            self._quarantine.set_company(group, suspicion.company(self.max_attempts))
        if group.attempts > 1:
            self._queue_returned(group)
        else:
            self._fresh.append(group)

    def readmit(self, groups: Sequence[GroupRecord], num_slots: int, live_version: int) -> list[GroupRecord]:
        """Let waiting groups be granted, oldest first, while they are among the num_slots oldest of `groups`.

        If steps cannot be repeated, more groups come back than there are slots, admitted under versions that do not
        exist yet.  Sampled at once, the last ones would be far too stale when their turn comes.  Returns the groups
        that from now on count as admitted under live_version.
        """
        changed = []
        while self._waiting:
            group = self._waiting[0]
            if not (group.is_finished or group.is_dropped):
                if sum(other.group_id < group.group_id for other in groups) >= num_slots:
                    break
                if group.admitted_version > live_version:
                    group.admitted_version = live_version
                    changed.append(group)
                self.add(group)
            self._waiting.popleft()
        return changed

    def grantable(self, holder: str) -> GroupRecord | None:
        """The group that this holder's next lease is for: the oldest returned one, else the oldest fresh one.

        None when nothing is free, or when quarantine keeps the free groups away from the groups that this holder has.
        """
        if self._quarantine.is_empty:
            return next(self._free_groups(), None)
        held = {group_id: group for (group_id, _), group in self._held.get(holder, {}).items()}
        suspects = [group for group in self._free_groups() if group.company]
        if self._quarantine.is_kept_free(holder, held, suspects):
            return next((group for group in suspects if _may_share(held, group)), None)
        return next((group for group in self._free_groups() if _may_share(held, group)), None)

    def hold(self, group: GroupRecord, indices: Iterable[int], holder: str) -> int:
        """Record that a generator samples these free members; return the number of the lease."""
        lease, group.num_leases = group.num_leases, group.num_leases + 1
        held, now_s = self._held.setdefault(holder, {}), self._clock()
        num_before = len(held)
        for index in indices:
            member = group.members[index]
            member.holder, member.lease, member.seen_s = holder, lease, now_s
            held[group.group_id, index] = group
        num_members = len(held) - num_before
        self.num_held += num_members
        self._forget_if_not_free(group)
        self._deadlines.begin((group.group_id, lease), holder, group, num_members)
        self._deadlines.look_at((group.group_id, lease), now_s + self.lease_deadline_s)
        return lease

    def deliver(self, group: GroupRecord, index: int) -> None:
        """Record that a member has arrived, no matter which generator held it."""
        self._let_go(group, index)
        group.deliver(index)
        self._forget_if_not_free(group)
        if group.group_id in self._returned:
            self._queue_returned(group)  # the delivered member may be the one that was out of attempts
        if group.is_finished:
            self._quarantine.forget(group)
            self._lost_leases.clear_strikes(group.prompt)

    def remove(self, group: GroupRecord) -> None:
        """Forget a dropped group: its leases end, and it is never granted again."""
        group.is_dropped = True
        for index in range(len(group.members)):
            self._let_go(group, index)
        self._returned.pop(group.group_id, None)
        self._quarantine.forget(group)

    def hand_back(
        self, group: GroupRecord | None, holder: str, indices: Sequence[int], prefixes: Sequence[Prefix | None]
    ) -> None:
        """Free the members that the holder still holds; keep the longest prefix of those that are free.

        group: None where there is none any more.  It may have come back smaller (history.py): members that it has not
        are ignored.  Raises LedgerError, changing nothing, for an inconsistent message.
        """
        _refuse_odd_message(group, indices, prefixes, may_be_gone=True)
        if group is None:
            return
        for position, index in enumerate(indices):
            if index >= len(group.members):
                continue
            member = group.members[index]
            if member.holder == holder:
                self._give_back(group, index, is_lost=False)
            if member.is_free and prefixes:
                member.prefix = _longer(member.prefix, prefixes[position])

    def renew(
        self, group: GroupRecord | None, holder: str, indices: Sequence[int], prefixes: Sequence[Prefix | None]
    ) -> None:
        """Renew the deadline of the members that the holder has; a prefix that it sends replaces the known one.

        Arguments and errors as in hand_back, and LedgerError for a member that is not there.
        """
        _refuse_odd_message(group, indices, prefixes)
        if group is None:
            return
        for position, index in enumerate(indices):
            member = group.members[index]
            if member.holder == holder:
                member.seen_s = self._clock()
                if prefixes and prefixes[position] is not None:
                    member.prefix = prefixes[position]

    def expire(self) -> list[tuple[int, str]]:
        """Free the members of overdue leases; return (group_id, holder) of each such lease."""
        expired = []
        now_s = self._clock()
        for key, lease in self._deadlines.due(now_s):
            group, holder = lease.group, lease.holder
            held = [i for i, member in enumerate(group.members) if member.holder == holder and member.lease == key[1]]
            overdue = [i for i in held if group.members[i].seen_s + self.lease_deadline_s <= now_s]
            for index in overdue:
                self._give_back(group, index, is_lost=True)
            if overdue:
                expired.append((group.group_id, holder))
            if renewed := [group.members[i].seen_s for i in held if i not in overdue]:
                self._deadlines.look_at(key, min(renewed) + self.lease_deadline_s)
        return expired

    def forget_holder(self, holder: str, *, is_dead: bool = True) -> list[int]:
        """Free everything a generator held; return the ids of the groups concerned, ascending.

        is_dead: its leases are lost, which counts against the prompts; else it is alive, and reports what it continues.
        """
        held = list(self._held.get(holder, {}).items())
        groups = {group_id: group for (group_id, _), group in held}
        for (_, index), group in held:
            self._give_back(group, index, is_lost=is_dead)
        if is_dead:
            lost = [(group.prompt, group.attempts - 1) for group in groups.values()]
            struck = self._lost_leases.record_death(lost, f"{holder} died or fell silent")
            for group, suspicion in zip(groups.values(), struck, strict=True):
                self._quarantine.set_company(group, suspicion.company(self.max_attempts))
        self._quarantine.holders.discard(holder)
        return sorted(groups)

    def poisoned(self) -> list[int]:
        """Ids of the groups that are no longer granted, ascending."""
        return sorted(i for i, group in self._returned.items() if group.is_poisoned(self.max_attempts))

    def check(self, groups: Sequence[GroupRecord]) -> None:
        """Raise LedgerError unless the book and the records of all groups agree."""
        recorded = {
            (member.holder, group.group_id, index)
            for group in groups
            for index, member in enumerate(group.members)
            if member.holder is not None
        }
        if recorded != {(holder, *key) for holder, keys in self._held.items() for key in keys}:
            raise LedgerError("the members that generators hold and the groups' own records differ")
        if self.num_held != len(recorded):
            raise LedgerError(f"{len(recorded)} members are held, and {self.num_held} are counted")
        queued = self._returned.keys() | {group.group_id for group in (*self._fresh, *self._waiting)}
        if lost := [group.group_id for group in groups if group.has_free and group.group_id not in queued]:
            raise LedgerError(f"groups {lost} have free members that no grant would find")

    def _free_groups(self) -> Iterator[GroupRecord]:
        """Groups with members to grant: all returned ones, oldest first, then the oldest fresh one.

        With n queued groups the first one costs O(log n), all others together O(n log n).
        """
        first = self._first_returned()
        if first is not None:
            yield first
            yield from (
                group for _, group in sorted(self._returned.items()) if group is not first and self._is_grantable(group)
            )
        while self._fresh and (self._fresh[0].group_id in self._returned or not self._is_grantable(self._fresh[0])):
            self._fresh.popleft()
        if self._fresh:
            yield self._fresh[0]

    def _queue_returned(self, group: GroupRecord) -> None:
        self._returned[group.group_id] = group
        if group.group_id not in self._queued_ids:
            self._queued_ids.add(group.group_id)
            heapq.heappush(self._returned_ids, group.group_id)

    def _first_returned(self) -> GroupRecord | None:
        """The oldest returned group that can be granted."""
        while self._returned_ids:
            group = self._returned.get(self._returned_ids[0])
            if group is not None and self._is_grantable(group):
                return group
            self._queued_ids.remove(heapq.heappop(self._returned_ids))
        return None

    def _is_grantable(self, group: GroupRecord) -> bool:
        return group.has_free and not group.is_dropped and not group.is_poisoned(self.max_attempts)

    def _forget_if_not_free(self, group: GroupRecord) -> None:
        if group.group_id in self._returned and not group.has_free:
            del self._returned[group.group_id]

    def _let_go(self, group: GroupRecord, index: int) -> None:
        """End the hold on a member, if any."""
        member = group.members[index]
        if member.holder is None:
            return
        held = self._held[member.holder]
        del held[group.group_id, index]
        if not held:
            del self._held[member.holder]
        self.num_held -= 1
        self.relieved.add(member.holder)
        self._deadlines.let_go((group.group_id, member.lease))
        member.holder = None

    def _give_back(self, group: GroupRecord, index: int, *, is_lost: bool) -> None:
        self._let_go(group, index)
        if is_lost:
            group.members[index].lost_leases += 1
            self.num_lost_members += 1
        self._queue_returned(group)


class Quarantine:
    """The suspect groups in flight, and the generators that are kept free for them.

    Groups that may kill their generator are kept away from others, but not from being sampled.  A suspect limits how
    many groups its generator may hold (`GroupRecord.company`).  Generators are usually full, so none would ever become
    free enough: for every waiting suspect, one gets no other work until the suspect is granted.
    """

    def __init__(self) -> None:
        self.holders: set[str] = set()
        self._suspects: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """True if no group in flight is a suspect."""
        return not self._suspects

    def set_company(self, group: GroupRecord, company: int) -> None:
        """Set how many groups a generator may hold beside this one, itself included."""
        group.company = company
        if company != ANY_COMPANY and not group.is_finished:
            self._suspects.add(group.group_id)

    def forget(self, group: GroupRecord) -> None:
        """Forget a group that is finished or dropped."""
        self._suspects.discard(group.group_id)
        if not self._suspects:
            self.holders.clear()

    def is_kept_free(self, holder: str, held: Mapping[int, GroupRecord], waiting: Sequence[GroupRecord]) -> bool:
        """Whether this generator, which holds these groups, may be granted only waiting suspects."""
        if not waiting:
            self.holders.clear()
            return False
        if any(_may_share(held, group) for group in waiting):
            return True
        if len(self.holders) < len(waiting):
            self.holders.add(holder)
        return holder in self.holders


def _may_share(held: Mapping[int, GroupRecord], group: GroupRecord) -> bool:
    """True if a generator that holds these groups may be given members of this one."""
    together = {**held, group.group_id: group}
    limits = [other.company for other in together.values() if other.company != ANY_COMPANY]
    return not limits or group.group_id in held or len(together) <= min(limits)


def _refuse_odd_message(
    group: GroupRecord | None,
    indices: Sequence[int],
    prefixes: Sequence[Prefix | None],
    *,
    may_be_gone: bool = False,
) -> None:
    name = "of a group that is gone" if group is None else f"of group {group.group_id}"
    if prefixes and len(prefixes) != len(indices):
        raise LedgerError(f"{len(indices)} members {name} with {len(prefixes)} prefixes")
    if group and indices and (min(indices) < 0 or (max(indices) >= len(group.members) and not may_be_gone)):
        raise LedgerError(f"members {tuple(indices)} {name}, which has {len(group.members)}")


def _longer(old: Prefix | None, new: Prefix | None) -> Prefix | None:
    if old is None or (new is not None and len(new.token_ids) > len(old.token_ids)):
        return new
    return old
