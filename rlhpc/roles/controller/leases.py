"""Leases go out to the generators, and rollouts come back.

In this file: the clock of deadlines; generators ordered by credit; the registry of processes; the lease dispatcher; the
rollout sink.

LeaseDispatcher keeps every generator supplied, from as few prompts as the bound on staleness allows.  It grants leases
up to the credit that each generator has stated, and draws a prompt when one has credit and nothing is left to grant:
each group is stamped with the version that is live when it is admitted.  The only backpressure of the system is here:
no free slot, no prompt.  RolloutSink puts returned rollouts into the buffer.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.algorithms.estimators import has_reward_variance
from rlhpc.algorithms.samples import RewardShaping
from rlhpc.buffer.batches import DropReason, GroupRecord, ResolvedGroup
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.lost_leases import LostLeases
from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.contracts import Clock, PromptSource, ServerChannel
from rlhpc.protocol.errors import ChannelError, ChannelFull, LedgerError, PeerUnreachable, StarvedError
from rlhpc.protocol.messages import CancelGroup, Heartbeat, Hello
from rlhpc.protocol.types import Lease, Rollout, RolloutGroup, ScoredRollout, Verdict
from rlhpc.rewards.outcomes import KILLS_ITS_WORKER, LEASES_LOST, QUARANTINED, ErrorGate
from rlhpc.roles.controller.state import Totals
from rlhpc.transport.sessions import is_earlier

if TYPE_CHECKING:
    from rlhpc.roles.controller.weight_sync import WeightSync

# ---------------------------------------------------------------------------------------------------------- awake clock
#
# Seconds in which this process was awake: the clock that measures deadlines of other processes.
#
# While this process is stopped, suspended with its machine or blocked by a filesystem, it receives no messages: they
# wait in its queues.  Such time counts neither as silence of others nor towards the deadline of a lease.

log = logging.getLogger("rlhpc.leases")
LOOKS_PER_STRETCH = 5  # enough that a merely busy event loop loses no time


class AwakeClock:
    """A monotonic clock that stops while the event loop is blocked, except for `longest_s`."""

    def __init__(
        self, clock: Clock, longest_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """longest_s: limit on the time counted between two looks; small compared with every time-out."""
        self._clock, self._longest_s, self._sleep = clock, longest_s, sleep
        self._counted_s = self._looked_at_s = clock()

    def __call__(self) -> float:
        """Seconds since an arbitrary moment, without pauses."""
        return self._counted_s + min(self._clock() - self._looked_at_s, self._longest_s)

    async def run(self) -> None:
        """Look periodically until cancelled: without looks the clock stops."""
        while True:
            self.look()
            await self._sleep(self._longest_s / LOOKS_PER_STRETCH)

    def look(self) -> None:
        """Count the time since the last look; called by the event loop."""
        now_s = self._clock()
        elapsed_s = now_s - self._looked_at_s
        if elapsed_s > 2 * self._longest_s:
            log.warning("this process was paused for %.1f s: this does not count as silence of others", elapsed_s)
        self._counted_s, self._looked_at_s = self(), now_s


# --------------------------------------------------------------------------------------------------------- credit queue
#
# Generators ordered by credit: how many more samples each is willing to hold.
#
# Input: names whose credit may have changed.  Output: the generator with most credit, the first by name among equals,
# so that grants are the same in every run.  Pure.  A change and a query cost O(log n) for n generators.

SPARE = 16  # outdated entries that the heap may always have


class CreditQueue:
    """A heap of credits as they were at the last look; an entry is checked again when it is taken out."""

    def __init__(self, credit_of: Callable[[str], int]) -> None:
        """credit_of: returns a generator's present credit; 0 or less for one that may be granted nothing."""
        self._credit_of = credit_of
        self._known: dict[str, int] = {}  # name → credit at the last look, of generators that had some
        self._heap: list[tuple[int, str]] = []  # (−credit, name); outdated if _known differs

    def look_at_all(self, names: Iterable[str]) -> None:
        """Start over with these names, which are all the generators."""
        self._known = {name: credit for name in names if (credit := self._credit_of(name)) > 0}
        self._heap = [(-credit, name) for name, credit in self._known.items()]
        heapq.heapify(self._heap)

    def look_at(self, name: str) -> None:
        """Look at this generator's credit, which may have changed."""
        credit = self._credit_of(name)
        if credit <= 0:
            self._known.pop(name, None)
        elif self._known.get(name) != credit:
            self._known[name] = credit
            heapq.heappush(self._heap, (-credit, name))
            if len(self._heap) > 2 * len(self._known) + SPARE:
                self._heap = [(-credit, name) for name, credit in self._known.items()]
                heapq.heapify(self._heap)

    def set_aside(self, name: str) -> None:
        """Leave this generator out until the next look at it."""
        self._known.pop(name, None)

    def most(self) -> tuple[str, int] | None:
        """Return the generator with most credit, and its credit; None if none has any."""
        while self._heap:
            credit, name = -self._heap[0][0], self._heap[0][1]
            if self._known.get(name) != credit:
                heapq.heappop(self._heap)
            elif self._credit_of(name) != credit:
                self.look_at(name)
            else:
                return name, credit
        return None


