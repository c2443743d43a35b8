"""Hold every group from its first member to its last use: the one object through which the controller sees rollouts.

Input: ScoredRollout.  Output: RolloutGroup.  The ledger decides, the assembler joins, the segments record.
Guarantees: a group is handed out once for training; what is consumed or dropped reaches a segment; a checkpoint carries
everything else, half-assembled groups included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.assembly import GroupAssembler
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.resolved import DropReason, ResolvedGroup
from rlhpc.buffer.segment_files import write_sealed
from rlhpc.buffer.segment_reader import read_segment
from rlhpc.buffer.segments import SegmentWriter, to_hdf5
from rlhpc.errors import CheckpointError, LedgerError, SegmentError
from rlhpc.types import FinishReason, RolloutGroup, ScoredRollout

BUFFERED_FILE = "buffered.h5"


@dataclass(frozen=True, slots=True)
class FrozenBuffer:
    """A snapshot of the buffer for a checkpoint.  It does not change any more, so that a thread may write it."""

    groups: tuple[ResolvedGroup, ...]  # neither consumed nor dropped at that moment
    ledger: dict[str, Any]
    next_step: int
    segments: SegmentWriter  # cut at that moment

    def write(self, directory: Path) -> dict[str, Any]:
        """Seal what was resolved before that moment and write what was not into `directory`.

        Returns the JSON that goes with it: the ledger, and the number of the first segment that a resume undoes.
        Raises SegmentError when it cannot be written.
        """
        next_index = self.segments.seal_to_cut()
        write_sealed(directory / BUFFERED_FILE, to_hdf5(self.groups, {"next_step": self.next_step}, "none"))
        return {"ledger": self.ledger, "next_segment_index": next_index}


class RolloutBuffer:
    """Groups by id, between generators and trainer."""

    def __init__(self, ledger: AdmissionLedger, assembler: GroupAssembler, segments: SegmentWriter) -> None:
        self.ledger, self.assembler, self.segments = ledger, assembler, segments
        self._groups: dict[int, RolloutGroup] = {}  # complete and neither consumed nor dropped

    def deliver(self, holder: str, scored: ScoredRollout) -> RolloutGroup | None:
        """Add a member; return its group when it is now complete (it stays here, ready to be taken or dropped).

        Second copies and members that are no longer wanted are ignored.
        Raises LedgerError for an aborted rollout: those are handed back, never delivered.
        """
        rollout = scored.rollout
        if rollout.finish_reason is FinishReason.ABORT:
            raise LedgerError(f"{holder} delivered the aborted rollout {rollout.group_id}:{rollout.sample_index}")
        if not self.ledger.deliver(holder, rollout.group_id, rollout.sample_index):
            return None
        admitted_version = self.ledger.group(rollout.group_id).admitted_version
        group = self.assembler.add(scored, admitted_version)
        if group is not None:
            self.put(group)
        return group

    def put(self, group: RolloutGroup) -> None:
        """Keep a complete group whose members the ledger has as delivered; `deliver` does it by itself.

        Raises LedgerError if the ledger disagrees; then nothing changes.
        """
        if not self.ledger.group(group.group_id).is_finished:
            raise LedgerError(f"group {group.group_id} is not finished according to the ledger")
        self._groups[group.group_id] = group

    def take(self, num_groups: int, step: int) -> list[RolloutGroup] | None:
        """Take the batch of a step, oldest group first; None, without effect, while it is not full."""
        group_ids = self.ledger.take(num_groups, step)
        return None if group_ids is None else [self._groups[group_id] for group_id in group_ids]

    def consume(self, groups: Sequence[RolloutGroup], step: int, *, trained_version: int, applied: bool) -> None:
        """Record that the optimiser step has used these groups.  Called after the step's report, before `release`.

        trained_version: of the policy that the step began with; applied: whether it led to another.

        Raises LedgerError, before anything changed, if one was not taken for this step or is consumed already.
        """
        for group in groups:
            if self.ledger.group(group.group_id).step != step or group.group_id not in self._groups:
                raise LedgerError(f"group {group.group_id} was not taken for step {step}, or is consumed already")
        for group in groups:
            attempts = self.ledger.group(group.group_id).attempts
            self.segments.add(
                ResolvedGroup(
                    self._groups.pop(group.group_id),
                    consumed_step=step,
                    attempts=attempts,
                    trained_version=trained_version,
                    applied=applied,
                )
            )

    def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of consumed groups, once the weights of their step are live.

        Raises LedgerError, before anything changed, if one is not consumed.
        """
        if unused := sorted(self._groups.keys() & set(group_ids)):
            raise LedgerError(f"groups {unused} are released before they are consumed")
        self.ledger.release(group_ids)
        for group_id in group_ids:
            self.assembler.forget(group_id)

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop a group and record its members so far; its slot is free at once.

        Raises LedgerError for a group that is taken, gone or unknown; then nothing changes.
        """
        record = self.ledger.group(group_id)
        self.ledger.drop(group_id, reason)
        members = self.assembler.forget(group_id)
        group = self._groups.pop(group_id, None) or RolloutGroup(
            group_id, record.prompt, record.admitted_version, members
        )
        self.segments.add(ResolvedGroup(group, drop_reason=reason, attempts=record.attempts))

    # ------------------------------------------------------------------------------------------------ checkpoints

    def freeze(self, next_step: int) -> FrozenBuffer:
        """Take a snapshot for a checkpoint; any thread may write it while the run goes on.

        next_step: the step that a resume begins with; groups taken for an earlier one and not consumed are an error.
        Raises LedgerError for that.
        """
        late = [i for i in self._groups if (step := self.ledger.group(i).step) is not None and step < next_step]
        if late:
            raise LedgerError(f"groups {sorted(late)} were taken before step {next_step}, but are not consumed")
        groups = [self._buffered(group) for _, group in sorted(self._groups.items())]
        for group_id in sorted(self.assembler.partial()):
            record, members = self.ledger.group(group_id), self.assembler.members(group_id)
            groups.append(self._buffered(RolloutGroup(group_id, record.prompt, record.admitted_version, members)))
        self.segments.cut()
        return FrozenBuffer(tuple(groups), self.ledger.state(next_step), next_step, self.segments)

    def load(self, directory: Path) -> int:
        """Take back what a frozen buffer wrote; the ledger was made from the same state.  Returns the number of groups.

        Raises CheckpointError when file and ledger do not agree, or the file is damaged.
        """
        try:
            saved = read_segment(directory / BUFFERED_FILE)
        except SegmentError as error:
            raise CheckpointError(f"the buffered rollouts of the checkpoint cannot be read: {error}") from error
        found = {(r.group.group_id, m.rollout.sample_index) for r in saved for m in r.group.members}
        wanted = {(g.group_id, i) for g in self.ledger.groups for i, m in enumerate(g.members) if m.is_delivered}
        if found != wanted:
            raise CheckpointError(
                f"{directory / BUFFERED_FILE} holds {len(found)} rollouts and the ledger counts {len(wanted)} as "
                f"delivered; first difference: group and sample {min(found ^ wanted)}"
            )
        for resolved in saved:
            for member in resolved.group.members:
                group = self.assembler.add(member, resolved.group.admitted_version)
                if group is not None:
                    self.put(group)
        return len(saved)

    def _buffered(self, group: RolloutGroup) -> ResolvedGroup:
        return ResolvedGroup(group, attempts=self.ledger.group(group.group_id).attempts)
