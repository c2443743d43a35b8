"""What the controller talks to: generators, a trainer, and broadcasts of weights between them.

A generator is the product's Generator with its outbox, reporter of progress and command queue, over the scripted engine;
it serves one controller after the other as roles/common/controller_session.py does.  The trainer is a script: what it
was given to train is its weights, so that a checkpoint of it says what its timeline consists of.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rlhpc.algorithms.step_limits import refusal
from rlhpc.contracts import ClientChannel, WeightTiming
from rlhpc.errors import ChannelError, TornWeights
from rlhpc.generation.scripted_engine import Script, ScriptedEngine
from rlhpc.messages import (
    FormGroup,
    GroupOpened,
    Heartbeat,
    PublishReport,
    PublishWeights,
    RewardReply,
    RewardRequest,
    SaveCheckpoint,
    SaveReport,
    SnapshotTaken,
    StepReport,
    StopRole,
    TrainerReady,
)
from rlhpc.roles.common.heartbeat import beat, hello
from rlhpc.roles.common.lifecycle import RoleContext, run_until
from rlhpc.roles.generator.outbox import Outbox
from rlhpc.roles.generator.role import Generator
from rlhpc.topology import BATCHES, CONTROL, LEASES
from rlhpc.transport.incarnation import another_of
from rlhpc.types import PackedBatch, ScoredRollout, TensorSpec, WeightGroup, WeightManifest
from tests.simulator.network import SimulatedClient

MANIFEST = WeightManifest(0, 0, (TensorSpec("w", "float32", (1,)),), (1,))
BROADCAST_S = 5.0  # how long the trainer waits for receivers, and they for it
LOOK_S = 1.0  # between looks for another controller
EOS = 2

Line = tuple[str, ...]


class Simulation(Protocol):
    """What the roles see of the world."""

    rng: random.Random
    broadcasts: Broadcasts
    controller_incarnation: str  # of the one that is being served; "": there is none

    def connect(self, channel: str, context: RoleContext) -> SimulatedClient | None:
        """To the present controller; None: it is not there."""

    def tell(self, *words: object) -> None:
        """A line of the trace."""

    def delivered(self, scored: ScoredRollout) -> None:
        """A generator has made a rollout and begins to deliver it."""

    def trained(self, batch: PackedBatch, weights: Weights) -> None:
        """The trainer is about to do a step."""


# ---------------------------------------------------------------------------------------------------------- broadcasts


class Broadcasts:
    """Weights on their way from the trainer to the members of an epoch: all get them, or some, or none."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: dict[tuple[int, int], dict[str, asyncio.Future[None]]] = {}  # (epoch, version) → member
        self._joined: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.newest = -1  # version that has reached a generator

    def join(self, group: WeightGroup, member: str) -> None:
        self._joined[member] = group.epoch

    async def receive(self, member: str, manifest: WeightManifest) -> None:
        """Raises TornWeights."""
        if self._joined.get(member) != manifest.epoch:
            raise TornWeights(f"{member} has not joined epoch {manifest.epoch}")
        arrival = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((manifest.epoch, manifest.policy_version), {})[member] = arrival
        self._changed.set()
        try:
            async with asyncio.timeout(BROADCAST_S):
                await arrival
        except TimeoutError:
            raise TornWeights(f"nothing came within {BROADCAST_S:g} s") from None

    async def publish(self, group: WeightGroup, version: int) -> str:
        """Return what went wrong; "": nothing."""
        loop = asyncio.get_running_loop()
        waiting, until_s = self._waiting.setdefault((group.epoch, version), {}), loop.time() + BROADCAST_S
        while set(waiting) != set(group.members):
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                missing = sorted(set(group.members) - set(waiting))
                self._end(waiting, {name for name in sorted(waiting) if self._rng.random() < 0.3}, version)
                return f"{', '.join(missing)} did not come"
        await asyncio.sleep(self._rng.random() * 0.3)
        self._end(waiting, set(group.members), version)
        return ""

    def _end(self, waiting: dict[str, asyncio.Future[None]], who: set[str], version: int) -> None:
        """Some may have got everything although others have not."""
        if who:
            self.newest = max(self.newest, version)
        for name, arrival in waiting.items():
            if not arrival.done():
                if name in who:
                    arrival.set_result(None)
                else:
                    arrival.set_exception(TornWeights("the broadcast broke"))