# ----------------------------------------------------------------------------------------------------- process registry
#
# Registry of the run's processes, by their last messages to the controller.
#
# Input: Hello and Heartbeat.  Output: which processes are registered, and which have gone silent.  Time is passed in.


@dataclass(slots=True)
class RoleProcess:
    """One process, by its last messages."""

    hello: Hello
    beat: Heartbeat
    heard_at: float


class ProcessRegistry:
    """Processes by name; an incarnation replaces an older one of its name, never one that was started later."""

    def __init__(self, config_hash: str, dead_after_s: float, clock: Clock, code: str = "") -> None:
        """code: digest of the controller's own code; "": not known."""
        self._config_hash, self._dead_after_s, self._clock, self._code = config_hash, dead_after_s, clock, code
        self._members: dict[str, RoleProcess] = {}
        self._latest: dict[str, str] = {}  # name → newest incarnation, including processes that are gone

    def is_superseded(self, name: str, hello: Hello) -> bool:
        """True for an incarnation that is older than one registered under this name."""
        return is_earlier(hello.incarnation, self._latest.get(name, ""))

    def is_of_other_code(self, hello: Hello) -> bool:
        """Whether this process was started from another version of rlhpc than the controller."""
        return bool(self._code) and hello.code != self._code

    def register(self, name: str, hello: Hello) -> bool:
        """Register a process.  False, without effect, if its settings differ or a later incarnation is registered."""
        if hello.config_hash != self._config_hash:
            log.error("%s has settings %s, the run has %s: not admitted", name, hello.config_hash, self._config_hash)
            return False
        if self.is_superseded(name, hello):
            log.error("%s, pid %d on %s: refused, a later incarnation is registered", name, hello.pid, hello.host)
            return False
        self._latest[name] = hello.incarnation
        known = self._members.get(name)
        if known is not None and known.hello.incarnation == hello.incarnation:  # it answers Reregister
            known.heard_at = self._clock()
            return True
        self._members[name] = RoleProcess(hello, Heartbeat("starting", "", -1), self._clock())
        log.info("%s registered: pid %d on %s", name, hello.pid, hello.host)
        if self.is_of_other_code(hello):
            log.warning(
                "%s, pid %d on %s, runs another version of rlhpc than the controller (code %s and %s): stop the run, "
                "and resume it when all nodes have the same",
                *(name, hello.pid, hello.host, hello.code or "without a digest", self._code),
            )
        return True

    def record(self, name: str, beat: Heartbeat) -> bool:
        """Record a heartbeat.  False, without effect, if the sender is not registered with this controller.

        A sender whose predecessor is registered under its name is not: its Hello was lost.
        """
        member = self._members.get(name)
        if member is None or beat.incarnation not in ("", member.hello.incarnation):
            return False
        member.beat, member.heard_at = beat, self._clock()
        return True

    def silent(self) -> list[str]:
        """Names that have been silent for dead_after_s."""
        oldest = self._clock() - self._dead_after_s
        return [name for name, member in self._members.items() if member.heard_at < oldest]

    def forget(self, name: str) -> None:
        """Remove a name.  Idempotent."""
        self._members.pop(name, None)

    def names(self, role: str | None = None) -> list[str]:
        """Names of all processes, or of those of one role."""
        return [name for name, member in self._members.items() if role in (None, member.hello.role)]

    def member(self, name: str) -> RoleProcess | None:
        """Return one process, None if it is not registered."""
        return self._members.get(name)

    def capacity(self, name: str) -> int:
        """Samples this generator is willing to hold."""
        member = self._members.get(name)
        return member.beat.capacity_samples if member is not None else 0

    def total(self, metric: str, role: str) -> float:
        """Sum of one heartbeat metric over all members of a role."""
        return sum(self._members[name].beat.metrics.get(metric, 0.0) for name in self.names(role))

    def totals(self, prefix: str, *roles: str) -> dict[str, float]:
        """Sums of all heartbeat metrics with this prefix, over all members of these roles."""
        found: dict[str, float] = {}
        for name in (name for role in roles for name in self.names(role)):
            for metric, value in self._members[name].beat.metrics.items():
                if metric.startswith(prefix):
                    found[metric] = found.get(metric, 0.0) + value
        return found

    def report(self) -> list[dict[str, Any]]:
        """One row per process, for status.json."""
        now = self._clock()
        return [
            {
                "name": name,
                "state": member.beat.state,
                "waits_for": member.beat.waits_for,
                "version": member.beat.policy_version,
                "silent_s": round(now - member.heard_at, 1),
                "pid": member.hello.pid,
                "host": member.hello.host,
                "metrics": dict(member.beat.metrics),
                **({"service": member.hello.service} if member.hello.service else {}),
            }
            for name, member in sorted(self._members.items())
        ]


