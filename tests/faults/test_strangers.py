"""Nothing that a stranger does at an open port reaches the application, and our own peers do not notice."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ChannelTimeout
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqClient, ZmqServer
from rlhpc.transport.codec import Codec
from rlhpc.transport.security import load_secret, mint_run_keys, public_key
from rlhpc.transport.sessions import Greeting, Session
from tests.patience import PATIENCE_S

NUM_RAW_CONNECTIONS = 1_000
NUM_ATTEMPTS = 20
NUM_AT_A_TIME, NUM_REFUSED = 50, 2_000
CONFIG = TransportConfig(kind="tcp")
CODEC = Codec((*CONTROL.to_server, Greeting))
HELLO = m.Hello("generator", 0, "inc", "hash", 1, "host")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    mint_run_keys(tmp_path / "secrets", ["controller-0", "generator-0", "generator-1"])
    return tmp_path / "secrets"


@pytest.fixture
async def server(secrets: Path) -> AsyncIterator[ZmqServer]:
    channel = ZmqServer(
        CONTROL, name="controller-0", config=CONFIG, secrets=secrets, clock=time.monotonic, interface="127.0.0.1"
    )
    yield channel
    await channel.close()


@pytest.fixture
async def friend(server: ZmqServer, secrets: Path) -> AsyncIterator[ZmqClient]:
    channel = ZmqClient(
        CONTROL,
        server.address,
        name="generator-0",
        incarnation="inc",
        server_name="controller-0",
        config=CONFIG,
        secrets=secrets,
    )
    yield channel
    await channel.close()


async def nothing_came_but_a_friend_is_heard(server: ZmqServer, friend: ZmqClient) -> None:
    with pytest.raises(ChannelTimeout):
        await server.receive(0.05)
    await friend.send(HELLO)
    assert await server.receive(PATIENCE_S) == ("generator-0", HELLO)
    assert server.statistics.messages_received == 1
    await server.send("generator-0", m.StopRole("bye"))
    assert await friend.receive(PATIENCE_S) == m.StopRole("bye")


def send_as(
    address: str,
    routing_id: bytes,
    keys: tuple[bytes, bytes, bytes] | None,
    *,
    is_member: bool = False,
    is_answered: Callable[[], bool] = lambda: True,
) -> None:
    """Send valid messages from a socket of one's own.  keys: public, secret, the server's public.

    is_member: its key is admitted, so that all of them leave however busy the machine; others give up after a while.
    is_answered: whether the server has done with it what it does with such a one; it stays for so long.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = int(PATIENCE_S * 1e3) if is_member else 0
    dealer.routing_id = routing_id
    if keys is not None:
        dealer.curve_publickey, dealer.curve_secretkey, dealer.curve_serverkey = keys
    dealer.connect(address)
    for sequence in range(NUM_ATTEMPTS):
        dealer.send_multipart(CODEC.encode(HELLO, sequence))
    dealer.poll(0 if is_member else 300)  # what was queued may go; nothing is answered
    has_been = Deadline(PATIENCE_S).wait_for(is_answered, 0.01)
    dealer.close()
    context.term()
    assert has_been


async def test_a_key_that_is_not_of_this_run_is_not_admitted(server: ZmqServer, friend: ZmqClient, secrets: Path):
    public, secret = zmq.curve_keypair()
    keys = (public, secret, public_key(secrets, "controller-0"))  # it knows the server's public key
    routing_id = Session.open("generator-1", "x").routing_id
    await asyncio.to_thread(
        send_as, server.address, routing_id, keys, is_answered=lambda: server.connections_denied > 0
    )
    assert server.peers <= {"generator-0"}
    await nothing_came_but_a_friend_is_heard(server, friend)
    assert server.statistics.messages_rejected == 0  # it did not even get that far
    assert server.connections_denied > 0


async def test_a_plain_zeromq_client_is_not_admitted(server: ZmqServer, friend: ZmqClient):
    await asyncio.to_thread(send_as, server.address, Session.open("generator-1", "x").routing_id, None)
    assert server.peers <= {"generator-0"}
    await nothing_came_but_a_friend_is_heard(server, friend)


