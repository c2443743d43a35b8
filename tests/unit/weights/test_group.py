"""Groups that receive a broadcast together: where they listen, who is missed, and what a dead one leaves behind."""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, distributed

from rlhpc.base.host_address import host_address, interface_addresses
from rlhpc.base.patience import Deadline
from rlhpc.config.tables import WeightsConfig
from rlhpc.generation.weight_updates import BUSY, DONE, FAILED, READY, WeightLink
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.broadcast import GroupPublisher, GroupReceiver
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.group import WITHOUT_WATCHDOG, Lifeline, SideGroup, file_of
from rlhpc.weights.ipc import IpcPublisher
from rlhpc.weights.memory import DeviceScope, HostShadow
from tests.contracts.weight_receiver_process import fingerprint
from tests.contracts.weight_receivers import Broadcast, ReceiverProcess, draw_weights, specs_of
from tests.listening import listening_addresses, listening_endpoints
from tests.patience import PATIENCE_S
from tests.unit.weights.doomed_peer import CPU, TIMEOUT_S

# ----------------------------------------------------------------------------------------------------------- dead peers
#
# A member of a broadcast that dies is noticed within seconds, also where its connections tell nothing (NCCL).


MANIFEST = make_manifest(1, 1, specs_of(draw_weights(1)), 1 << 16)
SECOND_BUCKET = MANIFEST.bucket_ends[0]
NOTHING_SENT = -1
assert TIMEOUT_S > 5 * PATIENCE_S


class Doomed:
    """Starts members that go deaf, and kills them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.weights.doomed_peer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[3],
        )  # fmt: skip

    def begin(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        command = {"do": do, "manifest": msgspec.to_builtins(MANIFEST), **arguments}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, key: str) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())[key]

    def kill_the_deaf(self) -> None:
        os.kill(self.hear("deaf"), signal.SIGKILL)


@pytest.fixture(scope="module")
def doomed() -> Iterator[Doomed]:
    started = Doomed()
    yield started
    started.process.kill()
    started.process.wait()
    for stream in (started.process.stdin, started.process.stdout):
        assert stream is not None
        stream.close()


def reached(link: WeightLink, *states: str) -> str:
    deadline = Deadline(PATIENCE_S)
    while (state := link.poll()[0]) not in states:
        assert not deadline.is_over, f"still {state}: the group's own time-out is {TIMEOUT_S:g} s"
        time.sleep(0.005)
    return link.poll()[1]


def joined(doomed: Doomed, directory: Path, stop_at: int) -> WeightLink:
    """A worker's end of a group whose publisher will go deaf."""
    doomed.begin("publish", directory=str(directory), stop_at=stop_at)
    group = msgspec.convert(doomed.hear("group"), WeightGroup)
    receiver = GroupReceiver("gloo", CPU, TIMEOUT_S)
    link = WeightLink(receiver, DeviceScope(CPU), HostShadow(is_pinned=False), permit_s=TIMEOUT_S)
    link.begin_join(group, 1)
    reached(link, "done")
    return link


