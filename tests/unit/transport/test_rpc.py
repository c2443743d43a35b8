from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rlhpc.protocol.errors import ChannelClosed, ChannelTimeout, ProtocolError
from rlhpc.protocol.messages import REWARDS, RewardReply, RewardRequest, StillWaiting, StopRole
from rlhpc.transport.rpc import RpcClient
from tests.engines.memory_channel import MemoryClient, MemoryServer
from tests.patience import PATIENCE_S

NEVER_S = 10 * PATIENCE_S  # a call that is given up only at its limit fails its test
REQUEST = RewardRequest(7, "math", "6 * 7 = 42", "42")
Answer = Callable[["Service", str, RewardRequest], Awaitable[None]]


class Service:
    """A reward replica whose behaviour a test chooses."""

    def __init__(self, replica: int) -> None:
        self.server = MemoryServer(REWARDS, replica)
        self.seen: list[RewardRequest] = []
        self.answer: Answer = reply

    async def run(self) -> None:
        while True:
            peer, request = await self.server.receive()
            self.seen.append(request)
            await self.answer(self, peer, request)


async def reply(service: Service, peer: str, request: RewardRequest) -> None:
    detail = service.server.name
    await service.server.send(peer, RewardReply(request.request_id, 1.0, "correct", {}, detail))


async def keep_silent(service: Service, peer: str, request: RewardRequest) -> None:
    pass


@pytest.fixture
async def services() -> AsyncIterator[list[Service]]:
    made = [Service(replica) for replica in range(2)]
    tasks = [asyncio.create_task(service.run()) for service in made]
    yield made
    for task in tasks:
        task.cancel()


def connected(services: list[Service]) -> list[MemoryClient]:
    return [service.server.connect("generator-0") for service in services]


async def test_many_calls_at_once_are_spread_and_not_mixed_up(services: list[Service]):
    async def echo(service: Service, peer: str, request: RewardRequest) -> None:
        await service.server.send(peer, RewardReply(request.request_id, 0.0, "wrong", {}, request.completion))

    for service in services:
        service.answer = echo
    async with RpcClient(connected(services)) as rpc:
        calls = [rpc.call(dataclasses.replace(REQUEST, completion=str(number)), 5) for number in range(100)]
        answers = await asyncio.gather(*calls)
    assert [answer.detail for answer in answers] == [str(number) for number in range(100)]
    assert {answer.request_id for answer in answers} == {REQUEST.request_id}  # the caller's own
    assert [len(service.seen) for service in services] == [50, 50]


async def test_a_request_that_is_not_answered_goes_to_another_replica(services: list[Service]):
    services[0].answer = keep_silent
    async with RpcClient(connected(services)) as rpc:
        assert (await rpc.call(REQUEST, 1.0)).detail == "reward-1"
        assert rpc.num_retries == 1
        first, second = services[0].seen[0], services[1].seen[0]
        assert first.request_id != second.request_id
        assert (await rpc.call(REQUEST, 1.0)).detail == "reward-1"  # the silent one is not asked first again
        assert len(services[0].seen) == 1


async def test_a_replica_that_answers_nothing_while_the_other_does_is_not_waited_for(services: list[Service]):
    services[0].answer = keep_silent
    async with RpcClient(connected(services), silence_s=0.2) as rpc:
        hung = asyncio.create_task(rpc.call(REQUEST, 1000))
        while not hung.done():
            await asyncio.sleep(0.05)
            await rpc.call(REQUEST, PATIENCE_S)
        assert (await hung).detail == services[1].server.name
        assert len(services[0].seen) == 1  # and nobody asks it again
        assert rpc.num_retries == 1


async def test_replicas_that_are_all_silent_may_have_long_queues(services: list[Service]):
    for service in services:
        service.answer = keep_silent
    async with RpcClient(connected(services), silence_s=0.02) as rpc:
        with pytest.raises(ChannelTimeout):
            await rpc.call(REQUEST, 0.3)
        assert [len(service.seen) for service in services] == [2, 1]


async def test_a_queue_that_moves_is_waited_for_and_nothing_is_asked_twice(services: list[Service]):
    """100 requests of 10 ms each at one replica; an attempt may take 0.5 s."""

    async def judge(service: Service, peer: str, request: RewardRequest) -> None:
        await asyncio.sleep(0.01)
        await reply(service, peer, request)

    services[0].answer = judge
    async with RpcClient(connected(services)[:1], max_attempts=1) as rpc:
        answers = await asyncio.gather(*(rpc.call(REQUEST, 0.5) for _ in range(100)))
    assert len(answers) == len(services[0].seen) == 100
    assert rpc.num_retries == 0


async def test_a_request_that_was_lost_is_asked_again_though_others_are_answered(services: list[Service]):
    async def lose_the_first(service: Service, peer: str, request: RewardRequest) -> None:
        if len(service.seen) > 1:
            await reply(service, peer, request)

    services[0].answer = lose_the_first
    async with RpcClient(connected(services)[:1]) as rpc:
        lost = asyncio.create_task(rpc.call(REQUEST, 0.5))
        while not services[0].seen:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0.01)
        while not lost.done():
            await rpc.call(REQUEST, PATIENCE_S)
            await asyncio.sleep(0.02)
        await lost
        assert rpc.num_retries == 1


