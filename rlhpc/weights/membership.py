"""Membership of weight broadcasts, and the version that each member samples with.

Input: events at the controller (Hello, WeightsLive, silence).  Output: WeightGroup.  Pure: no clock, no sockets, no
torch.

Rules:
1. A membership epoch has a fixed roster.  When a generator joins, leaves or restarts, a new epoch is needed; an
   existing epoch is never joined or left.
2. A member that is lost or fails is no longer waited for, and breaks the epoch.  A failed one is in the next epoch; a
   lost one is in the next epoch after it has sent Hello again.  A late joiner enters the next epoch.
3. Epoch numbers only grow, across restarts of the controller too: state() holds the last one.
4. An acknowledgement counts if it is for the current epoch and from one of its members; it then holds until the member
   is lost or restarts, so that a member need not acknowledge the same version again in a new epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhpc.errors import CheckpointError
from rlhpc.types import WeightGroup

NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A generator that is alive."""

    num_ranks: int
    incarnation: str
    policy_version: int = NO_VERSION  # the newest it has acknowledged


class Membership:
    """The roster of live generators and the epoch formed from it."""

    def __init__(self) -> None:
        """Starts without generators and without an epoch."""
        self._members: dict[str, Member] = {}
        self._last_epoch = 0
        self._group: WeightGroup | None = None
        self._roster: dict[str, str] = {}  # of the current epoch: name → incarnation

    # ------------------------------------------------------------------------------------------- who is here

    def hello(self, name: str, num_ranks: int, incarnation: str) -> None:
        """A generator has registered.  Idempotent for one incarnation; a new one starts without a version.

        Raises ValueError if it has no rank that receives.
        """
        if num_ranks < 1:
            raise ValueError(f"{name}: num_weight_ranks={num_ranks}; legal: 1 or more")
        known = self._members.get(name)
        if known is None or known.incarnation != incarnation or known.num_ranks != num_ranks:
            self._members[name] = Member(num_ranks, incarnation)
            self._roster.pop(name, None)  # so that an epoch of the old incarnation never counts as complete

    def lost(self, name: str) -> None:
        """A generator died or fell silent.  Unknown names are ignored."""
        self._members.pop(name, None)
        self._roster.pop(name, None)  # so that it is not a member of this epoch even if it comes back at once

    def failed(self, name: str, epoch: int) -> None:
        """A generator could not join this epoch or receive in it, but is alive: it tries again in the next one.

        It keeps its version.  Ignored if for another epoch.
        """
        if self._group is not None and self._group.epoch == epoch:
            self._roster.pop(name, None)

    # ---------------------------------------------------------------------------------------------- epochs

    @property
    def candidates(self) -> frozenset[str]:
        """All live generators: the members of the next epoch."""
        return frozenset(self._members)

    @property
    def is_whole(self) -> bool:
        """True if every member of the current epoch is alive: only then can a broadcast succeed."""
        return self._group is not None and all(
            name in self._members and self._roster.get(name) == self._members[name].incarnation
            for name in self._group.members
        )

    @property
    def needs_new_epoch(self) -> bool:
        """True if a generator is alive and the current epoch's roster differs from the live generators."""
        if not self._members:
            return False
        return not self.is_whole or self._roster != {name: m.incarnation for name, m in self._members.items()}

    def next_group(self, transport: str, address: str = "") -> WeightGroup:
        """Form a new epoch of all live generators, sorted by name, and make it the current one.

        Raises ValueError if there is none.
        """
        if not self._members:
            raise ValueError("no generator is alive to form a group with")
        self._last_epoch += 1
        names = tuple(sorted(self._members))
        ranks = tuple(self._members[name].num_ranks for name in names)
        self._group = WeightGroup(self._last_epoch, transport, address, names, ranks)
        self._roster = {name: self._members[name].incarnation for name in names}
        return self._group

    # -------------------------------------------------------------------------------------------- versions

    def acknowledged(self, name: str, epoch: int, policy_version: int) -> bool:
        """A member serves this version.  Returns False, without effect, if rule 4 does not count it."""
        member = self._members.get(name)
        is_present = self._group is not None and self._group.epoch == epoch
        if member is None or not is_present or self._roster.get(name) != member.incarnation:
            return False
        self._members[name] = replace(member, policy_version=policy_version)
        return True

    def waiting_for(self, policy_version: int) -> frozenset[str]:
        """Live members of the current epoch that do not serve this version or a newer one yet."""
        return frozenset(
            name for name in self._roster if name in self._members and not self.serves(name, policy_version)
        )

    def live_members(self, policy_version: int) -> frozenset[str]:
        """Live generators that serve this version or a newer one, in any epoch: these may get leases."""
        return frozenset(name for name in self._members if self.serves(name, policy_version))

    def serves(self, name: str, policy_version: int) -> bool:
        """Whether this is a live generator that serves this version or a newer one."""
        member = self._members.get(name)
        return member is not None and member.policy_version >= policy_version

    # ----------------------------------------------------------------------------------------------- restart

    def state(self) -> dict[str, Any]:
        """JSON for the checkpoint.  Live generators register again; only the counter has to survive."""
        return {"last_epoch": self._last_epoch}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue counting epochs.  Raises CheckpointError if there is no count in it."""
        last_epoch = state.get("last_epoch")
        if not isinstance(last_epoch, int) or last_epoch < 0:
            raise CheckpointError(f"membership: last_epoch={last_epoch!r} is not a count of epochs")
        self._last_epoch = max(self._last_epoch, last_epoch)
