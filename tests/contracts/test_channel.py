"""Every channel keeps the promises of contracts.ServerChannel, ClientChannel and BlockingClientChannel.

Runs against the in-memory channel and against ZeroMQ over unix sockets and TCP.  A channel of your own: add a Wiring.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.contracts import BlockingClientChannel, ClientChannel, ServerChannel
from rlhpc.protocol.errors import ChannelClosed, ChannelFull, ChannelTimeout, PeerUnreachable, ProtocolError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.protocol.types import Lease, PackedBatch, PackedMicrobatch, PackedMinibatch, Prompt, SamplingParams
from rlhpc.transport.channel import ZmqBlockingClient, ZmqClient, ZmqServer
from rlhpc.transport.security import mint_run_keys
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S

NUM_NAMES = 12
CAPACITY = 8

SPEC = ChannelSpec(
    "test", "controller", ("generator",),
    (m.Heartbeat, m.StepReport, PackedBatch),
    (Lease, m.StopRole, PackedBatch),
    CAPACITY,
)  # fmt: skip


class Wiring(ABC):
    """How a kind of channel is opened."""

    @abstractmethod
    def serve(self) -> ServerChannel: ...

    @abstractmethod
    def join(self, server: ServerChannel, name: str, incarnation: str = "first") -> ClientChannel: ...

    @abstractmethod
    def join_blocking(self, server: ServerChannel, name: str) -> BlockingClientChannel: ...


class MemoryWiring(Wiring):
    def serve(self) -> ServerChannel:
        return MemoryServer(SPEC)

    def join(self, server: ServerChannel, name: str, incarnation: str = "first") -> ClientChannel:
        assert isinstance(server, MemoryServer)
        return server.connect(name, incarnation)

    def join_blocking(self, server: ServerChannel, name: str) -> BlockingClientChannel:
        assert isinstance(server, MemoryServer)
        return server.connect_blocking(name)


class ZmqWiring(Wiring):
    def __init__(self, config: TransportConfig, secrets: Path) -> None:
        self.config, self.secrets = config, secrets

    def serve(self) -> ServerChannel:
        return ZmqServer(
            SPEC,
            name="controller-0",
            config=self.config,
            secrets=self.secrets,
            clock=time.monotonic,
            interface="127.0.0.1",
        )

    def identity(self, name: str, incarnation: str = "first") -> dict[str, object]:
        return {
            "name": name,
            "incarnation": incarnation,
            "server_name": "controller-0",
            "config": self.config,
            "secrets": self.secrets,
        }

    def join(self, server: ServerChannel, name: str, incarnation: str = "first") -> ClientChannel:
        return ZmqClient(SPEC, server.address, **self.identity(name, incarnation))

    def join_blocking(self, server: ServerChannel, name: str) -> BlockingClientChannel:
        return ZmqBlockingClient(SPEC, server.address, **self.identity(name))


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "secrets"
    mint_run_keys(directory, ["controller-0", *(f"generator-{i}" for i in range(NUM_NAMES))])
    return directory


@pytest.fixture(params=["memory", "ipc-curve", "ipc-plain", "tcp-curve"])
def wiring(request: pytest.FixtureRequest, secrets: Path) -> Wiring:
    if request.param == "memory":
        return MemoryWiring()
    kind, security = request.param.split("-")
    return ZmqWiring(TransportConfig(kind=kind, curve=security == "curve"), secrets)


@pytest.fixture
async def server(wiring: Wiring) -> AsyncIterator[ServerChannel]:
    channel = wiring.serve()
    yield channel
    await channel.close()


@pytest.fixture
async def client(wiring: Wiring, server: ServerChannel) -> AsyncIterator[ClientChannel]:
    channel = wiring.join(server, "generator-0")
    yield channel
    await channel.close()


def beat(number: int) -> m.Heartbeat:
    return m.Heartbeat("running", "", number)


def lease(number: int) -> Lease:
    prompt = Prompt(number, "math", np.arange(number % 7, dtype=np.int32), "")
    return Lease(number, 0, prompt, 1, (0,), SamplingParams(8), 0)


def big_batch(num_tokens: int) -> PackedBatch:
    ints = np.arange(num_tokens, dtype=np.int32)
    floats = ints.astype(np.float32)
    row = PackedMicrobatch(ints, ints, np.array([0, num_tokens], np.int32), ints > 0, floats, floats, ints, floats[:1])
    return PackedBatch(0, 0, (PackedMinibatch(((row,),), num_tokens - 1, 1),))


async def greet(server: ServerChannel, client: ClientChannel) -> None:
    """Make sure the server knows the client."""
    await client.send(beat(-1))
    await server.receive(PATIENCE_S)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - channels have no event for it
            await asyncio.sleep(0.005)


def patience_for(num_sent: int) -> float:
    """A channel takes messages up to its capacity, however busy the machine; then it may say that it is full."""
    return PATIENCE_S if num_sent < CAPACITY else 0.05


async def fill(send: Callable[[float], Awaitable[None]]) -> int:
    """Call send(timeout_s) until the channel is full; return how many it took."""
    for sent in range(1_000):
        try:
            await send(patience_for(sent))
        except ChannelFull:
            return sent
    raise AssertionError("the channel is never full")


# ----------------------------------------------------------------------------------------------- order and wholeness


async def test_messages_arrive_once_and_in_order_both_ways(server: ServerChannel, client: ClientChannel):
    async def send_all() -> None:
        for number in range(300):
            await client.send(beat(number))

    async def answer_all() -> None:
        for number in range(300):
            name, message = await server.receive(PATIENCE_S)
            assert (name, message) == ("generator-0", beat(number))
            await server.send(name, lease(number))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send_all())
        tasks.create_task(answer_all())
        for number in range(300):
            assert (await client.receive(PATIENCE_S)).group_id == number
    with pytest.raises(ChannelTimeout):
        await server.receive(0.01)


async def test_a_message_of_16_mib_arrives_bit_for_bit(server: ServerChannel, client: ClientChannel):
    batch = big_batch(1 << 22)  # six arrays, five of 16 MiB
    await client.send(batch)
    _, received = await server.receive(PATIENCE_S)
    await server.send("generator-0", received)
    returned = await client.receive(PATIENCE_S)
    for message in (received, returned):
        row, expected = message.rows[0], batch.rows[0]
        for name in ("token_ids", "cu_seqlens", "loss_mask", "advantages"):
            assert np.array_equal(getattr(row, name), getattr(expected, name))
            assert getattr(row, name).dtype == getattr(expected, name).dtype


async def test_many_peers_are_told_apart_and_answered_by_name(wiring: Wiring, server: ServerChannel):
    clients = {f"generator-{index}": wiring.join(server, f"generator-{index}") for index in range(NUM_NAMES)}
    for number in range(5):
        for index, channel in enumerate(clients.values()):
            await channel.send(beat(100 * index + number))
    next_number = dict.fromkeys(clients, 0)
    for _ in range(5 * NUM_NAMES):
        name, message = await server.receive(PATIENCE_S)
        index = int(name.split("-")[1])
        assert message.policy_version == 100 * index + next_number[name]
        next_number[name] += 1
    assert server.peers == frozenset(clients)
    for index, name in enumerate(clients):
        await server.send(name, lease(index))
    for index, channel in enumerate(clients.values()):
        assert (await channel.receive(PATIENCE_S)).group_id == index
        with pytest.raises(ChannelTimeout):
            await channel.receive(0)
    for channel in clients.values():
        await channel.close()


async def test_a_client_that_has_connected_can_be_addressed_before_it_speaks(
    server: ServerChannel, client: ClientChannel
):
    await until(lambda: "generator-0" in server.peers)
    await server.send("generator-0", lease(3))
    assert (await client.receive(PATIENCE_S)).group_id == 3


async def test_a_peer_that_opens_its_channel_again_is_the_one_that_is_answered(wiring: Wiring, server: ServerChannel):
    for number in range(3):
        client = wiring.join(server, "generator-0")
        await client.send(beat(number))
        assert await server.receive(PATIENCE_S) == ("generator-0", beat(number))
        await server.send("generator-0", lease(number))
        assert (await client.receive(PATIENCE_S)).group_id == number
        await client.close()


# ----------------------------------------------------------------------------------------------------------- fencing


async def test_an_earlier_start_is_never_heard_again_though_it_opens_new_sessions(
    wiring: Wiring, server: ServerChannel
):
    new = wiring.join(server, "generator-0", "71.1.0-new")
    await new.send(beat(0))
    assert await server.receive(PATIENCE_S) == ("generator-0", beat(0))
    for number, incarnation in enumerate(("71.0.0-old", "71.0.4-old", "70.9.9-other")):  # none of them was heard before
        rejected = server.statistics.messages_rejected
        old = wiring.join(server, "generator-0", incarnation)
        await old.send(beat(-1))
        await until(lambda rejected=rejected: server.statistics.messages_rejected > rejected)
        await server.send("generator-0", lease(number))
        assert (await new.receive(PATIENCE_S)).group_id == number
        with pytest.raises(ChannelTimeout):
            await old.receive(0.01)
        await old.close()
    await new.send(beat(1))
    assert await server.receive(PATIENCE_S) == ("generator-0", beat(1))
    await new.close()


async def test_a_later_start_and_another_of_the_same_take_over(wiring: Wiring, server: ServerChannel):
    clients = [wiring.join(server, "generator-0", "71.0.0-a")]
    await greet(server, clients[0])
    for number, incarnation in enumerate(("71.0.0-b", "71.0.1-c", "71.2.0-d", "72.0.0-e")):
        clients.append(wiring.join(server, "generator-0", incarnation))
        await greet(server, clients[-1])
        rejected = server.statistics.messages_rejected
        await clients[-2].send(beat(-1))  # whom it has followed
        await until(lambda rejected=rejected: server.statistics.messages_rejected > rejected)
        await server.send("generator-0", lease(number))
        assert (await clients[-1].receive(PATIENCE_S)).group_id == number
    for client in clients:
        await client.close()


# ------------------------------------------------------------------------------------------------------ backpressure


async def test_a_full_channel_refuses_and_what_it_took_arrives_whole(server: ServerChannel, client: ClientChannel):
    report = m.StepReport(0, 0, True, {"x" * 200_000: 0.0})  # soon fills the kernel's buffers
    sent = await fill(lambda timeout_s: client.send(report, timeout_s=timeout_s))
    assert sent >= CAPACITY
    for _ in range(sent):
        assert (await server.receive(PATIENCE_S))[1] == report
    with pytest.raises(ChannelTimeout):  # the refused one left nothing behind
        await server.receive(0.05)
    await client.send(beat(1))
    assert (await server.receive(PATIENCE_S))[1] == beat(1)
    assert server.statistics.messages_received == client.statistics.messages_sent == sent + 1


async def test_a_peer_that_takes_nothing_does_not_hold_up_another(wiring: Wiring, server: ServerChannel):
    slow, quick = wiring.join(server, "generator-0"), wiring.join(server, "generator-1")
    await greet(server, slow)
    await greet(server, quick)
    order = m.StopRole("x" * 200_000)
    sent = await fill(lambda timeout_s: server.send("generator-0", order, timeout_s=timeout_s))
    await server.send("generator-1", lease(1), timeout_s=PATIENCE_S)
    assert (await quick.receive(PATIENCE_S)).group_id == 1
    for _ in range(sent):
        assert await slow.receive(PATIENCE_S) == order
    await server.send("generator-0", lease(2))
    assert (await slow.receive(PATIENCE_S)).group_id == 2
    await slow.close()
    await quick.close()


async def test_a_send_that_waits_goes_on_once_there_is_room(server: ServerChannel, client: ClientChannel):
    report = m.StepReport(0, 0, True, {"x" * 200_000: 0.0})

    async def send_all() -> None:
        for _ in range(100):
            await client.send(report, timeout_s=PATIENCE_S)

    sending = asyncio.create_task(send_all())
    await asyncio.sleep(0.03)
    assert not sending.done()
    for _ in range(100):
        await server.receive(PATIENCE_S)
    await sending


# ---------------------------------------------------------------------------------------------- timeouts and closing


async def test_a_timeout_takes_nothing(server: ServerChannel, client: ClientChannel):
    for timeout_s in (0, 0.01):
        with pytest.raises(ChannelTimeout):
            await server.receive(timeout_s)
        with pytest.raises(ChannelTimeout):
            await client.receive(timeout_s)
    await client.send(beat(1))
    assert (await server.receive(PATIENCE_S))[1] == beat(1)


async def test_a_cancelled_receive_takes_nothing(server: ServerChannel, client: ClientChannel):
    for number in range(30):
        waiting = asyncio.create_task(server.receive())
        await asyncio.sleep(0)
        sending = asyncio.create_task(client.send(beat(number)))
        await asyncio.sleep(0.0005 * (number % 4))
        waiting.cancel()
        await sending
        try:
            _, message = await waiting
        except asyncio.CancelledError:
            _, message = await server.receive(PATIENCE_S)
        assert message == beat(number)


async def test_closing_wakes_who_waits_and_refuses_further_calls(
    wiring: Wiring, server: ServerChannel, client: ClientChannel
):
    await greet(server, client)
    waiting = [asyncio.create_task(server.receive()), asyncio.create_task(client.receive())]
    await asyncio.sleep(0.01)
    await client.close()
    await server.close()
    for task in waiting:
        with pytest.raises(ChannelClosed):
            await task
    with pytest.raises(ChannelClosed):
        await server.receive(0.1)
    with pytest.raises(ChannelClosed):
        await client.receive(0.1)
    with pytest.raises(ChannelClosed):
        await client.send(beat(1))
    with pytest.raises(ChannelClosed):
        await server.send("generator-0", lease(1))
    await client.close()
    await server.close()


async def test_what_was_sent_before_closing_arrives(
    wiring: Wiring, server: ServerChannel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlhpc.transport.sockets.LINGER_MS", int(1e3 * PATIENCE_S))  # a handshake may take a second
    client = wiring.join(server, "generator-0")
    for number in range(5):
        await client.send(beat(number))
    await client.close()
    assert [(await server.receive(PATIENCE_S))[1].policy_version for _ in range(5)] == list(range(5))


async def test_a_send_to_nobody_says_so(server: ServerChannel, client: ClientChannel):
    with pytest.raises(PeerUnreachable, match="generator-7"):
        await server.send("generator-7", lease(1))
    await greet(server, client)
    await client.close()

    async def is_unreachable() -> bool:
        try:
            await server.send("generator-0", lease(1))
        except PeerUnreachable:
            return True
        return False

    async with asyncio.timeout(PATIENCE_S):  # over a socket, the news takes a moment
        while not await is_unreachable():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)


# ---------------------------------------------------------------------------------------------- types and statistics


async def test_a_message_the_table_does_not_allow_goes_nowhere(server: ServerChannel, client: ClientChannel):
    await greet(server, client)
    with pytest.raises(ProtocolError, match="Lease"):
        await client.send(lease(1))
    with pytest.raises(ProtocolError, match="Heartbeat"):
        await server.send("generator-0", beat(1))
    await client.send(beat(2))
    assert (await server.receive(PATIENCE_S))[1] == beat(2)
    assert server.statistics.messages_rejected == client.statistics.messages_rejected == 0


async def test_statistics_count_what_went_through(server: ServerChannel, client: ClientChannel):
    for number in range(3):
        await client.send(beat(number))
    for _ in range(3):
        await server.receive(PATIENCE_S)
    await server.send("generator-0", lease(1))
    await client.receive(PATIENCE_S)
    ours, theirs = server.statistics, client.statistics
    assert (theirs.messages_sent, ours.messages_received) == (3, 3)
    assert (ours.messages_sent, theirs.messages_received) == (1, 1)
    assert theirs.bytes_sent == ours.bytes_received > 0
    assert ours.bytes_sent == theirs.bytes_received > 0
    assert ours.messages_rejected == theirs.messages_rejected == ours.receive_queue_depth == 0


async def test_the_server_binds_to_an_address_of_its_own(wiring: Wiring, server: ServerChannel):
    assert "://" in server.address
    assert "0.0.0.0" not in server.address
    assert "*" not in server.address


# ----------------------------------------------------------------------------------------------- without an event loop


async def test_a_blocking_client_keeps_the_same_promises(wiring: Wiring, server: ServerChannel):
    client = wiring.join_blocking(server, "generator-0")

    def role() -> list[int]:
        got = []
        for number in range(100):
            client.send(beat(number), timeout_s=PATIENCE_S)
            if number % CAPACITY == CAPACITY - 1:
                got += [client.receive(PATIENCE_S).group_id for _ in range(CAPACITY)]
        with pytest.raises(ProtocolError):
            client.send(lease(1))
        got += [client.receive(PATIENCE_S).group_id for _ in range(100 - len(got))]
        with pytest.raises(ChannelTimeout):
            client.receive(0.01)
        return got

    running = asyncio.create_task(asyncio.to_thread(role))
    for number in range(100):
        assert await server.receive(PATIENCE_S) == ("generator-0", beat(number))
        await server.send("generator-0", lease(number))
    assert await running == list(range(100))
    assert client.statistics.messages_sent == client.statistics.messages_received == 100
    for _ in range(2):
        await asyncio.to_thread(client.close)
    with pytest.raises(ChannelClosed):
        await asyncio.to_thread(client.send, beat(1))
    with pytest.raises(ChannelClosed):
        await asyncio.to_thread(client.receive, 0.1)


async def test_a_blocking_client_says_when_the_channel_is_full(wiring: Wiring, server: ServerChannel):
    client = wiring.join_blocking(server, "generator-0")
    report = m.StepReport(0, 0, True, {"x" * 200_000: 0.0})

    def fill() -> int:
        for sent in range(1_000):
            try:
                client.send(report, timeout_s=patience_for(sent))
            except ChannelFull:
                return sent
        return 1_000

    sent = await asyncio.to_thread(fill)
    assert CAPACITY <= sent < 1_000
    for _ in range(sent):
        await server.receive(PATIENCE_S)
    with pytest.raises(ChannelTimeout):
        await server.receive(0.02)
    await asyncio.to_thread(client.close)