# ----------------------------------------------------------------------------------------------------- lease dispatcher


class LeaseDispatcher:
    """Admits and grants whenever it is woken."""

    def __init__(
        self,
        leases: ServerChannel,
        buffer: RolloutBuffer,
        prompts: PromptSource,
        weight_sync: WeightSync,
        registry: ProcessRegistry,
        on_disk: Callable[[], Awaitable[None]] | None = None,
        fills_slots: bool = False,
        gate: ErrorGate | None = None,
    ) -> None:
        """on_disk: awaited between admission and lease, where a restart might otherwise draw another prompt.

        fills_slots: admit as soon as a slot is free, also without a generator that has credit: then no duration
        decides which prompts are admitted under which version.
        """
        self._leases, self._buffer, self._ledger, self._prompts = leases, buffer, buffer.ledger, prompts
        self._weight_sync, self._registry, self._on_disk = weight_sync, registry, on_disk
        self._fills_slots, self._gate = fills_slots, gate
        self._work = asyncio.Event()
        self._queue = CreditQueue(self._credit_of)
        self._changed: set[str] = set()  # generators whose credit may have changed
        self._is_all_changed = True
        self.is_open = True  # False: nothing new is admitted, the run is ending

    def wake(self, name: str = "") -> None:
        """Call when a slot, a credit, a generator or a version has changed.

        name: of the only generator with a change; the others are not looked at then.
        """
        if name:
            self._changed.add(name)
        else:
            self._is_all_changed = True
        self._work.set()

    async def cancel(self, group_ids: list[int]) -> None:
        """Tell generators to stop sampling these groups, and empty the list.

        If a message is lost, the group is sampled in vain: nothing breaks.
        """
        while group_ids:
            group_id = group_ids.pop()
            for name in sorted(self._weight_sync.ready_members):
                with suppress(ChannelError):
                    await self._leases.send(name, CancelGroup(group_id))

    async def run(self) -> None:
        """Admit and grant, endlessly."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self.is_open and self._weight_sync.live_version >= 0:
                self._buffer.readmit(self._weight_sync.live_version)
                # Free room of a quarantined generator is nobody's, and says nothing about what others could sample.
                if self._fills_slots or self._ledger.is_quarantining:
                    await self._admit(math.inf)
                await self._grant()

    async def _admit(self, num_samples: float) -> bool:
        """Draw prompts for num_samples samples, as far as slots are free; return whether some may be granted."""
        is_new = False
        while num_samples > 0 and self._ledger.has_slot:
            version = self._weight_sync.live_version
            prompt = self._prompts.draw(version)
            size = self._prompts.num_rollouts(prompt.prompt_id)
            num_samples -= len(self._ledger.group(self._buffer.admit(prompt, version, size)).members)
            is_new = True
        if is_new and self._on_disk is not None:
            # Generators keep sampling a group by its id over a restart: the id must not get another prompt then.
            await self._on_disk()
        return is_new

    async def _grant(self) -> None:
        """Grant leases, the generator with most credit first, so that replicas stay equally full."""
        self._look()
        while self.is_open and (most := self._queue.most()) is not None:  # it may end while something is written
            name, credit = most
            lease = self._ledger.grant(name, credit)
            if lease is not None:
                await self._send(name, lease)
            elif self._ledger.is_quarantining:
                self._leave_out(name)  # there may be something for another one
            elif not await self._admit(credit):
                return

    async def _send(self, name: str, lease: Lease) -> None:
        if self._gate is not None:
            self._gate.lease_granted()
        try:
            await self._leases.send(name, lease)
        except (PeerUnreachable, ChannelFull) as error:
            log.warning("lease of group %d not delivered: %s", lease.group_id, error)
            self._ledger.hand_back(name, lease.group_id, lease.sample_indices, lease.prefixes)
            self._leave_out(name)
        else:
            self._queue.look_at(name)

    def _look(self) -> None:
        """Look at the credit of generators whose credit may have changed."""
        relieved = self._ledger.take_relieved()
        if self._is_all_changed:
            self._is_all_changed = False
            self._queue.look_at_all(self._weight_sync.ready_members)
        else:
            for name in self._changed | relieved:
                self._queue.look_at(name)
        self._changed.clear()

    def _leave_out(self, name: str) -> None:
        """Grant this generator nothing more until the next wake."""
        self._queue.set_aside(name)
        self._changed.add(name)

    def _credit_of(self, name: str) -> int:
        if not self._weight_sync.is_ready(name) or (self._gate is not None and not self._gate.may_lease(name)):
            return 0
        return self._registry.capacity(name) - self._ledger.outstanding(name)


# --------------------------------------------------------------------------------------------------------- rollout sink
#
# Input: ScoredRollout.  Output: finished groups.  Active sampling (OlmoRL): a zero-variance group teaches nothing; it
# is dropped and its slot is free at once, so that batches are always full.


@dataclass(slots=True)
class IntakeStats:
    """Groups finished since the last step was recorded, dropped ones included."""

    groups: list[RolloutGroup] = field(default_factory=list)
    shaped_rewards: list[float] = field(default_factory=list)  # one per member of these groups
    num_zero_variance: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0

    def add_to(self, totals: Totals) -> None:
        """Add these counts to the totals of the run."""
        totals.tokens_generated += self.num_tokens
        totals.groups_dropped += sum(self.num_dropped.values())
        totals.zero_variance_groups += self.num_zero_variance


class RolloutSink:
    """Receives scored rollouts; synchronous, so that no rollout is ever half received."""

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
        """prompts: learns pass rates of groups.  lost_leases: the ledger's; deaths of reward workers are added.

        of_one_version: accept only rollouts sampled whole by the version of their admission.
        """
        self._shaping = shaping or RewardShaping()
        self._buffer, self._ledger = buffer, buffer.ledger
        self._gate, self._admission, self._of_one_version = gate, admission, of_one_version
        self._prompts = prompts
        self._lost_leases = lost_leases or LostLeases()
        self._num_consecutive_zero_variance = 0
        self._last_alike: list[tuple[float, bool]] = []  # of groups without variance: reward, is any correct
        self.stats = IntakeStats()
        self.cancelled: list[int] = []  # dropped groups with members that are still being sampled

    def receive(self, holder: str, scored: ScoredRollout, prompt_checksum: int) -> bool:
        """Receive one rollout.  True: a slot became free or a group is finished.  prompt_checksum: as in Delivery.

        Raises StarvedError after too many consecutive zero-variance groups, RoleFailed when verifiers fail too often,
        LedgerError if a lease was sampled by other weights than its own.
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
        self._gate.check(self._admission.max_zero_variance_groups)
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
        """Raise LedgerError if the lease's holder sampled the rollout: sampled again, it would be no better."""
        if record.members[rollout.sample_index].holder == holder:
            raise LedgerError(
                f"{holder} was given sample {rollout.sample_index} of group {rollout.group_id}, admitted under version "
                f"{record.admitted_version}, and has sampled it by versions {sorted(set(rollout.versions.tolist()))}: "
                "run.deterministic=true wants one"
            )

    def restored(self, groups: Iterable[ResolvedGroup]) -> None:
        """Count groups that the journal has given back, finished or dropped, as if they arrived now.

        Their tokens are counted already, like those of unfinished groups (Replay.num_tokens).  A finished group
        without variance is dropped, if its drop was not recorded.
        """
        for resolved in groups:
            group = resolved.group
            is_finished = resolved.drop_reason is None or resolved.drop_reason is DropReason.ZERO_VARIANCE
            if is_finished and group.members:  # a damaged journal may have lost all of them
                self._count_finished(group)
            if resolved.drop_reason is not None:
                self.stats.num_zero_variance += resolved.drop_reason is DropReason.ZERO_VARIANCE
                self._count_drop(resolved.drop_reason)
            elif self._ledger.is_open(group.group_id):
                self._check_reward_variance(group)

    def refuse(self, group_id: int) -> None:
        """Drop a group that is no longer granted: its prompt is quarantined, or one of its members has lost its leases.

        Raises StarvedError or RoleFailed when that happens too often: a run must not go on if it refuses most groups.
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
        self._gate.check(self._admission.max_zero_variance_groups)

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
        """Return a copy of the totals plus the counts that `drain` would return: a checkpoint has these rollouts."""
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
        self.drop(group.group_id, DropReason.ZERO_VARIANCE)
        if self._num_consecutive_zero_variance >= self._admission.max_zero_variance_groups:
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
