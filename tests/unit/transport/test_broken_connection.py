"""A connection that breaks and comes back: what is lost is counted, nothing comes twice, order holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ChannelTimeout, PeerUnreachable
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.client import ZmqClient
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.server import ZmqServer
from tests.cable import Cable
from tests.patience import PATIENCE_S

NUM_MESSAGES = 600
CUT_AFTER = (100, 250, 400, 550)


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
    with Cable(server.address) as cable:
        client = ZmqClient(
            CONTROL,
            cable.address,
            name="generator-0",
            incarnation="one",
            server_name="controller-0",
            config=config,
            secrets=tmp_path / "secrets",
        )
        assert await client.admission(PATIENCE_S) == ""
        yield server, client, cable
        await client.close()
        await server.close()


async def test_messages_to_the_server(ends: Any):
    server, client, cable = ends
    heard: list[int] = []

    async def talk() -> int:
        number = 0
        while number < NUM_MESSAGES or heard[-1] < number - 1:  # until the last one has arrived: a cut is noticed late
            await client.send(m.Heartbeat("running" * 500, "", number))
            await asyncio.sleep(0.05 if number >= NUM_MESSAGES else 0.001 if number % 10 == 0 else 0)
            if number in CUT_AFTER:
                cable.cut()
            number += 1
        return number

    talking = asyncio.create_task(talk())
    while not talking.done():
        with contextlib.suppress(ChannelTimeout):
            heard.append((await server.receive(0.02))[1].policy_version)
    assert heard == sorted(set(heard))
    assert len(heard) + server.statistics.messages_lost == await talking
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

    async with asyncio.timeout(PATIENCE_S):
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
