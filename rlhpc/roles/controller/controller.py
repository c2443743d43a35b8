"""The controller: admits prompts, grants leases, assembles groups, feeds the trainer, publishes weights.

    hear control ─▶ registry, weight sync       which processes run, which generator has which version
    take leases  ─▶ sink ─▶ buffer              rollouts come back, groups are finished or dropped
    dispatcher   ─▶ leases out                  prompts are admitted and granted
    train loop   ─▶ batches out, reports back   a step, its weights, its slots
    watch                                       overdue leases, silent processes, poisoned prompts, due writes

All five run in one event loop and share the buffer; none of them awaits while it changes it.  `assemble` builds every
part once.  The first two loops wait for their channel, the last one for the clock.  The others wait for each other (a
test holds this table true):

    who waits                   for               which is called by
    LeaseDispatcher.run         wake()            Controller._hear _take_in _watch; TrainLoop._release_when_live
    TrainLoop._full_batch       groups_changed()  Controller._hear _take_in _watch; TrainLoop._release_when_live
    WeightSync._until           notify_all()      WeightSync.joined lost acknowledge _follow stop_waiting
    CheckpointWriter._complete  reported()        ControllerFrame.saved _outlast_save

The train loop also waits for the trainer's answers (batch_maker.py), for weights to be live before it saves, and for
metrics that are steps behind.  All disk work while they run is done in the lanes of persistence.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhpc.algorithms.packing import FlopCost, warm_up
from rlhpc.algorithms.samples import RewardShaping
from rlhpc.base.hf_config import language_model
from rlhpc.base.patience import patiently, patiently_awaited
from rlhpc.buffer.batches import DropReason
from rlhpc.buffer.lost_leases import LostLeaseFile
from rlhpc.buffer.prefixes import PartialIntake, PartialLog
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import ServerChannel
from rlhpc.protocol.errors import (
    ChannelError,
    JournalError,
    OwnershipLost,
    RoleFailed,
    SegmentError,
)
from rlhpc.protocol.messages import (
    BATCHES,
    CONTROL,
    LEASES,
    CanaryTaken,
    Delivery,
    Heartbeat,
    Hello,
    LeaseProgress,
    LeaseReturn,
    Reregister,
    SaveReport,
    StopRole,
    WeightsLive,
)
from rlhpc.rewards.outcomes import ErrorGate
from rlhpc.roles.controller.batch_maker import TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.frame import (
    ANSWER_S,
    PAUSE_COUNTS_FOR,
    WATCH_INTERVAL_S,
    ControllerFrame,
    run_controller,
)
from rlhpc.roles.controller.guarding import GuardFile, Guarding
from rlhpc.roles.controller.leases import AwakeClock, LeaseDispatcher, ProcessRegistry, RolloutSink
from rlhpc.roles.controller.persistence import DiskLane, DiskWriter, Journaling, PartialKeeping, PatientSealing
from rlhpc.roles.controller.recorder import RunRecorder
from rlhpc.roles.controller.run_status import StatusBoard, summarise
from rlhpc.roles.controller.state import ControllerState, StatePart, open_controller_state
from rlhpc.roles.controller.train_loop import TrainLoop
from rlhpc.roles.controller.weight_sync import WeightSync, WeightSyncLimits, open_canary, transport_choice
from rlhpc.roles.lifecycle import RoleContext, run_loop
from rlhpc.transport.sessions import is_same_start

log = logging.getLogger("rlhpc.controller")
CLOSE_S = 15.0  # patience with a disk that refuses writes when a run fails or is stopped
OUTLIVES_CONTROLLERS = ("generator-", "reward-", "service-")  # a trainer that is taken for dead ends the attempt


def run(context: RoleContext) -> None:
    """Run to the last step, or until asked to stop; then stop all other roles."""
    run_loop(run_controller(context, (CONTROL, LEASES, BATCHES), assemble))


def assemble(context: RoleContext, control: ServerChannel, leases: ServerChannel, batches: ServerChannel) -> Controller:
    """Build every part once; blocks.  Raises CheckpointError, ConfigError, OwnershipLost."""
    config, layout, fence, clock = context.config, context.layout, context.fence, asyncio.get_running_loop().time
    awake = AwakeClock(clock, longest_s=config.transport.dead_after_s / PAUSE_COUNTS_FOR)
    state = patiently(partial(open_controller_state, context, awake), layout.root)
    buffer, ledger, prompts, disk = state.buffer, state.ledger, state.prompts, DiskWriter()
    # Registered processes, and the weights with which they sample.
    registry = ProcessRegistry(context.config_hash, config.transport.dead_after_s, clock=awake, code=context.code)
    trainer = TrainerLink(batches)
    weight_sync = WeightSync(
        control=control, trainer=trainer, membership=state.membership, choose=transport_choice(config),
        timeline=state.replay.timeline, limits=WeightSyncLimits.of(context.meet_timeout_s, config.weights.timeout_s),
        canary=open_canary(config, prompts), clock=awake,
    )  # fmt: skip
    processes = RunProcesses(context, control, registry, weight_sync, state, lane=disk.notes)
    # Prompts go out, rollouts come back.
    journaling = Journaling(state.journal, leases, clock=awake, lane=disk.journal)
    gate = ErrorGate(config.rewards.max_error_share, patience_s=config.rewards.error_patience_s, clock=awake)
    dispatcher = LeaseDispatcher(
        leases=leases, buffer=buffer, prompts=prompts, weight_sync=weight_sync, registry=registry, gate=gate,
        on_disk=journaling.durable if config.curriculum.goes_by_memory else None, fills_slots=config.run.deterministic,
    )  # fmt: skip
    sink = RolloutSink(
        buffer=buffer, gate=gate, admission=config.admission, shaping=RewardShaping.of(config), prompts=prompts,
        lost_leases=state.lost_leases, of_one_version=config.run.deterministic,
    )  # fmt: skip
    # Batches are trained, weights are published, slots come free.
    guarding = Guarding(
        guard=state.guard, ledger=ledger, admission=config.admission, file=GuardFile(layout.guard, fence),
        lane=disk.notes, attempt=context.attempt, may_tighten=not config.run.deterministic,
    )  # fmt: skip
    loop = TrainLoop(
        config=config, buffer=buffer, trainer=trainer, weight_sync=weight_sync, cost=_cost_of(config), step=state.step,
        version=state.policy_version, made=state.replay.version, wake=dispatcher.wake, durable=journaling.durable,
        guarding=guarding, progress=state.progress,
    )  # fmt: skip
    partials = PartialKeeping(
        intake=PartialIntake(ledger, config.generation.max_completion_tokens),
        files=PartialLog(layout.rollouts, context.attempt, fence, config.run.name), leases=leases, lane=disk.partials,
        timeline=state.replay.timeline, newest_version=loop.newest_version, commit_groups=journaling.commit_soon,
    )  # fmt: skip
    # Checkpoints and journal for a resume; metrics and status for people.
    sealing = PatientSealing(state.segments, clock=awake)
    checkpoints = CheckpointWriter(
        layout=layout, keep=config.checkpoint.keep, trainer=trainer, disk=disk, fence=fence, durable=journaling.durable,
        own=StatePart(state, layout, partial(sink.counted_in, state.totals)),
    )  # fmt: skip
    board = StatusBoard(layout, config, registry, ledger, fence, writers=(journaling, sealing, checkpoints), gate=gate)
    open_recorder = partial(
        RunRecorder, context=context, state=state, live=board.figures, registry=registry, weight_sync=weight_sync,
        sink=sink, lane=disk.metrics, channels=(control, leases, batches), clock=clock,
    )  # fmt: skip
    recorder = patiently(open_recorder, layout.tensorboard)
    return Controller(
        context=context, control=control, leases=leases, awake=awake, state=state, disk=disk, registry=registry,
        trainer=trainer, weight_sync=weight_sync, processes=processes, journaling=journaling, dispatcher=dispatcher,
        sink=sink, loop=loop, partials=partials, sealing=sealing, checkpoints=checkpoints,
        board=board, recorder=recorder,
    )  # fmt: skip


def _cost_of(config: Config) -> FlopCost:
    """Cost of a row in FLOPs, by the model's config.json."""
    path = config.model.path / "config.json"
    return FlopCost.from_hf_config(language_model(json.loads(patiently(path.read_bytes, path))))