def load_all(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def begin_paused_and_permit(link: WeightLink) -> None:
    link.begin_paused(MANIFEST, load_all)
    reached(link, READY)
    link.permit()


BEGINNINGS: dict[str, tuple[int, Callable[[WeightLink], object]]] = {
    "paused, before the first bucket": (NOTHING_SENT, lambda link: link.begin_paused(MANIFEST, load_all)),
    "paused, while the engine stops sampling": (SECOND_BUCKET, lambda link: link.begin_paused(MANIFEST, load_all)),
    "paused, half of it loaded": (SECOND_BUCKET, begin_paused_and_permit),
    "shadow": (SECOND_BUCKET, lambda link: link.begin_shadow(MANIFEST)),
}


@pytest.mark.starts
@pytest.mark.parametrize("moment", BEGINNINGS)
def test_a_receiver_notices_a_dead_publisher_though_its_connections_stay_open(
    doomed: Doomed, tmp_path: Path, moment: str
) -> None:
    stop_at, begin = BEGINNINGS[moment]
    link = joined(doomed, tmp_path, stop_at)
    begin(link)
    doomed.kill_the_deaf()
    assert "publisher is gone" in reached(link, FAILED)
    link.leave()


@pytest.mark.starts
def test_a_worker_may_leave_while_it_waits_for_a_publisher_that_hangs(doomed: Doomed, tmp_path: Path) -> None:
    """Its thread ends, and whoever calls leave() is not held up: in a worker that is the thread that decodes."""
    link = joined(doomed, tmp_path, SECOND_BUCKET)
    link.begin_shadow(MANIFEST)
    deaf = doomed.hear("deaf")
    assert link.poll()[0] == BUSY
    with ThreadPoolExecutor(1) as pool:
        pool.submit(link.leave).result(PATIENCE_S)
    assert "has left the group" in reached(link, FAILED)
    os.kill(deaf, signal.SIGKILL)


@pytest.mark.starts
def test_a_worker_may_leave_while_it_waits_for_a_publisher_that_has_not_begun(tmp_path: Path) -> None:
    config = WeightsConfig(transport="ipc", timeout_s=TIMEOUT_S)
    publisher = make_publisher(config, directory=tmp_path, device="cpu")
    group = publisher.open(WeightGroup(1, "ipc", "", ("generator-0",), (1,)))
    receiver = make_receiver("ipc", device="cpu", timeout_s=TIMEOUT_S)
    link = WeightLink(receiver, DeviceScope(CPU), HostShadow(is_pinned=False), permit_s=TIMEOUT_S)
    link.begin_join(group, 1)
    reached(link, DONE)
    publisher.form()
    link.begin_shadow(MANIFEST)
    time.sleep(0.1)  # it waits now
    assert link.poll()[0] == BUSY
    with ThreadPoolExecutor(1) as pool:
        pool.submit(link.leave).result(PATIENCE_S)
    assert "member" in reached(link, FAILED)
    publisher.dissolve()


@pytest.mark.starts
@pytest.mark.parametrize("stop_at", [NOTHING_SENT, 0])
def test_the_trainer_notices_a_dead_receiver_though_its_connections_stay_open(
    doomed: Doomed, tmp_path: Path, stop_at: int
) -> None:
    publisher = GroupPublisher("gloo", tmp_path, TIMEOUT_S, device=CPU)
    group = publisher.open(WeightGroup(1, "gloo", "", ("g",), (1,)))
    doomed.begin("receive", group=msgspec.to_builtins(group), stop_at=stop_at)
    publisher.form()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publisher.publish, MANIFEST, iter(draw_weights(1)))
        doomed.kill_the_deaf()
        with pytest.raises(GroupFailed, match="a receiver is gone"):
            publishing.result(PATIENCE_S)
    publisher.dissolve()


# ------------------------------------------------------------------------------------------------------- the lifeline


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return distributed.FileStore(str(tmp_path / "store"), 2)


def lost(line: Lifeline) -> str:
    Deadline(PATIENCE_S).wait_for(lambda: bool(line.lost()), 0.001)
    return line.lost()


@pytest.mark.starts
def test_a_lifeline_is_lost_when_either_end_is_closed(store: Any) -> None:
    for closed in (0, 1):
        ends = Lifeline.listen(store, ""), Lifeline.reach(store)
        assert [end.lost() for end in ends] == ["", ""]
        ends[closed].close()
        assert lost(ends[1 - closed])
        ends[1 - closed].close()


@pytest.mark.starts
def test_a_receiver_that_was_gone_before_it_was_looked_at_is_missed(store: Any) -> None:
    with_publisher = Lifeline.listen(store, "")
    Lifeline.reach(store).close()
    assert lost(with_publisher)
    with_publisher.close()


