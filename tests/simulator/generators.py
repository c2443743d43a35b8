"""Generators: the product's Generator, with its outbox, reporter of progress and command queue, over a scripted engine.

One serves one controller after the other, as roles/common/controller_session.py does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlhpc.protocol.contracts import ClientChannel, WeightTiming
from rlhpc.protocol.errors import ChannelError
from rlhpc.protocol.messages import CONTROL, LEASES, RewardReply, RewardRequest, StopRole
from rlhpc.protocol.types import Prompt, ScoredRollout, WeightGroup, WeightManifest
from rlhpc.roles.generator.generator import Generator
from rlhpc.roles.generator.sampling import Link, Outbox, Sampling
from rlhpc.roles.lifecycle import RoleContext, beat, hello, run_until
from rlhpc.transport.sessions import another_of
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.simulator.network import SimulatedClient
from tests.simulator.trainer import LOOK_S, Simulation, connected


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

    async def call(self, request: RewardRequest, timeout_s: float, tried: set[int] | None = None) -> RewardReply:
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

    async def deliver(self, channel: ClientChannel, prompt: Prompt, scored: ScoredRollout, timeline: int) -> None:
        self._world.delivered(prompt, scored)
        await super().deliver(channel, prompt, scored, timeline)
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
    """A process with an engine, what it samples and an outbox, which outlive sessions."""

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
        async with asyncio.TaskGroup() as tasks:
            sampling = Sampling(self._context.config, self._engine, tasks)
            sampling.outbox = self.outbox
            await self._serve_controllers(sampling)
            await sampling.give_up()

    async def _serve_controllers(self, sampling: Sampling) -> None:
        context = self._context
        while True:
            session = Session(self.stop)
            try:
                await self._serve(session, context, sampling)
            except BaseExceptionGroup as group:
                if group.split(ChannelError)[1] is not None:
                    raise
                self._gone = ""
            if session.is_last or self.stop.is_set():
                return
            context = replace(context, incarnation=another_of(context.incarnation))

    async def _serve(self, session: Session, context: RoleContext, sampling: Sampling) -> None:
        world = self._world
        while world.controller_incarnation in ("", self._gone):
            if self.stop.is_set():
                return
            await asyncio.sleep(LOOK_S)
        self._gone = controller = world.controller_incarnation
        leases = await connected(world, LEASES.name, context)
        control = await connected(world, CONTROL.name, context)
        await control.send(hello(context, self._engine.weight_devices))
        await sampling.attach(Link(leases, self._judges, lambda _: session.over.set()))
        generator = Generator(context, self._engine, sampling, leases, self._judges)

        async def watch() -> None:
            while world.controller_incarnation == controller:  # noqa: ASYNC110  as the product looks at files
                await asyncio.sleep(LOOK_S)
            session.over.set()

        async def heed() -> None:
            await session.stop.wait()
            session.is_last = True
            session.over.set()

        self.channels = [leases, control]
        try:
            await run_until(
                session.over,
                watch(),
                heed(),
                generator.take_leases(),
                generator.obey(control, session),  # type: ignore[arg-type]
                beat(control, context.config.transport.heartbeat_s, generator.heartbeat),
                generator.report_progress(),
                self.outbox.repeat(leases),
            )
            if session.stop.is_set():
                await generator.leave(control)
        finally:
            sampling.detach()
            self.channels = []
            for channel in (leases, control):
                await channel.close()
