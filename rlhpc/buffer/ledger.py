"""Admit prompts and grant them to generators, with bounded staleness and without losing any.

In this file: which lease to check when; leases of members; the ledger.

Input: Prompt.  Output: Lease.  The only backpressure and the only retry of the system; pure, synchronous, time passed
in.  Guarantees: (1) slots: admitted − released − dropped ≤ num_slots;  (2) staleness: a group taken for step s was
admitted at version ≥ s − ⌊(num_slots − 1) / groups_per_step⌋, if groups are released only when the weights of their
step are live;  (3) conservation: every admitted group is in exactly one of {in flight, finished, taken, released,
dropped}.  Why (2) holds: docs/staleness.md.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhpc.buffer.batches import BatchChoice, DropReason, GroupRecord, MemberRecord, UntakenTally
from rlhpc.buffer.lost_leases import ANY_COMPANY, LostLeases
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import CheckpointError, LedgerError
from rlhpc.protocol.types import Lease, Prefix, Prompt, SamplingParams

# ------------------------------------------------------------------------------------------------------ lease deadlines
#
# Which lease to check when: the oldest that may be overdue first, in memory proportional to the current leases.
#
# Input: leases, by group and number.  Output: those due for a check.  Pure; time is passed in.  A check, an end and a
# begin cost O(log n) for n current leases.


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
        """Have `passed` return this lease once that time has passed."""
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

    def passed(self, now_s: float) -> Iterator[tuple[LeaseKey, RunningLease]]:
        """Leases that are due for a check, oldest first; each once, unless `look_at` asks for another."""
        while self._looks and self._looks[0][0] <= now_s:
            key = heapq.heappop(self._looks)[1]
            if (lease := self._running.get(key)) is not None:
                yield key, lease


# --------------------------------------------------------------------------------------------------------------- leases
#
# Track which members of the groups in flight are free, and which are held, by which generator and until when.
#
# Half of the ledger, which is built on it.  A member is either delivered, held, or free; a group with a free member is
# in one of two queues, `fresh` (never granted whole) or `returned` (lost a lease or had one handed back).


class Leases:
    """Holders, deadlines and the order of grants."""

    def __init__(self, lease_deadline_s: float, max_attempts: int, *, clock: Clock, lost_leases: LostLeases) -> None:
        self._untaken: dict[int, GroupRecord] = {}  # in flight or finished, in order of admission
        self.lease_deadline_s = lease_deadline_s
        self.max_attempts = max_attempts
        self._lost_leases = lost_leases
        self._quarantine = Suspects()
        self.num_lost_members = 0
        self._clock = clock
        # Entries of the queues may be out of date; the record is authoritative.
        self._fresh: deque[GroupRecord] = deque()  # in order of admission
        self._waiting: deque[GroupRecord] = deque()  # came back after a restart and may not be granted yet
        self._returned: dict[int, GroupRecord] = {}
        self._returned_ids: list[int] = []  # heap, with each id of _queued_ids once
        self._queued_ids: set[int] = set()
        self._held: dict[str, dict[tuple[int, int], GroupRecord]] = {}  # holder → (group_id, sample_index) → group
        self.num_held = 0  # samples that are held by some generator
        self._relieved: set[str] = set()  # generators whose holds have ended since `take_relieved`
        self._deadlines = LeaseDeadlines()

    @property
    def is_quarantining(self) -> bool:
        """True if `grant` may return None for one holder and a lease for another, because of quarantine."""
        return not self._quarantine.is_empty

    def outstanding(self, holder: str) -> int:
        """Number of samples leased to this generator that it has neither delivered, lost nor handed back."""
        return len(self._held.get(holder, ()))

    def take_relieved(self) -> set[str]:
        """Holders that have let go of a sample since the last call."""
        relieved, self._relieved = self._relieved, set()
        return relieved

    def hand_back(
        self, holder: str, group_id: int, sample_indices: Sequence[int], prefixes: Sequence[Prefix | None] = ()
    ) -> None:
        """Make members grantable again, each with the longest prefix known; this does not count as a lost lease.

        Ignored: members that another generator holds, delivered members, members that do not exist (a restored group
        may be smaller, history.py), unknown groups.  prefixes: none, or one per sample index.  Raises LedgerError,
        changing nothing, for another number of prefixes, or an index below 0.
        """
        group = self._untaken.get(group_id)
        _refuse_odd_message(group, sample_indices, prefixes, may_be_gone=True)
        if group is None:
            return
        for position, index in enumerate(sample_indices):
            if index >= len(group.members):
                continue
            member = group.members[index]
            if member.holder == holder:
                self._give_back(group, index, is_lost=False)
            if member.is_free and prefixes:
                member.prefix = _longer(member.prefix, prefixes[position])

    def renew(
        self, holder: str, group_id: int, sample_indices: Sequence[int], prefixes: Sequence[Prefix | None] = ()
    ) -> None:
        """Renew the deadlines of the members that the holder has; a prefix from the holder replaces the known one.

        Ignores and raises as hand_back; also raises LedgerError for a member that does not exist.
        """
        group = self._untaken.get(group_id)
        _refuse_odd_message(group, sample_indices, prefixes)
        if group is None:
            return
        for position, index in enumerate(sample_indices):
            member = group.members[index]
            if member.holder == holder:
                member.seen_s = self._clock()
                if prefixes and prefixes[position] is not None:
                    member.prefix = prefixes[position]

    def expire(self) -> list[tuple[int, str]]:
        """Free the members of leases whose deadline has passed; return (group_id, holder) of each such lease."""
        expired = []
        now_s = self._clock()
        for key, lease in self._deadlines.passed(now_s):
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

        is_dead: its leases are lost, which counts against the prompts; else it lives and reports its rollouts.
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
        """Groups with a member that has lost max_attempts leases; they are no longer granted, the caller drops them."""
        return sorted(i for i, group in self._returned.items() if group.is_poisoned(self.max_attempts))

    # --------------------------------------------------------------------------------------------- for the ledger

    def _queue(self, group: GroupRecord, *, waits: bool = False) -> None:
        """Queue a group's free members; groups come in order of admission.  waits: not granted before `readmit`."""
        if waits:
            self._waiting.append(group)
            return
        if (suspicion := self._lost_leases.of(group.prompt)) is not None:
            is_quarantined = suspicion.is_quarantined(self.max_attempts)
            group.remember(self.max_attempts if is_quarantined else suspicion.lost_leases)
            self._quarantine.set_company(group, suspicion.company(self.max_attempts))
        if group.attempts > 1:
            self._queue_returned(group)
        else:
            self._fresh.append(group)

    def _grantable(self, holder: str) -> GroupRecord | None:
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

    def _hold(self, group: GroupRecord, indices: Iterable[int], holder: str) -> int:
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

    def _delivered(self, group: GroupRecord, index: int) -> None:
        """Record that a member has arrived, no matter which generator held it."""
        self._let_go(group, index)
        group.deliver(index)
        self._forget_if_not_free(group)
        if group.group_id in self._returned:
            self._queue_returned(group)  # the delivered member may have been the one out of attempts
        if group.is_finished:
            self._quarantine.forget(group)
            self._lost_leases.clear_lost_leases(group.prompt)

    def _remove(self, group: GroupRecord) -> None:
        """Forget a dropped group: its leases end, and it is never granted again."""
        group.is_dropped = True
        for index in range(len(group.members)):
            self._let_go(group, index)
        self._returned.pop(group.group_id, None)
        self._quarantine.forget(group)

    def _check_leases(self, groups: Sequence[GroupRecord]) -> None:
        """Raise LedgerError unless the holders and the records of all groups agree."""
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

    # ---------------------------------------------------------------------------------------------------- internals

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
        self._relieved.add(member.holder)
        self._deadlines.let_go((group.group_id, member.lease))
        member.holder = None

    def _give_back(self, group: GroupRecord, index: int, *, is_lost: bool) -> None:
        self._let_go(group, index)
        if is_lost:
            group.members[index].lost_leases += 1
            self.num_lost_members += 1
        self._queue_returned(group)