@pytest.mark.starts
def test_strangers_at_the_port_are_nothing_to_a_lifeline(store: Any) -> None:
    """A port scanner connects and leaves; what it sends is not the group's password."""
    publisher = Lifeline.listen(store, "")
    host, port = store.get("lifeline").decode().split()[0].rsplit(":", 1)
    for said in (b"", b"GET / HTTP/1.1\r\nHost: publisher.example.org\r\n\r\n", b"abc"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(said)
            publisher.lost()
        threading.Event().wait(0.01)
        assert publisher.lost() == ""
    receiver = Lifeline.reach(store)
    assert publisher.lost() == ""
    receiver.close()
    assert lost(publisher)
    publisher.close()


@pytest.mark.starts
def test_a_host_that_vanishes_is_missed_by_the_kernel_within_seconds(store: Any) -> None:
    """Read from the sockets: no cable can be pulled here."""
    publisher, receiver = Lifeline.listen(store, ""), Lifeline.reach(store)
    publisher.lost()
    for line in (*publisher.sockets, *receiver.sockets):
        idle, interval, count = (
            line.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count <= 10
    assert len(publisher.sockets) == len(receiver.sockets) == 1
    publisher.close()
    receiver.close()


@pytest.mark.starts
def test_a_lifeline_that_cannot_be_reached_is_a_failed_group(store: Any) -> None:
    line = Lifeline.listen(store, "")
    line.close()
    with pytest.raises(OSError, match="refused"):
        Lifeline.reach(store)


@pytest.mark.starts
def test_what_arrived_before_the_end_counts(tmp_path: Path) -> None:
    """A publisher that leaves as soon as every vote is in has published."""
    publisher = GroupPublisher("gloo", tmp_path, TIMEOUT_S, device=CPU)
    group = publisher.open(WeightGroup(1, "gloo", "", ("g",), (1,)))
    receiver = GroupReceiver("gloo", CPU, TIMEOUT_S)
    link = WeightLink(receiver, DeviceScope(CPU), HostShadow(is_pinned=False), permit_s=TIMEOUT_S)
    link.begin_join(group, 1)
    publisher.form()
    reached(link, "done")
    link.begin_shadow(MANIFEST)
    publisher.publish(MANIFEST, iter(draw_weights(1)))
    publisher.dissolve()
    reached(link, "done")
    for (_, got), (_, sent) in zip(link.take(), draw_weights(1), strict=True):
        assert torch.equal(got, sent)
    assert link.poll()[0] != BUSY


# --------------------------------------------------------------------------------------------------- earlier rendezvous
#
# A member that still waits for an epoch of an earlier attempt does not disturb one of the same number.


EPOCH = WeightGroup(1, "gloo", "", ("generator-0", "generator-1"), (1, 1))
LATE_S = 5.0


@pytest.mark.waits
def test_a_member_that_waits_in_an_epoch_of_a_dead_trainer_is_no_member_of_the_next_one(tmp_path: Path) -> None:
    """With one path for both it would be taken for the member of its rank, and connected to."""
    dead = GroupPublisher("gloo", tmp_path, LATE_S, device=CPU)
    opened = dead.open(EPOCH)
    late = GroupReceiver("gloo", CPU, LATE_S)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(late.join, opened, 2)
        alive = GroupPublisher("gloo", tmp_path, PATIENCE_S, device=CPU)
        again = alive.open(EPOCH)
        receivers = [GroupReceiver("gloo", CPU, PATIENCE_S) for _ in EPOCH.members]
        forming = pool.submit(alive.form)
        first = pool.submit(receivers[0].join, again, 1)
        with pytest.raises(GroupFailed):
            waiting.result(PATIENCE_S)
        assert not forming.done()
        receivers[1].join(again, 2)
        forming.result(PATIENCE_S)
        first.result(PATIENCE_S)
    assert [receiver.lost() for receiver in receivers] == ["", ""]
    for receiver in receivers:
        receiver.leave()
    alive.dissolve()


def test_a_rendezvous_that_the_filesystem_does_not_let_go_is_no_obstacle_to_the_next_epoch(tmp_path: Path) -> None:
    """The trainer would end where an epoch was to be dissolved because a member has failed."""
    publisher = IpcPublisher(tmp_path, CPU, LATE_S)
    first = file_of(publisher.open(EPOCH).address)
    first.unlink()
    first.mkdir()
    second = file_of(publisher.open(replace(EPOCH, epoch=2)).address)
    assert second != first
    publisher.dissolve()
    assert not second.exists()


# ------------------------------------------------------------------------------------------------ weights between hosts
#
# A broadcast that other hosts take part in listens where they reach it, whatever this host's name resolves to.


BUCKET_BYTES = 1 << 16


@contextmanager
def broadcast_from(host: str, directory: Path) -> Iterator[Broadcast]:
    """A publisher here, and two receivers in processes that have this one's environment."""
    publisher = make_publisher(
        WeightsConfig(transport="gloo", timeout_s=PATIENCE_S), directory=directory, device="cpu", host=host
    )
    receivers = [ReceiverProcess() for _ in range(2)]
    try:
        assert [receiver.answer() for receiver in receivers] == [{"ok": "ready"}] * 2
        yield Broadcast(publisher, "gloo", receivers, PATIENCE_S, "cpu")
    finally:
        publisher.dissolve()
        for receiver in receivers:
            receiver.kill()


def publish_once(broadcast: Broadcast) -> list[set[str]]:
    """Form, publish, check what arrived; returns where each process listens, the publisher first."""
    before = listening_endpoints(os.getpid())  # other tests of this process may have left groups open
    broadcast.form(epoch=1)
    weights = draw_weights(1)
    manifest = make_manifest(1, 1, specs_of(weights), BUCKET_BYTES)
    broadcast.tell_all(manifest)
    broadcast.publisher.publish(manifest, iter(weights))
    assert [receiver.answer() for receiver in broadcast.receivers] == [{"ok": fingerprint(weights)}] * 2
    here = {host for host, _ in listening_endpoints(os.getpid()) - before}
    return [here, *(listening_addresses(receiver.process.pid) for receiver in broadcast.receivers)]


@pytest.mark.starts
def test_every_process_listens_at_the_address_that_other_hosts_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("RLHPC_INTERFACE", raising=False)
    host = host_address()
    with broadcast_from(host, tmp_path) as broadcast:
        assert publish_once(broadcast) == [{host}] * 3
    assert list(tmp_path.iterdir()) == []  # nothing of it is in a file
    if any(not address.startswith("127.") for address in interface_addresses().values()):
        assert not host.startswith("127.")


@pytest.mark.starts
@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("GLOO_SOCKET_IFNAME", "lo"),
        pytest.param("GLOO_SOCKET_IFNAME", "lo,lo", marks=pytest.mark.long),
        ("RLHPC_INTERFACE", "lo"),  # of the run
    ],
)
def test_the_interface_that_gloo_or_the_run_is_told_comes_before_our_own_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, names: str
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv(variable, names)
    host = host_address({})
    with broadcast_from(host, tmp_path) as broadcast:
        publisher, *receivers = publish_once(broadcast)
    assert receivers == [{"127.0.0.1"}] * 2
    if variable == "GLOO_SOCKET_IFNAME":
        assert publisher == {host, "127.0.0.1"}  # its store besides


