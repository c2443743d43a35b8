"""A generator: samples the prompts it holds leases for, has rollouts scored, delivers them, and receives new weights
meanwhile.

Input: Lease.  Output: ScoredRollout.  It keeps delivered rollouts until the controller has them on disk (sampling.py);
other rollouts that are lost with it are granted again to another generator.  It states how many samples it is willing
to hold; the controller never grants it more.

When the controller is replaced (lifecycle.py) a generator keeps its engine, which takes minutes to start, and
goes on sampling (sampling.py).  Its weights do not count as a version of the next controller, which grants it no new
lease before it has received new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from rlhpc.config.tables import AGENT
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.generation.factory import engine_seed, start_engine
from rlhpc.protocol.contracts import ClientChannel, GenerationEngine
from rlhpc.protocol.errors import ChannelError, ChannelTimeout, GroupFailed, RoleFailed, TornWeights
from rlhpc.protocol.messages import (
    CONTROL,
    LEASES,
    REWARDS,
    CanaryTaken,
    CancelGroup,
    Delivered,
    Heartbeat,
    JoinGroup,
    LeaseReturn,
    Quarantine,
    ReceiveWeights,
    Reregister,
    ShowWhole,
    StopRole,
    TakeCanary,
    WeightsLive,
)
from rlhpc.protocol.types import Lease
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.roles.lifecycle import (
    ControllerSession,
    RoleContext,
    beat,
    follow_services,
    hello,
    run_loop,
    serve_controllers,
    stop_event,
    unless_stopped,
)
from rlhpc.transport.open import FoundClient
from rlhpc.transport.rpc import RpcClient

# --------------------------------------------------------------------------------------------------------- canary taker
#
# Score the controller's canary beside the sampling, so that neither leases nor weights wait for it.
#
# Input: TakeCanary.  Output: CanaryTaken.  If several wait only the newest is scored.


class CanaryTaker:
    """Scores one row after the other."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._newest: TakeCanary | None = None
        self._has_come = asyncio.Event()

    def take(self, command: TakeCanary) -> None:
        """Score this canary next, in place of one that still waits."""
        self._newest = command
        self._has_come.set()

    async def run(self, control: ClientChannel) -> None:
        """Score canaries as they come, endlessly.  Raises EngineError."""
        while True:
            await self._has_come.wait()
            self._has_come.clear()
            command, self._newest = self._newest, None
            if command is not None:
                score = await self._engine.score(command.token_ids)
                await control.send(CanaryTaken(command.number, score.policy_version, score.logprobs))


# -------------------------------------------------------------------------------------------------------- command queue
#
# The controller's commands to a generator, without those for weight groups that a newer one has replaced.
#
# Input: a channel to the controller.  Output: JoinGroup, ReceiveWeights, Reregister, StopRole, in their order.
# Guarantees: a generator that was busy while groups were formed and dissolved joins the newest one next.  Joining a
# group that the trainer has left costs a full time-out, in which the trainer forms and dissolves the next one: a
# generator that tried them all would never catch up.  It reports every skipped group to the controller.


class CommandQueue:
    """Reads the controller's commands ahead of their execution."""

    def __init__(self, control: ClientChannel) -> None:
        self._control = control
        self._waiting: deque[Any] = deque()
        self._passed_over: set[int] = set()  # epochs of skipped groups

    async def next(self) -> Any:
        """Return the oldest command that still has to be executed.  Raises what the channel's receive() raises."""
        while True:
            command = await self._oldest()
            if isinstance(command, JoinGroup) and (newest := self._newest_epoch()) > command.group.epoch:
                self._passed_over.add(command.group.epoch)
                await self._tell(command.group.epoch, -1, f"join: epoch {newest} has replaced it")
            elif isinstance(command, ReceiveWeights) and command.manifest.epoch in self._passed_over:
                await self._tell(command.manifest.epoch, command.manifest.policy_version, "its group was not joined")
            else:
                return command

    async def _oldest(self) -> Any:
        if not self._waiting:
            self._waiting.append(await self._control.receive())
        with suppress(ChannelTimeout):
            while True:
                self._waiting.append(await self._control.receive(0))
        return self._waiting.popleft()

    def _newest_epoch(self) -> int:
        """The newest epoch among groups that are still to be joined; -1 if there is none."""
        return max((each.group.epoch for each in self._waiting if isinstance(each, JoinGroup)), default=-1)

    async def _tell(self, epoch: int, version: int, error: str) -> None:
        await self._control.send(WeightsLive(epoch, version, 0.0, 0.0, error=error))


# ----------------------------------------------------------------------------------------------------------------- role


