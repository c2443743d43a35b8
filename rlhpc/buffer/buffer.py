"""Keep every group from the admission of its prompt to its last use: the controller's only store of prompts.

    admit ──▶ grant ──▶ deliver, member by member ──▶ take ──▶ consume ──▶ release        or drop, before it is taken
                └── hand_back, renew, expire, forget_holder ──▶ grant again

Input: Prompt, later ScoredRollout.  Output: Lease, later RolloutGroup.  The ledger decides (ledger.py): operations
without a rollout (the second line, and queries) are methods of `ledger` alone.  Groups are assembled here; the journal
and segments record their fate.  Guarantees: those of the ledger; a group is handed out once for
training, complete; consumed and dropped groups reach a segment; a checkpoint has the rest, incomplete groups too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.batches import DropReason, GroupRecord, ResolvedGroup
from rlhpc.buffer.history import START, Admitted, Dropped, Event, History, Position, Taken, Trained
from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.buffer.rollout_journal import RolloutJournal
from rlhpc.buffer.segments import SegmentWriter, read_segment, to_hdf5, write_sealed
from rlhpc.protocol.errors import CheckpointError, LedgerError, SegmentError
from rlhpc.protocol.types import FinishReason, Prompt, RolloutGroup, ScoredRollout, Verdict

# -------------------------------------------------------------------------------------------------------- frozen buffer
#
# A snapshot of the buffer, for a checkpoint.


log = logging.getLogger("rlhpc.buffer")
BUFFERED_FILE = "buffered.h5"


@dataclass(frozen=True, slots=True)
class FrozenBuffer:
    """A snapshot of the buffer for a checkpoint.  It is immutable, so that a thread may write it."""

    groups: tuple[ResolvedGroup, ...]  # neither consumed nor dropped at that moment
    ledger: dict[str, Any]
    next_step: int
    segments: SegmentWriter  # cut at that moment
    position: Position  # of the journal, at that moment

    def seal(self) -> int:
        """Seal groups resolved before that moment; return the number of the first segment that a resume undoes.

        Raises SegmentError when a segment cannot be written, OwnershipLost.
        """
        return self.segments.seal_to_cut()

    def write(self, directory: Path, next_index: int) -> dict[str, Any]:
        """Write the unresolved groups into `directory`; return the JSON that goes with them: ledger and positions.

        next_index: the result of `seal`.  Raises SegmentError when the groups cannot be written.
        """
        groups = self.groups if self.segments.keeps_routes else [each.without_routes() for each in self.groups]
        # Uncompressed: it is read once, by a resume, or never.
        write_sealed(directory / BUFFERED_FILE, to_hdf5(groups, {"next_step": self.next_step}, compress=False))
        return {"ledger": self.ledger, "next_segment_index": next_index, "journal": asdict(self.position)}


# ------------------------------------------------------------------------------------------------------- rollout buffer


class RolloutBuffer:
    """Groups by id, between prompts and trainer.  Synchronous: changes are atomic."""

    def __init__(self, ledger: AdmissionLedger, segments: SegmentWriter, journal: RolloutJournal | None = None) -> None:
        """ledger: slots and leases; others may call it directly for changes that this class has no method for.

        journal: where the history is written; None: nowhere, e.g. while the buffer is being restored.
        """
        self.ledger, self.segments, self.journal = ledger, segments, journal
        self._members: dict[int, dict[int, ScoredRollout]] = {}  # group → sample index → member, while incomplete
        self._groups: dict[int, RolloutGroup] = {}  # complete and neither consumed nor dropped

    # --------------------------------------------------------------------------------------------------- prompts

    def admit(self, prompt: Prompt, policy_version: int, size: int = 0) -> int:
        """Admit a prompt under the live version; return its group's id (AdmissionLedger.admit)."""
        group_id = self.ledger.admit(prompt, policy_version, size=size)
        self._note(Admitted(group_id, prompt.prompt_id, policy_version, self._own_size(group_id)))
        return group_id

    def readmit(self, live_version: int) -> None:
        """Let groups restored after a restart be granted, as slots allow (AdmissionLedger.readmit)."""
        for group in self.ledger.readmit(live_version):
            size = self._own_size(group.group_id)
            self._note(Admitted(group.group_id, group.prompt.prompt_id, group.admitted_version, size))

    # ------------------------------------------------------------------------------------------- rollouts and groups

    def deliver(self, holder: str, scored: ScoredRollout) -> RolloutGroup | None:
        """Add a member; return its group if the group is now complete (it stays here, ready to be taken or dropped).

        Unwanted members are ignored.  Raises LedgerError, changing nothing, for an aborted rollout (those are handed
        back), for impossible rows, and for a rollout of another prompt than its group's.
        """
        rollout = scored.rollout
        if rollout.finish_reason is FinishReason.ABORT:
            raise LedgerError(f"{holder} delivered the aborted rollout {rollout.group_id}:{rollout.sample_index}")
        if fault := rollout.row_fault:
            raise LedgerError(f"{holder} delivered rollout {rollout.group_id}:{rollout.sample_index}: {fault}")
        record = self.ledger.wanted(rollout.group_id, rollout.sample_index)
        if record is None:
            return None
        if rollout.prompt_id != record.prompt.prompt_id:
            place = f"sample {rollout.sample_index} of group {rollout.group_id}"
            raise LedgerError(f"{place} answers another prompt, {rollout.prompt_id}")
        self.ledger.deliver(rollout.group_id, rollout.sample_index)
        if self.journal is not None:
            self.journal.add(scored, record.prompt, record.admitted_version)
        return self._add(scored)

    def upcoming(self, num_groups: int) -> list[RolloutGroup] | None:
        """The groups that a batch would take now; None: it would have to wait (AdmissionLedger.upcoming)."""
        return None if (chosen := self.ledger.upcoming(num_groups)) is None else [self._groups[i] for i in chosen]

    def part(self, num_groups: int, least: int) -> list[RolloutGroup]:
        """`least` or more groups with which the next step can begin or go on before its batch is complete; else []."""
        return [self._groups[group_id] for group_id in self.ledger.part(num_groups, least)]

    def begin(self, part: Sequence[RolloutGroup]) -> None:
        """The next batch includes these groups (AdmissionLedger.begin)."""
        self.ledger.begin([group.group_id for group in part])

    def take(self, num_groups: int, step: int) -> list[RolloutGroup] | None:
        """Take the batch of a step, in order of admission; None, without effect, while it has to wait."""
        groups = self.upcoming(num_groups)
        return None if groups is None else self.take_again([group.group_id for group in groups], step)

    def take_again(self, group_ids: Sequence[int], step: int) -> list[RolloutGroup]:
        """Take these groups again, as before the interruption.  Raises LedgerError if one is not finished."""
        self.ledger.take_these(group_ids, step)
        self._note(Taken(step, tuple(group_ids)))
        return [self._groups[group_id] for group_id in group_ids]

    def consume(
        self,
        groups: Sequence[RolloutGroup],
        step: int,
        *,
        trained_version: int,
        applied: bool,
        metrics: Mapping[str, float] | None = None,
        refused: str = "",
        skipped: tuple[int, ...] = (),
        began_s: float = 0.0,
    ) -> None:
        """Record that a step has used these groups; to be called after its report and before `release`.

        trained_version: at the step's start; applied: whether the step led to a new version; metrics: the trainer's,
        for a replay to compare; refused: why the guard skipped the step, or its `skipped` parts; began_s: seconds
        trained before.  Raises LedgerError, changing nothing, if a group was not taken for this step, or is consumed.
        """
        for group in groups:
            if self.ledger.group(group.group_id).step != step or group.group_id not in self._groups:
                raise LedgerError(f"group {group.group_id} was not taken for step {step}, or is consumed already")
        self._note(Trained(step, trained_version, applied, dict(metrics or {}), refused, skipped, began_s))
        for group in groups:
            end = {"consumed_step": step, "trained_version": trained_version, "applied": applied}
            self.segments.add(self._resolved(self._groups.pop(group.group_id), **end))

    def release(self, group_ids: Sequence[int]) -> None:
        """Free the slots of consumed groups, once their weights are live.  Raises LedgerError if one is unused."""
        if unused := sorted(self._groups.keys() & set(group_ids)):
            raise LedgerError(f"groups {unused} are released before they are consumed")
        self.ledger.release(group_ids)

    def drop(self, group_id: int, reason: DropReason) -> RolloutGroup:
        """Drop a group; record and return it with its members so far.  Raises as AdmissionLedger.drop."""
        group = self._groups.get(group_id) or self._assembled(self.ledger.group(group_id))
        resolved = self._resolved(group, drop_reason=reason)
        self.ledger.drop(group_id, reason)
        self._note(Dropped(group_id, reason))
        self._groups.pop(group_id, None)
        self._members.pop(group_id, None)
        self.segments.add(resolved)
        return group

    # ----------------------------------------------------------------------------------- checkpoints, restoration

    def freeze(self, next_step: int) -> FrozenBuffer:
        """Take a snapshot for a checkpoint; any thread may write it while the run goes on.

        next_step: that a resume begins with.  Raises LedgerError if a group was taken before it and is not consumed.
        """
        late = [i for i in self._groups if (step := self.ledger.group(i).step) is not None and step < next_step]
        if late:
            raise LedgerError(f"groups {sorted(late)} were taken before step {next_step}, but are not consumed")
        groups = [self._resolved(group) for _, group in sorted(self._groups.items())]
        groups += [self._resolved(self._assembled(self.ledger.group(i))) for i in sorted(self._members)]
        self.segments.cut()
        position = START if self.journal is None else self.journal.position
        return FrozenBuffer(tuple(groups), self.ledger.state(next_step), next_step, self.segments, position)

    def load(self, directory: Path) -> int:
        """Take back the groups that a frozen buffer wrote; return their number.

        Raises CheckpointError when file and ledger, made from the same state, do not agree, or the file is damaged.
        """
        try:
            saved = read_segment(directory / BUFFERED_FILE)
        except SegmentError as error:
            raise CheckpointError(f"the buffered rollouts of the checkpoint cannot be read: {error}") from error
        held = [(r.group.group_id, m.rollout.sample_index, m.rollout.prompt_id) for r in saved for m in r.group.members]
        found = set(held)
        wanted = {
            (group.group_id, index, group.prompt.prompt_id)
            for group in self.ledger.groups
            for index, member in enumerate(group.members)
            if member.is_delivered
        }
        if found != wanted or len(held) != len(found):
            raise CheckpointError(
                f"{directory / BUFFERED_FILE} holds {len(held)} rollouts and the ledger counts {len(wanted)} as "
                f"delivered; first difference: group, sample and prompt {min(found ^ wanted, default='held twice')}"
            )
        for member in [member for resolved in saved for member in resolved.group.members]:
            self._add(member)
        return len(saved)

    def restore(self, history: History, draw_again: Callable[[int | None], Prompt]) -> list[ResolvedGroup]:
        """Replay the history since the checkpoint, or since the start: admissions, rollouts, drops.

        Groups that were trained on since then are finished again.  draw_again: takes the id of a prompt that was drawn,
        or None if the id is lost (PromptSource).  Adds admissions that only the order of groups implies to
        history.implied.  Returns the groups that these rollouts finished, or that were dropped, in order of admission.
        Raises CheckpointError if the order of prompts is not that of the history.
        """
        known = history.implied | history.admitted
        # The tokens that were answered: a chat template that writes the date gives a prompt drawn again other tokens.
        answered = {(each.scored.rollout.group_id, each.prompt.prompt_id): each.prompt for each in history.rollouts}
        last = max(known, default=-1)
        while (group_id := self.ledger.next_group_id) <= last:
            admitted = known.get(group_id)
            prompt = draw_again(admitted.prompt if admitted is not None else None)
            if admitted is None:
                # Its event was lost, but rollouts of a younger group were not.  Weights go out once everything before
                # is on disk, so it was admitted under the younger group's version, and no older version sampled it.
                younger = min(each for each in known if each > group_id)
                admitted = history.implied[group_id] = Admitted(group_id, prompt.prompt_id, known[younger].version)
            prompt = answered.get((group_id, prompt.prompt_id), prompt)
            self.ledger.admit(prompt, admitted.version, size=admitted.size, again=True)
        changed, dropped = set[int](), dict(history.dropped)
        for record in history.rollouts:
            rollout = record.scored.rollout
            wanted = self.ledger.wanted(rollout.group_id, rollout.sample_index)
            if wanted is not None and not wanted.prompt.is_same(record.prompt):
                history.problems.append(f"rollout {record.sequence} answers another prompt than its group has")
                log.warning("%s: it is sampled again", history.problems[-1])
            elif self.ledger.deliver(rollout.group_id, rollout.sample_index):
                self._add(record.scored)
                changed.add(rollout.group_id)
                history.num_tokens += len(rollout.token_ids)
                if record.scored.verdict is Verdict.VERIFIER_ERROR:
                    dropped.setdefault(rollout.group_id, DropReason.VERIFIER_ERROR)
        found = [ResolvedGroup(group) for group in self.finished() if group.group_id in changed - dropped.keys()]
        for group_id, reason in dropped.items():
            if self.ledger.is_open(group_id):
                group = self._groups.get(group_id) or self._assembled(self.ledger.group(group_id))
                found.append(ResolvedGroup(group, drop_reason=reason))
                self.drop(group_id, reason)
        return sorted(found, key=lambda resolved: resolved.group.group_id)

    def is_finished(self, group_id: int) -> bool:
        """True if all members are here, and the group is neither taken nor dropped."""
        return self.ledger.is_open(group_id) and group_id in self._groups

    def finished(self) -> list[RolloutGroup]:
        """All groups that are complete and neither taken nor dropped, in order of admission."""
        return [self._groups[group_id] for group_id in self.ledger.open_groups() if group_id in self._groups]

    def _note(self, event: Event) -> None:
        if self.journal is not None:
            self.journal.note(event)

    def _resolved(self, group: RolloutGroup, **end: Any) -> ResolvedGroup:
        record, size = self.ledger.group(group.group_id), self._own_size(group.group_id)
        return ResolvedGroup(group, attempts=record.attempts, group_size=size, **end)

    def _own_size(self, group_id: int) -> int:
        """Rollouts wanted of a group, or 0 if that is admission.group_size."""
        size = len(self.ledger.group(group_id).members)
        return size if size != self.ledger.group_size else 0

    def _add(self, scored: ScoredRollout) -> RolloutGroup | None:
        """Keep a member that the ledger counts as delivered; return its group if it was the last member."""
        group_id, record = scored.rollout.group_id, self.ledger.group(scored.rollout.group_id)
        members = self._members.setdefault(group_id, {})
        members[scored.rollout.sample_index] = scored
        if len(members) < len(record.members):
            return None
        group = self._groups[group_id] = self._assembled(record)
        del self._members[group_id]
        return group

    def _assembled(self, record: GroupRecord) -> RolloutGroup:
        """A group of the members that have arrived, ordered by sample index."""
        members = self._members.get(record.group_id, {})
        ordered = tuple(members[index] for index in sorted(members))
        return RolloutGroup(record.group_id, record.prompt, record.admitted_version, ordered)
