"""What a generator does with commands: groups to join, canaries, quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.protocol.contracts import ClientChannel, ServerChannel
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import (
    CONTROL,
    LEASES,
    REWARDS,
    CanaryTaken,
    Heartbeat,
    JoinGroup,
    LeaseReturn,
    Quarantine,
    ReceiveWeights,
    StopRole,
    TakeCanary,
    WeightsLive,
)
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.roles.generator.generator import CommandQueue, Generator
from rlhpc.roles.generator.sampling import Link, Sampling
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_tokenizer_files
from tests.unit.roles.small_ring import small_config

# ----------------------------------------------------------------------------------------------------- generator canary
#
# What a generator does with a canary, and when it hears that its weights are wrong.


NAME = "generator-0"


class Here:
    """A generator with an engine that never ends by itself, and the controller's ends of its channels."""

    def __init__(self, root: Path, judges: RpcClient, tasks: asyncio.TaskGroup) -> None:
        config = small_config()
        model = config.model.model_copy(update={"path": make_tokenizer_files(root / "model")})
        config = config.model_copy(update={"model": model})
        context = RoleContext("generator", 0, 1, 0, None, "first", RunLayout(root), config, config_hash(config))
        self.control, self.leases = MemoryServer(CONTROL), MemoryServer(LEASES)
        self.engine = ScriptedEngine(Script(stop_probability=0.0, token_s=0.001))
        self.link = Link(self.leases.connect(NAME), judges, lambda error: pytest.fail(str(error)))
        self.sampling = Sampling(config, self.engine, tasks)
        generator = Generator(context, self.engine, self.sampling, self.link.leases, judges)
        client, session = self.control.connect(NAME), cast("Any", SimpleNamespace(asked_to_stop=lambda message: None))
        self.obeying = asyncio.ensure_future(generator.obey(client, session))
        self.loops = [tasks.create_task(loop) for loop in (generator.take_leases(), generator.canary.run(client))]

    async def weights(self, version: int) -> None:
        await self.sampling.enter(0)
        await self.engine.receive_weights(make_manifest(version, 1, (), 1))

    async def grant(self, group_id: int) -> None:
        await self.leases.send(NAME, build.lease(group_id, max_tokens=100_000))

    async def until_sampled(self, group_id: int, num_tokens: int) -> None:
        while min(self.engine.num_sampled(f"{group_id}:{index}") for index in (0, 1)) < num_tokens:  # noqa: ASYNC110 - tokens announce nothing
            await asyncio.sleep(0.001)

    async def returns(self, count: int) -> list[LeaseReturn]:
        found: list[LeaseReturn] = []
        while len(found) < count:
            _, message = await self.leases.receive(PATIENCE_S)
            assert isinstance(message, LeaseReturn)
            found.append(message)
        return found


@asynccontextmanager
async def generating(root: Path) -> AsyncIterator[Here]:
    judges = RpcClient([MemoryServer(REWARDS).connect(NAME)], max_attempts=1)
    async with judges, asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        here = Here(root, judges, tasks)
        await here.sampling.attach(here.link)
        await here.weights(0)
        try:
            yield here
        finally:
            for task in (here.obeying, *here.loops):
                task.cancel()
            await here.sampling.give_up()


async def test_a_canary_is_scored_while_it_samples_and_says_by_which_version(tmp_path: Path) -> None:
    async with generating(tmp_path) as here:
        await here.grant(0)
        await here.until_sampled(0, 3)
        row = np.arange(4, 14, dtype=np.int32)
        await here.control.send(NAME, TakeCanary(7, row))
        _, answer = await here.control.receive(PATIENCE_S)
        assert isinstance(answer, CanaryTaken)
        assert (answer.number, answer.policy_version) == (7, 0)
        np.testing.assert_array_equal(answer.logprobs[1:], here.engine.logprob_table(0)[row[1:]])


@pytest.mark.parametrize("newest_good", [-1, 0])
async def test_in_quarantine_it_hands_back_what_it_samples_without_what_wrong_weights_sampled(
    newest_good: int, tmp_path: Path
) -> None:
    async with generating(tmp_path) as here:
        await here.grant(3)
        await here.until_sampled(3, 5)
        await here.weights(1)
        await here.until_sampled(3, 40)
        await here.control.send(NAME, Quarantine(newest_good, False, "a test"))
        returned = await here.returns(2)
        assert sorted(message.sample_indices for message in returned) == [(0,), (1,)]
        for message in returned:
            (prefix,) = message.prefixes
            assert message.reason == "quarantined"
            if newest_good < 0:
                assert prefix is None
            else:
                assert prefix is not None
                assert 5 <= len(prefix.token_ids) < 40
                assert set(prefix.versions) == {0}
        await here.grant(4)  # it passed a later canary
        await here.until_sampled(4, 5)
        assert not here.obeying.done()


async def test_one_that_has_to_be_started_again_fails_after_it_has_handed_back_its_rollouts(tmp_path: Path) -> None:
    async with generating(tmp_path) as here:
        await here.grant(0)
        await here.until_sampled(0, 3)
        await here.control.send(NAME, Quarantine(0, True, "three failures"))
        with pytest.raises(RoleFailed, match="started again: three failures"):
            await here.obeying
        assert len(await here.returns(2)) == 2


# -------------------------------------------------------------------------------------------------------- command queue
#
# A generator that was busy while groups came and went joins the newest one next.


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