@dataclass(kw_only=True, eq=False)
class Controller(ControllerFrame):
    """Runs the parts that `assemble` has built: all loops at once, then the end of the run."""

    leases: ServerChannel
    state: ControllerState
    weight_sync: WeightSync
    processes: RunProcesses
    journaling: Journaling
    dispatcher: LeaseDispatcher
    sink: RolloutSink
    loop: TrainLoop
    partials: PartialKeeping
    sealing: PatientSealing
    recorder: RunRecorder

    # ---------------------------------------------------------------------------------------------------------- running

    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the endless loops, beside training."""
        return (
            self._hear(),  # waits for the control channel
            self._take_in(),  # for the channel of leases
            self.dispatcher.run(),  # for wake()
            self._watch(),  # for the clock, and its writes
            self.journaling.run(),  # for received(), durable(), commit_soon(); then for its lane
            self.partials.run(),  # for receive(), handed_back(); then for its lane
            self.recorder.run(),  # for record(); then for its lane
            self.recorder.lag.run(),  # for the clock
        )

    async def stop_waiting(self) -> None:
        """Admit no more prompts, and wait for no generator."""
        self.dispatcher.is_open = False
        await self.weight_sync.stop_waiting()

    async def train(self, stop: asyncio.Event) -> None:
        """Repeat recorded steps, publish, train to the last step.  Waits for the trainer, groups and live weights."""
        await asyncio.to_thread(warm_up)  # compiles the planner, or loads it, while trainer and engines start
        ready = await self.trainer_is_ready(self.loop.version)
        self.weight_sync.describe(ready.manifest, ready.device)
        if self.state.replay.steps:
            self.recorder.training_begins()
            self.board.figures.phase = "replaying"  # does not count as progress for the supervisor
        await self.loop.replay(self.state.replay, stop, self.sink.restored, self.recorder.record)
        if stop.is_set():
            return  # nothing is saved: the checkpoint before it and the journal hold all of it
        self.board.figures.phase = "waiting for generators"
        await self.loop.begin()
        self.recorder.training_begins()
        await self.loop.run(stop, self.recorder.record, self.checkpoints)

    async def _hear(self) -> None:
        """Receive control messages of all roles.  Waits for their channel; wakes dispatcher and train loop."""
        while True:
            name, message = await self.control.receive()
            if isinstance(message, Hello):
                if await self.processes.greet(name, message):
                    self.loop.groups_changed()  # it may be the only one now: nothing else would make the loop publish
                    self.dispatcher.wake()
            elif isinstance(message, Heartbeat):
                await self.processes.beat(name, message)
                self.dispatcher.wake(name)  # its credit may have grown
            elif isinstance(message, WeightsLive):
                await self.weight_sync.acknowledge(name, message)
                self.dispatcher.wake(name)
            elif isinstance(message, CanaryTaken):
                await self.weight_sync.scored(name, message)
                self.loop.groups_changed()  # nobody may be trusted any more
                self.dispatcher.wake()  # or one more
            elif isinstance(message, SaveReport):
                self.saved(message)

    async def _take_in(self) -> None:
        """Receive rollouts and progress from generators.  Waits for their channel; wakes dispatcher and train loop."""
        while True:
            name, message = await self.leases.receive()
            if isinstance(message, Delivery):
                has_changed = self._counts(message) and self.sink.receive(name, message.scored, message.prompt_checksum)
                self.journaling.received(name, message)
                if not has_changed:
                    continue
                await self.dispatcher.cancel(self.sink.cancelled)
            elif isinstance(message, LeaseReturn) and self._counts(message):
                self.state.ledger.hand_back(name, message.group_id, message.sample_indices, message.prefixes)
                self.partials.handed_back(message)
            elif isinstance(message, LeaseProgress):
                await self.partials.receive(name, message)
                continue
            self.loop.groups_changed()
            self.dispatcher.wake(name)

    def _counts(self, message: Delivery | LeaseReturn) -> bool:
        """Whether the rollout's weights are of the timeline that this controller's trainer makes, or makes again."""
        return message.timeline == self.state.replay.timeline

    async def _watch(self) -> None:
        """Check periodically for silent processes, expired leases, groups out of attempts and segments that are due.

        Waits for the clock and for each of its writes; wakes dispatcher and train loop.
        """
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await self.processes.lose_silent():
                self.loop.groups_changed()  # perhaps only generators without weights are left
            self.state.totals.leases_regranted += len(self.state.ledger.expire())
            for group_id in self.state.ledger.poisoned():
                self.sink.refuse(group_id)
                self.loop.groups_changed()
            await self.disk.segments.run(self.sealing.tick)
            await self.processes.write()
            self.dispatcher.wake()
            await self.show()

    # ----------------------------------------------------------------------------------------------------------- ending

    def loops_of_a_save(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the journal's loop: a checkpoint is complete only when the journal has all that it refers to."""
        return (self.journaling.run(),)

    async def close_run(self) -> None:
        """Drop groups in flight, seal and summarise a finished run; a stopped one has saved them for the resume."""
        context, state = self.context, self.state
        is_complete = self.loop.step >= context.config.run.num_steps
        if is_complete:
            for group_id in state.ledger.open_groups():
                self.sink.drop(group_id, DropReason.CANCELLED)
            lane, layout = self.disk.segments, context.layout
            await patiently_awaited(lambda: lane.run(state.segments.seal_all), layout.rollouts)
            self.recorder.close_totals()
            facts = state.totals, state.ledger.staleness_bound, context.config.admission.group_size, context.fence
            await patiently_awaited(lambda: lane.run(summarise, layout, *facts), layout.summary)
        self.board.figures.phase = "complete" if is_complete else "stopped"

    def last_writes(self, *, is_complete: bool) -> Sequence[Coroutine[Any, Any, None]]:
        """Write rollouts that a failed run still holds, lost leases, metrics."""
        return (
            self._keep_rollouts(),
            self.partials.close(is_complete=is_complete),
            self.processes.write(),
            self.recorder.close(),
        )

    async def _keep_rollouts(self) -> None:
        journal, segments = self.state.journal, self.state.segments
        try:
            for write in (
                lambda: self.disk.journal.run(journal.commit),
                lambda: self.disk.segments.run(segments.seal_all),
            ):
                await patiently_awaited(write, self.context.layout.rollouts, limit_s=CLOSE_S)
        except (JournalError, SegmentError, OwnershipLost, OSError):
            log.exception("%d groups could not be sealed", segments.num_pending)
        finally:
            await self.disk.journal.run(journal.close)


