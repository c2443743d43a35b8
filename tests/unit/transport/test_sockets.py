"""Who a message is from, and what was lost before it; keys of a run, received messages, broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from rlhpc.config.tables import TransportConfig
from rlhpc.protocol import messages as m
from rlhpc.protocol.errors import ChannelTimeout, PeerUnreachable, ProtocolError, RunDirectoryError
from rlhpc.protocol.messages import CONTROL
from rlhpc.transport.channel import ZmqClient, ZmqServer
from rlhpc.transport.security import allowed_keys, load_secret, mint_run_keys, public_key
from rlhpc.transport.sessions import PeerBook, SequenceCheck, Session, another_of, is_earlier, order_of, peer_name
from rlhpc.transport.sockets import REREAD_AFTER_S, TAKES_BEFORE_YIELD, AllowList, Inbox
from tests.cable import Cable
from tests.patience import PATIENCE_S

# ------------------------------------------------------------------------------------------------------------- sessions


def opened(name: str = "generator-0", incarnation: str = "first") -> bytes:
    return Session.open(name, incarnation).routing_id


def hear(book: PeerBook, routing_id: bytes, sequence: int, user_id: str | None = None) -> str:
    """What the server does for every message."""
    name = book.name_of(routing_id, user_id)
    book.accept(routing_id, sequence)
    return name


def test_a_session_survives_the_way_through_a_routing_id():
    session = Session.open("generator-12", "4711.0-1-uuid")
    assert Session.parse(session.routing_id) == session
    assert len(session.routing_id) < 255  # ZeroMQ's limit
    assert peer_name("generator", 1) == "generator-1"
    with pytest.raises(ValueError, match="generator/0"):
        peer_name("generator/0", 1)


@pytest.mark.parametrize("incarnation", ["", "a/b", "ä", "x" * 121, "a b", "a\n"])
def test_an_incarnation_that_cannot_travel_is_refused(incarnation: str):
    with pytest.raises(ValueError, match="incarnation"):
        Session.open("generator-0", incarnation)


@pytest.mark.parametrize("routing_id", [b"", b"\0abcd", b"generator-0", b"generator-0/x/1", b"\xff" * 40])
def test_other_routing_ids_are_no_sessions(routing_id: bytes):
    with pytest.raises(ProtocolError):
        PeerBook().name_of(routing_id, None)


def test_a_gap_is_counted_and_a_copy_refused():
    check = SequenceCheck()
    for sequence in (0, 1, 4):
        check.accept(sequence, "peer")
    assert check.lost == 2
    for sequence in (4, 2, 0):
        with pytest.raises(ProtocolError, match="duplicate or late"):
            check.accept(sequence, "peer")
    check.accept(5, "peer")
    assert check.lost == 2


def test_a_loss_before_the_first_message_is_counted_too():
    book = PeerBook()
    hear(book, opened(), 3)
    assert book.lost == 3


def test_an_incarnation_without_order_takes_over_and_does_not_unfence_the_earlier():
    book = PeerBook()
    for incarnation in ("2.0.0-a", "x"):
        hear(book, opened(incarnation=incarnation), 0)
    with pytest.raises(ProtocolError):
        book.name_of(opened(incarnation="1.0.0-b"), None)
    hear(book, opened(incarnation="2.0.1-b"), 0)


def test_a_key_speaks_under_its_own_name_only():
    book = PeerBook()
    hear(book, opened("generator-1"), 0, "generator-1")
    with pytest.raises(ProtocolError, match="generator-1: routing id: claims to be generator-2") as error:
        book.name_of(opened("generator-2"), "generator-1")
    assert error.value.peer == "generator-1"
    assert book.names == {"generator-1"}


def test_who_is_missing_is_said_beside_who_is_there():
    book = PeerBook()
    hear(book, opened("generator-1"), 0)
    with pytest.raises(PeerUnreachable, match="generator-2 is not connected; generator-1 is"):
        book.find("generator-2")


# ---------------------------------------------------------------------------------------------------------- incarnation
#
# Which of two starts is the later one.


@pytest.mark.parametrize(
    ("earlier", "later"),
    [("4711.0.0-z", "4711.0.1-a"), ("4711.0.9-z", "4711.1.0-a"), ("999.9.9-z", "4711.0.0-a"), ("0.2.0-a", "0.10.0-a")],
)
def test_jobs_come_before_restarts_and_those_before_starts(earlier: str, later: str):
    assert is_earlier(earlier, later)
    assert not is_earlier(later, earlier)


@pytest.mark.parametrize("text", ["", "a", "0-abc", "1.2-a", "1.2.3", "1.2.3-", "x.1.2-a", "1.2.3.4-a", "-1.2.3-a"])
def test_any_other_text_has_no_order(text: str):
    assert order_of(text) is None
    assert not is_earlier(text, "9.9.9-a")
    assert not is_earlier("1.1.1-a", text)


def test_another_incarnation_has_the_same_order():
    assert order_of(another_of("17.2.3-abc")) == (17, 2, 3)
    assert not is_earlier("1.2.3-a", "1.2.3-b")
    assert another_of("17.2.3-abc") != another_of("17.2.3-abc")
    assert another_of("x").startswith("x-")


# ----------------------------------------------------------------------------------------------------------------- keys


NAMES = ["controller-0", "generator-0", "generator-1"]


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_nobody_else_can_read_a_secret_under_any_umask(tmp_path: Path):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, NAMES)
    assert mode(secrets) == mode(secrets / "public") == 0o700
    assert {mode(file) for file in secrets.glob("*.secret")} == {0o600}
    assert len(list(secrets.glob("*.secret"))) == 3
    assert not list(secrets.glob(".*"))  # no temporary file is left
    assert load_secret(secrets, "generator-1")


def test_public_and_secret_keys_belong_together(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    for name in NAMES:
        public = public_key(tmp_path / "secrets", name)
        assert zmq.curve_public(load_secret(tmp_path / "secrets", name)) == public
        assert allowed_keys(tmp_path / "secrets")[public] == name
    assert len(allowed_keys(tmp_path / "secrets")) == 3


def test_names_can_be_added_and_keys_that_exist_stay(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    before = allowed_keys(tmp_path / "secrets")
    mint_run_keys(tmp_path / "secrets", [*NAMES, "generator-7"])
    after = allowed_keys(tmp_path / "secrets")
    assert before.items() < after.items()
    assert set(after.values()) == {*NAMES, "generator-7"}


def test_a_public_key_that_was_not_written_any_more_is_written_again(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    before = public_key(tmp_path / "secrets", "generator-0")
    (tmp_path / "secrets" / "public" / "generator-0.pub").unlink()  # killed between the two files
    mint_run_keys(tmp_path / "secrets", NAMES)
    assert public_key(tmp_path / "secrets", "generator-0") == before


@pytest.mark.parametrize(("which", "loosened"), [("file", 0o640), ("file", 0o604), ("directory", 0o750)])
def test_loosened_permissions_are_refused_by_name_and_mode(tmp_path: Path, which: str, loosened: int):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, NAMES)
    path = secrets / "generator-0.secret" if which == "file" else secrets
    path.chmod(loosened)
    with pytest.raises(RunDirectoryError, match=f"{path} has mode {loosened:04o}"):
        load_secret(secrets, "generator-0")


def test_keys_are_not_admitted_from_a_directory_that_others_can_write(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    (tmp_path / "secrets" / "public").chmod(0o777)
    with pytest.raises(RunDirectoryError, match="mode 0777"):
        allowed_keys(tmp_path / "secrets")


def test_a_missing_and_a_cut_key_are_named(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    with pytest.raises(RunDirectoryError, match=r"generator-9\.secret: No such file"):
        load_secret(tmp_path / "secrets", "generator-9")
    (tmp_path / "secrets" / "public" / "generator-0.pub").write_bytes(b"short")
    with pytest.raises(RunDirectoryError, match="has 5 characters, not 40"):
        public_key(tmp_path / "secrets", "generator-0")
    with pytest.raises(RunDirectoryError, match="No such file"):
        allowed_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["../etc/passwd-0", "generator", "", "Generator-0", "generator-0/x", "a-1\n"])
def test_what_is_no_name_becomes_no_file(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match="is not the name of a role instance"):
        mint_run_keys(tmp_path / "secrets", [name])


# ------------------------------------------------------------------------------------------------------- allow-list


def test_strangers_do_not_make_it_read_the_directory_over_and_over():
    reads = 0

    def read() -> dict[bytes, str]:
        nonlocal reads
        reads += 1
        return {b"known": "generator-0"}

    now = 0.0
    allowed = AllowList(read, lambda: now)
    for tick in range(100):
        now = tick * REREAD_AFTER_S / 10
        assert allowed.name_of(f"stranger {tick}".encode()) is None
        assert allowed.name_of(b"known") == "generator-0"
    assert reads <= 11


def test_loosened_permissions_keep_newcomers_out_and_members_in(tmp_path: Path):
    mint_run_keys(tmp_path / "secrets", NAMES)
    member = public_key(tmp_path / "secrets", "generator-0")
    now = 0.0
    allowed = AllowList(lambda: allowed_keys(tmp_path / "secrets"), lambda: now)
    (tmp_path / "secrets").chmod(0o755)
    now = 10.0
    assert allowed.name_of(b"x" * 40) is None
    assert allowed.name_of(member) == "generator-0"


def test_a_file_that_is_nobodys_key_keeps_nobody_out(tmp_path: Path):
    secrets = tmp_path / "secrets"
    mint_run_keys(secrets, ["controller-0"])
    (secrets / "public" / "copy of controller-0.pub").write_text("x")
    now = 0.0
    allowed = AllowList(lambda: allowed_keys(secrets), lambda: now)
    mint_run_keys(secrets, ["generator-3"])
    now = REREAD_AFTER_S
    assert allowed.name_of(public_key(secrets, "generator-3")) == "generator-3"


def test_a_filesystem_that_fails_once_keeps_newcomers_out_until_it_answers():
    """An error would end the thread that admits, and with it nobody could ever connect again."""
    answers = iter([{b"known": "generator-0"}, OSError(errno.ESTALE, "Stale file handle"), {b"new": "generator-1"}])

    def read() -> dict[bytes, str]:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    now = 0.0
    allowed = AllowList(read, lambda: now)
    now = REREAD_AFTER_S
    assert allowed.name_of(b"new") is None
    assert allowed.name_of(b"known") == "generator-0"
    now = 2 * REREAD_AFTER_S
    assert allowed.name_of(b"new") == "generator-1"


# ---------------------------------------------------------------------------------------------------------------- inbox


async def test_a_timeout_names_the_channel():
    with pytest.raises(ChannelTimeout, match=r"leases of controller-0: no message within 0.01 s"):
        await Inbox[int](1, "leases of controller-0").take(0.01)


async def test_each_waiting_take_gets_one_item():
    inbox: Inbox[int] = Inbox(10, "test")
    takes = [asyncio.create_task(inbox.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    inbox.put(1)
    await asyncio.sleep(0)
    inbox.put(2)
    inbox.put(3)
    assert sorted(await asyncio.gather(*takes)) == [1, 2, 3]


async def test_a_backlog_leaves_other_tasks_their_turn():
    inbox: Inbox[int] = Inbox(10_000, "test")
    for number in range(10 * TAKES_BEFORE_YIELD):
        inbox.put(number)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(10 * TAKES_BEFORE_YIELD):
        await inbox.take(1)
    task.cancel()
    assert turns >= 9


async def test_room_is_announced_once_a_full_inbox_is_half_empty():
    announced = []
    inbox: Inbox[int] = Inbox(4, "test", lambda: announced.append(len(inbox)))
    for number in range(3):
        inbox.put(number)
    await inbox.take(1)
    assert announced == []  # it was never full
    inbox.put(3)
    inbox.put(4)
    assert not inbox.has_room()
    for _ in range(4):
        await inbox.take(1)
    assert announced == [2]


# ---------------------------------------------------------------------------------------------------- broken connection
#
# A connection that breaks and comes back: what is lost is counted, nothing comes twice, order holds.


@pytest.fixture
async def ends(tmp_path: Path) -> Any:
    config = TransportConfig(kind="tcp")
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
