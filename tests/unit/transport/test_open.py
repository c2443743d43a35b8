"""The functions by which roles open and find channels, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zmq

from rlhpc.base.patience import Deadline
from rlhpc.base.processes import MAX_OPEN_FILES
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.errors import ChannelTimeout, ConfigError, ProtocolError, RunDirectoryError
from rlhpc.protocol.messages import BATCHES, CONTROL, Heartbeat, Hello, StopRole
from rlhpc.transport.open import (
    Endpoint,
    await_endpoint,
    await_endpoint_blocking,
    connect,
    find,
    open_server,
    publish,
    successor,
    withdraw,
)
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.sockets import MAX_IPC_PATH_BYTES, SOCKET_NAME, terminate
from tests.patience import PATIENCE_S

# ------------------------------------------------------------------------------------------------------------- channels
#
# The doors the roles use, over real sockets.


CONFIG = TransportConfig()


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    mint_run_keys(layout.secrets, ["controller-0", "generator-0", "generator-1"])
    return layout


def serve(layout: RunLayout, incarnation: str = "one", config: TransportConfig = CONFIG) -> Any:
    return open_server(CONTROL, layout=layout, config=config, replica=0, incarnation=incarnation, interface="127.0.0.1")


def arguments_of(layout: RunLayout, incarnation: str = "a", **changed: Any) -> dict[str, Any]:
    known = {"role": "generator", "replica": 0, "incarnation": incarnation, "timeout_s": PATIENCE_S}
    return {"layout": layout, "config": CONFIG, **known, **changed}


async def join(layout: RunLayout, incarnation: str = "a", **changed: Any) -> Any:
    return await connect(CONTROL, **arguments_of(layout, incarnation, **changed))


def beat(number: int) -> Heartbeat:
    return Heartbeat("running", "", number)


async def meet(server: Any, client: Any, name: str = "generator-0") -> None:
    """What the client says is heard under its name; then both end."""
    await client.send(beat(1))
    assert await server.receive(PATIENCE_S) == (name, beat(1))
    await client.close()
    await server.close()


async def test_a_server_whose_socket_a_cleaner_has_deleted_is_reached_again(layout: RunLayout) -> None:
    """Those that had connected went on, and a generator that was started again waited for good."""
    server = serve(layout)
    first = await join(layout)
    directory = Path(server.address.removeprefix("ipc://")).parent
    assert stat.S_ISSOCK((directory / SOCKET_NAME).stat().st_mode)
    shutil.rmtree(directory)
    second = await join(layout, replica=1)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for number, client in enumerate((first, second)):
        await client.send(beat(number))
        assert await server.receive(PATIENCE_S) == (f"generator-{number}", beat(number))
    for end in (first, second, server):
        await end.close()
    assert not directory.exists()


async def test_a_server_may_open_as_many_files_as_the_host_allows(layout: RunLayout):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        server = serve(layout)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MAX_OPEN_FILES), hard)
        await server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
async def test_a_role_finds_the_server_by_the_run_directory_alone(layout: RunLayout, kind: Any):
    config = TransportConfig(kind=kind)
    waiting = asyncio.create_task(join(layout, config=config))
    await asyncio.sleep(0.02)  # the client is first
    server = serve(layout, config=config)
    client = await waiting
    hello = Hello("generator", 0, "a", "hash", 1, "host")
    await client.send(hello)
    assert await server.receive(PATIENCE_S) == ("generator-0", hello)
    assert find(layout.rendezvous, "control") == Endpoint(
        "control", "controller", 0, server.address, "one", os.getpid(), socket.gethostname()
    )
    await client.close()
    await server.close()
    assert find(layout.rendezvous, "control") is None


async def test_an_address_that_a_dead_server_left_behind_is_read_again(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlhpc.transport.open.ATTEMPT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stale = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    publish(layout.rendezvous, Endpoint("control", "controller", 0, stale, "dead", 1, socket.gethostname()))
    waiting = asyncio.create_task(join(layout))
    await asyncio.sleep(0.05)
    server = serve(layout)
    client = await waiting
    await meet(server, client)


async def test_keys_of_a_new_attempt_are_waited_for_where_that_is_asked_for(layout: RunLayout):
    server = serve(layout)
    shutil.rmtree(layout.secrets)
    with pytest.raises(RunDirectoryError, match="every start of a run makes them"):
        await join(layout)
    with pytest.raises(RunDirectoryError, match="every start of a run makes them"):
        await join(layout, awaits_keys=True, timeout_s=0.15)
    waiting = asyncio.create_task(join(layout, awaits_keys=True))
    await asyncio.sleep(0.15)
    await server.close()  # the attempt before is over, and its keys are worth nothing
    mint_run_keys(layout.secrets, ["controller-0", "generator-0"])
    server = serve(layout, "two")
    client = await waiting
    assert client.endpoint.incarnation == "two"
    await meet(server, client)


@pytest.mark.waits
async def test_the_error_tells_the_whole_wait_though_an_address_was_there_meanwhile(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rlhpc.transport.open.ATTEMPT_S", 0.05)
    stale = Endpoint("control", "controller", 0, "ipc:///nowhere/s", "dead", 4711, socket.gethostname())
    publish(layout.rendezvous, stale)
    waiting = asyncio.create_task(join(layout, timeout_s=1.0))
    await asyncio.sleep(0.1)
    shutil.rmtree(layout.rendezvous)
    with pytest.raises(ChannelTimeout, match=r"controller-0 has not opened channel 'control' after 1 s"):
        await waiting


async def test_the_error_names_the_server_that_does_not_answer(layout: RunLayout):
    stale = Endpoint("control", "controller", 0, "ipc:///nowhere/s", "dead", 4711, socket.gethostname())
    publish(layout.rendezvous, stale)
    with pytest.raises(ChannelTimeout, match=r"controller-0 \(process 4711 .*incarnation dead\).*no answer"):
        await join(layout, timeout_s=0.1)


async def test_an_elastic_joiner_whose_key_is_minted_later_gets_in(layout: RunLayout):
    server = serve(layout)
    mint_run_keys(layout.secrets, ["generator-9"])
    client = await join(layout, replica=9)
    await meet(server, client, "generator-9")


async def test_a_role_without_a_key_is_told_so(layout: RunLayout):
    server = serve(layout)
    with pytest.raises(RunDirectoryError, match=r"generator-5\.secret"):
        await join(layout, replica=5)
    await server.close()


async def test_a_local_address_on_another_host_is_refused_with_the_reason(layout: RunLayout):
    publish(layout.rendezvous, Endpoint("control", "controller", 0, "ipc:///tmp/x/s", "one", 1, "elsewhere"))
    with pytest.raises(ConfigError, match=r"on elsewhere.*transport\.kind must be 'tcp'"):
        await join(layout)


async def test_a_restarted_peer_is_heard_and_its_zombie_is_not(layout: RunLayout):
    server = serve(layout)
    zombie = await join(layout, "first")
    await zombie.send(beat(1))
    assert (await server.receive(PATIENCE_S))[1] == beat(1)
    successor = await join(layout, "second")
    await successor.send(beat(2))
    assert (await server.receive(PATIENCE_S))[1] == beat(2)
    await zombie.send(beat(3))
    await successor.send(beat(4))
    assert (await server.receive(PATIENCE_S))[1] == beat(4)
    for number in range(20):  # with bare names as routing ids, the two would throw each other out by turns
        await server.send("generator-0", StopRole(str(number)))
        assert await successor.receive(PATIENCE_S) == StopRole(str(number))
    async with asyncio.timeout(PATIENCE_S):
        while server.statistics.messages_rejected < 1:  # noqa: ASYNC110  it comes over another connection, perhaps late
            await asyncio.sleep(0.01)
    assert server.statistics.messages_rejected == 1
    await zombie.close()
    await successor.close()
    await server.close()


async def test_the_unix_socket_lies_in_a_private_directory_that_goes_with_it(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))  # a TMPDIR too long for a unix socket
    server = serve(layout)
    path = Path(server.address.removeprefix("ipc://"))
    assert len(str(path)) <= MAX_IPC_PATH_BYTES
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await server.close()
    assert not path.parent.exists()
    assert not list(long.iterdir())


def test_closing_does_not_wait_for_ever_for_a_socket_that_stays_open():
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    forgotten = context.socket(zmq.PAIR)
    assert not terminate(context, timeout_s=0.05)
    forgotten.close()


async def test_a_server_whose_address_cannot_be_withdrawn_is_closed_all_the_same(layout: RunLayout):
    """An address may outlive its server; an error instead of a normal end would end a role that serves again."""
    before = num_open()
    server = serve(layout)
    (address,) = layout.rendezvous.glob("control-0.json")
    address.unlink()
    address.mkdir()
    await server.close()
    assert num_open() == before
    address.rmdir()


async def test_a_server_whose_address_cannot_be_published_leaves_nothing_open(layout: RunLayout):
    layout.rendezvous.parent.mkdir(parents=True, exist_ok=True)
    layout.rendezvous.write_text("a file in the way")
    before = num_open()
    for _ in range(2):
        with pytest.raises(OSError, match="rendezvous"):
            serve(layout)
    assert num_open() == before


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ----------------------------------------------------------------------------------------------------------- rendezvous


FIRST = Endpoint("leases", "controller", 0, "tcp://10.0.0.1:4000", "first", 12, "node-1")
SECOND = dataclasses.replace(FIRST, address="tcp://10.0.0.2:5000", incarnation="second", pid=13, host="node-2")


def test_what_is_published_is_found_and_is_private(tmp_path: Path):
    directory = tmp_path / "rendezvous"
    assert find(directory, "leases") is None
    publish(directory, FIRST)
    assert find(directory, "leases") == FIRST
    assert find(directory, "leases", replica=1) is None
    assert find(directory, "control") is None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()] == [0o600]


def test_a_newer_incarnation_overwrites_and_is_not_withdrawn_by_the_older(tmp_path: Path):
    publish(tmp_path, FIRST)
    publish(tmp_path, SECOND)
    withdraw(tmp_path, FIRST)
    assert find(tmp_path, "leases") == SECOND
    for _ in range(2):
        withdraw(tmp_path, SECOND)
    assert find(tmp_path, "leases") is None
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_endpoint_is_named(tmp_path: Path):
    (tmp_path / "leases-0.json").write_text('{"channel": "leases"}')
    with pytest.raises(ProtocolError, match=r"leases-0\.json: endpoint"):
        find(tmp_path, "leases")


def test_a_successor_is_another_incarnation_and_none_of_an_earlier_start(tmp_path: Path):
    ours = dataclasses.replace(FIRST, incarnation="5.1.0-a")
    assert successor(tmp_path / "nowhere", ours) is None
    publish(tmp_path, ours)
    assert successor(tmp_path, ours) is None
    for incarnation, follows in (("5.0.9-z", False), ("5.1.0-b", True), ("5.1.1-a", True), ("by-hand", True)):
        other = dataclasses.replace(SECOND, incarnation=incarnation)
        publish(tmp_path, other)
        assert successor(tmp_path, ours) == (other if follows else None)
    (tmp_path / "leases-0.json").write_text("{")
    assert successor(tmp_path, ours) is None


async def test_who_is_gone_for_good_is_not_waited_for(tmp_path: Path):
    publish(tmp_path, FIRST)
    with pytest.raises(ChannelTimeout, match="controller-0 has not opened channel 'leases'"):
        await await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(0.06), gone="first")
    waiting = asyncio.create_task(
        await_endpoint(tmp_path, "leases", "controller", deadline=Deadline(PATIENCE_S), gone="first")
    )
    await asyncio.sleep(0.01)
    publish(tmp_path, SECOND)
    assert await waiting == SECOND


def test_the_error_says_who_is_missing_after_how_long(tmp_path: Path):
    with pytest.raises(ChannelTimeout, match=r"reward-3 has not opened channel 'rewards' after 0.01 s"):
        await_endpoint_blocking(tmp_path, "rewards", "reward", 3, deadline=Deadline(0.01))


# -------------------------------------------------------------------------------------------------------------- signals
#
# A role without an event loop hears its signals while it waits for a message.


# The signal reaches a thread that is not the one that waits, so it interrupts no system call: just like a signal that
# arrives between Python's last look for signals and the call.
WAITER = """
import os, signal, sys, threading, time
from pathlib import Path
from rlhpc.config.tables import TransportConfig
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.messages import BATCHES
from rlhpc.transport.open import connect_blocking

def leave(number, frame):  # an exception would be lost wherever Python runs a destructor
    os.write(1, b"heard\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, leave)
channel = connect_blocking(BATCHES, layout=RunLayout(Path(sys.argv[1])), config=TransportConfig(kind="ipc"),
                           role="trainer", replica=0, incarnation="0.0.0-t", timeout_s=60)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waiting", flush=True)
channel.receive()
"""


@pytest.mark.starts
async def test_a_signal_that_interrupts_no_system_call_is_heard_all_the_same(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    mint_run_keys(layout.secrets, ["controller-0", "trainer-0"])
    server = open_server(BATCHES, layout=layout, config=TransportConfig(kind="ipc"), replica=0, incarnation="0.0.0-c")
    waiter = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITER, tmp_path, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert waiter.stdout is not None
        assert await waiter.stdout.readline() == b"waiting\n"
        waiter.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await waiter.stdout.read() == b"heard\n"
            assert await waiter.wait() == 0
    finally:
        if waiter.returncode is None:
            waiter.kill()
            await waiter.wait()
        await server.close()
