"""A connection that breaks and comes back: what is lost is counted, nothing comes twice, order holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc import messages as m
from rlhpc.config_sections import TransportConfig
from rlhpc.errors import ChannelTimeout, PeerUnreachable
from rlhpc.topology import CONTROL
from rlhpc.transport.keys import mint_run_keys
from rlhpc.transport.zmq_client import ZmqClient
from rlhpc.transport.zmq_server import ZmqServer
from tests.patience import PATIENCE_S

NUM_MESSAGES = 600
NUM_CUTS = 3


class Cable:
    """A TCP forwarder that can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.writers: list[asyncio.StreamWriter] = []

    async def plug_in(self) -> str:
        self.server = await asyncio.start_server(self.forward, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def forward(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(*self.target)
        self.writers += (near_out, far_out)
        with contextlib.suppress(OSError):
            await asyncio.gather(self.copy(near_in, far_out), self.copy(far_in, near_out))

    async def copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@pytest.fixture(params=[False, True], ids=["plain", "curve"])
async def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    config = TransportConfig(kind="tcp", curve=request.param)
    mint_run_keys(tmp_path / "secrets", ["controller-0", "generator-0"])
    server = ZmqServer(
        CONTROL,
        name="controller-0",
        config=config,
        secrets=tmp_path / "secrets",
        clock=time.monotonic,
        interface="127.0.0.1",
    )
    host, port = server.address.removeprefix("tcp://").split(":")
    cable = Cable(host, int(port))
    client = ZmqClient(
        CONTROL,
        await cable.plug_in(),
        name="generator-0",
        incarnation="one",
        server_name="controller-0",
        config=config,
        secrets=tmp_path / "secrets",
    )
    assert await client.admission(5) == ""
    yield server, client, cable
    await client.close()
    await server.close()
    cable.cut()
    cable.server.close()


async def test_messages_to_the_server(ends: Any):
    server, client, cable = ends
    heard: list[int] = []

    async def talk() -> None:
        for number in range(NUM_MESSAGES):
            await client.send(m.Heartbeat("running" * 500, "", number))
            await asyncio.sleep(0.001 if number % 10 == 0 else 0)
            if number % (NUM_MESSAGES // (NUM_CUTS + 1)) == 100:
                cable.cut()

    talking = asyncio.create_task(talk())
    while not heard or heard[-1] != NUM_MESSAGES - 1:  # the last ones survive: nothing is cut after them
        heard.append((await server.receive(PATIENCE_S))[1].policy_version)
    await talking
    assert heard == sorted(set(heard))
    assert len(heard) + server.statistics.messages_lost == NUM_MESSAGES
    assert server.statistics.messages_rejected == 0
    with pytest.raises(ChannelTimeout):
        await server.receive(0.02)


async def test_messages_to_the_client(ends: Any):
    server, client, cable = ends
    await client.send(m.Heartbeat("running", "", 0))
    await server.receive(PATIENCE_S)
    sent: list[int] = []
    heard: list[int] = []

    async def listen() -> None:
        while True:
            heard.append(int((await client.receive()).reason))

    async with asyncio.timeout(20):
        listening = asyncio.create_task(listen())
        number = 0
        while number < 200 or heard[-1] < 200:  # until one that was sent after the last cut has arrived
            if number in (30, 90, 150):
                cable.cut()
            with contextlib.suppress(PeerUnreachable):  # until it has connected again
                await server.send("generator-0", m.StopRole(str(number)))
                sent.append(number)
            await asyncio.sleep(0.003)
            number += 1
        while heard[-1] != sent[-1]:  # noqa: ASYNC110 - what is heard changes in another task
            await asyncio.sleep(0.003)
    listening.cancel()
    assert heard == sorted(set(heard))
    assert len(heard) + client.statistics.messages_lost == len(sent)