class Suspects:
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
        """True if this generator, which holds these groups, may be granted waiting suspects only."""
        if not waiting:
            self.holders.clear()
            return False
        if any(_may_share(held, group) for group in waiting):
            return True
        if len(self.holders) < len(waiting):
            self.holders.add(holder)
        return holder in self.holders


def _may_share(held: Mapping[int, GroupRecord], group: GroupRecord) -> bool:
    """True if a generator that holds these groups may be given members of this one.

    A generator that has a member of it among too many groups, since before another generator's death, gets no more.
    """
    together = {**held, group.group_id: group}
    limits = [other.company for other in together.values() if other.company != ANY_COMPANY]
    return not limits or len(together) <= min(limits)


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


# --------------------------------------------------------------------------------------------------------------- ledger


class AdmissionLedger(Leases):
    """The life of every group: admitted, granted (again and again), finished, taken, released; or dropped."""

    def __init__(
        self,
        *,
        num_slots: int,
        window_groups: int,
        groups_per_step: int,
        group_size: int,
        sampling: Callable[[int], SamplingParams],
        lease_deadline_s: float,
        max_attempts: int,
        clock: Clock,
        lost_leases: LostLeases | None = None,
    ) -> None:
        """sampling: parameters by prompt id; lost_leases: of earlier attempts of the run; records changes."""
        if num_slots < groups_per_step:
            raise LedgerError(f"{num_slots} slots can never hold a batch of {groups_per_step} groups")
        self.num_slots = self._num_slots_open = num_slots
        self.window_groups, self.groups_per_step, self.group_size = window_groups, groups_per_step, group_size
        super().__init__(lease_deadline_s, max_attempts, clock=clock, lost_leases=lost_leases or LostLeases())
        self._sampling = sampling
        self.next_group_id = 0  # of the group that is admitted next
        self._tally = UntakenTally(groups_per_step)  # of these
        self._choice = BatchChoice(groups_per_step, window_groups)
        self._taken: dict[int, GroupRecord] = {}
        self._num_released = 0
        self._dropped: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------- admission

    @property
    def has_slot(self) -> bool:
        """True if another group may be admitted now."""
        return self._num_slots_taken < self._num_slots_open

    def tighten(self, num_slots: int) -> None:
        """Use only this many slots, at least groups_per_step: groups admitted from now on are less stale."""
        self._num_slots_open = min(self.num_slots, max(self.groups_per_step, num_slots))

    @property
    def staleness_bound(self) -> int:
        """Upper bound of the staleness of a taken group, in steps."""
        return (self.num_slots - 1) // self.groups_per_step

    def admit(self, prompt: Prompt, policy_version: int, *, size: int = 0, again: bool = False) -> int:
        """Take a slot for this prompt and return the new group's id; policy_version is what generators serve now.

        size: rollouts wanted, if more than group_size.  again: the group had a slot before an interruption; it gets
        one, free or not, and waits for `readmit`.  Raises LedgerError, changing nothing, when no slot is free.
        """
        if not (self.has_slot or again):
            raise LedgerError(f"no free slot among {self._num_slots_open} for prompt {prompt.prompt_id}")
        members = [MemberRecord() for _ in range(max(size, self.group_size))]
        group = GroupRecord(self.next_group_id, prompt, policy_version, self._clock(), members)
        if not again:
            most_behind = (self._num_slots_open - 1) // self.groups_per_step  # batches that may come before its own
            group.due_after = self._num_released + most_behind * self.groups_per_step
        self.next_group_id, self._untaken[group.group_id] = group.group_id + 1, group
        self._tally.add(group)
        self._queue(group, waits=again)
        return group.group_id

    def readmit(self, live_version: int) -> list[GroupRecord]:
        """Let restored groups be granted, oldest first, while they are among the num_slots oldest that have a slot.

        If steps cannot be repeated, more groups are restored than there are slots, admitted under versions that do not
        exist yet.  Sampled at once, the last ones would be far too stale by the time they are trained.  Returns the
        groups that from now on count as admitted under live_version.
        """
        changed = []
        while self._waiting:
            group = self._waiting[0]
            if not (group.is_finished or group.is_dropped):
                if sum(other.group_id < group.group_id for other in self.groups) >= self.num_slots:
                    break
                if group.admitted_version > live_version:
                    group.admitted_version = live_version
                    changed.append(group)
                self._queue(group)
            self._waiting.popleft()
        return changed

    # ---------------------------------------------------------------------------------------------------- leases

    def grant(self, holder: str, credit_samples: int) -> Lease | None:
        """Lease free members of one group to a generator, at most credit_samples; None: nothing can be granted to it.

        Returned groups come first, then fresh ones, oldest first; a suspect group may get a generator of its own.
        """
        group = self._grantable(holder) if credit_samples > 0 else None
        if group is None:
            return None
        indices = tuple(group.free_indices[:credit_samples])
        prefixes = tuple(group.members[index].prefix for index in indices)
        return Lease(
            group_id=group.group_id,
            attempt=self._hold(group, indices, holder),
            prompt=group.prompt,
            group_size=len(group.members),
            sample_indices=indices,
            sampling=self._sampling(group.prompt.prompt_id),
            admitted_version=group.admitted_version,
            prefixes=prefixes if any(prefix is not None for prefix in prefixes) else (),
        )

    def adopt(self, holder: str, group_id: int, sample_index: int) -> None:
        """Count a free member as leased to this generator, which kept sampling it after its lease was over."""
        self._hold(self.group(group_id), (sample_index,), holder)

    def deliver(self, group_id: int, sample_index: int) -> bool:
        """Record that a member arrived, whichever generator holds it.  False, without effect, if it is not wanted."""
        group = self.wanted(group_id, sample_index)
        if group is None:
            return False
        self._delivered(group, sample_index)
        self._tally.delivered(group)
        return True

    # ------------------------------------------------------------------------------------------------ resolution

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop an open group; its slot is free at once.  Raises LedgerError, changing nothing, for any other."""
        group = self._untaken.pop(group_id, None)
        if group is None:
            raise LedgerError(f"group {group_id} cannot be dropped ({reason}): it is {self._whereabouts(group_id)}")
        self._tally.remove(group)
        self._remove(group)
        self._dropped[reason.value] += 1

    def upcoming(self, num_groups: int) -> list[int] | None:
        """Ids of the groups that a batch would take now, ascending; None: it has to wait (buffer/batches.py)."""
        if self.num_missing(num_groups):
            return None
        return self._choice.batch(list(self._untaken.values()), num_groups, self._num_taken)

    def num_missing(self, num_groups: int) -> int:
        """The least number of groups that have to end before a batch can be formed; 0: ask `upcoming`."""
        return self._tally.num_missing(num_groups, self._num_taken)

    def part(self, num_groups: int, least: int) -> list[int]:
        """Ids of the finished groups, `least` or more, that the next batch can begin with or go on with; else []."""
        begun_due = [self._untaken[group_id].due_after for group_id in self._choice.begun]
        may_be = self._tally.most_in_part(num_groups, self._num_taken, begun_due) >= least
        part = self._choice.part(list(self._untaken.values()), num_groups, self._num_taken) if may_be else []
        return part if len(part) >= least else []

    def begin(self, part: Sequence[int]) -> None:
        """Begin the next batch with these groups, which `part` has just returned."""
        self._choice.begun += part

    def take(self, num_groups: int, step: int) -> list[int] | None:
        """Move the upcoming groups into the batch of this step; None, without effect, if it has to wait."""
        chosen = self.upcoming(num_groups)
        if chosen is not None:
            self.take_these(chosen, step)
        return chosen

    def take_these(self, group_ids: Sequence[int], step: int) -> None:
        """Move finished groups, begun ones included, into a batch.  Raises LedgerError, first, if one is unfinished."""
        for group_id in group_ids:
            if group_id not in self._untaken or not self._untaken[group_id].is_finished:
                raise LedgerError(f"group {group_id} cannot be taken: it is {self._whereabouts(group_id)}")
        self._choice.complete(group_ids)
        for group_id in group_ids:
            group = self._taken[group_id] = self._untaken.pop(group_id)
            self._tally.remove(group)
            group.step = step

    def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of groups whose weights are live.  Raises LedgerError, first, if one is not taken."""
        for group_id in group_ids:
            if group_id not in self._taken:
                raise LedgerError(f"group {group_id} cannot be released: it is {self._whereabouts(group_id)}")
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"a group is released twice at once: {sorted(group_ids)}")
        for group_id in group_ids:
            del self._taken[group_id]
        self._num_released += len(group_ids)

    # ------------------------------------------------------------------------------------------------ inspection

    def wanted(self, group_id: int, sample_index: int) -> GroupRecord | None:
        """The record, read-only, of a group that wants this member; None: `deliver` would ignore the member."""
        group = self._untaken.get(group_id)
        members = group.members if group is not None else []
        return group if 0 <= sample_index < len(members) and not members[sample_index].is_delivered else None

    def is_wanted(self, group_id: int, sample_index: int) -> bool:
        """True if `deliver` would accept this member."""
        return self.wanted(group_id, sample_index) is not None

    def is_open(self, group_id: int) -> bool:
        """True while a group is in flight or finished: neither taken nor dropped."""
        return group_id in self._untaken

    def open_record(self, group_id: int) -> GroupRecord | None:
        """The record, read-only, of a group that is in flight or finished; None for any other."""
        return self._untaken.get(group_id)

    def open_groups(self) -> list[int]:
        """Ids of all groups that are in flight or finished, in order of admission."""
        return [*self._untaken]

    def group(self, group_id: int) -> GroupRecord:
        """The record of a group that has a slot, read-only.  Raises LedgerError for one that is gone or unknown."""
        group = self._untaken.get(group_id) or self._taken.get(group_id)
        if group is None:
            raise LedgerError(f"group {group_id} is {self._whereabouts(group_id)}")
        return group

    @property
    def groups(self) -> list[GroupRecord]:
        """Records of all groups that have a slot, read-only: those taken, then the others in order of admission."""
        return [*self._taken.values(), *self._untaken.values()]

    @property
    def oldest_in_flight_age_s(self) -> float:
        """Seconds since the admission of the oldest unfinished group, or since the restart; 0 if there is none."""
        admitted = next((group.admitted_at_s for group in self._untaken.values() if not group.is_finished), None)
        return 0.0 if admitted is None else self._clock() - admitted

    def counts(self) -> dict[str, int]:
        """Groups per state, and members held or lost, for metrics and status."""
        return {
            "admitted": self.next_group_id,
            "in_flight": len(self._untaken) - self._tally.num_finished,
            "finished": self._tally.num_finished,
            "taken": len(self._taken),
            "released": self._num_released,
            "dropped": self._dropped.total(),
            **{f"dropped_{reason}": self._dropped[reason.value] for reason in DropReason},
            "free_slots": max(0, self._num_slots_open - self._num_slots_taken),
            "held_samples": self.num_held,
            "lost_samples": self.num_lost_members,  # leased and not delivered: expired or died
        }

    def conservation(self) -> None:
        """Raise LedgerError unless every admitted group is in exactly one state and the leases agree with it."""
        num_ended = self._num_released + self._dropped.total()
        if self._num_slots_taken + num_ended != self.next_group_id or self._untaken.keys() & self._taken.keys():
            raise LedgerError(f"the counts contradict each other: {self.counts()}")
        if unfinished := [group_id for group_id, group in self._taken.items() if not group.is_finished]:
            raise LedgerError(f"groups {unfinished} are taken, but not finished")
        num_finished = sum(all(m.is_delivered for m in group.members) for group in self._untaken.values())
        if num_finished != self._tally.num_finished:
            raise LedgerError(f"{num_finished} groups are finished, and {self._tally.num_finished} are counted")
        self._check_leases(self.groups)

    # ----------------------------------------------------------------------------------------------- persistence

    def state(self, next_step: int) -> dict[str, Any]:
        """The current state as JSON, for a run that resumes with step `next_step`.

        Groups taken for an earlier step count as released: a resumed run publishes its weights before anything else.
        Groups taken for next_step or later (prefetched) count as finished: they are taken again.  Leases in flight
        come back as free members, without prefixes.
        """
        again = [group for group in self.groups if group.step is None or group.step >= next_step]
        return {
            "group_size": self.group_size,
            "next_group_id": self.next_group_id,
            "num_released": self._num_released + self._num_slots_taken - len(again),
            "dropped": dict(self._dropped),
            "groups": [group.to_json() for group in sorted(again, key=lambda group: group.group_id)],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], **settings: Any) -> AdmissionLedger:
        """Continue from state(); settings are those of the constructor.

        Slots and window may differ from before: with fewer slots nothing is admitted until enough are released.
        Raises CheckpointError when the state is malformed, breaks conservation, or is of another group size.
        """
        ledger = cls(**settings)
        try:
            ledger._restore(state)
            ledger.conservation()
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise CheckpointError(f"the ledger's state is malformed or contradicts itself: {error!r}") from error
        return ledger

    def _restore(self, state: dict[str, Any]) -> None:
        if state["group_size"] != self.group_size:
            raise CheckpointError(f"the ledger was saved with group_size={state['group_size']}, not {self.group_size}")
        self.next_group_id = int(state["next_group_id"])
        self._num_released = int(state["num_released"])
        self._dropped = Counter({DropReason(reason).value: int(n) for reason, n in state["dropped"].items()})
        for saved in state["groups"]:
            group = GroupRecord.from_json(saved, self._clock())
            self._untaken[group.group_id] = group
            self._tally.add(group)
            self._queue(group)

    @property
    def _num_taken(self) -> int:
        return self._num_released + len(self._taken)

    @property
    def _num_slots_taken(self) -> int:
        return len(self._untaken) + len(self._taken)

    def _whereabouts(self, group_id: int) -> str:
        if group_id in self._taken:
            return f"taken for step {self._taken[group_id].step}"
        if group_id in self._untaken:
            return "finished, not taken" if self._untaken[group_id].is_finished else "in flight"
        return "released or dropped" if 0 <= group_id < self.next_group_id else "unknown: it was never admitted"