@pytest.mark.starts
def test_members_of_one_machine_are_out_of_every_others_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ",".join(name for name in interface_addresses() if name != "lo") or "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)  # a site sets it for all jobs
    with broadcast_from("", tmp_path) as broadcast:
        assert publish_once(broadcast) == [{"127.0.0.1"}] * 3


@pytest.mark.starts
def test_an_address_that_is_not_this_hosts_is_a_failed_group(tmp_path: Path) -> None:
    publisher = make_publisher(
        WeightsConfig(transport="gloo", timeout_s=1.0), directory=tmp_path, device="cpu", host="203.0.113.7"
    )
    with pytest.raises(GroupFailed, match="the rendezvous could not be opened"):
        publisher.open(WeightGroup(1, "gloo", "", ("g",), (1,)))


# ----------------------------------------------------------------------------------------------------------- nccl group
#
# How an NCCL group of ours is made, met and left, on a machine without GPUs.


GPU = torch.device("cuda", 3)


class FakeNccl:
    """ProcessGroupNCCL as far as its constructor and abort() are concerned.

    torch 2.13: the watchdog is started unless TORCH_NCCL_BLOCKING_WAIT is set when the group is made.
    """

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    made: list[FakeNccl]
    connects = True
    has_communicator = True  # an abort finds none that is still being made
    may_go_on: threading.Event

    def __init__(self, store: object, rank: int, world_size: int, options: Any) -> None:
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "1"
        self.rethrows = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("1", "3")
        self.timeout = options._timeout
        self.has_stream_of_its_own = options.is_high_priority_stream
        self.is_aborted = threading.Event()
        type(self).made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> FakeNccl:
        if not self.has_communicator:
            assert self.may_go_on.wait(PATIENCE_S)
            self.has_communicator = True
        if not self.connects:
            assert self.is_aborted.wait(PATIENCE_S)
            raise RuntimeError("NCCL communicator was aborted")
        return self

    def wait(self, timeout: datetime.timedelta) -> None:
        pass

    def abort(self) -> None:
        if self.has_communicator:
            self.is_aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    """torch as it is on a GPU machine, for these few calls."""

    class Fake(FakeNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - one list a test

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Fake, raising=False)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(SideGroup, "total", lambda self, value: self._group.allreduce([], None) and value)
    return Fake


