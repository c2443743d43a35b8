"""A reward service and its clients: who waits behind the requests of others, and who waits for nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.protocol.errors import ChannelTimeout, RoleFailed
from rlhpc.protocol.messages import CONTROL, REWARDS, Hello, Reregister, RewardRequest
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.lifecycle import ControllerSession, RoleContext
from rlhpc.roles.reward_service import RewardService, _hear
from rlhpc.transport.rpc import RpcClient
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S
from tests.unit.roles.small_ring import small_config

VERDICT_S, NUM_AHEAD = 0.1, 60
TIMEOUT_S = NUM_AHEAD * VERDICT_S / 2  # that no verdict takes on a busy machine
MODULE = f"""
import time

def slow(completion, reference):
    time.sleep({VERDICT_S})
    return 1.0

def zero(completion, reference):
    return 0.0

def hang(completion, reference):
    time.sleep(3600)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rewards_that_wait.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "rewards_that_wait:"


@asynccontextmanager
async def serving(server: MemoryServer, timeout_s: float) -> AsyncIterator[None]:
    async with RewardPool(1, timeout_s) as pool:
        task = asyncio.create_task(RewardService(server, pool, news_s=0.1).serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until_waiting(server: MemoryServer, num_requests: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.statistics.messages_received < num_requests:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.01)


@pytest.mark.starts
async def test_who_waits_behind_the_requests_of_others_is_not_given_up_while_these_go_on(task: str) -> None:
    """For twice as long as an attempt may take."""
    server = MemoryServer(REWARDS)
    first, second = (RpcClient([server.connect(name)], max_attempts=1) for name in ("generator-0", "generator-1"))
    async with serving(server, PATIENCE_S), first, second:
        slow = RewardRequest(0, f"{task}slow", "x", "")
        ahead = [asyncio.create_task(first.call(slow, PATIENCE_S)) for _ in range(NUM_AHEAD)]
        await until_waiting(server, NUM_AHEAD)
        assert (await second.call(slow, TIMEOUT_S)).reward == 1.0
        assert all(reply.reward == 1.0 for reply in await asyncio.gather(*ahead))


@pytest.mark.starts
async def test_a_service_that_has_stopped_is_given_up_though_it_lives(task: str) -> None:
    server = MemoryServer(REWARDS)
    first, second = (RpcClient([server.connect(name)], max_attempts=1) for name in ("generator-0", "generator-1"))
    async with serving(server, 100 * PATIENCE_S), first, second:
        ahead = asyncio.create_task(first.call(RewardRequest(0, f"{task}hang", "x", ""), 10 * PATIENCE_S))
        await until_waiting(server, 1)
        with pytest.raises(ChannelTimeout):
            await second.call(RewardRequest(0, f"{task}slow", "x", ""), 1.0)
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


async def test_a_service_says_hello_again_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    """The controller has taken it for dead, or has never heard its first one."""
    server, config = MemoryServer(CONTROL), small_config()
    context = RoleContext("reward", 0, 1, 0, None, "0.0.0-first", RunLayout(tmp_path), config, config_hash(config))
    control = server.connect("reward-0")
    hearing = asyncio.create_task(_hear(control, ControllerSession(context, asyncio.Event())))
    for _ in range(2):
        await server.send("reward-0", Reregister())
        name, message = await server.receive(PATIENCE_S)
        assert isinstance(message, Hello)
        assert (name, message.incarnation) == ("reward-0", "0.0.0-first")
    hearing.cancel()
    await asyncio.gather(hearing, return_exceptions=True)


@pytest.mark.starts
async def test_a_verdict_on_what_a_dead_generator_asked_is_none_for_its_next_life(task: str) -> None:
    """Its first question is still being judged; a reply goes to whoever has the name now."""
    server = MemoryServer(REWARDS)
    dead = RpcClient([server.connect("generator-0", "0.0.0-a")], max_attempts=1)
    async with serving(server, PATIENCE_S):
        async with dead:
            lost = asyncio.create_task(dead.call(RewardRequest(0, f"{task}slow", "x", ""), PATIENCE_S))
            await until_waiting(server, 1)
        await asyncio.gather(lost, return_exceptions=True)
        alive = RpcClient([server.connect("generator-0", "0.0.1-b")], max_attempts=1)
        async with alive:
            assert (await alive.call(RewardRequest(0, f"{task}zero", "x", ""), PATIENCE_S)).reward == 0.0


@pytest.mark.starts
async def test_a_service_that_judges_nothing_while_requests_wait_fails_and_one_that_has_none_does_not(
    task: str,
) -> None:
    """A worker is gone, and nobody has noticed: to its supervisor it is as if the process had died."""
    server = MemoryServer(REWARDS)
    client = RpcClient([server.connect("generator-0")], max_attempts=1)
    async with RewardPool(1, PATIENCE_S) as pool, client:
        service = asyncio.create_task(RewardService(server, pool, stuck_s=2.0).serve())
        zero = RewardRequest(0, f"{task}zero", "x", "")
        assert (await client.call(zero, PATIENCE_S)).reward == 0.0
        await pool._turns.take("somebody who never gives it back")
        await asyncio.sleep(4.0)
        assert not service.done()
        asked = asyncio.create_task(client.call(zero, 10 * PATIENCE_S))
        with pytest.raises(ExceptionGroup) as failed:
            async with asyncio.timeout(PATIENCE_S):
                await service
        assert failed.group_contains(RoleFailed, match="1 requests wait, and nothing was judged for 3 s")
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
