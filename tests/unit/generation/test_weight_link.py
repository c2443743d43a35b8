from __future__ import annotations

import threading

import pytest
import torch

from rlhpc.contracts import WeightReceiver
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.generation.weight_link import BUSY, DONE, FAILED, TORN, NamedTensors, WeightLink
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.device_scope import DeviceScope
from tests.unit.weights.fake_cuda import FakeCuda

GROUP = WeightGroup(1, "gloo", "file:///x", ("g",), (1,))
MANIFEST = WeightManifest(1, 1, (), ())
ON_CPU = DeviceScope(torch.device("cpu"))


class GatedReceiver(WeightReceiver):
    """Receives when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.rank = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        self.rank = rank

    def receive(self, manifest: WeightManifest) -> NamedTensors:
        assert self.gate.wait(5)
        if self.error is not None:
            raise self.error
        return [("w", torch.ones(2))]

    def leave(self) -> None:
        self.rank = 0


@pytest.fixture
def receiver() -> GatedReceiver:
    return GatedReceiver()


def ended(link: WeightLink) -> tuple[str, str]:
    while link.poll()[0] == BUSY:
        threading.Event().wait(0.001)
    return link.poll()


def test_a_shadow_is_handed_over_once(receiver: GatedReceiver) -> None:
    link = WeightLink(receiver, ON_CPU)
    assert link.begin_receive(MANIFEST) == (BUSY, "")
    with pytest.raises(TornWeights):
        link.take()
    receiver.gate.set()
    assert ended(link) == (DONE, "")
    assert [name for name, _ in link.take()] == ["w"]
    with pytest.raises(TornWeights):
        link.take()


def test_joining_passes_the_rank(receiver: GatedReceiver) -> None:
    link = WeightLink(receiver, ON_CPU)
    link.begin_join(GROUP, 3)
    assert ended(link) == (DONE, "")
    assert receiver.rank == 3


@pytest.mark.parametrize(
    ("error", "state"),
    [(TornWeights("bad sum"), TORN), (GroupFailed("gone"), FAILED), (MemoryError("no room"), FAILED)],
)
def test_whatever_goes_wrong_is_told_and_leaves_no_shadow(
    receiver: GatedReceiver, error: Exception, state: str
) -> None:
    link = WeightLink(receiver, ON_CPU)
    receiver.error = error
    receiver.gate.set()
    link.begin_receive(MANIFEST)
    found, message = ended(link)
    assert found == state
    assert str(error) in message
    with pytest.raises(TornWeights):
        link.take()


def test_a_second_task_does_not_wait_for_the_first(receiver: GatedReceiver) -> None:
    link = WeightLink(receiver, ON_CPU)
    link.begin_receive(MANIFEST)
    assert link.begin_receive(MANIFEST)[0] == FAILED
    receiver.gate.set()
    assert ended(link) == (DONE, "")


def test_leaving_drops_the_shadow(receiver: GatedReceiver) -> None:
    link = WeightLink(receiver, ON_CPU)
    receiver.gate.set()
    link.begin_receive(MANIFEST)
    ended(link)
    link.leave()
    with pytest.raises(TornWeights):
        link.take()


def test_a_receiver_works_on_its_workers_gpu_and_on_a_stream_of_its_own(
    receiver: GatedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(receiver, "receive", lambda manifest: seen.append(cuda.here()) or [])
    scope = DeviceScope(torch.device("cuda", 3))
    for link in (WeightLink(receiver, scope), WeightLink(receiver, scope)):  # two epochs of one worker
        link.begin_receive(MANIFEST)
        assert ended(link) == (DONE, "")
    assert seen == [(3, "stream 0 of cuda:3")] * 2  # one stream for life: its freed blocks are found again
    assert cuda.here() == (0, "default")  # the engine's thread is left as it was
    assert cuda.synchronized == ["stream 0 of cuda:3"] * 2  # done is said when the copies have ended
