"""The step: a full batch, an optimiser step, new weights, slots released.

    full batch ──▶ train ──▶ publish ──┬──▶ next batch …       the trainer goes on while the generators load
                                       └──▶ live ───▶ release   slots come free: new prompts start on the new weights

Input: RolloutGroup.  Output: TrainBatch; its rows go to the ranks ahead of it (batch_maker.py).  Slots are released
only after the weights are live: releasing them earlier would let a prompt start on the old policy and break the
staleness bound (docs/design.md, "Staleness").
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from rlhpc.algorithms.estimators import has_reward_variance
from rlhpc.algorithms.guard import StepGuard
from rlhpc.algorithms.packing import FlopCost
from rlhpc.algorithms.samples import RewardShaping, SampleMaker
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.buffer import RolloutBuffer
from rlhpc.buffer.history import RecordedStep, Replay
from rlhpc.config.rules import Config
from rlhpc.config.tables import AdmissionConfig
from rlhpc.protocol.errors import LedgerError, RoleFailed
from rlhpc.protocol.messages import PartReport, StepReport, TrainBatch
from rlhpc.protocol.types import RolloutGroup
from rlhpc.roles.controller.batch_maker import BatchMaker, StepRecord, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.guarding import Guarding
from rlhpc.roles.controller.persistence import at_once
from rlhpc.roles.controller.state import LearningRates, RunProgress
from rlhpc.roles.controller.weight_sync import WeightSync

# ------------------------------------------------------------------------------------------------------------- lockstep
#
# Weights change only while nothing is being sampled: the order of events that run.deterministic requires.
#
# Then every rollout is sampled by one version, and durations do not decide which: the groups of step t were admitted,
# in the order of prompts, under version max(0, t − max_staleness).  With a staleness of 1 or more the trainer still
# works while generators sample; each waits for the other once a step.
#
# Input: the groups of the buffer.  Output: whether the weights of a step may be published.  No clock.


class Lockstep:
    """Tells when all groups of the live weights are sampled."""

    def __init__(self, buffer: RolloutBuffer, admission: AdmissionConfig, shaping: RewardShaping) -> None:
        self._buffer, self._admission, self._shaping = buffer, admission, shaping

    def is_settled(self, num_steps: int) -> bool:
        """Whether the weights after num_steps steps may be published: all groups admitted before them are finished.

        While step t is trained, the groups of the steps up to t + max_staleness have slots.  A group without variance
        does not count: another one is sampled in its place, by the same weights.
        """
        admission, counts = self._admission, self._buffer.ledger.counts()
        num_fit = sum(
            not admission.active_sampling or has_reward_variance(self._shaping.judged(group))
            for group in self._buffer.finished()
        )
        num_settled = counts["released"] + counts["taken"] + num_fit
        return num_settled >= (num_steps + admission.max_staleness) * admission.groups_per_step


# -------------------------------------------------------------------------------------------------------- repeated step
#
# Compare a step that was trained again with its first record.

log = logging.getLogger("rlhpc.train_loop")

# Relative: kernels and reductions may differ between machines and layouts, and a step trained in parts is repeated as a
# whole, in other rows (in bfloat16 that has changed a norm by 0.4 %).
TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}
ABSOLUTE = 1e-3


def compare(
    recorded: RecordedStep, groups: list[int], trained_version: int, report: StepReport, *, exact: bool
) -> None:
    """Describe the differences between the two.  exact: run.deterministic; otherwise tolerances apply."""
    differences = []
    if sorted(recorded.groups) != sorted(groups):
        differences.append(f"groups {sorted(recorded.groups)} then, {sorted(groups)} now")
    if (then := recorded.trained) is not None:
        if (trained_version, report.applied) != (then.version, then.applied):
            was = f"version {then.version}, {'applied' if then.applied else 'skipped'}"
            differences.append(f"{was} then, version {trained_version}, applied {report.applied} now")
        for name, relative in TOLERANCES.items():
            near = {"rel_tol": 0.0, "abs_tol": 0.0} if exact else {"rel_tol": relative, "abs_tol": ABSOLUTE}
            a, b = then.metrics.get(name), report.metrics.get(name)
            if a is not None and b is not None and not math.isclose(a, b, **near):
                differences.append(f"{name} {a:.9g} then, {b:.9g} now")
    if differences:
        log.warning("step %d, repeated, went differently: %s", report.step, "; ".join(differences))


# ----------------------------------------------------------------------------------------------------------- step parts
#
# Steps that begin with a part of their batch: finished groups are trained while the rest is still being sampled.
#
#     some groups finished, trainer waits ──▶ BatchRows, TrainBatch(is_part) ──▶ gradients summed ──▶ PartReport ──▶ …
#     all groups finished ─────────────────▶ the rest, as any batch ─────────────────────────────▶ one optimiser step
#
# Input: finished RolloutGroup, from the buffer, which keeps them until the whole batch is taken.  Output: none; the
# ranks hold gradients until the step's last part.  The result is that of the whole batch at once: no weight changes in
# between.  A part is begun only if the ledger can still complete the batch without making other groups late
# (buffer/batches.py).  StreamRL (Zhong et al. 2025, arXiv:2504.15930) calls it stream generation.

LOOK_AGAIN_AT = 8  # after 1/8 more groups: a look takes time proportional to the number of groups


class StepParts:
    """Trains parts of a step for one train loop."""

    def __init__(self, config: Config, buffer: RolloutBuffer, trainer: TrainerLink, batches: BatchMaker) -> None:
        self._config, self._buffer, self._trainer, self._batches = config, buffer, trainer, batches
        self._smallest = config.smallest_part
        self._least = self._smallest.groups  # groups for the next part; raised when too few fill no rows
        self._pack_s = 0.0  # packing time of the step's parts so far

    async def train(self, step: int, version: int) -> float:
        """Train the finished groups if they make a part of the step's batch; return its seconds, 0 if they do not.

        A batch that has become complete meanwhile is left to the caller.
        """
        num_groups, began = self._config.admission.groups_per_step, time.monotonic()
        if self._smallest.groups == num_groups or self._buffer.upcoming(num_groups) is not None:
            return 0.0
        groups = self._buffer.part(num_groups, self._least)
        num_tokens = sum(group.num_tokens for group in groups)
        if not groups:
            return 0.0
        if num_tokens < self._smallest.tokens:
            # Enough groups if all are as long as these; later ones are longer, since short ones finish first.
            enough = -(-len(groups) * self._smallest.tokens // num_tokens)
            self._least = min(enough, len(groups) + max(1, len(groups) // LOOK_AGAIN_AT))
            return 0.0
        self._least = self._smallest.groups
        refuse_stale(groups, version, self._buffer.ledger.staleness_bound)
        self._buffer.begin(groups)
        packing = time.monotonic()
        made = await self._batches.part(groups, step, num_groups)
        self._pack_s += time.monotonic() - packing
        batch = made.packed(step, version, self._config.algorithm, is_part=True)
        await self._trainer.tell(TrainBatch(made.number, replace(batch, minibatches=())))
        self._batches.begin(step)
        await self._trainer.answer(PartReport)
        return time.monotonic() - began

    def end(self) -> float:
        """Call after the last part of a step; return the seconds spent packing the parts before it."""
        packed_s, self._pack_s, self._least = self._pack_s, 0.0, self._smallest.groups
        return packed_s


def refuse_stale(groups: Sequence[RolloutGroup], version: int, bound: int) -> None:
    """Raise LedgerError for a group beyond the staleness bound: the bound holds by construction, so that is a bug."""
    for group in groups:
        if version - group.admitted_version > bound:
            raise LedgerError(
                f"group {group.group_id}, admitted under version {group.admitted_version}, would be trained at "
                f"version {version}: staler than the bound of {bound}"
            )


# ----------------------------------------------------------------------------------------------------------- train loop


class TrainLoop:
    """Runs steps until the last one or until `stop`."""

    def __init__(
        self,
        config: Config,
        buffer: RolloutBuffer,
        trainer: TrainerLink,
        weight_sync: WeightSync,
        cost: FlopCost,
        *,
        step: int,
        version: int,
        made: int = 0,
        wake: Callable[[], None],
        durable: Callable[[], Awaitable[None]] = at_once,
        guarding: Guarding | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        """step, version: where to continue.  wake: called when slots or groups have changed.

        made: the newest version of earlier attempts, with which generators may still sample.

        durable: returns once all events so far are in the journal.  Weights are published after it, so that a restart
        can make them again.
        """
        make_samples = SampleMaker.of(config)
        self._batches = BatchMaker(config, buffer, trainer, cost, make_samples)
        self._parts = StepParts(config, buffer, trainer, self._batches)
        self._lockstep = Lockstep(buffer, config.admission, make_samples.shaping) if config.run.deterministic else None
        self._recorded: dict[int, RecordedStep] = {}  # steps trained before the run was interrupted
        self._config, self._buffer, self._trainer, self._weight_sync = config, buffer, trainer, weight_sync
        self._wake, self._durable = wake, durable
        self._rates = LearningRates(config, progress or RunProgress())
        self._guarding = guarding or Guarding(StepGuard(config.guard), buffer.ledger, config.admission)
        self.step, self.version, self._made = step, version, made
        self._saved = step  # of the last checkpoint
        self._ready = asyncio.Event()  # set when groups or generators have changed, or the run is to stop
        self._stopped: asyncio.Future[Literal[True]] = asyncio.get_running_loop().create_future()  # done at `stop`
        self._going_live: asyncio.Task[None] | None = None
        self._none_is_live = False  # all generators have failed to load the last version
        self._unreleased: list[int] = []  # groups trained, waiting for weights to be live
        self.until_live_s = self.checkpoint_s = 0.0  # of the last version and the last checkpoint: see StepRecord

    def groups_changed(self) -> None:
        """Call when a group is finished or dropped (a batch may be full), or a generator came or went (publish?)."""
        self._ready.set()
        self._batches.look_again()

    def newest_version(self) -> int:
        """Newest version with which any generator can have sampled."""
        return max(self.version, self._made)

    # -------------------------------------------------------------------------------------------- before the first step

    async def replay(
        self,
        replay: Replay,
        stop: asyncio.Event,
        restored: Callable[[Sequence[ResolvedGroup]], None],
        record: Callable[[StepRecord], Awaitable[None]],
    ) -> None:
        """Repeat the steps trained after the checkpoint, on the same batches; publish nothing.

        In lockstep the last step may have to wait for groups of the weights before it.
        restored: called with the groups from the journal, those of a step before it is recorded.
        """
        left, first = replay.hand_over(), self.step
        self._recorded = {recorded.step: recorded for recorded in replay.steps}
        for recorded in replay.steps:
            if stop.is_set() or self.step >= self._config.run.num_steps:
                return
            if self._lockstep is not None and not self._lockstep.is_settled(self.step + 1):
                break
            newest = max(recorded.groups)
            restored([left.popleft() for _ in range(sum(group.group.group_id <= newest for group in left))])
            done = await self._train(self._buffer.take_again(recorded.groups, self.step))
            self._buffer.release(recorded.groups)
            await record(done)
            self._guarding.enforce()
        restored(left)
        if self.step > first:
            last = self.step - 1
            again = f"step {first}" if last == first else f"steps {first} to {last}"
            log.info("trained again, from the journal: %s", again)

    async def begin(self) -> None:
        """Publish the version to start from, and wait until a generator samples with it."""
        await self._durable()
        while self._weight_sync.live_version != self.version:
            await self._publish()
            await self._wait_until_released()

    # ------------------------------------------------------------------------------------------------------------ steps

    async def run(
        self, stop: asyncio.Event, record: Callable[[StepRecord], Awaitable[None]], checkpoints: CheckpointWriter
    ) -> None:
        """Train to the last step; on `stop`, to the next boundary.  Saves on schedule and at the end.

        After `stop` nothing is published and no generator is waited for: they may be gone already, and a resume
        publishes before anything else.  A checkpoint that fails is tried again soon.  Returns when the last one is
        complete.  Raises CheckpointError if that fails, or if none succeeds for long.
        """
        last = self._config.run.num_steps
        self._stopped = asyncio.ensure_future(stop.wait())
        self._stopped.add_done_callback(lambda _: self._ready.set())
        self._rates.start()
        try:
            while self.step < last and not stop.is_set():
                await self._one_step(stop, record, checkpoints)
            await self._finish(checkpoints)
        finally:
            self._batches.give_up()
            self._stopped.cancel()

    async def _one_step(
        self, stop: asyncio.Event, record: Callable[[StepRecord], Awaitable[None]], checkpoints: CheckpointWriter
    ) -> None:
        """Run one step; return without one if `stop` is set before there is a batch."""
        # A full batch; while the trainer would wait for it, it trains parts of it.
        groups, waited_s = await self._full_batch(stop)
        if groups is None:
            return

        # Its optimiser step; the next batch is made meanwhile.
        done = await self._train(groups, goes_on=self.step + 1 < self._config.run.num_steps)

        # New weights.  The version before may not be live yet; when it is, it releases all listed groups: list these
        # afterwards.
        await self._wait_until_released()
        self._unreleased += [group.group_id for group in groups]
        if await self._may_publish(stop):
            await self._durable()
            await self._publish()  # slots come free when it is live, while the next steps run

        # Metrics and totals, which a checkpoint holds; then the guard may end the run.
        await record(
            replace(
                done,
                wait_for_groups_s=waited_s,
                until_live_s=self.until_live_s,
                checkpoint_s=self.checkpoint_s,
                checkpoint_write_s=checkpoints.write_s,
                longest_save_s=checkpoints.longest_s,
            )
        )
        self._guarding.enforce()

        # A checkpoint, where one is due.
        checkpoints.raise_failure()
        is_due = (
            checkpoints.is_overdue if checkpoints.has_failed else self.step % self._config.checkpoint.every_steps == 0
        )
        if is_due and self.step < self._config.run.num_steps:
            await self._save(checkpoints)

    async def _full_batch(self, stop: asyncio.Event) -> tuple[list[RolloutGroup] | None, float]:
        """Wait for the groups of one batch, None if `stop` is set first; return them and the seconds waited."""
        began = time.monotonic()  # moved on by the time in which parts were trained
        while True:
            self._ready.clear()
            groups = self._buffer.take(self._config.admission.groups_per_step, self.step)
            if groups is not None:
                refuse_stale(groups, self.version, self._buffer.ledger.staleness_bound)
                return groups, time.monotonic() - began
            await self._republish_if_deserted()
            if not stop.is_set() and (trained_s := await self._parts.train(self.step, self.version)):
                began += trained_s
            else:
                await self._ready.wait()
            if stop.is_set():
                return None, time.monotonic() - began

    async def _train(self, groups: list[RolloutGroup], *, goes_on: bool = False) -> StepRecord:
        """Pack, train, consume.  goes_on: the next step's batch is made meanwhile."""
        began = time.monotonic()
        recorded = self._recorded.pop(self.step, None)
        then = None if recorded is None else recorded.trained
        made = await self._batches.made(groups, self.step)
        batch = made.packed(self.step, self.version, self._config.algorithm)
        batch = self._guarding.limit(self._rates.give(batch, then), then)
        packed_s = time.monotonic() - began + self._parts.end()
        await self._trainer.tell(TrainBatch(made.number, replace(batch, minibatches=())))
        if goes_on:
            self._batches.begin(self.step + 1)
        report = await self._trainer.answer(StepReport)
        trained, self.version = self.version, report.policy_version
        note = await self._guarding.judge(report, groups, trained, then)
        if recorded is not None:
            compare(recorded, [group.group_id for group in groups], trained, report, exact=self._lockstep is not None)
        self._buffer.consume(
            groups,
            self.step,
            trained_version=trained,
            applied=report.applied,
            metrics=report.metrics,
            refused=report.refused,
            skipped=report.skipped,
            began_s=self._rates.began_s,
        )
        self._rates.trained(batch)
        self.step += 1
        return StepRecord(
            report=report,
            batch=batch,
            groups=tuple(groups),
            trained_version=trained,
            lockstep_slowdown=made.slowdown,
            pack_s=packed_s,
            guard=note,
        )

    # ---------------------------------------------------------------------------------------------------------- weights

    async def _may_publish(self, stop: asyncio.Event) -> bool:
        """Return False after `stop`.  In lockstep: wait until the weights before these have sampled all their groups.

        Raises RoleFailed if no generator has those weights any more: the trainer has overwritten them.
        """
        if self._lockstep is None or stop.is_set():
            return not stop.is_set()
        if self.step >= self._config.run.num_steps:
            return False  # no step would use rollouts of these weights
        while not (self._lockstep.is_settled(self.step) or stop.is_set()):
            self._ready.clear()
            if self._weight_sync.is_deserted:
                raise RoleFailed(
                    f"run.deterministic=true: every generator with weights {self._weight_sync.live_version} is gone, "
                    f"and the trainer has weights {self.version}; the next attempt makes those again"
                )
            await self._ready.wait()
        return not stop.is_set()

    async def _publish(self) -> None:
        """Publish the current version; return while the generators still load it."""
        if await self._weight_sync.publish(self.version):
            self._none_is_live = False
            self._going_live = asyncio.create_task(self._release_when_live(self.version))

    async def _republish_if_deserted(self) -> None:
        """Publish again if no generator can get a lease: without rollouts no step would publish."""
        if self._none_is_live or self._weight_sync.is_deserted:
            await self._wait_until_released()  # the version may be on its way already
            if self._none_is_live or self._weight_sync.is_deserted:
                await self._publish()

    async def _release_when_live(self, version: int) -> None:
        began = time.monotonic()
        is_live = await self._weight_sync.wait_until_live(version)
        self.until_live_s = time.monotonic() - began
        if is_live:
            self._buffer.release(self._unreleased)
            self._unreleased.clear()
            self._wake()
        else:  # every generator failed while loading: the loop publishes again, to those that come back
            self._none_is_live = True
            self.groups_changed()

    async def _wait_until_released(self) -> None:
        """Wait until the previous version is live and its slots are released; not after `stop`."""
        if self._going_live is None:
            return
        await asyncio.wait((self._going_live, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if self._going_live.done():
            self._going_live.result()
        else:
            self._going_live.cancel()
        self._going_live = None

    # ------------------------------------------------------------------------------------------------------ checkpoints

    async def _save(self, checkpoints: CheckpointWriter) -> None:
        await self._wait_until_released()
        began = time.monotonic()
        await checkpoints.write(self.step, self.version)
        self.checkpoint_s, self._saved = time.monotonic() - began, self.step

    async def _finish(self, checkpoints: CheckpointWriter) -> None:
        """Save the last steps, trying again while the disk refuses.  Return when the checkpoint is complete.

        In lockstep nothing is saved while the weights before these still have to sample: the journal has it all.
        Raises CheckpointError if the disk refuses for too long.
        """
        self._batches.give_up()
        await self._wait_until_released()
        if self.step > self._saved or checkpoints.has_failed:
            is_over = self.step >= self._config.run.num_steps
            if self._lockstep is None or is_over or self._lockstep.is_settled(self.step):
                await checkpoints.write_surely(self.step, self.version)
            else:
                log.info("no checkpoint: a resume trains the steps after the last one again, from the journal")
        await checkpoints.finish()
