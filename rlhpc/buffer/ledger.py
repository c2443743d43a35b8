"""Admit prompts and grant them to generators, with bounded staleness and without losing any.

Input: Prompt.  Output: Lease.  The only backpressure and the only retry of the system; pure, synchronous, time passed
in.  Guarantees: (1) slots: admitted − released − dropped ≤ num_slots;  (2) staleness: a group taken for step s was
admitted at version ≥ s − ⌊(num_slots − 1) / groups_per_step⌋, if groups are released only when the weights of their
step are live;  (3) conservation: every admitted group is in exactly one of {in flight, finished, taken, released,
dropped}.  Why (2) holds: docs/staleness.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlhpc.buffer.batch_choice import BatchChoice
from rlhpc.buffer.group_record import GroupRecord, MemberRecord
from rlhpc.buffer.lease_book import LeaseBook
from rlhpc.buffer.lost_leases import LostLeases
from rlhpc.buffer.resolved import DropReason
from rlhpc.buffer.untaken_tally import UntakenTally
from rlhpc.contracts import Clock
from rlhpc.errors import CheckpointError, LedgerError
from rlhpc.types import Lease, Prefix, Prompt, SamplingParams


class AdmissionLedger:
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
        """sampling: of a prompt, by its id; lost_leases: of earlier attempts of the run; changes are recorded in it."""
        if num_slots < groups_per_step:
            raise LedgerError(f"{num_slots} slots can never hold a batch of {groups_per_step} groups")
        self.num_slots = self._num_slots_open = num_slots
        self.window_groups, self.groups_per_step, self.group_size = window_groups, groups_per_step, group_size
        self._sampling, self._clock = sampling, clock
        self._leases = LeaseBook(lease_deadline_s, max_attempts, clock=clock, lost_leases=lost_leases or LostLeases())
        self.next_group_id = 0  # of the group that is admitted next
        self._untaken: dict[int, GroupRecord] = {}  # in flight or finished, in order of admission
        self._tally = UntakenTally(groups_per_step)  # of these
        self._choice = BatchChoice(groups_per_step, window_groups)
        self._taken: dict[int, GroupRecord] = {}
        self._num_released = 0
        self._dropped: Counter[str] = Counter()

    # ------------------------------------------------------------------------------------------------- admission

    @property
    def has_slot(self) -> bool:
        """Whether another group may be admitted now."""
        return self._num_slots_taken < self._num_slots_open

    def tighten(self, num_slots: int) -> None:
        """Use only this many slots, but at least a batch's worth: groups admitted from now on are less stale."""
        self._num_slots_open = min(self.num_slots, max(self.groups_per_step, num_slots))

    @property
    def staleness_bound(self) -> int:
        """Upper bound of the staleness of a taken group, in steps."""
        return (self.num_slots - 1) // self.groups_per_step

    def admit(self, prompt: Prompt, policy_version: int, *, size: int = 0, again: bool = False) -> int:
        """Take a slot for this prompt and return the new group's id; policy_version is what generators serve now.

        size: rollouts wanted for it, if more than group_size.  again: it had a slot before the run was interrupted; it
        gets one, free or not, and waits for `readmit`.  Raises LedgerError, changing nothing, when no slot is free.
        """
        if not (self.has_slot or again):
            raise LedgerError(f"no free slot among {self._num_slots_open} for prompt {prompt.prompt_id}")
        members = [MemberRecord() for _ in range(max(size, self.group_size))]
        group = GroupRecord(self.next_group_id, prompt, policy_version, self._clock(), members)
        if not again:
            most_behind = (self._num_slots_open - 1) // self.groups_per_step  # batches that may come before its own
            group.due = self._num_released + most_behind * self.groups_per_step
        self.next_group_id, self._untaken[group.group_id] = group.group_id + 1, group
        self._tally.add(group)
        self._leases.add(group, waits=again)
        return group.group_id

    def readmit(self, live_version: int) -> list[GroupRecord]:
        """Let restored groups be granted in order; return those that count as admitted now (LeaseBook.readmit)."""
        return self._leases.readmit(self.groups, self.num_slots, live_version)

    # ---------------------------------------------------------------------------------------------------- leases

    def grant(self, holder: str, credit_samples: int) -> Lease | None:
        """Lease free members of one group to a generator, at most credit_samples; None: there is nothing for it.

        Returned groups come first, then fresh ones, oldest first; a suspect group may get a generator of its own.
        """
        group = self._leases.grantable(holder) if credit_samples > 0 else None
        if group is None:
            return None
        indices = tuple(group.free_indices[:credit_samples])
        prefixes = tuple(group.members[index].prefix for index in indices)
        return Lease(
            group_id=group.group_id,
            attempt=self._leases.hold(group, indices, holder),
            prompt=group.prompt,
            group_size=len(group.members),
            sample_indices=indices,
            sampling=self._sampling(group.prompt.prompt_id),
            admitted_version=group.admitted_version,
            prefixes=prefixes if any(prefix is not None for prefix in prefixes) else (),
        )

    def adopt(self, holder: str, group_id: int, sample_index: int) -> None:
        """Count a free member as leased to this generator, which kept sampling it after its lease was over."""
        self._leases.hold(self.group(group_id), (sample_index,), holder)

    @property
    def is_quarantining(self) -> bool:
        """Whether `grant` may return None for one holder and a lease for another."""
        return self._leases.is_quarantining

    def outstanding(self, holder: str) -> int:
        """Samples leased to this generator that it neither delivered, lost nor handed back."""
        return self._leases.outstanding(holder)

    def take_relieved(self) -> set[str]:
        """Holders that have let go of a sample since the last call."""
        relieved, self._leases.relieved = self._leases.relieved, set()
        return relieved

    def deliver(self, group_id: int, sample_index: int) -> bool:
        """Record that a member arrived, whichever generator holds it.  False, without effect, if it is not wanted."""
        if not self.is_wanted(group_id, sample_index):
            return False
        group = self._untaken[group_id]
        self._leases.deliver(group, sample_index)
        self._tally.delivered(group)
        return True

    def hand_back(
        self, holder: str, group_id: int, sample_indices: Sequence[int], prefixes: Sequence[Prefix | None] = ()
    ) -> None:
        """Make members grantable again, each with what was sampled of it; this does not count as a lost lease.

        Ignored: members that another one holds, that are delivered or not there, unknown groups.  prefixes: none, or
        one per sample index.  Raises LedgerError, changing nothing, for another number of them, or an index below 0.
        """
        self._leases.hand_back(self._untaken.get(group_id), holder, sample_indices, prefixes)

    def renew(
        self, holder: str, group_id: int, sample_indices: Sequence[int], prefixes: Sequence[Prefix | None] = ()
    ) -> None:
        """The holder continues these members; prefixes are for the next holder.  Ignores and raises as hand_back."""
        self._leases.renew(self._untaken.get(group_id), holder, sample_indices, prefixes)

    def expire(self) -> list[tuple[int, str]]:
        """Free the members of leases whose deadline has passed; return (group_id, holder) of each such lease."""
        return self._leases.expire()

    def forget_holder(self, holder: str, *, is_dead: bool = True) -> list[int]:
        """Free everything that a dead or reconnected generator held; return the groups' ids, ascending."""
        return self._leases.forget_holder(holder, is_dead=is_dead)

    def poisoned(self) -> list[int]:
        """Groups with a member that has lost max_attempts leases; they are no longer granted, the caller drops them."""
        return self._leases.poisoned()

    # ------------------------------------------------------------------------------------------------ resolution

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop an open group; its slot is free at once.  Raises LedgerError, changing nothing, for any other."""
        group = self._untaken.pop(group_id, None)
        if group is None:
            raise LedgerError(f"group {group_id} cannot be dropped ({reason}): it is {self._whereabouts(group_id)}")
        self._tally.remove(group)
        self._leases.remove(group)
        self._dropped[reason.value] += 1

    def upcoming(self, num_groups: int) -> list[int] | None:
        """Ids of the groups that a batch would take now, ascending; None: it has to wait (batch_choice.py)."""
        if self.num_missing(num_groups):
            return None
        return self._choice.batch(list(self._untaken.values()), num_groups, self._num_taken)

    def num_missing(self, num_groups: int) -> int:
        """The least number of groups that have to end before a batch can be formed; 0: ask `upcoming`."""
        return self._tally.num_missing(num_groups, self._num_taken)

    def part(self, num_groups: int, least: int) -> list[int]:
        """Ids of the finished groups, `least` or more, that the next batch can begin with or go on with; else []."""
        begun_due = [self._untaken[group_id].due for group_id in self._choice.begun]
        may_be = self._tally.most_in_part(num_groups, self._num_taken, begun_due) >= least
        part = self._choice.part(list(self._untaken.values()), num_groups, self._num_taken) if may_be else []
        return part if len(part) >= least else []

    def begin(self, part: Sequence[int]) -> None:
        """The next batch includes these groups, which `part` has just told."""
        self._choice.begun += part

    def take(self, num_groups: int, step: int) -> list[int] | None:
        """Move the upcoming groups into the batch of this step; None, without effect, if it has to wait."""
        chosen = self.upcoming(num_groups)
        if chosen is not None:
            self.take_these(chosen, step)
        return chosen

    def take_these(self, group_ids: Sequence[int], step: int) -> None:
        """Move finished groups, begun ones included, into a batch; LedgerError, before any, where they are not."""
        for group_id in group_ids:
            if group_id not in self._untaken or not self._untaken[group_id].is_finished:
                raise LedgerError(f"group {group_id} cannot be taken: it is {self._whereabouts(group_id)}")
        self._choice.complete(group_ids)
        for group_id in group_ids:
            group = self._taken[group_id] = self._untaken.pop(group_id)
            self._tally.remove(group)
            group.step = step

    def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of groups whose weights are live.  Raises LedgerError, before any, if one is not taken."""
        for group_id in group_ids:
            if group_id not in self._taken:
                raise LedgerError(f"group {group_id} cannot be released: it is {self._whereabouts(group_id)}")
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"a group is released twice at once: {sorted(group_ids)}")
        for group_id in group_ids:
            del self._taken[group_id]
        self._num_released += len(group_ids)

    # ------------------------------------------------------------------------------------------------ inspection

    def is_wanted(self, group_id: int, sample_index: int) -> bool:
        """True if `deliver` would take this member."""
        group = self._untaken.get(group_id)
        members = group.members if group is not None else []
        return 0 <= sample_index < len(members) and not members[sample_index].is_delivered

    def is_open(self, group_id: int) -> bool:
        """True while a group is in flight or finished: neither taken nor dropped."""
        return group_id in self._untaken

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
            "held_samples": self._leases.num_held,
            "lost_samples": self._leases.num_lost_members,  # leased and not delivered: expired or died
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
        self._leases.check(self.groups)

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
            self._leases.add(group)

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
