"""A generator: samples the prompts it holds leases for, has rollouts scored, delivers them, and receives new weights
meanwhile.

Input: Lease.  Output: ScoredRollout.  It keeps what it has delivered until the controller has it on disk (outbox.py);
whatever else it loses is granted again to another.  It states how many samples it is willing to hold; the controller
never grants it more.

Its engine takes minutes to start, so a generator keeps its engine when the controller is replaced
(controller_session.py).  Its weights do not count as a version of the next controller, which grants it no lease before
it has received new ones.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

from rlhpc.contracts import ClientChannel, GenerationEngine
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ChannelTimeout, GroupFailed, RoleFailed, TornWeights
from rlhpc.generation.factory import engine_seed, start_engine
from rlhpc.generation.finished_request import prefix_of, prefix_up_to
from rlhpc.messages import (
    CancelGroup,
    Delivered,
    Heartbeat,
    JoinGroup,
    LeaseReturn,
    Quarantine,
    ReceiveWeights,
    Reregister,
    RewardRequest,
    ShowWhole,
    StopRole,
    TakeCanary,
    WeightsLive,
)
from rlhpc.metrics.meters import Rate
from rlhpc.roles.common.controller_session import ControllerSession, follow_services, serve_controllers
from rlhpc.roles.common.heartbeat import beat, hello
from rlhpc.roles.common.lifecycle import RoleContext, stop_event, unless_stopped
from rlhpc.roles.generator.canary_taker import CanaryTaker
from rlhpc.roles.generator.command_queue import CommandQueue
from rlhpc.roles.generator.lease_progress import ProgressReporter
from rlhpc.roles.generator.outbox import Outbox
from rlhpc.topology import CONTROL, LEASES, REWARDS
from rlhpc.transport.open import FoundClient
from rlhpc.transport.rpc import RpcClient
from rlhpc.types import FinishReason, Lease, Prefix, Rollout, RolloutRequest, ScoredRollout, Verdict

log = logging.getLogger("rlhpc.generator")
SILENT_S = 5.0  # beyond the time of one verdict, for a replica that answers nobody here while another one does
JUDGE_TIMEOUT_S = 60.0  # of one replica, its queue included: a long queue does not justify a second request
DRAIN_S = 5.0  # for verdicts in flight when asked to stop


def run(context: RoleContext) -> None:
    """Generate until asked to stop."""
    asyncio.run(_generate(context))


async def _generate(context: RoleContext) -> None:
    stop = stop_event()
    config = context.config
    starting = asyncio.create_task(start_engine(config, seed=engine_seed(config.run.seed, context.replica)))
    engine = await unless_stopped(stop, starting)
    if engine is None:
        return
    try:
        await serve_controllers(context, stop, partial(_serve, engine, Outbox()))
    finally:
        await engine.close()


async def _serve(engine: GenerationEngine, outbox: Outbox, session: ControllerSession) -> None:
    """Sample for one controller."""
    context = session.context
    await engine.leave_weights()  # the group of the previous session, whose trainer is gone
    async with AsyncExitStack() as stack:
        connecting = asyncio.create_task(_connect(session, stack))
        channels = await unless_stopped(session.stop, connecting)
        if channels is None:
            return
        leases, services, control = channels
        rewards = context.config.rewards
        judges = await stack.enter_async_context(
            RpcClient(services, max_attempts=rewards.max_attempts, silence_s=rewards.timeout_s + SILENT_S)
        )
        await control.send(hello(context, engine.weight_devices))
        generator = Generator(context, engine, leases, judges, outbox)
        loops = [
            generator.obey(control, session),
            beat(control, context.config.transport.heartbeat_s, generator.heartbeat),
            generator.report_progress(),
            generator.canary.run(control),
            outbox.repeat(leases),
            follow_services(session, REWARDS, services, judges.replace),
        ]
        async with asyncio.TaskGroup() as sampling:
            await session.until_over(generator.take_leases(sampling), *loops)
            await generator.leave(control, hands_back=session.stop.is_set())


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
    """The work of a generator, between an engine and its channels."""

    def __init__(
        self,
        context: RoleContext,
        engine: GenerationEngine,
        leases: ClientChannel,
        judges: RpcClient,
        outbox: Outbox,
    ) -> None:
        self._context, self._engine, self._leases, self._outbox = context, engine, leases, outbox
        self._tokenizer = PromptTokenizer(context.config.model.path)
        self._judges = judges
        self._sampling: dict[str, asyncio.Task[None]] = {}  # request id → task
        self._requests: dict[str, RolloutRequest] = {}  # the same
        self._now = asyncio.get_running_loop().time
        self._progress = ProgressReporter(engine, context.config.admission, context.config.buffer, self._now)
        self._rate = Rate(10.0, self._now())
        self._is_draining = False
        self.canary = CanaryTaker(engine)
        self._recalled: dict[str, int] = {}  # request id → version up to which its tokens are kept

    # ------------------------------------------------------------------------------------------------- leases in

    async def take_leases(self, sampling: asyncio.TaskGroup) -> None:
        """Start a `sampling` task for every sample that is granted, endlessly."""
        while True:
            message = await self._leases.receive()
            if isinstance(message, CancelGroup):
                await self._cancel(message.group_id)
            elif isinstance(message, Delivered):
                self._outbox.acknowledged(message)
            elif isinstance(message, ShowWhole):
                self._progress.show_whole(message.members)
            else:
                self._start(message, sampling)

    def _start(self, lease: Lease, sampling: asyncio.TaskGroup) -> None:
        prefixes: tuple[Prefix | None, ...] = lease.prefixes or (None,) * len(lease.sample_indices)
        if self._context.config.run.deterministic:  # the rest of a prefix would be drawn otherwise than the whole
            prefixes = (None,) * len(lease.sample_indices)
        for sample_index, prefix in zip(lease.sample_indices, prefixes, strict=True):
            request = RolloutRequest(lease.group_id, sample_index, lease.prompt, lease.sampling, prefix)
            if request.request_id in self._sampling:
                continue  # the lease expired and was granted to this generator again: it is already sampling that
            task = sampling.create_task(self._sample(request))
            self._sampling[request.request_id], self._requests[request.request_id] = task, request
            task.add_done_callback(partial(self._forget, request.request_id))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        self._sampling.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._recalled.pop(request_id, None)

    async def report_progress(self) -> None:
        """Report what is sampled of running rollouts, endlessly."""
        while True:
            await asyncio.sleep(self._progress.look_s)
            report = self._progress.report(self._requests.values())
            if report is not None:
                await self._leases.send(report)

    async def _cancel(self, group_id: int) -> None:
        for request_id in [r for r in self._sampling if r.startswith(f"{group_id}:")]:
            await self._engine.abort(request_id)

    async def _sample(self, request: RolloutRequest) -> None:
        rollout = await self._engine.generate(request)
        self._rate.add(self._now(), len(rollout.token_ids))
        if rollout.finish_reason is FinishReason.ABORT:
            if self._is_draining or request.request_id in self._recalled:
                await self._return(request, rollout)
            return
        await self._outbox.deliver(self._leases, await self._judge(rollout))

    async def _return(self, request: RolloutRequest, rollout: Rollout) -> None:
        newest = self._recalled.get(request.request_id)
        tokens = prefix_of(rollout) if newest is None else prefix_up_to(rollout, newest)
        prefix = tokens if len(tokens.token_ids) else None
        reason = "leaving" if newest is None else "quarantined"
        await self._leases.send(LeaseReturn(request.group_id, (request.sample_index,), (prefix,), reason))

    async def _recall(self, message: Quarantine) -> None:
        """Hand back what is being sampled.  Raises RoleFailed if this process has to be started again."""
        log.error("quarantined: %s", message.reason)
        for request_id in list(self._sampling):
            self._recalled[request_id] = message.newest_good
            await self._engine.abort(request_id)
        if message.must_restart:
            if self._sampling:
                await asyncio.wait(self._sampling.values(), timeout=DRAIN_S)
            raise RoleFailed(f"this engine has to be started again: {message.reason}")

    # ---------------------------------------------------------------------------------------------- rewards between

    async def _judge(self, rollout: Rollout) -> ScoredRollout:
        """Ask for a verdict, again if the verifier failed; a verifier error is never a reward of zero."""
        rewards = self._context.config.rewards
        request = RewardRequest(
            request_id=0,  # the RPC client numbers calls
            task=rollout.prompt.task,
            completion=self._completion_text(rollout),
            reference=rollout.prompt.reference,
        )
        timeout_s = max(JUDGE_TIMEOUT_S, 10 * rewards.timeout_s)
        try:
            reply = await self._judges.call(request, timeout_s)
            for _ in range(1, rewards.max_attempts):
                if reply.verdict != Verdict.VERIFIER_ERROR.value:
                    break
                reply = await self._judges.call(request, timeout_s)
        except ChannelTimeout as error:  # every replica was asked
            return ScoredRollout(rollout, 0.0, Verdict.VERIFIER_ERROR, detail=str(error))
        return ScoredRollout(rollout, reply.reward, Verdict(reply.verdict), reply.reward_parts, reply.detail)

    def _completion_text(self, rollout: Rollout) -> str:
        """The completion without the token that ended it."""
        ends = rollout.finish_reason is FinishReason.STOP
        return self._tokenizer.decode(rollout.token_ids[:-1] if ends else rollout.token_ids)

    # ------------------------------------------------------------------------------------------- weights and control

    async def obey(self, control: ClientChannel, session: ControllerSession) -> None:
        """Execute the controller's commands, one after the other."""
        commands = CommandQueue(control)
        while True:
            message = await commands.next()
            if isinstance(message, JoinGroup):
                await self._join(control, message)
            elif isinstance(message, ReceiveWeights):
                await control.send(await self._receive(message))
            elif isinstance(message, TakeCanary):
                self.canary.take(message)
            elif isinstance(message, Quarantine):
                await self._recall(message)
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

    def heartbeat(self) -> Heartbeat:
        """How much is being sampled, and how much more could be."""
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
                "kv_usage": figures.kv_usage,
                "preemptions": float(figures.num_preemptions),
                "reward_retries": float(self._judges.num_retries),
                "tokens_per_s": self._rate.per_second(self._now()),
                "tokens_unreported": 0.0 if self._is_draining else float(self._progress.num_unreported),
            },
        )

    def _capacity(self) -> int:
        """One group more than fits, so that a finished sequence is replaced within the same decoding step.

        0 while the engine has no complete weights.
        """
        fits = self._engine.capacity_samples
        return fits + self._context.config.admission.group_size if fits else 0

    async def leave(self, control: ClientChannel, *, hands_back: bool) -> None:
        """Stop sampling.

        While the run continues without this generator, each task hands back its unfinished rollout as a prefix for
        another generator; a controller that is gone, or stops, gets none.
        """
        self._is_draining = True
        if hands_back:
            await control.send(self.heartbeat())  # no credit from now on: what would be granted would be lost
            for request_id in list(self._sampling):
                await self._engine.abort(request_id)
            if self._sampling:
                await asyncio.wait(self._sampling.values(), timeout=DRAIN_S)
        for task in self._sampling.values():
            task.cancel()