# -------------------------------------------------------------------------------------------------------- run processes
#
# Admit the processes of a run, and remove those that died or left.
#
# Input: Hello and Heartbeat.  Output: registered processes, generators to send weights to, leases freed by deaths.
# A death is noticed by silence, or by the Hello of a successor.  The run survives the loss of generators, not of other
# roles.  The prompts that a lost generator sampled each lose a lease, which is recorded on disk before anything else
# (rlhpc/buffer/lost_leases.py).


class RunProcesses:
    """Admits and removes processes; each method returns whether the set of generators has changed."""

    def __init__(
        self,
        context: RoleContext,
        control: ServerChannel,
        registry: ProcessRegistry,
        weight_sync: WeightSync,
        state: ControllerState,
        lane: DiskLane,
    ) -> None:
        """lane: the one that writes lost leases."""
        self._lane = lane
        self._control, self._registry, self._weight_sync, self._state = control, registry, weight_sync, state
        self._file = LostLeaseFile(context.layout.lost_leases, context.fence)
        self._dead_after_s = context.config.transport.dead_after_s

    # --------------------------------------------------------------------------------------------------------- arrivals

    async def greet(self, name: str, message: Hello) -> bool:
        """Register a process, or tell it to stop.  True: the set of generators has changed."""
        if self._registry.is_superseded(name, message):
            self._registry.register(name, message)  # it is refused; StopRole would reach its successor
            return False
        known, has_lost = self._registry.member(name), False
        if known is not None and known.hello.incarnation != message.incarnation:
            if message.role == "generator" and is_same_start(known.hello.incarnation, message.incarnation):
                log.warning("%s has connected again", name)  # a channel failed; it reports its running rollouts
                self._state.ledger.forget_holder(name, is_dead=False)
                has_lost = True
            else:
                has_lost = await self._lose(name, "was started again")  # its leases are lost
        if not self._registry.register(name, message):
            await self._tell(name, StopRole("other settings than the run's"))
            return has_lost
        if message.role != "generator":
            return False
        if misplaced := self._weight_sync.misplaced(name, message.weight_devices):
            log.error("%s is not admitted: %s", name, misplaced)
            self._registry.forget(name)
            await self._tell(name, StopRole(misplaced))
            return has_lost
        await self._weight_sync.joined(name, message.weight_devices, message.incarnation)
        return True

    async def beat(self, name: str, message: Heartbeat) -> None:
        """Record a heartbeat; a process declared dead, perhaps because it was paused, may register again."""
        if not self._registry.record(name, message) and name.startswith(OUTLIVES_CONTROLLERS):
            await self._tell(name, Reregister())

    async def _tell(self, name: str, message: object) -> None:
        with suppress(ChannelError):  # it is gone already
            await self._control.send(name, message, timeout_s=ANSWER_S)

    # ----------------------------------------------------------------------------------------------------------- losses

    async def lose_silent(self) -> bool:
        """Remove processes that have been silent for too long.  True: a generator was among them.

        Raises RoleFailed if a trainer was among them.
        """
        lost = [await self._lose(name, f"is silent for {self._dead_after_s:g} s") for name in self._registry.silent()]
        return any(lost)

    async def write(self) -> None:
        """Write new lost leases, and completions of suspect prompts, to disk.  Raises OwnershipLost."""
        if self._state.lost_leases.unwritten:
            await self._lane.run(self._file.append, self._state.lost_leases)

    async def _lose(self, name: str, why: str) -> bool:
        """Remove one process.  True: it was a generator.  Raises RoleFailed for a trainer."""
        member = self._registry.member(name)
        self._registry.forget(name)
        of_service = f" ({member.hello.service})" if member is not None and member.hello.service else ""
        log.warning("%s%s %s", name, of_service, why)
        role = member.hello.role if member is not None else ""
        if role == "trainer":
            raise RoleFailed(f"{name} {why}")
        if role == "generator":
            lost = member.beat.metrics.get("tokens_unreported", 0.0) if member is not None else 0.0
            self._state.totals.tokens_lost += int(lost)
            # One that said that it leaves has handed back what it had; what was on its way is nobody's fault.
            is_dead = member is None or member.beat.state != "draining"
            groups = self._state.ledger.forget_holder(name, is_dead=is_dead)
            self._state.totals.leases_regranted += len(groups)
            await self.write()
            await self._weight_sync.lost(name)
        return role == "generator"