log = logging.getLogger("rlhpc.generator")
LATE_LEASES_S = 0.5  # for leases that were granted before the controller knew that this process leaves
SILENT_S = 5.0  # beyond the time of one verdict, for a replica that is silent while another one answers


def run(context: RoleContext) -> None:
    """Generate until asked to stop."""
    run_loop(_generate(context))


async def _generate(context: RoleContext) -> None:
    config = context.config
    # Starting the engine may block for minutes.  Until then there is nothing to hand back: SIGTERM ends this process by
    # its default, and the role task ends the engine's child processes (launch/supervisor/role_task.py).
    seed = engine_seed(config.run.seed, context.replica)
    engine = await start_engine(config, seed=seed, make_decode=lambda: PromptTokenizer.of(config.model).decode)
    stop = stop_event()
    try:
        async with asyncio.TaskGroup() as tasks:
            sampling = Sampling(config, engine, tasks, context.layout.rendezvous)
            try:
                await serve_controllers(context, stop, partial(_serve, engine, sampling))
                await sampling.give_up()
            finally:
                await sampling.agents.close()
                await sampling.teachers.close()
    finally:
        await engine.close()


async def _serve(engine: GenerationEngine, sampling: Sampling, session: ControllerSession) -> None:
    """Sample for one controller."""
    context = session.context
    await engine.leave_weights()  # the group of the previous session, whose trainer is gone
    if context.config.run.deterministic:  # rollouts continued over a restart would be of several versions
        await sampling.give_up()
    async with AsyncExitStack() as stack:
        connecting = asyncio.create_task(_connect(session, stack))
        channels = await unless_stopped(session.stop, connecting)
        if channels is None:
            return
        leases, services, control = channels
        rewards = context.config.rewards
        verdict_s = rewards.longest_timeout_s + context.config.longest_service_patience_s
        judges = await stack.enter_async_context(
            RpcClient(services, max_attempts=rewards.max_attempts, silence_s=verdict_s + SILENT_S)
        )
        await control.send(hello(context, engine.weight_devices))
        stack.callback(sampling.detach)
        await sampling.attach(Link(leases, judges, session.failed))
        generator = Generator(context, engine, sampling, leases, judges)
        await session.until_over(
            generator.take_leases(),
            generator.obey(control, session),
            beat(control, context.config.transport.heartbeat_s, generator.heartbeat),
            generator.report_progress(),
            generator.canary.run(control),
            sampling.outbox.repeat(leases),
            follow_services(session, REWARDS, services, judges.replace),
        )
        if session.stop.is_set():
            await generator.leave(control)


async def _connect(
    session: ControllerSession, stack: AsyncExitStack
) -> tuple[FoundClient, list[FoundClient], FoundClient]:
    """Return the channels for leases, rewards (one a replica) and control; `stack` closes them."""
    leases = await session.connect(LEASES)
    stack.push_async_callback(leases.close)
    services: list[FoundClient] = []
    for replica in range(session.context.config.rewards.num_replicas):
        services.append(await session.connect(REWARDS, replica))
        stack.push_async_callback(services[-1].close)
    control = await session.connect(CONTROL)
    stack.push_async_callback(control.close)
    return leases, services, control


