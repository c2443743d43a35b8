"""What an abandoned link still receives must not get into the version of the link that took over."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import torch

from rlhpc.generation.worker_extension import BUSY, DONE, WeightLink
from rlhpc.protocol.types import TensorSpec, WeightGroup
from rlhpc.weights.buckets import header_of, make_manifest
from rlhpc.weights.group import SideGroup, open_store
from rlhpc.weights.memory import DeviceScope, HostShadow
from rlhpc.weights.publisher import GroupPublisher
from rlhpc.weights.receiver import GroupReceiver
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")
SPEC = TensorSpec("w", "float32", (1 << 16,))
OLD, NEW = make_manifest(1, 1, [SPEC], 1 << 20), make_manifest(2, 2, [SPEC], 1 << 20)


def link_to(shadow: HostShadow) -> WeightLink:
    return WeightLink(GroupReceiver("gloo", CPU, PATIENCE_S), DeviceScope(CPU), shadow, permit_s=PATIENCE_S)


def settle(link: WeightLink) -> None:
    while link.poll()[0] == BUSY:
        threading.Event().wait(0.01)
    assert link.poll() == (DONE, "")


def group_of(epoch: int) -> WeightGroup:
    return WeightGroup(epoch, "gloo", "", ("generator-0",), (1,))


def late_publisher(store: object, goes_on: threading.Event, has_asked: threading.Event) -> None:
    """A trainer that everybody has left: stopped between the votes and the first bucket, it goes on later."""
    group = SideGroup("gloo", store, 0, 2, PATIENCE_S, device=CPU)
    group.broadcast(torch.tensor([*header_of(OLD), 0], dtype=torch.int64))
    group.total(0)
    has_asked.set()
    assert goes_on.wait(PATIENCE_S)
    group.broadcast(torch.full(SPEC.shape, -1.0))


def test_a_bucket_that_comes_when_another_link_has_taken_over_is_not_in_its_version(tmp_path: Path) -> None:
    shadow, goes_on, has_asked = HostShadow(is_pinned=False), threading.Event(), threading.Event()
    store, address = open_store(tmp_path, "old", "", 2, PATIENCE_S)
    late = threading.Thread(target=late_publisher, args=(store, goes_on, has_asked))
    late.start()
    old = link_to(shadow)
    old.begin_join(replace(group_of(1), address=address), 1)
    settle(old)
    old.begin_shadow(OLD)
    assert has_asked.wait(PATIENCE_S)
    threading.Event().wait(0.2)  # it awaits the first bucket now
    old.leave()

    publisher = GroupPublisher("gloo", tmp_path, PATIENCE_S, device=CPU)
    opened = publisher.open(group_of(2))
    new = link_to(shadow)
    new.begin_join(opened, 1)
    publisher.form()
    settle(new)
    new.begin_shadow(NEW)
    publisher.publish(NEW, iter([("w", torch.ones(SPEC.shape))]))
    settle(new)
    tensor = dict(new.take())["w"]
    goes_on.set()
    late.join()
    publisher.dissolve()
    assert torch.equal(tensor, torch.ones(SPEC.shape))
