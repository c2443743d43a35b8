"""A network that resets, falls silent and dribbles between a generator and the controller: nothing is lost for good."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ChannelError, ChannelFull
from rlhpc.protocol.messages import CONTROL, LEASES, ChannelSpec
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, ScoredRollout, Verdict
from rlhpc.roles.generator import sampling as outbox_module
from rlhpc.roles.generator.sampling import Outbox
from rlhpc.transport.channel import ZmqClient, ZmqServer
from rlhpc.transport.security import mint_run_keys
from tests.cable import Cable
from tests.patience import PATIENCE_S

DEAD_AFTER_S = 0.6
CONFIG = TransportConfig(kind="tcp", dead_after_s=DEAD_AFTER_S)
NUM_ROLLOUTS = 300
NUM_BEATS = 400
QUEUED_BYTES = 64 << 10  # of each message that shall fill queues


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    mint_run_keys(tmp_path / "secrets", ["controller-0", "generator-0", "generator-1"])
    return tmp_path / "secrets"


@contextlib.asynccontextmanager
async def serving(spec: ChannelSpec, secrets: Path) -> AsyncIterator[ZmqServer]:
    server = ZmqServer(
        spec, name="controller-0", config=CONFIG, secrets=secrets, clock=time.monotonic, interface="127.0.0.1"
    )
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(spec: ChannelSpec, address: str, secrets: Path, name: str) -> AsyncIterator[ZmqClient]:
    client = ZmqClient(
        spec,
        address,
        name=name,
        incarnation="one",
        server_name="controller-0",
        config=CONFIG,
        secrets=secrets,
    )
    try:
        assert await client.admission(PATIENCE_S) == ""
        yield client
    finally:
        await client.close()


PROMPT = Prompt(0, "none", np.arange(3, dtype=np.int32), "")


def scored(number: int) -> ScoredRollout:
    ids = np.arange(200, dtype=np.int32)
    rollout = Rollout(number, 0, number, ids, -ids.astype(np.float32), ids, ids > 3, FinishReason.STOP)
    return ScoredRollout(rollout, 1.0, Verdict.CORRECT)


def a_reset(cable: Cable) -> float:
    cable.cut()
    return 0.0


def a_short_silence(cable: Cable) -> float:
    cable.fall_silent()
    return DEAD_AFTER_S / 3


def a_long_silence(cable: Cable) -> float:
    cable.fall_silent()
    return 3 * DEAD_AFTER_S


def dribbling(cable: Cable) -> float:
    cable.dribble(700, 0.001)
    return DEAD_AFTER_S


async def until_connected(cable: Cable, times: int) -> None:
    """Wait for so many connections in all: there is something to reset."""
    async with asyncio.timeout(PATIENCE_S):
        while cable.num_connections < times:  # noqa: ASYNC110 - a thread counts
            await asyncio.sleep(0.01)


class Controller:
    """Receives deliveries, and acknowledges those that it has up to the first gap, as the journal does."""

    def __init__(self, server: ZmqServer) -> None:
        self._server, self._num_on_disk = server, 0
        self.heard = Counter[int]()

    async def serve(self) -> None:
        while True:
            peer, delivery = await self._server.receive()
            self.heard[delivery.number] += 1
            assert delivery.scored.rollout.group_id == delivery.number
            while self._num_on_disk + 1 in self.heard:
                self._num_on_disk += 1
            with contextlib.suppress(ChannelError):  # it is not connected just now: the next one is acknowledged
                await self._server.send(peer, m.Delivered(self._num_on_disk, delivery.outbox), 0.1)


@pytest.mark.parametrize("forget", [False, True], ids=["held", "forgotten"])
@pytest.mark.parametrize("fault", [a_reset, a_short_silence, a_long_silence, dribbling])
async def test_every_rollout_arrives_and_is_acknowledged_whatever_the_network_does(
    secrets: Path, fault: Callable[[Cable], float], forget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "SILENCE_S", 0.2)
    outbox, loop = Outbox(), asyncio.get_running_loop()
    async with serving(LEASES, secrets) as server:
        with Cable(server.address) as cable:
            async with connected(LEASES, cable.address, secrets, "generator-0") as client:

                async def listen() -> None:
                    while True:
                        outbox.acknowledged(await client.receive())

                def heal() -> None:
                    cable.work_again(forget=forget and fault is not dribbling)

                controller = Controller(server)
                tasks = [asyncio.create_task(each) for each in (controller.serve(), listen(), outbox.repeat(client))]
                for number in range(1, NUM_ROLLOUTS + 1):
                    await outbox.deliver(client, PROMPT, scored(number), timeline=0)
                    await asyncio.sleep(0.001)
                    if number % (NUM_ROLLOUTS // 3) == NUM_ROLLOUTS // 6:
                        if fault is a_reset:
                            await until_connected(cable, 1 + number // (NUM_ROLLOUTS // 3))
                        loop.call_later(fault(cable), heal)
                async with asyncio.timeout(PATIENCE_S):
                    while outbox.num_kept:
                        assert not any(task.done() for task in tasks), tasks
                        await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(controller.heard) == list(range(1, NUM_ROLLOUTS + 1))
    assert server.statistics.messages_rejected == 0
    if fault is a_reset:
        assert cable.num_connections > 3


async def test_a_silence_longer_than_dead_after_loses_nothing_that_the_channel_took(secrets: Path) -> None:
    """TCP sends it again.  What does not fit any more is refused without effect, and goes when there is room."""
    async with serving(CONTROL, secrets) as server:
        with Cable(server.address) as cable:
            async with connected(CONTROL, cable.address, secrets, "generator-0") as client:
                cable.fall_silent()
                num_taken, began, was_full = 0, time.monotonic(), False
                while not was_full:
                    try:
                        await client.send(m.Heartbeat("x" * QUEUED_BYTES, "", num_taken), DEAD_AFTER_S)
                        num_taken += 1
                    except ChannelFull:
                        was_full = True
                assert 0.9 * CONTROL.capacity_messages < num_taken < 2 * CONTROL.capacity_messages
                await asyncio.sleep(max(0.0, 2 * DEAD_AFTER_S - (time.monotonic() - began)))
                cable.work_again()
                last = asyncio.create_task(client.send(m.Heartbeat("last", "", num_taken), PATIENCE_S))
                heard = [(await server.receive(PATIENCE_S))[1].policy_version for _ in range(num_taken + 1)]
                await last
                assert heard == list(range(num_taken + 1))
                assert server.statistics.messages_lost == 0
                assert cable.num_connections == 1


async def test_who_is_behind_a_bad_cable_disturbs_nobody_else(secrets: Path) -> None:
    """One generator's bytes come one at a time, or not at all; the other one is answered meanwhile."""
    async with serving(CONTROL, secrets) as server:
        with Cable(server.address) as cable:
            async with (
                connected(CONTROL, cable.address, secrets, "generator-0") as slow,
                connected(CONTROL, server.address, secrets, "generator-1") as quick,
            ):
                heard: list[int] = []

                async def converse() -> None:
                    for number in range(NUM_BEATS):
                        await quick.send(m.Heartbeat("running", "", number))
                        while (got := await server.receive(PATIENCE_S))[0] == "generator-0":
                            heard.append(got[1].policy_version)
                        assert got == ("generator-1", m.Heartbeat("running", "", number))

                cable.dribble(1, 0.001)
                for number in range(20):
                    await slow.send(m.Heartbeat("running", "", number))
                await converse()
                cable.fall_silent()
                for number in range(20, 40):
                    await slow.send(m.Heartbeat("running", "", number))
                await converse()
                assert len(heard) <= 20
                cable.dribble(1 << 16, 0.0)
                cable.work_again()
                while len(heard) < 40:
                    heard.append((await server.receive(PATIENCE_S))[1].policy_version)
                assert heard == list(range(40))
