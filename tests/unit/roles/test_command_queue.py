"""A generator that was busy while groups came and went joins the newest one next."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rlhpc.protocol.contracts import ClientChannel, ServerChannel
from rlhpc.protocol.messages import CONTROL, Heartbeat, JoinGroup, ReceiveWeights, StopRole, WeightsLive
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.roles.generator.generator import CommandQueue
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S


@pytest.fixture
async def channels() -> AsyncIterator[tuple[ServerChannel, ClientChannel]]:
    server = MemoryServer(CONTROL)
    client = server.connect("generator-0")
    await client.send(Heartbeat("running", "", -1))
    await server.receive(PATIENCE_S)
    yield server, client
    await client.close()
    await server.close()


def join(epoch: int) -> JoinGroup:
    return JoinGroup(WeightGroup(epoch, "gloo", "", ("generator-0",), (1,)), 0)


def receive(epoch: int, version: int = 0) -> ReceiveWeights:
    return ReceiveWeights(WeightManifest(version, epoch, (), ()))


async def test_groups_that_were_replaced_meanwhile_are_passed_over_and_said_to_be(
    channels: tuple[ServerChannel, ClientChannel],
) -> None:
    """It tried each of them for its whole time-out, three epochs late, until the run ended for want of a broadcast."""
    server, client = channels
    commands = CommandQueue(client)
    await server.send("generator-0", join(1))
    assert await commands.next() == join(1)
    for command in (receive(1), join(2), receive(2), join(3), receive(3), StopRole("")):
        await server.send("generator-0", command)
    assert [await commands.next() for _ in range(4)] == [receive(1), join(3), receive(3), StopRole("")]
    told = [(await server.receive(PATIENCE_S))[1] for _ in range(2)]
    assert told == [
        WeightsLive(2, -1, 0.0, 0.0, error="join: epoch 3 has replaced it"),
        WeightsLive(2, 0, 0.0, 0.0, error="its group was not joined"),
    ]


async def test_commands_that_follow_each_other_are_all_executed(channels: tuple[ServerChannel, ClientChannel]) -> None:
    server, client = channels
    commands = CommandQueue(client)
    for command in (join(1), receive(1), receive(1, 1), join(2), receive(2, 2)):
        await server.send("generator-0", command)
        assert await commands.next() == command
