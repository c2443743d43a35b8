"""A network that drops every packet and tells nobody: a controller and a generator on two sides of a switch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.private_slurm import processes
from launch.private_slurm.processes import Process, process
from launch.private_slurm.shape import machine_address
from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import ChannelTimeout, ConfigError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqServer
from rlhpc.transport.security import mint_run_keys
from tests.patience import PATIENCE_S
from tests.ring.run_kit import command_environment

pytestmark = pytest.mark.starts
DEAD_AFTER_S = 3.0
QUIET_S = 1.0  # ten heartbeats
MANY = 200  # of twenty seconds
# A generator that sends a numbered heartbeat ten times a second.
GENERATOR = f"""
import asyncio, sys
from pathlib import Path
from rlhpc.protocol import messages as m
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqClient

async def main():
    channel = ZmqClient(CONTROL, sys.argv[1], name="generator-0", incarnation="one", server_name="controller-0",
                        config=TransportConfig(kind="tcp", dead_after_s={DEAD_AFTER_S}), secrets=Path(sys.argv[2]))
    for number in range(1_000_000):
        await channel.send(m.Heartbeat("running", "", number))
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Net:
    """A switch with this machine and one node."""

    hub: Process
    node: Process
    subnet: str

    def cut(self) -> None:
        processes.forward(self.hub, "n0", is_cut=True)

    def heal(self) -> None:
        processes.forward(self.hub, "n0", is_cut=False)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    try:
        processes.require()
    except ConfigError as error:
        pytest.skip(str(error))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n", encoding="ascii")
    commands = (processes.hub_command(), processes.node_command("n0", hosts))
    started = [subprocess.Popen(command) for command in commands]
    try:
        hub, node = (process(each.pid) for each in started)
        assert hub is not None
        assert node is not None
        assert Deadline(PATIENCE_S).wait_for(lambda: processes.is_ready(hub) and processes.is_ready(node), 0.05)
        subnet = processes.claim_subnet(hub, str(tmp_path))
        processes.plug(hub, node, "n0", f"{subnet}.9")
        yield Net(hub, node, subnet)
    finally:
        for each in reversed(started):
            each.kill()
            each.wait()


@pytest.mark.parametrize(
    "cut_s", [DEAD_AFTER_S / 3, pytest.param(3 * DEAD_AFTER_S, marks=pytest.mark.long)], ids=["short", "long"]
)
async def test_after_a_cut_without_a_word_heartbeats_come_again_in_order_and_losses_are_counted(
    net: Net, tmp_path: Path, cut_s: float
) -> None:
    mint_run_keys(tmp_path / "secrets", ["controller-0", "generator-0"])
    server = ZmqServer(
        CONTROL,
        name="controller-0",
        config=TransportConfig(kind="tcp", dead_after_s=DEAD_AFTER_S),
        secrets=tmp_path / "secrets",
        clock=time.monotonic,
        interface=machine_address(net.subnet),
    )
    words = [*processes.inside(net.node), sys.executable, "-c", GENERATOR, server.address, str(tmp_path / "secrets")]
    generator = subprocess.Popen(words, env=command_environment())  # noqa: ASYNC220 - it starts at once
    try:
        heard = [(await server.receive(PATIENCE_S))[1].policy_version for _ in range(10)]
        await asyncio.to_thread(net.cut)
        with suppress(ChannelTimeout):  # what was on its way passes, and nothing after it
            for _ in range(MANY):
                heard.append((await server.receive(QUIET_S))[1].policy_version)
            pytest.fail(f"{MANY} messages have passed the cut")
        await asyncio.sleep(cut_s)
        assert server.statistics.messages_received == len(heard)
        await asyncio.to_thread(net.heal)
        for _ in range(30):
            heard.append((await server.receive(2 * PATIENCE_S))[1].policy_version)
        statistics = server.statistics
        heard += [(await server.receive(0.0))[1].policy_version for _ in range(statistics.receive_queue_depth)]
        assert heard == sorted(set(heard))
        assert heard[-1] + 1 == len(heard) + statistics.messages_lost
        assert statistics.messages_rejected == 0
        assert generator.poll() is None
    finally:
        generator.kill()
        generator.wait()
        await server.close()
