"""A broadcast that other hosts take part in listens where they reach it, whatever this host's name resolves to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhpc.base.host_address import host_address, interface_addresses
from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher
from tests.contracts.weight_receiver_process import fingerprint
from tests.contracts.weight_receivers import Broadcast, ReceiverProcess, draw_weights, specs_of
from tests.listening import listening_addresses, listening_endpoints
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

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


@pytest.mark.parametrize("names", ["lo", pytest.param("lo,lo", marks=pytest.mark.long)])
def test_the_interface_that_gloo_is_told_comes_before_our_own_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    host = host_address({})
    with broadcast_from(host, tmp_path) as broadcast:
        publisher, *receivers = publish_once(broadcast)
    assert receivers == [{"127.0.0.1"}] * 2
    assert publisher == {host, "127.0.0.1"}  # its store besides


def test_the_interface_of_the_run_is_taken_by_receivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("RLHPC_INTERFACE", "lo")
    with broadcast_from(host_address({}), tmp_path) as broadcast:
        assert publish_once(broadcast)[1:] == [{"127.0.0.1"}] * 2


def test_members_of_one_machine_are_out_of_every_others_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ",".join(name for name in interface_addresses() if name != "lo") or "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)  # a site sets it for all jobs
    with broadcast_from("", tmp_path) as broadcast:
        assert publish_once(broadcast) == [{"127.0.0.1"}] * 3


def test_an_address_that_is_not_this_hosts_is_a_failed_group(tmp_path: Path) -> None:
    publisher = make_publisher(
        WeightsConfig(transport="gloo", timeout_s=1.0), directory=tmp_path, device="cpu", host="203.0.113.7"
    )
    with pytest.raises(GroupFailed, match="the rendezvous could not be opened"):
        publisher.open(WeightGroup(1, "gloo", "", ("g",), (1,)))