@pytest.mark.parametrize("claimed", ["generator-0", "trainer-0", "controller-0", ""])
async def test_a_member_that_claims_anothers_name_is_not_heard(
    server: ZmqServer,
    friend: ZmqClient,
    secrets: Path,
    claimed: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rlhpc.transport.sockets.TELL_AFTER_S", math.inf)
    secret = load_secret(secrets, "generator-1")
    keys = (zmq.curve_public(secret), secret, public_key(secrets, "controller-0"))
    routing_id = Session.open(claimed, "inc").routing_id if claimed else b"not a session at all"
    await asyncio.to_thread(send_as, server.address, routing_id, keys, is_member=True)
    await nothing_came_but_a_friend_is_heard(server, friend)
    async with asyncio.timeout(PATIENCE_S):
        while server.statistics.messages_rejected < NUM_ATTEMPTS:  # noqa: ASYNC110 - the server wakes nobody
            await asyncio.sleep(0.01)
    assert server.statistics.messages_rejected == NUM_ATTEMPTS
    told = [line for line in caplog.messages if "messages rejected so far: " in line]
    assert len(told) == 1
    assert "messages rejected so far: 1; message from " in told[0]
    assert told[0].endswith(f"routing id: claims to be {claimed}" if claimed else "is not a session")
    assert server.peers == {"generator-0"}


async def test_a_member_that_guesses_wrongly_cannot_take_a_session_over(
    server: ZmqServer, friend: ZmqClient, secrets: Path
):
    """With a bare name as routing id, ROUTER_HANDOVER would now send the friend's messages to the other one."""
    await friend.send(HELLO)
    await server.receive(PATIENCE_S)
    secret = load_secret(secrets, "generator-1")
    keys = (zmq.curve_public(secret), secret, public_key(secrets, "controller-0"))
    await asyncio.to_thread(send_as, server.address, b"generator-0", keys)
    await asyncio.to_thread(send_as, server.address, b"generator-0/inc/0000000000000000", keys)
    await server.send("generator-0", m.StopRole("for the friend"))
    assert await friend.receive(PATIENCE_S) == m.StopRole("for the friend")


async def test_a_thousand_connections_of_noise_deliver_nothing(server: ZmqServer, friend: ZmqClient):
    host, port = server.address.removeprefix("tcp://").split(":")
    noise = random.Random(0)
    # How a real greeting begins: signature, version 3.1, mechanism; then noise, or a frame that claims 2^40 bytes.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    huge = b"\x02" + (1 << 40).to_bytes(8, "big")
    openings = [b"", greeting, greeting + b"NULL".ljust(20, b"\0") + bytes(32), greeting + b"CURVE".ljust(20, b"\0")]

    def pester() -> None:
        for number in range(NUM_RAW_CONNECTIONS):
            opening = openings[number % len(openings)]
            tail = huge if number % 10 == 0 else noise.randbytes(noise.randint(1, 400))
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
                connection.sendall(opening + tail)

    began = time.monotonic()
    await asyncio.to_thread(pester)
    await nothing_came_but_a_friend_is_heard(server, friend)
    assert time.monotonic() - began < PATIENCE_S
    assert server.statistics.messages_rejected == 0


async def test_a_flood_of_refused_handshakes_costs_little_memory_and_one_line(
    server: ZmqServer,
    friend: ZmqClient,
    secrets: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    """Strangers that know the server's public key, each with a key of its own, fifty at a time."""
    monkeypatch.setattr("rlhpc.transport.sockets.TELL_AFTER_S", math.inf)  # it may take minutes on a busy machine
    known, before = public_key(secrets, "controller-0"), psutil.Process().memory_info().rss

    def insist() -> None:
        for wave in range(1, NUM_REFUSED // NUM_AT_A_TIME + 1):
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            dealers = [context.socket(zmq.DEALER) for _ in range(NUM_AT_A_TIME)]
            for dealer in dealers:
                dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
                dealer.curve_serverkey = known
                dealer.connect(server.address)
            for _ in Deadline(PATIENCE_S).polls(0.005):
                if server.connections_denied >= wave * NUM_AT_A_TIME:
                    break
            context.destroy(linger=0)

    with caplog.at_level("WARNING", "rlhpc.transport"):
        await asyncio.to_thread(insist)
        await nothing_came_but_a_friend_is_heard(server, friend)
    assert server.connections_denied >= NUM_REFUSED
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert len([record for record in caplog.records if "refused connections" in record.message]) == 1
    assert "the last one from 127.0.0.1" in caplog.text


async def test_a_friend_that_keeps_talking_is_heard_in_full_meanwhile(server: ZmqServer, friend: ZmqClient):
    host, port = server.address.removeprefix("tcp://").split(":")

    def pester() -> None:
        noise = random.Random(1)
        for _ in range(200):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
                connection.sendall(noise.randbytes(100))

    async def talk() -> None:
        for number in range(500):
            await friend.send(m.Heartbeat("running", "", number))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(pester))
        tasks.create_task(talk())
        heard: list[Any] = [(await server.receive(PATIENCE_S))[1].policy_version for _ in range(500)]
    assert heard == list(range(500))


async def test_an_unpublished_server_key_cannot_be_posed_as(server: ZmqServer, secrets: Path):
    """A client pinned to another server's key finds nobody, rather than the wrong one."""
    client = ZmqClient(
        CONTROL,
        server.address,
        name="generator-0",
        incarnation="inc",
        server_name="generator-1",  # whose key the process at this address does not have
        config=CONFIG,
        secrets=secrets,
    )
    assert await client.admission(0.3)
    await client.close()
    assert server.peers == frozenset()
