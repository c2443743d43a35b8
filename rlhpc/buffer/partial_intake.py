"""Assemble the pieces of running rollouts that generators report into prefixes, from which others can continue.

    PartialRollout ─▶ prefix of a member, in the ledger ─▶ the lease that is granted after a death

Guarantees: a prefix is a gapless beginning of one draft: a piece that does not continue it changes nothing, and its
sender is asked for all tokens.  Only the holder of a member changes its prefix; a generator that reports a free member
becomes its holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhpc.buffer.group_record import GroupRecord
from rlhpc.buffer.partial_codec import PartialRollout, joined, up_to_version
from rlhpc.buffer.rollout_buffer import RolloutBuffer

Member = tuple[int, int]  # group, sample index


@dataclass(slots=True)
class Receipt:
    """What became of a report."""

    kept: list[PartialRollout] = field(default_factory=list)  # those that changed a prefix
    wanted: list[Member] = field(default_factory=list)  # members whose beginning is not known here
    refused: list[str] = field(default_factory=list)  # descriptions of impossible pieces
    unwanted: list[int] = field(default_factory=list)  # groups that are finished or dropped
    num_adopted: int = 0  # members that were free


class PartialIntake:
    """Receives pieces, and knows the prefix of every member that is being sampled."""

    def __init__(self, buffer: RolloutBuffer, max_tokens: int) -> None:
        """max_tokens: of a completion."""
        self._buffer, self._max_tokens = buffer, max_tokens

    def receive(self, holder: str, partials: Sequence[PartialRollout], newest_version: int) -> Receipt:
        """Extend the prefixes of members that this generator holds, and renew its leases of them.

        newest_version: the newest that any generator can have sampled with.  Ignored: members of other generators, and
        groups not admitted yet: a controller that lost an admission will admit the same prompt again.
        """
        receipt = Receipt()
        for partial in partials:
            group = self._buffer.open_record(partial.group_id)
            if group is None:
                if partial.group_id < self._buffer.num_admitted and partial.group_id not in receipt.unwanted:
                    receipt.unwanted.append(partial.group_id)
                continue
            if odd := self._oddity(partial, group, newest_version):
                receipt.refused.append(f"sample {partial.sample_index} of group {partial.group_id}: {odd}")
                continue
            member = group.members[partial.sample_index]
            if member.is_free:
                self._buffer.adopt(holder, partial.group_id, partial.sample_index)
                receipt.num_adopted += 1
            if member.holder != holder:
                continue
            prefix = None
            if len(partial.tokens.token_ids):
                if partial.follows(member.prefix):
                    prefix = joined(member.prefix, partial)
                    receipt.kept.append(partial)
                else:
                    receipt.wanted.append((partial.group_id, partial.sample_index))
            self._buffer.renew(holder, partial.group_id, (partial.sample_index,), (prefix,))
        return receipt

    def whole(self, members: Iterable[Member]) -> list[PartialRollout]:
        """The prefixes of these members, for those that have one and whose group is still open."""
        found = []
        for group_id, index in members:
            group = self._buffer.open_record(group_id)
            prefix = group.members[index].prefix if group is not None and index < len(group.members) else None
            if group is not None and prefix is not None:
                found.append(PartialRollout(group_id, index, group.prompt.prompt_id, 0, 0, prefix))
        return found

    def all(self) -> list[PartialRollout]:
        """The prefixes of all unfinished members."""
        groups = [(group_id, self._buffer.open_record(group_id)) for group_id in self._buffer.open_groups()]
        return self.whole((group_id, i) for group_id, group in groups if group for i in range(len(group.members)))

    def restore(self, partials: Mapping[Member, PartialRollout], newest_version: int) -> list[PartialRollout]:
        """Give unfinished members what an earlier attempt of the run knew of them; return what they got.

        newest_version: the newest that this attempt has or will repeat: tokens from the first newer one on are cut off.
        """
        members = []
        for (group_id, index), partial in partials.items():
            group = self._buffer.open_record(group_id)
            if group is None or self._oddity(partial, group, None) or not group.members[index].is_free:
                continue
            prefix = up_to_version(partial.tokens, newest_version)
            if prefix is not None:
                self._buffer.hand_back("", group_id, (index,), (prefix,))
                members.append((group_id, index))
        return self.whole(members)

    def _oddity(self, partial: PartialRollout, group: GroupRecord, newest_version: int | None) -> str:
        """Description of what is wrong with a piece; "": nothing."""
        versions = partial.tokens.versions
        if partial.sample_index >= len(group.members):
            return f"the group has {len(group.members)}"
        if partial.prompt_id != group.prompt.prompt_id:
            return f"it continues prompt {partial.prompt_id}, not {group.prompt.prompt_id}"
        if partial.end > self._max_tokens:
            return f"{partial.end} tokens, more than the {self._max_tokens} that a completion may have"
        if len(versions) and versions.min() < group.admitted_version:
            return f"version {versions.min()} sampled it, and {group.admitted_version} was live when it was admitted"
        if len(versions) and newest_version is not None and versions.max() > newest_version:
            return f"version {versions.max()} sampled it, and the newest is {newest_version}"
        return ""
