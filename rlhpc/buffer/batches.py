"""The records of groups, and the choice of a batch's groups so that all other groups can still be trained in time.

In this file: the record of a group that has a slot; a resolved group; whether a batch can be formed, from counts alone;
the choice.

Input of the choice: GroupRecord, in order of admission.  Output: ids of a batch, or None while none can be formed; ids
of a part of a batch, with which a step may begin.  Pure.

Each group has a last batch that it may be in (`GroupRecord.due_after`).  A batch takes finished groups, those due
first.  It may skip an unfinished one, a straggler, while that has batches left with room for all groups that need
them: for each k, at most k · groups_per_step groups that are due within the next k batches are left.  That is Hall's
condition: if it holds, taking the earliest due groups first meets every due date.  A part of a batch leaves places in
it, which count as room.  docs/staleness.md has the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from rlhpc.buffer.lost_leases import ANY_COMPANY
from rlhpc.protocol.errors import LedgerError
from rlhpc.protocol.types import Prefix, Prompt, RolloutGroup

# --------------------------------------------------------------------------------------------------------- group record
#
# The ledger's record of a group that has a slot, and of each of its members.
#
# A member is delivered, held by one generator, or free; a group is in flight, finished, or taken for a step.


@dataclass(slots=True)
class MemberRecord:
    """One of the group_size completions of a group."""

    is_delivered: bool = False
    holder: str | None = None  # generator that samples it now
    lease: int = -1  # number of its lease within the group
    seen_s: float = 0.0  # when its holder got or last renewed it; by the ledger's clock
    lost_leases: int = 0  # leases lost with this member undelivered; handing a member back does not count
    prefix: Prefix | None = None  # what an earlier holder had sampled

    @property
    def is_free(self) -> bool:
        """Neither delivered nor held."""
        return not self.is_delivered and self.holder is None


@dataclass(slots=True, eq=False)
class GroupRecord:
    """A group from its admission to its release or drop."""

    group_id: int
    prompt: Prompt
    admitted_version: int
    admitted_at_s: float  # by the ledger's clock
    members: list[MemberRecord]
    num_leases: int = 0
    due_after: int = (
        -1
    )  # groups of the run that may be taken before the batch that it is due in; -1: in order of admission
    step: int | None = None  # the step it was taken for
    is_dropped: bool = False
    company: int = ANY_COMPANY  # groups that a generator may hold at once, this one included
    num_missing: int = field(init=False)  # members that are not delivered

    def __post_init__(self) -> None:
        """Count the missing members; `deliver` updates the count."""
        self.num_missing = sum(not member.is_delivered for member in self.members)

    @property
    def is_finished(self) -> bool:
        """All members are delivered."""
        return not self.num_missing

    def deliver(self, index: int) -> None:
        """Record that a missing member has arrived."""
        self.members[index].is_delivered, self.members[index].prefix = True, None
        self.num_missing -= 1

    @property
    def free_indices(self) -> list[int]:
        """Members that a lease may name."""
        return [index for index, member in enumerate(self.members) if member.is_free]

    @property
    def has_free(self) -> bool:
        """A lease may name some member."""
        return any(member.is_free for member in self.members)

    @property
    def attempts(self) -> int:
        """1 + the most leases lost by a member."""
        return 1 + max(member.lost_leases for member in self.members)

    def is_poisoned(self, max_attempts: int) -> bool:
        """Some free member has used up its attempts."""
        return any(member.is_free and member.lost_leases >= max_attempts for member in self.members)

    def remember(self, lost_leases: int) -> None:
        """Count leases lost in earlier attempts of the run: any member may be the one that lost them."""
        for member in self.members:
            if not member.is_delivered:
                member.lost_leases = max(member.lost_leases, lost_leases)

    def to_json(self) -> dict[str, Any]:
        """Everything that outlives a process: holders, deadlines and prefixes do not."""
        return {
            "group_id": self.group_id,
            "admitted_version": self.admitted_version,
            "prompt": {
                "prompt_id": self.prompt.prompt_id,
                "task": self.prompt.task,
                "token_ids": self.prompt.token_ids.tolist(),
                "reference": self.prompt.reference,
            },
            "delivered": [index for index, member in enumerate(self.members) if member.is_delivered],
            "lost_leases": [member.lost_leases for member in self.members],
            "num_leases": self.num_leases,
        }

    @classmethod
    def from_json(cls, state: dict[str, Any], now_s: float) -> GroupRecord:
        """Undo to_json; the group counts as admitted at now_s.  Raises KeyError, TypeError, ValueError."""
        prompt = state["prompt"]
        delivered = set(state["delivered"])
        return cls(
            group_id=int(state["group_id"]),
            prompt=Prompt(
                prompt_id=int(prompt["prompt_id"]),
                task=prompt["task"],
                token_ids=np.asarray(prompt["token_ids"], dtype=np.int32),
                reference=prompt["reference"],
            ),
            admitted_version=int(state["admitted_version"]),
            admitted_at_s=now_s,
            members=[
                MemberRecord(is_delivered=index in delivered, lost_leases=int(lost_leases))
                for index, lost_leases in enumerate(state["lost_leases"])
            ],
            num_leases=int(state["num_leases"]),
        )


# ------------------------------------------------------------------------------------------------------------- resolved
#
# A resolved group, trained or dropped: the unit of segments on disk.
#
# Input: RolloutGroup.  A group is resolved once: consumed by an optimiser step, or dropped for a named reason.


class DropReason(StrEnum):
    """Reason for dropping a group.  The values are part of the file format: none is ever renamed."""

    ZERO_VARIANCE = "zero_variance"  # all rewards equal, so that every advantage is zero
    VERIFIER_ERROR = "verifier_error"  # no reward could be computed
    POISON = "poison"  # every lease of one of its members was lost
    CANCELLED = "cancelled"  # on request


@dataclass(frozen=True, slots=True)
class ResolvedGroup:
    """A group and its end; neither step nor reason is set while it is only buffered (in a checkpoint)."""

    group: RolloutGroup  # may lack members if it was dropped, or buffered while incomplete
    consumed_step: int = -1  # the optimiser step that used it; -1: none
    drop_reason: DropReason | None = None
    attempts: int = 1  # 1 + the most leases lost by a member
    trained_version: int = -1  # the version that step trained: staleness is counted against it; -1: none
    applied: bool | None = None  # False: the step was skipped, the version stayed; None: no step
    group_size: int = 0  # rollouts that were wanted of it, if more than admission.group_size

    def without_routes(self) -> ResolvedGroup:
        """Itself, or a copy whose members have no routes."""
        if all(each.rollout.routes is None for each in self.group.members):
            return self
        members = tuple(each.without_routes() for each in self.group.members)
        return replace(self, group=replace(self.group, members=members))


# -------------------------------------------------------------------------------------------------------- untaken tally
#
# Decide from counts alone whether a batch, or a part of one, can be formed, so that groups are scanned only then.
#
# Input: groups, as they are admitted, finish and leave.  Output: how many more have to end first, and how many a part
# of the batch may have meanwhile.  A scan of all groups costs a microsecond per group; with
# thousands that finish one by one, it would dominate.


class UntakenTally:
    """The groups that no batch has taken, counted by when they are due: a handful of numbers, however many groups."""

    def __init__(self, groups_per_step: int) -> None:
        """Start without groups."""
        self._groups_per_step = groups_per_step
        self._all: Counter[int] = Counter()  # due → groups
        self._finished: Counter[int] = Counter()
        self.num_finished = 0

    def add(self, group: GroupRecord) -> None:
        """Count a group that is admitted, or was before the run was interrupted."""
        self._all[group.due_after] += 1
        self.delivered(group)

    def delivered(self, group: GroupRecord) -> None:
        """A member of this group has arrived: count the group as finished if it was the last."""
        if group.is_finished:
            self._finished[group.due_after] += 1
            self.num_finished += 1

    def remove(self, group: GroupRecord) -> None:
        """Forget a group that is taken or dropped."""
        _less_one(self._all, group.due_after)
        if group.is_finished:
            _less_one(self._finished, group.due_after)
            self.num_finished -= 1

    def num_missing(self, num_groups: int, num_taken: int) -> int:
        """Number of groups that must still end, finished or dropped, before there can be a batch; 0: perhaps now.

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
        """Number of groups that choose_part would choose if there were no window; arguments as in num_missing.

        begun_due: due dates of the groups that are already part of the batch.
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
        """Number of groups by the number of batches that may still come before theirs."""
        counts: Counter[int] = Counter()
        for due, count in by_due.items():
            counts[max(0, (due - num_taken) // self._groups_per_step)] += count
        return counts


def _less_one(counts: Counter[int], due: int) -> None:
    counts[due] -= 1
    if not counts[due]:
        del counts[due]


# --------------------------------------------------------------------------------------------------------- batch choice


class BatchChoice:
    """The choices of one ledger; remembers the groups with which the next batch has begun."""

    def __init__(self, groups_per_step: int, window_groups: int) -> None:
        self._rules = groups_per_step, window_groups
        self.begun: list[int] = []

    def batch(self, groups: Sequence[GroupRecord], num_groups: int, num_taken: int) -> list[int] | None:
        """The next batch, including the groups it has begun with (choose_batch)."""
        return choose_batch(groups, num_groups, num_taken, *self._rules, self.begun)

    def part(self, groups: Sequence[GroupRecord], num_groups: int, num_taken: int) -> list[int]:
        """Groups that the next batch could begin or go on with (choose_part)."""
        return choose_part(groups, num_groups, num_taken, *self._rules, self.begun)

    def complete(self, group_ids: Collection[int]) -> None:
        """Complete the batch with these groups.  Raises LedgerError if they lack one that it has begun with."""
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
    """Ids of all finished groups with which a batch of num_groups can begin or continue, ascending.

    Whichever group finishes next, the batch can be completed, and all groups left behind meet their due dates.  At
    least one group is left for the end of the batch.  Arguments as in choose_batch.
    """
    spare = _spare(groups, num_taken, groups_per_step)
    left = Counter(spare.values())
    left.subtract(Counter(spare[group_id] for group_id in begun))
    chosen, num_places = list[int](), num_groups - len(begun)
    for group_id in _most_urgent(groups, spare, window_groups, begun)[: num_places - 1]:
        num_due = 0
        for later in range(spare[group_id]):  # later ones lose a place, but also a group that needs one
            num_due += left[later]
            if num_due > num_places - len(chosen) - 1 + later * groups_per_step:
                return sorted(chosen)
        left[spare[group_id]] -= 1
        chosen.append(group_id)
    return sorted(chosen)


def _spare(groups: Sequence[GroupRecord], num_taken: int, groups_per_step: int) -> dict[int, int]:
    """Number of batches that may still come before a group's own; groups restored after a restart go in order."""
    return {
        group.group_id: max(0, (group.due_after - num_taken) // groups_per_step)
        if group.due_after >= 0
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
    """True if some group left behind would miss its due date, though another choice would save it."""
    left = Counter(spare.values())
    left.subtract(Counter(spare[group_id] for group_id in chosen))
    num_due = 0
    for later in range(max(spare[group_id] for group_id in chosen)):  # beyond, all chosen are among the most urgent
        num_due += left[later]
        if num_due > later * groups_per_step:
            return True
    return False