def side_group(tmp_path: Path, timeout_s: float = 60.0) -> SideGroup:
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    return SideGroup("nccl", store, 0, 2, timeout_s, device=GPU)


def test_a_group_for_weights_has_no_watchdog_that_could_end_the_process(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    """Its collectives share no stream with an engine's kernels, and its tensors live on the rank's own GPU."""
    assert side_group(tmp_path).device == GPU
    (made,) = nccl.made
    assert (made.has_watchdog, made.rethrows, made.has_stream_of_its_own) == (False, False, True)


def test_other_groups_of_the_process_keep_theirs(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    side_group(tmp_path)
    options = nccl.Options()
    options._timeout = None
    training = nccl(None, 0, 1, options)
    assert training.has_watchdog
    assert training.rethrows
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


def test_a_rendezvous_that_nccl_waits_in_for_ever_ends_and_is_aborted(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "connects", False)
    with pytest.raises(GroupFailed, match="NCCL did not connect to all ranks"):
        side_group(tmp_path, timeout_s=0.1)
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_a_communicator_that_is_made_after_it_was_given_up_is_aborted(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first collective would stay on the GPU for ever, and whoever waits for the device with it."""
    monkeypatch.setattr(nccl, "has_communicator", False)
    monkeypatch.setattr(nccl, "may_go_on", threading.Event(), raising=False)
    with pytest.raises(GroupFailed, match="NCCL did not connect to all ranks"):
        side_group(tmp_path, timeout_s=0.1)
    assert not nccl.made[0].is_aborted.is_set()
    nccl.may_go_on.set()
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_an_abort_that_fails_is_no_failure_of_who_leaves(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = side_group(tmp_path)

    def fail(self: FakeNccl) -> None:
        raise RuntimeError("aborting took 120 s")

    monkeypatch.setattr(nccl, "abort", fail)
    group.close()
    assert "aborting took 120 s" in caplog.text


def test_a_rendezvous_ends_when_a_receiver_dies_in_it(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "connects", False)
    other_end = distributed.FileStore(str(tmp_path / "store"), 2)
    reaching = threading.Thread(target=lambda: Lifeline.reach(other_end).close())
    reaching.start()
    with pytest.raises(GroupFailed, match="did not connect to all ranks: a receiver is gone"):
        side_group(tmp_path, timeout_s=10 * PATIENCE_S)
    reaching.join()
    assert nccl.made[0].is_aborted.wait(PATIENCE_S)


def test_nccl_finds_the_memory_that_the_trainers_allocator_does_not_use(
    tmp_path: Path, nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups_before: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: groups_before.append(len(nccl.made)))
    publisher = GroupPublisher("nccl", tmp_path, 60.0, device=GPU)
    for epoch in range(2):
        publisher.open(WeightGroup(epoch, "nccl", "", ("generator-0",), (1,)))
        publisher.form()
    publisher.dissolve()
    assert groups_before == [0, 1]


def test_a_group_that_is_closed_is_aborted_once(tmp_path: Path, nccl: type[FakeNccl]) -> None:
    group = side_group(tmp_path)
    group.close()
    assert nccl.made[0].is_aborted.is_set()
    group.close()


def test_several_threads_may_ask_who_is_lost_at_once(tmp_path: Path) -> None:
    """While a group connects two do, and Python refuses a second poll as long as the first has not returned."""
    store = distributed.FileStore(str(tmp_path / "store"), 2)
    line, before = Lifeline.listen(store, ""), sys.getswitchinterval()

    def ask(_: int) -> set[str]:
        return {line.lost() for _ in range(3_000)}

    sys.setswitchinterval(1e-6)  # each gives way all the time
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, range(4))) == [{""}] * 4
    finally:
        sys.setswitchinterval(before)
        line.close()


@pytest.mark.parametrize("variable", WITHOUT_WATCHDOG)
def test_torch_still_knows_the_variable(variable: str) -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    assert f'"{variable}"' in header.read_text()
