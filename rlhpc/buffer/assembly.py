"""Put the members of a group together, each once.

Input: ScoredRollout.  Output: RolloutGroup.
"""

from __future__ import annotations

from rlhpc.errors import LedgerError
from rlhpc.types import RolloutGroup, ScoredRollout


class GroupAssembler:
    """Groups of which some members have arrived."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._members: dict[int, dict[int, ScoredRollout]] = {}
        self._completed: set[int] = set()  # until forgotten, so that a late copy does not start the group again

    def add(self, scored: ScoredRollout, admitted_version: int) -> RolloutGroup | None:
        """Add a member; return the group when it was the last one.  A second copy is ignored, whatever it holds.

        Raises LedgerError for a member that cannot be of this group; then nothing changes.
        """
        rollout = scored.rollout
        group_id, index = rollout.group_id, rollout.sample_index
        if not 0 <= index < self._group_size:
            raise LedgerError(f"sample {index} of group {group_id}, which has {self._group_size} members")
        if group_id in self._completed:
            return None
        members = self._members.get(group_id, {})
        if any(other.rollout.prompt.prompt_id != rollout.prompt.prompt_id for other in members.values()):
            raise LedgerError(f"sample {index} of group {group_id} answers another prompt, {rollout.prompt.prompt_id}")
        self._members.setdefault(group_id, members).setdefault(index, scored)
        if len(members) < self._group_size:
            return None
        del self._members[group_id]
        self._completed.add(group_id)
        ordered = tuple(members[i] for i in range(self._group_size))
        return RolloutGroup(group_id, rollout.prompt, admitted_version, ordered)

    def forget(self, group_id: int) -> tuple[ScoredRollout, ...]:
        """Drop all knowledge of a group; return the members of it that had arrived, if it was not complete."""
        self._completed.discard(group_id)
        return _ordered(self._members.pop(group_id, {}))

    def members(self, group_id: int) -> tuple[ScoredRollout, ...]:
        """Members of an incomplete group that have arrived, ordered by sample_index."""
        return _ordered(self._members.get(group_id, {}))

    def partial(self) -> dict[int, int]:
        """Number of members that have arrived of each incomplete group, for status."""
        return {group_id: len(members) for group_id, members in self._members.items()}


def _ordered(members: dict[int, ScoredRollout]) -> tuple[ScoredRollout, ...]:
    return tuple(members[index] for index in sorted(members))