@pytest.mark.waits
async def test_a_replica_that_is_busy_with_the_requests_of_others_is_waited_for(services: list[Service]):
    """Its news come for twice as long as an attempt may take, and five times as long as a silence."""

    services[0].answer = keep_silent
    async with RpcClient(connected(services), silence_s=0.4) as rpc:
        waiting = asyncio.create_task(rpc.call(REQUEST, 1.0))
        while not services[0].seen:  # noqa: ASYNC110 - by polling
            await asyncio.sleep(0)
        (request,) = services[0].seen
        for _ in range(20):
            await asyncio.sleep(0.1)
            # Both are heard of in the same moment: a pause of this process makes one no more silent than the other.
            await services[0].server.send("generator-0", StillWaiting((request.request_id,)))
            assert (await rpc.call(REQUEST, PATIENCE_S)).detail == services[1].server.name
        await reply(services[0], "generator-0", request)
        assert (await waiting).detail == services[0].server.name
        assert len(services[0].seen) == 1
        assert rpc.num_retries == 0


@pytest.mark.parametrize("number_off", [0, 1000])
async def test_news_of_other_requests_and_news_that_stop_are_not_waited_for(
    services: list[Service], number_off: int
) -> None:
    """It says once that the request waits, and stops; or says so again and again of requests that it does not have."""

    async def mislead(service: Service, peer: str, request: RewardRequest) -> None:
        while True:
            await service.server.send(peer, StillWaiting((request.request_id + number_off,)))
            if not number_off:
                break
            await asyncio.sleep(0.05)

    services[0].answer = mislead
    async with RpcClient(connected(services)) as rpc:
        answer = await asyncio.wait_for(rpc.call(REQUEST, 0.3), PATIENCE_S)
        assert (answer.detail, rpc.num_retries) == (services[1].server.name, 1)


async def test_a_late_reply_is_given_to_nobody(services: list[Service]):
    services[0].answer = keep_silent
    async with RpcClient(connected(services)) as rpc:
        await rpc.call(REQUEST, 1.0)
        await reply(services[0], "generator-0", services[0].seen[0])
        await asyncio.sleep(0.01)
        services[1].answer = keep_silent
        services[0].answer = reply  # having spoken, it is trusted again
        assert (await rpc.call(REQUEST, 0.5)).detail == "reward-0"


async def test_after_all_attempts_the_error_says_how_many(services: list[Service]):
    for service in services:
        service.answer = keep_silent
    async with RpcClient(connected(services), max_attempts=3) as rpc:
        with pytest.raises(ChannelTimeout, match=r"RewardRequest 7: no reply from 2 replicas in 3 attempts"):
            await rpc.call(REQUEST, 0.02)
    assert sum(len(service.seen) for service in services) == 3


async def test_a_channel_that_is_closed_meanwhile_costs_no_timeout(services: list[Service]):
    services[0].answer = keep_silent
    channels = connected(services)
    async with RpcClient(channels) as rpc:
        call = asyncio.create_task(rpc.call(REQUEST, NEVER_S))
        await asyncio.sleep(0.01)
        await channels[0].close()
        assert (await asyncio.wait_for(call, PATIENCE_S)).detail == "reward-1"


async def test_a_channel_that_nobody_reads_any_more_is_as_good_as_closed(
    services: list[Service], monkeypatch: pytest.MonkeyPatch
):
    async def receive(_: MemoryClient) -> object:
        raise MemoryError

    (channel,) = connected(services[:1])
    monkeypatch.setattr(MemoryClient, "receive", receive)
    async with RpcClient([channel]) as client:
        with pytest.raises(ChannelClosed):
            await client.call(REQUEST, NEVER_S)


async def test_a_replica_can_be_added_when_the_others_are_gone(services: list[Service]):
    channels = connected(services)
    async with RpcClient(channels[:1]) as rpc:
        await channels[0].close()
        with pytest.raises(ChannelClosed, match="no replica is left"):
            await rpc.call(REQUEST, 0.1)
        rpc.add(channels[1])
        assert (await rpc.call(REQUEST, 1)).detail == "reward-1"


async def test_a_replica_that_was_started_again_is_asked_anew_and_that_counts_as_no_attempt(services: list[Service]):
    services[0].answer = keep_silent
    channels = connected(services)
    async with RpcClient(channels[:1], max_attempts=1) as rpc:
        calls = [asyncio.create_task(rpc.call(REQUEST, NEVER_S)) for _ in range(3)]
        await asyncio.sleep(0.01)
        await rpc.replace(channels[0], channels[1])
        replies = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        assert [reply.detail for reply in replies] == ["reward-1"] * 3
        assert (await rpc.call(REQUEST, 1)).detail == "reward-1"
    assert len(services[0].seen) == 3


async def test_closing_ends_calls_that_wait(services: list[Service]):
    services[0].answer = keep_silent
    rpc = RpcClient(connected(services)[:1])
    async with rpc:
        call = asyncio.create_task(rpc.call(REQUEST, NEVER_S))
        await asyncio.sleep(0.01)
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(call, PATIENCE_S)
    await rpc.close()


async def test_what_may_not_be_sent_is_not_retried(services: list[Service]):
    @dataclasses.dataclass(frozen=True)
    class Foreign:
        request_id: int

    async with RpcClient(connected(services)) as rpc:
        with pytest.raises(ProtocolError, match="Foreign is not one of RewardRequest"):
            await rpc.call(Foreign(1), 1)
        assert rpc.num_retries == 0
    assert StopRole not in REWARDS.to_client