# ------------------------------------------------------------------------------------------------------------- trainer


@dataclass(frozen=True)
class Weights:
    """What has been trained, step by step: each step's prompts, with the number of samples of each."""

    step: int = 0
    version: int = 0
    lineage: tuple[dict[str, int], ...] = ()

    def after(self, batch: PackedBatch, applied: bool) -> Weights:
        return Weights(self.step + 1, self.version + applied, (*self.lineage, prompts_of(batch)))


def prompts_of(batch: PackedBatch) -> dict[str, int]:
    """How many samples of each prompt are in a batch; a prompt is named by its tokens."""
    found: dict[str, int] = {}
    for rank in batch.ranks:
        for row in rank:
            for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
                mask = row.loss_mask[start:end]
                if mask.any():
                    name = " ".join(map(str, row.token_ids[start : start + int(mask.argmax())]))
                    found[name] = found.get(name, 0) + 1
    return found


class ScriptedTrainer:
    """Serves one controller, until it is told to stop."""

    def __init__(self, world: Simulation, context: RoleContext, step_s: float) -> None:
        self._world, self._context, self._step_s = world, context, step_s
        self.weights = Weights()
        if context.resume_step is not None:
            path = context.layout.checkpoint(context.resume_step) / "trainer" / "weights.json"
            saved = json.loads(path.read_bytes())
            self.weights = Weights(saved["step"], saved["version"], tuple(saved["lineage"]))
        self._group: WeightGroup | None = None

    async def run(self) -> None:
        batches = await _connected(self._world, BATCHES.name, self._context)
        control = await _connected(self._world, CONTROL.name, self._context)
        over = asyncio.Event()
        await control.send(hello(self._context))
        await batches.send(TrainerReady(self.weights.version, MANIFEST, ""))

        def heartbeat() -> Heartbeat:
            return Heartbeat("running", "", self.weights.version)

        beats = beat(control, self._context.config.transport.heartbeat_s, heartbeat)
        await run_until(over, self._obey(batches, control, over), beats)

    async def _obey(self, batches: ClientChannel, control: ClientChannel, over: asyncio.Event) -> None:
        rng = self._world.rng
        while True:
            match await batches.receive():
                case PackedBatch() as batch:
                    await asyncio.sleep(rng.random() * self._step_s)
                    await batches.send(self._train(batch))
                case FormGroup(group):
                    self._group = replace(group, address="memory")
                    await batches.send(GroupOpened(self._group))
                case PublishWeights(epoch, version):
                    assert self._group is not None
                    assert (epoch, version) == (self._group.epoch, self.weights.version)
                    error = await self._world.broadcasts.publish(self._group, version)
                    await batches.send(PublishReport(epoch, version, 0.1, error))
                case SaveCheckpoint(step, directory):
                    self._saving = asyncio.create_task(self._save(self.weights, step, Path(directory), control))
                    await batches.send(SnapshotTaken(step, 0.1))
                case StopRole():
                    over.set()
                    return

    def _train(self, batch: PackedBatch) -> StepReport:
        self._world.trained(batch, self.weights)
        metrics = {"loss": batch.step / 10, "grad_norm": 1.0}
        refused = refusal(batch.limits, metrics)
        applied = batch.step % 5 != 3 and not refused  # by the step alone: a repeated step goes as it went
        self.weights = self.weights.after(batch, applied)
        return StepReport(batch.step, self.weights.version, applied, metrics, refused)

    async def _save(self, weights: Weights, step: int, directory: Path, control: ClientChannel) -> None:
        await asyncio.sleep(self._world.rng.random() * 2 * self._step_s)
        error = ""
        try:
            (directory / "trainer").mkdir()
            content = {"step": weights.step, "version": weights.version, "lineage": weights.lineage}
            (directory / "trainer" / "weights.json").write_text(json.dumps(content))
        except OSError as refused:
            error = str(refused)
        await asyncio.sleep(self._world.rng.random() * 2 * self._step_s)
        await control.send(SaveReport(step, 0.1, error))


# ---------------------------------------------------------------------------------------------------------- generators


