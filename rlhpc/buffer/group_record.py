"""The ledger's record of a group that has a slot, and of each of its members.

A member is delivered, held by one generator, or free; a group is in flight, finished, or taken for a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhpc.buffer.lost_leases import ANY_COMPANY
from rlhpc.types import Prefix, Prompt


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
    due: int = -1  # groups of the run that may be taken before its batch; -1: in order of admission
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
            "strikes": [member.lost_leases for member in self.members],
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
                for index, lost_leases in enumerate(state["strikes"])
            ],
            num_leases=int(state["num_leases"]),
        )
