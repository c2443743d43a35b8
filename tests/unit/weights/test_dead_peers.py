"""A member of a broadcast that dies is noticed within seconds, also where its connections tell nothing (NCCL)."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, distributed

from rlhpc.base.patience import Deadline
from rlhpc.config.tables import WeightsConfig
from rlhpc.generation.worker_extension import BUSY, DONE, FAILED, READY, WeightLink
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.group import Lifeline
from rlhpc.weights.memory import DeviceScope, HostShadow
from rlhpc.weights.publisher import GroupPublisher
from rlhpc.weights.receiver import GroupReceiver
from tests.contracts.weight_receivers import draw_weights, specs_of
from tests.patience import PATIENCE_S
from tests.unit.weights.doomed_peer import CPU, TIMEOUT_S

pytestmark = pytest.mark.starts
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


def test_a_lifeline_is_lost_when_either_end_is_closed(store: Any) -> None:
    for closed in (0, 1):
        ends = Lifeline.listen(store, ""), Lifeline.reach(store)
        assert [end.lost() for end in ends] == ["", ""]
        ends[closed].close()
        assert lost(ends[1 - closed])
        ends[1 - closed].close()


def test_a_receiver_that_was_gone_before_it_was_looked_at_is_missed(store: Any) -> None:
    with_publisher = Lifeline.listen(store, "")
    Lifeline.reach(store).close()
    assert lost(with_publisher)
    with_publisher.close()


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


def test_a_lifeline_that_cannot_be_reached_is_a_failed_group(store: Any) -> None:
    line = Lifeline.listen(store, "")
    line.close()
    with pytest.raises(OSError, match="refused"):
        Lifeline.reach(store)


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