class SimulatedEngine(ScriptedEngine):
    """Takes part in broadcasts."""

    def __init__(self, script: Script, world: Simulation, name: str, clock: Callable[[], float]) -> None:
        super().__init__(script, clock=clock)
        self._world, self._name = world, name

    async def join_weights(self, group: WeightGroup, member: str) -> None:
        self._world.broadcasts.join(group, member)

    async def receive_weights(self, manifest: WeightManifest) -> WeightTiming:
        await self._world.broadcasts.receive(self._name, manifest)
        await asyncio.sleep(self._world.rng.random() * 0.2)
        return await super().receive_weights(manifest)


class ScriptedJudges:
    """In the place of the RPC client of reward services."""

    num_retries = 0

    def __init__(self, world: Simulation, name: str) -> None:
        self._world, self._name, self._serial = world, name, 0

    async def call(self, request: RewardRequest, timeout_s: float) -> RewardReply:
        rng = self._world.rng
        await asyncio.sleep(rng.random() * 0.2)
        self._serial += 1
        reward = float(rng.randrange(4))
        verdict = "verifier_error" if rng.random() < 0.01 else "correct" if reward else "wrong"
        return RewardReply(request.request_id, reward, verdict, {}, f"{self._name}:{self._serial}")


class WatchedOutbox(Outbox):
    """Tells the world what is delivered; for some time its silences end as soon as something was sent."""

    def __init__(self, world: Simulation) -> None:
        super().__init__()
        self._world, self.twice_until_s = world, 0.0

    async def deliver(self, channel: ClientChannel, scored: ScoredRollout) -> None:
        self._world.delivered(scored)
        await super().deliver(channel, scored)
        if asyncio.get_running_loop().time() < self.twice_until_s:
            for number in list(self._kept):
                if number in self._kept:
                    await self._send(channel, number)


class Session:
    """The service of one controller."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.stop, self.over, self.is_last = stop, asyncio.Event(), False

    def asked_to_stop(self, message: StopRole) -> None:
        self.is_last |= message.run_is_over
        self.over.set()


class SimulatedGenerator:
    """A process with an engine and an outbox, which outlive sessions."""

    def __init__(self, world: Simulation, context: RoleContext, script: Script) -> None:
        self._world, self._context = world, context
        self._engine = SimulatedEngine(script, world, context.name, asyncio.get_running_loop().time)
        self.outbox = WatchedOutbox(world)
        self._judges: Any = ScriptedJudges(world, context.incarnation.partition("-")[0] + context.name)
        self.stop = asyncio.Event()
        self._gone = ""  # the controller that was left
        self.channels: list[SimulatedClient] = []

    async def run(self) -> None:
        """Serve one controller after another (roles/common/controller_session.py)."""
        context = self._context
        while True:
            session = Session(self.stop)
            try:
                await self._serve(session, context)
            except BaseExceptionGroup as group:
                if group.split(ChannelError)[1] is not None:
                    raise
                self._gone = ""
            if session.is_last or self.stop.is_set():
                return
            context = replace(context, incarnation=another_of(context.incarnation))

    async def _serve(self, session: Session, context: RoleContext) -> None:
        world = self._world
        while world.controller_incarnation in ("", self._gone):
            if self.stop.is_set():
                return
            await asyncio.sleep(LOOK_S)
        self._gone = controller = world.controller_incarnation
        leases = await _connected(world, LEASES.name, context)
        control = await _connected(world, CONTROL.name, context)
        await control.send(hello(context, self._engine.weight_devices))
        generator = Generator(context, self._engine, leases, self._judges, self.outbox)

        async def watch() -> None:
            while world.controller_incarnation == controller:
                await asyncio.sleep(LOOK_S)
            session.over.set()

        async def heed() -> None:
            await session.stop.wait()
            session.is_last = True
            session.over.set()

        self.channels = [leases, control]
        try:
            async with asyncio.TaskGroup() as sampling:
                await run_until(
                    session.over,
                    watch(),
                    heed(),
                    generator.take_leases(sampling),
                    generator.obey(control, session),  # type: ignore[arg-type]
                    beat(control, context.config.transport.heartbeat_s, generator.heartbeat),
                    generator.report_progress(),
                    self.outbox.repeat(leases),
                )
                await generator.leave(control, hands_back=session.stop.is_set())
        finally:
            self.channels = []
            for channel in (leases, control):
                await channel.close()


async def _connected(world: Simulation, channel: str, context: RoleContext) -> SimulatedClient:
    while (client := world.connect(channel, context)) is None:
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(world.rng.random() * 0.05)  # the handshake
    return client