class Generator:
    """A generator's loops, between its engine and its channels."""

    def __init__(
        self,
        context: RoleContext,
        engine: GenerationEngine,
        sampling: Sampling,
        leases: ClientChannel,
        judges: RpcClient,
    ) -> None:
        self._context, self._engine, self._sampling = context, engine, sampling
        self._leases, self._judges = leases, judges
        self._is_draining = False
        self.canary = CanaryTaker(engine)

    # ----------------------------------------------------------------------------------------------------------- leases

    async def take_leases(self) -> None:
        """Start granted leases, endlessly."""
        while True:
            message = await self._leases.receive()
            if isinstance(message, CancelGroup):
                await self._sampling.cancel(message.group_id)
            elif isinstance(message, Delivered):
                self._sampling.outbox.acknowledged(message)
            elif isinstance(message, ShowWhole):
                self._sampling.progress.show_whole(message.members)
            else:
                self._sampling.start(message)

    async def report_progress(self) -> None:
        """Report the progress of running rollouts, endlessly."""
        while True:
            report = self._sampling.report()
            if report is not None:
                await self._leases.send(report)
            await asyncio.sleep(self._sampling.progress.look_s)

    # ------------------------------------------------------------------------------------------- weights and control

    async def obey(self, control: ClientChannel, session: ControllerSession) -> None:
        """Execute the controller's commands, one after the other."""
        commands = CommandQueue(control)
        while True:
            message = await commands.next()
            if isinstance(message, JoinGroup):
                await self._sampling.enter(message.timeline)
                await self._join(control, message)
            elif isinstance(message, ReceiveWeights):
                await control.send(await self._receive(message))
            elif isinstance(message, TakeCanary):
                self.canary.take(message)
            elif isinstance(message, Quarantine):
                await self._hand_back_all(message)
            elif isinstance(message, Reregister):
                await control.send(hello(self._context, self._engine.weight_devices))
            elif isinstance(message, StopRole):
                session.asked_to_stop(message)

    async def _join(self, control: ClientChannel, message: JoinGroup) -> None:
        group = message.group
        try:
            await self._engine.join_weights(group, self._context.name)
        except GroupFailed as error:
            await control.send(WeightsLive(group.epoch, -1, 0.0, 0.0, error=f"join: {error}"))

    async def _receive(self, message: ReceiveWeights) -> WeightsLive:
        manifest = message.manifest
        try:
            timing = await self._engine.receive_weights(manifest)
        except (TornWeights, GroupFailed) as error:
            log.warning("version %d not received: %s", manifest.policy_version, error)
            return WeightsLive(manifest.epoch, manifest.policy_version, 0.0, 0.0, error=str(error))
        return WeightsLive(manifest.epoch, manifest.policy_version, timing.receive_s, timing.pause_s, held=timing.held)

    async def _hand_back_all(self, message: Quarantine) -> None:
        """Hand back all rollouts: wrong weights have sampled them.  Raises RoleFailed if a restart is required."""
        log.error("quarantined: %s", message.reason)
        await self._sampling.recall(message.newest_good)
        if message.must_restart:
            await self._sampling.settle()
            raise RoleFailed(f"this engine has to be started again: {message.reason}")

    def heartbeat(self) -> Heartbeat:
        """Heartbeat with the number of running samples and the capacity for more."""
        figures = self._engine.statistics()
        return Heartbeat(
            state="draining" if self._is_draining else "running",
            waits_for="" if self._sampling else "leases",
            policy_version=self._engine.policy_version,
            capacity_samples=0 if self._is_draining else self._capacity(),
            metrics={
                "running": float(figures.num_running),
                "waiting": float(figures.num_waiting),
                "tokens": float(figures.tokens_generated),
                "busy_s": figures.busy_s,
                "decoding_s": figures.decoding_s,
                "kv_usage": figures.kv_usage,
                "preemptions": float(figures.num_preemptions),
                "reward_retries": float(self._judges.num_retries),
                "tokens_per_s": self._sampling.tokens_per_s,
                "tokens_unreported": 0.0 if self._is_draining else float(self._sampling.progress.num_unreported),
                **self._sampling.agents.counts.as_metrics(),
                **self._sampling.teachers.as_metrics(),
            },
            incarnation=self._context.incarnation,
        )

    def _capacity(self) -> int:
        """Number of samples to hold: one group more than fit, so that finished sequences are replaced at once.

        Those that wait for a verdict or a teacher do not count: sampling goes on meanwhile, as far as slots are free.
        0 while the engine has no complete weights.
        """
        fits, config = self._engine.capacity_samples, self._context.config
        if all(dataset.environment == AGENT for dataset in config.data):
            fits = min(fits, config.agent.max_sessions)  # a rollout that waits for its agent makes no progress
        return fits + config.largest_group + self._sampling.num_sampled if fits else 0

    async def leave(self, control: ClientChannel) -> None:
        """Hand back unfinished rollouts: the run continues without this generator, or a checkpoint keeps them."""
        self._is_draining = True
        await control.send(self.heartbeat())  # states no credit: further leases would be lost
        late = asyncio.create_task(self._return_leases())
        await self._sampling.hand_back()
        await asyncio.sleep(LATE_LEASES_S)
        late.cancel()
        log.info("%d rollouts handed back", self._sampling.num_handed_back)

    async def _return_leases(self) -> None:
        """Hand back leases that were granted before the controller knew that this process leaves, endlessly."""
        with suppress(ChannelError):  # the controller is gone: the leases are its successor's
            while True:
                message = await self._leases.receive()
                if isinstance(message, Delivered):
                    self._sampling.outbox.acknowledged(message)
                elif isinstance(message, Lease):
                    members, timeline = message.sample_indices, self._sampling.timeline
                    prefixes = message.prefixes or (None,) * len(members)
                    await self._leases.send(LeaseReturn(message.group_id, members, prefixes, "leaving", timeline))
                    self._sampling.num_handed_back += len(members)
