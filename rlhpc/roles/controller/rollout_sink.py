"""Receives rollouts from generators: verdict, group, place in the buffer.

Input: ScoredRollout.  Output: finished groups.  Active sampling (OlmoRL): a zero-variance group teaches nothing;
it is dropped and its slot is free at once, so that batches are always full.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from rlhpc.algorithms.estimators import has_reward_variance
from rlhpc.algorithms.samples import RewardShaping
from rlhpc.buffer.batches import DropReason, GroupRecord, ResolvedGroup
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.lost_leases import LostLeases
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.contracts import PromptSource
from rlhpc.protocol.errors import LedgerError, StarvedError
from rlhpc.protocol.types import Rollout, RolloutGroup, ScoredRollout, Verdict
from rlhpc.rewards.outcomes import KILLS_ITS_WORKER, LEASES_LOST, QUARANTINED, ErrorGate
from rlhpc.roles.controller.state import Totals

log = logging.getLogger("rlhpc.rollout_sink")


@dataclass(slots=True)
class IntakeStats:
    """Groups finished since the last step was recorded, dropped ones included."""

    groups: list[RolloutGroup] = field(default_factory=list)
    shaped_rewards: list[float] = field(default_factory=list)  # of the members of groups
    num_zero_variance: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add_to(self, totals: Totals) -> None:
        """Count it as a part of the run."""
        totals.tokens_generated += self.num_tokens
        totals.groups_dropped += sum(self.num_dropped.values())
        totals.groups_without_spread += self.num_zero_variance


class RolloutSink:
    """Receives scored rollouts; synchronous, so that a rollout is never half received."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        gate: ErrorGate,
        admission: AdmissionConfig,
        shaping: RewardShaping | None = None,
        prompts: PromptSource | None = None,
        *,
        lost_leases: LostLeases | None = None,
        of_one_version: bool = False,
    ) -> None:
        """prompts: told how groups went.  lost_leases: the ledger's; deaths of reward workers are added.

        of_one_version: take only what the weights of its admission sampled whole.
        """
        self._shaping = shaping or RewardShaping()
        self._buffer, self._ledger = buffer, buffer.ledger
        self._gate, self._admission, self._of_one_version = gate, admission, of_one_version
        self._prompts = prompts
        self._lost_leases = lost_leases or LostLeases()
        self._num_consecutive_zero_variance = 0
        self._last_alike: list[tuple[float, bool]] = []  # reward of all members, and whether one is correct
        self.stats = IntakeStats()
        self.cancelled: list[int] = []  # dropped groups of which members are still being sampled

    def receive(self, holder: str, scored: ScoredRollout, prompt_checksum: int) -> bool:
        """Receive one rollout.  True: a slot became free or a group is finished.  prompt_checksum: as in Delivery.

        Raises StarvedError after too many consecutive zero-variance groups, RoleFailed when verifiers fail too often,
        LedgerError if a lease was sampled by weights that it was not for.
        """
        rollout = scored.rollout
        record = self._ledger.wanted(rollout.group_id, rollout.sample_index)
        if record is None:
            return False  # a second copy, or its group was dropped meanwhile
        if (record.prompt.prompt_id, id_checksum(record.prompt.token_ids)) != (rollout.prompt_id, prompt_checksum):
            log.warning("rollout %d:%d belongs to another prompt: ignored", rollout.group_id, rollout.sample_index)
            return False
        if self._of_one_version and (rollout.versions != record.admitted_version).any():
            self._check_holder(holder, rollout, record)
            log.warning("rollout %d:%d was sampled with other weights: ignored", rollout.group_id, rollout.sample_index)
            return False  # a generator has kept it from before a restart that has not repeated its steps
        self.stats.num_tokens += len(rollout.token_ids)
        self._gate.count(scored.verdict, scored.detail, scored.failure, holder)
        if scored.verdict is Verdict.VERIFIER_ERROR:
            log.warning("group %d: verifier error: %s", rollout.group_id, scored.detail)
            if scored.failure in KILLS_ITS_WORKER:
                self._lost_leases.record_worker_death(record.prompt, scored.detail)
        self._gate.check(self._admission.max_groups_without_spread)
        group = self._buffer.deliver(holder, scored)
        if scored.verdict is Verdict.VERIFIER_ERROR:
            self._drop(record, DropReason.VERIFIER_ERROR)
            return True
        if group is None:
            return False
        self._lost_leases.clear_workers(group.prompt)
        self._count_finished(group)
        self._check_reward_variance(group)
        return True

    def _check_holder(self, holder: str, rollout: Rollout, record: GroupRecord) -> None:
        """Who holds a lease samples it with the live weights: others would not be better the next time."""
        if record.members[rollout.sample_index].holder == holder:
            raise LedgerError(
                f"{holder} was given sample {rollout.sample_index} of group {rollout.group_id}, admitted under version "
                f"{record.admitted_version}, and has sampled it by versions {sorted(set(rollout.versions.tolist()))}: "
                "run.deterministic=true wants one"
            )

    def restored(self, groups: Iterable[ResolvedGroup]) -> None:
        """Groups have come back from the journal, finished or dropped: count them, as if they arrived now.

        Their tokens count already, as those of unfinished groups do (Replay.num_tokens).  One that is finished and has
        no variance is dropped, if that was not recorded any more.
        """
        for resolved in groups:
            group = resolved.group
            is_finished = resolved.drop_reason is None or resolved.drop_reason is DropReason.NO_SPREAD
            if is_finished and group.members:  # a damaged journal may have lost all of them
                self._count_finished(group)
            if resolved.drop_reason is not None:
                self.stats.num_zero_variance += resolved.drop_reason is DropReason.NO_SPREAD
                self._count_drop(resolved.drop_reason)
            elif self._ledger.is_open(group.group_id):
                self._check_reward_variance(group)

    def refuse(self, group_id: int) -> None:
        """Drop a group that is no longer granted: its prompt is quarantined, or one of its members has lost its leases.

        Raises StarvedError or RoleFailed when that happens too often: a run must not go on with what it refuses.
        """
        record = self._ledger.open_record(group_id)
        if record is None:
            return
        suspicion = self._lost_leases.of(record.prompt)
        if suspicion is not None and suspicion.is_quarantined(self._admission.max_attempts):
            cause, why = QUARANTINED, suspicion.text
        else:
            name, num_lost = self._lost_leases.record_of(record.prompt.prompt_id), record.attempts - 1
            cause, why = LEASES_LOST, f"{name}: {num_lost} leases of one of its samples expired or ended with a death"
        log.warning("group %d is dropped: %s: %s", group_id, cause.replace("_", " "), why)
        self._drop(record, DropReason.POISON)
        self._gate.count_refused(cause, why)
        self._gate.check(self._admission.max_groups_without_spread)

    @property
    def verifier_error_share(self) -> float:
        """Share of verifier errors among the last verdicts, 0–1."""
        return self._gate.error_share

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop a group; its slot is free at once.  No effect if it is already resolved."""
        record = self._ledger.open_record(group_id)
        if record is not None:
            self._drop(record, reason)

    def _drop(self, record: GroupRecord, reason: DropReason) -> None:
        if not record.is_finished:
            self.cancelled.append(record.group_id)
        self._buffer.drop(record.group_id, reason)
        self._count_drop(reason)

    def _count_finished(self, group: RolloutGroup) -> None:
        self.stats.groups.append(group)
        self.stats.shaped_rewards += self._shaping.rewards(group).tolist()
        if self._prompts is not None:
            pass_rate = sum(member.verdict is Verdict.CORRECT for member in group.members) / len(group.members)
            self._prompts.learn(group.group_id, group.admitted_version, group.prompt.prompt_id, pass_rate)

    def _count_drop(self, reason: DropReason) -> None:
        self.stats.num_dropped[reason.value] = self.stats.num_dropped.get(reason.value, 0) + 1

    def drain(self) -> IntakeStats:
        """Return what was received since the last call, and start over."""
        stats, self.stats = self.stats, IntakeStats()
        return stats

    def counted_in(self, totals: Totals) -> Totals:
        """A copy of the totals with what `drain` would return now: a checkpoint has these rollouts."""
        copy = replace(totals)
        self.stats.add_to(copy)
        return copy

    def _check_reward_variance(self, group: RolloutGroup) -> None:
        rewards = self._shaping.judged(group)
        if has_reward_variance(rewards):
            self._num_consecutive_zero_variance, self._last_alike = 0, []
            return
        self.stats.num_zero_variance += 1
        if not self._admission.active_sampling:
            return
        self._num_consecutive_zero_variance += 1
        if not self._shaping.is_all_masked(group):
            is_correct = any(member.verdict is Verdict.CORRECT for member in group.members)
            self._last_alike = [*self._last_alike[-4:], (float(rewards[0]), is_correct)]
        self.drop(group.group_id, DropReason.NO_SPREAD)
        if self._num_consecutive_zero_variance >= self._admission.max_groups_without_spread:
            raise StarvedError(self._advice())

    def _advice(self) -> str:
        if not self._last_alike:
            return (
                f"{self._num_consecutive_zero_variance} consecutive groups had no completion that was not cut off, and "
                "shaping.truncated='masked' keeps those out of the loss, so that no batch can be filled; raise "
                "generation.max_completion_tokens (of dialogues also environment.max_turn_tokens), warm-start the "
                "model, or set shaping.truncated='scored'"
            )
        rewards, are_correct = zip(*self._last_alike, strict=True)
        mean = float(np.mean(rewards))
        remedy = (
            "the tasks are too easy for this model: choose harder prompts"
            if sum(are_correct) * 2 > len(are_correct)
            else "no answer is right: warm-start the model, choose easier prompts, check data.task and "
            "data.prompt_template, raise generation.max_completion_tokens or admission.group_size"
        )
        return (
            f"{self._num_consecutive_zero_variance} consecutive groups had rewards of zero variance (the last ones "
            f"{mean:g} on average), so that no batch can be filled; {remedy}; admission.active_sampling=false "
            "trains regardless"
        )
