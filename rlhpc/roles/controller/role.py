"""The controller: admits prompts, grants leases, assembles groups, feeds the trainer, publishes weights.

    hear control ─▶ registry, weight sync       who is there, who samples with which version
    take leases  ─▶ sink ─▶ buffer              rollouts come back, groups are finished or dropped
    dispatcher   ─▶ leases out                  prompts are admitted and granted
    train loop   ─▶ batches out, reports back   a step, its weights, its slots
    watch                                       what is overdue, silent, poisoned, due on disk

All five run in one event loop and share the buffer; none of them awaits while it changes it.  The first two wait for
their channel, the last one for the clock.  The others wait for each other (a test holds this table true):

    who waits                   for               which is called by
    LeaseDispatcher.run         wake()            Controller._hear _take_in _watch; TrainLoop._release_when_live
    TrainLoop._full_batch       groups_changed()  Controller._hear _take_in _watch; TrainLoop._release_when_live
    WeightSync._until           notify_all()      WeightSync.joined lost acknowledge _follow stop_waiting
    CheckpointWriter._complete  reported()        Controller._hear; LastSave.outlast

The train loop waits for the trainer's answers besides (trainer_link.py), for weights to be live before it saves, and
for metrics that are steps behind.  Whatever touches the disk while they run is done in the lanes of disk_writer.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack, suppress
from functools import partial

from rlhpc.algorithms.shaping import RewardShaping
from rlhpc.buffer.partial_files import PartialLog
from rlhpc.buffer.partial_intake import PartialIntake
from rlhpc.buffer.resolved import DropReason
from rlhpc.contracts import ServerChannel
from rlhpc.errors import (
    ChannelError,
    CheckpointError,
    JournalError,
    OwnershipLost,
    RunDirectoryError,
    SegmentError,
)
from rlhpc.messages import (
    CanaryTaken,
    Delivery,
    Heartbeat,
    Hello,
    LeaseProgress,
    LeaseReturn,
    SaveReport,
    StopRole,
    WeightsLive,
)
from rlhpc.packing.cost import FlopCost
from rlhpc.packing.planner import warm_up
from rlhpc.patience import patiently, patiently_awaited, patiently_here
from rlhpc.rewards.error_gate import ErrorGate
from rlhpc.roles.common.lifecycle import RoleContext, StopRequest, run_loop
from rlhpc.roles.controller.awake_clock import AwakeClock
from rlhpc.roles.controller.canary import open_canary
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.disk_patience import PatientSealing
from rlhpc.roles.controller.disk_writer import DiskWriter
from rlhpc.roles.controller.guarding import Guarding
from rlhpc.roles.controller.journaling import Journaling
from rlhpc.roles.controller.last_save import LastSave
from rlhpc.roles.controller.lease_dispatcher import LeaseDispatcher
from rlhpc.roles.controller.metrics.recorder import RunRecorder
from rlhpc.roles.controller.metrics.status_board import StatusBoard
from rlhpc.roles.controller.metrics.summary import summarise
from rlhpc.roles.controller.partial_keeping import PartialKeeping
from rlhpc.roles.controller.process_registry import ProcessRegistry
from rlhpc.roles.controller.rollout_sink import RolloutSink
from rlhpc.roles.controller.run_processes import RunProcesses
from rlhpc.roles.controller.state import open_controller_state
from rlhpc.roles.controller.train_loop import TrainLoop
from rlhpc.roles.controller.trainer_link import RANK_0, TrainerLink
from rlhpc.roles.controller.weight_sync import WeightSync, WeightSyncLimits, transport_choice
from rlhpc.topology import BATCHES, CONTROL, LEASES
from rlhpc.transport.open import open_server

log = logging.getLogger("rlhpc.controller")
WATCH_INTERVAL_S = 0.5
PAUSE_COUNTS_FOR = 8  # a pause of this process counts for at most this part of the silence that others are allowed
CLOSE_S = 15.0  # for a disk that refuses at the end of a run that has failed, or was stopped
FAREWELL_S = 2.0  # for StopRole to reach the others
SHOWN_S = 10.0  # for the disk to take the status by which the others are told to leave
CLOSING_S = 60.0  # for the disk to take what only this process has


def run(context: RoleContext) -> None:
    """Run to the last step, or until asked to stop; then stop all other roles."""
    run_loop(_control(context))


async def _control(context: RoleContext) -> None:
    stop = StopRequest()
    async with AsyncExitStack() as stack:
        channels: list[ServerChannel] = []
        for spec in (CONTROL, LEASES, BATCHES):
            opening = partial(open_server, spec, **context.listener)
            channel = await patiently_here(opening, context.layout.rendezvous)
            stack.push_async_callback(channel.close)
            channels.append(channel)
        await Controller(context, *channels).run_and_close(stop)


class Controller:
    """Wires the parts together and runs them."""

    def __init__(
        self, context: RoleContext, control: ServerChannel, leases: ServerChannel, batches: ServerChannel
    ) -> None:
        self._context, self._control, self._leases = context, control, leases
        config, clock = context.config, asyncio.get_running_loop().time
        self._awake = AwakeClock(clock, config.transport.dead_after_s / PAUSE_COUNTS_FOR)
        # Blocks: nothing is served yet.
        self._state = patiently(partial(open_controller_state, context, self._awake), context.layout.root)
        self._disk = DiskWriter()
        self._registry = ProcessRegistry(context.config_hash, config.transport.dead_after_s, self._awake, context.code)
        self._trainer = TrainerLink(batches)
        self._weight_sync = WeightSync(
            control,
            self._trainer,
            self._state.membership,
            choose=transport_choice(config),
            timeline=self._state.replay.timeline,
            limits=WeightSyncLimits.of(context.meet_timeout_s, config.weights.timeout_s),
            canary=open_canary(config, self._state.prompts),
            clock=self._awake,
        )
        self._journaling = Journaling(self._state.journal, leases, self._awake, self._disk.journal)
        rewards, is_exact = config.rewards, config.run.deterministic
        gate = ErrorGate(rewards.max_error_share, patience_s=rewards.error_patience_s, clock=self._awake)
        buffer, prompts, shaping = self._state.buffer, self._state.prompts, RewardShaping.of(config)
        self._sink = RolloutSink(buffer, gate, config.admission, shaping, prompts, of_one_version=is_exact)
        self._sink.lost_leases = self._state.lost_leases
        saved = self._journaling.durable if config.curriculum.goes_by_memory else None
        known = prompts, self._weight_sync, self._registry
        self._dispatcher = LeaseDispatcher(leases, buffer, *known, saved, is_exact, gate)
        self._guarding = Guarding.of(context, self._state, self._disk.notes)
        self._loop = self._make_loop()
        self._partials = self._make_partials()
        facts = context.layout, config.checkpoint.keep, self._trainer, self._state, self._disk
        self._checkpoints = CheckpointWriter(
            *facts,
            fence=context.fence,
            durable=self._journaling.durable,
            totals=lambda: self._sink.counted_in(self._state.totals),
        )
        self._sealing = PatientSealing(self._state.segments, self._awake)
        writers = self._journaling, self._sealing, self._checkpoints
        self._board = StatusBoard(context.layout, config, self._registry, buffer, context.fence, writers, gate)
        sync, notes = self._weight_sync, self._disk.notes
        self._processes = RunProcesses(context, control, self._registry, sync, self._state, notes)
        met = self._registry, self._weight_sync, self._sink, self._disk.metrics
        channels = control, leases, batches
        recording = partial(
            RunRecorder, context, self._state, self._board.figures, *met, channels=channels, clock=clock
        )
        self._recorder = patiently(recording, context.layout.tensorboard)

    def _make_loop(self) -> TrainLoop:
        config = self._context.config
        model_file = config.model.path / "config.json"
        return TrainLoop(
            config,
            self._state.buffer,
            self._trainer,
            self._weight_sync,
            FlopCost.from_hf_config(json.loads(patiently(model_file.read_bytes, model_file))),
            step=self._state.step,
            version=self._state.policy_version,
            wake=self._dispatcher.wake,
            durable=self._journaling.durable,
            guarding=self._guarding,
            progress=self._state.progress,
        )

    def _make_partials(self) -> PartialKeeping:
        context, state = self._context, self._state
        return PartialKeeping(
            PartialIntake(state.buffer, context.config.generation.max_completion_tokens),
            PartialLog(context.layout.rollouts, context.attempt, context.fence),
            self._leases,
            self._disk.partials,
            timeline=state.replay.timeline,
            newest_version=lambda: max(self._loop.version, state.replay.version),
            commit_groups=self._journaling.commit_soon,
        )

    # ---------------------------------------------------------------------------------------------------------- running

    async def run_and_close(self, stop: StopRequest) -> None:
        """Run; whatever ends it, tell the others to leave, then write what is only in memory."""
        try:
            try:
                await self.run(stop)
            finally:
                await self.say_farewell()
        finally:
            await self.close()

    async def run(self, stop: StopRequest) -> None:
        """Run until the last step or `stop`; then finish the records."""
        try:
            await self._run_loops(stop)
        except BaseExceptionGroup:
            parts = self._registry, self._checkpoints, self._journaling, self._awake
            await LastSave(self._control, *parts).outlast(stop.event)
            raise
        await self._close_run()

    async def _run_loops(self, stop: StopRequest) -> None:
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(loop)
                for loop in (
                    self._hear(),
                    self._take_in(),
                    self._dispatcher.run(),
                    self._watch(),
                    self._journaling.run(),
                    self._partials.run(),
                    self._recorder.lag.run(),
                    self._recorder.run(),
                    self._awake.run(),
                )
            ]
            training, stopped = group.create_task(self._train(stop.event)), group.create_task(stop.event.wait())
            await asyncio.wait((training, stopped), return_when=asyncio.FIRST_COMPLETED)
            self._dispatcher.is_open = False
            await self._weight_sync.stop_waiting()
            if self._board.figures.phase == "training":  # it ends by itself at the next step boundary, having saved
                await stop.wait_for(training)
            for task in (*loops, stopped, training):
                task.cancel()

    async def _train(self, stop: asyncio.Event) -> None:
        await asyncio.to_thread(warm_up)  # compiles the planner, or loads it, while trainer and engines start
        ready = await self._trainer.ready(self._context.meet_timeout_s, self._missing_trainers)
        if ready.policy_version != self._loop.version:
            theirs, ours = ready.policy_version, self._loop.version
            raise CheckpointError(f"the trainer is at policy version {theirs}, the controller at {ours}")
        self._weight_sync.describe(ready.manifest, ready.device)
        if self._state.replay.steps:
            self._recorder.training_begins()
            self._board.figures.phase = "replaying"  # which is no progress for those who wait for some
        await self._loop.replay(self._state.replay, stop, self._sink.restored, self._recorder.record)
        if stop.is_set():
            return  # nothing is saved: the checkpoint before it and the journal hold all of it
        self._board.figures.phase = "waiting for generators"
        await self._loop.begin()
        self._recorder.training_begins()
        await self._loop.run(stop, self._recorder.record, self._checkpoints)

    def _missing_trainers(self) -> list[str]:
        ranks = (f"trainer-{rank}" for rank in range(self._context.config.trainer.num_ranks))
        return [name for name in ranks if self._registry.member(name) is None]

    async def _hear(self) -> None:
        """Receive control messages of all roles."""
        while True:
            name, message = await self._control.receive()
            if isinstance(message, Hello):
                if await self._processes.greet(name, message):
                    self._loop.groups_changed()  # it may be the only one now: nothing else would make the loop publish
                    self._dispatcher.wake()
            elif isinstance(message, Heartbeat):
                await self._processes.beat(name, message)
                self._dispatcher.wake(name)  # its credit may have grown
            elif isinstance(message, WeightsLive):
                await self._weight_sync.acknowledge(name, message)
                self._dispatcher.wake(name)
            elif isinstance(message, CanaryTaken):
                await self._weight_sync.scored(name, message)
                self._loop.groups_changed()  # nobody may be trusted any more
                self._dispatcher.wake()  # or one more
            elif isinstance(message, SaveReport):
                self._checkpoints.reported(message)

    async def _take_in(self) -> None:
        """Receive rollouts and progress from generators."""
        while True:
            name, message = await self._leases.receive()
            if isinstance(message, Delivery):
                has_changed = self._counts(message) and self._sink.receive(name, message.scored)
                self._journaling.received(name, message)
                if not has_changed:
                    continue
                await self._dispatcher.cancel(self._sink.cancelled)
            elif isinstance(message, LeaseReturn) and self._counts(message):
                self._state.buffer.hand_back(name, message.group_id, message.sample_indices, message.prefixes)
                self._partials.handed_back(message)
            elif isinstance(message, LeaseProgress):
                await self._partials.receive(name, message)
                continue
            self._loop.groups_changed()
            self._dispatcher.wake(name)

    def _counts(self, message: Delivery | LeaseReturn) -> bool:
        """Whether the weights that sampled it are among those that this controller's trainer makes, or makes again."""
        return message.timeline == self._state.replay.timeline

    async def _watch(self) -> None:
        """Check periodically for silent processes, expired leases, groups out of attempts and segments that are due."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            if await self._processes.lose_silent():
                self._loop.groups_changed()  # perhaps only generators without weights are left
            self._state.totals.leases_regranted += self._state.buffer.expire()
            for group_id in self._state.buffer.poisoned():
                self._sink.refuse(group_id)
                self._loop.groups_changed()
            await self._disk.segments.run(self._sealing.tick)
            await self._processes.write()
            self._dispatcher.wake()
            await self._show()

    # ----------------------------------------------------------------------------------------------------------- ending

    async def _close_run(self) -> None:
        """Drop groups in flight, seal and summarise a finished run; a stopped one has saved them for the resume."""
        context, state = self._context, self._state
        is_complete = self._loop.step >= context.config.run.num_steps
        if is_complete:
            for group_id in state.buffer.open_groups():
                self._sink.drop(group_id, DropReason.CANCELLED)
            lane, layout = self._disk.segments, context.layout
            await patiently_awaited(lambda: lane.run(state.segments.seal_all), layout.rollouts)
            self._recorder.close_totals()
            facts = state.totals, state.buffer.staleness_bound, context.config.admission.group_size, context.fence
            await patiently_awaited(lambda: lane.run(summarise, layout, *facts), layout.summary)
        self._board.figures.phase = "complete" if is_complete else "stopped"

    async def say_farewell(self) -> None:
        """Send StopRole to every process, and whether another controller will follow."""
        self._board.figures.is_ending = True
        with suppress(OwnershipLost):  # first: whoever sees a process end knows that it was told to
            await self._show(SHOWN_S)
        is_complete = self._board.figures.phase == "complete"
        farewell = StopRole("the run is complete" if is_complete else "the controller stops", is_complete)
        ranks = self._registry.names("trainer")
        others = [name for name in self._registry.names() if not (self._trainer.obeys and name in ranks)]
        for name in others:
            with suppress(ChannelError):  # it is gone already
                await self._control.send(name, farewell, timeout_s=FAREWELL_S)
        if self._trainer.obeys and RANK_0 in ranks:  # which tells the other ranks
            with suppress(ChannelError):
                await self._trainer.tell(farewell)
        await self._show(SHOWN_S)

    async def close(self) -> None:
        """Write to disk what is only in memory: rollouts that a failed run still holds, lost leases, metrics.

        Whatever becomes of one of them, all are tried; then the first failure is raised.  RunDirectoryError: the disk
        has not answered for CLOSING_S.
        """
        self._checkpoints.give_up()
        is_complete = self._board.figures.phase == "complete"
        last = [
            asyncio.ensure_future(each)
            for each in (
                self._keep_rollouts(),
                self._partials.close(is_complete=is_complete),
                self._processes.write(),
                self._recorder.close(),
            )
        ]
        _, late = await asyncio.wait(last, timeout=CLOSING_S)
        unfinished = await self._disk.close(0.0 if late else CLOSING_S)
        if late or unfinished:
            for each in late:
                each.cancel()
            names = ", ".join(unfinished)
            raise RunDirectoryError(
                f"{self._context.layout.root}: the disk has not answered for {CLOSING_S:g} s: {names}"
            )
        for each in last:
            each.result()

    async def _keep_rollouts(self) -> None:
        journal, segments = self._state.journal, self._state.segments
        try:
            for write in (
                lambda: self._disk.journal.run(journal.commit),
                lambda: self._disk.segments.run(segments.seal_all),
            ):
                await patiently_awaited(write, self._context.layout.rollouts, limit_s=CLOSE_S)
        except (JournalError, SegmentError, OwnershipLost, OSError):
            log.exception("%d groups could not be sealed", segments.num_pending)
        finally:
            await self._disk.journal.run(journal.close)

    async def _show(self, limit_s: float | None = None) -> None:
        """Write the status; after limit_s leave it to be written.  Raises OwnershipLost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._disk.notes.run(self._board.write, self._board.document())
