from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

import pytest
import torch

from rlhpc.generation.worker_extension import BUSY, DONE, FAILED, READY, TORN, WeightLink
from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.memory import DeviceScope, HostShadow
from tests.patience import PATIENCE_S
from tests.unit.weights.fake_cuda import FakeCuda

GROUP = WeightGroup(1, "gloo", "file:///x", ("g",), (1,))
MANIFEST = make_manifest(1, 1, [TensorSpec(name, "float32", (4,)) for name in "abc"], 16)  # three buckets
ON_CPU = DeviceScope(torch.device("cpu"))


class GatedReceiver(WeightReceiver):
    """Receives when it is let; what it gives is the index of the bucket."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.error_after = 0  # buckets
        self.rank = 0
        self.has_refused = False
        self.devices: list[torch.device] = []

    def join(self, group: WeightGroup, rank: int) -> None:
        self.rank = rank

    def receive(
        self, manifest: object, allocate: Allocate, held: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        assert self.gate.wait(PATIENCE_S)
        try:
            for index in range(3):
                if self.error is not None and index == self.error_after:
                    raise self.error
                block = allocate(index, torch.device("cpu"))
                yield block.view(torch.float32).fill_(index).view(torch.uint8)
            if self.error is not None:
                raise self.error
        except GeneratorExit:
            self.has_refused = True
            raise

    def leave(self) -> None:
        self.rank = 0


@pytest.fixture
def receiver() -> GatedReceiver:
    return GatedReceiver()


@pytest.fixture
def link(receiver: GatedReceiver) -> WeightLink:
    return WeightLink(receiver, ON_CPU, HostShadow(is_pinned=False), permit_s=PATIENCE_S)


class Model:
    """Loads what it is given."""

    def __init__(self) -> None:
        self.loaded: dict[str, float] = {}
        self.error: Exception | None = None

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name] = float(tensor[0])
            if self.error is not None:
                raise self.error


def ended(link: WeightLink) -> tuple[str, str]:
    while link.poll()[0] == BUSY:
        threading.Event().wait(0.001)
    return link.poll()


def test_a_shadow_is_handed_over_once(link: WeightLink, receiver: GatedReceiver) -> None:
    assert link.begin_shadow(MANIFEST) == (BUSY, "")
    with pytest.raises(TornWeights):
        link.take()
    receiver.gate.set()
    assert ended(link) == (DONE, "")
    assert [(name, float(tensor[0])) for name, tensor in link.take()] == [("a", 0), ("b", 1), ("c", 2)]
    with pytest.raises(TornWeights):
        link.take()


def test_joining_passes_the_rank(link: WeightLink, receiver: GatedReceiver) -> None:
    link.begin_join(GROUP, 3)
    assert ended(link) == (DONE, "")
    assert receiver.rank == 3


@pytest.mark.parametrize("error_after", range(4))
@pytest.mark.parametrize(
    ("error", "state"),
    [(TornWeights("bad sum"), TORN), (GroupFailed("gone"), FAILED), (MemoryError("no room"), FAILED)],
)
def test_whatever_goes_wrong_is_told_and_leaves_no_shadow(
    link: WeightLink, receiver: GatedReceiver, error: Exception, state: str, error_after: int
) -> None:
    receiver.error, receiver.error_after = error, error_after
    receiver.gate.set()
    link.begin_shadow(MANIFEST)
    found, message = ended(link)
    assert found == state
    assert str(error) in message
    with pytest.raises(TornWeights):
        link.take()


def test_a_second_task_does_not_wait_for_the_first(link: WeightLink, receiver: GatedReceiver) -> None:
    link.begin_shadow(MANIFEST)
    assert link.begin_shadow(MANIFEST)[0] == FAILED
    receiver.gate.set()
    assert ended(link) == (DONE, "")


def test_leaving_drops_the_shadow(link: WeightLink, receiver: GatedReceiver) -> None:
    receiver.gate.set()
    link.begin_shadow(MANIFEST)
    ended(link)
    link.leave()
    with pytest.raises(TornWeights):
        link.take()


def test_nothing_is_loaded_before_it_is_permitted(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    link.begin_paused(MANIFEST, model.load)
    assert link.poll() == (BUSY, "")
    receiver.gate.set()
    assert ended(link) == (READY, "")
    assert model.loaded == {}
    link.permit()
    assert ended(link) == (DONE, "")
    assert model.loaded == {"a": 0, "b": 1, "c": 2}


def test_a_version_that_is_given_up_touches_nothing_and_is_refused(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    receiver.gate.set()
    link.begin_paused(MANIFEST, model.load)
    assert ended(link) == (READY, "")
    link.give_up()
    assert ended(link)[0] == FAILED
    assert model.loaded == {}
    assert receiver.has_refused


def test_what_was_given_up_while_its_load_waited_for_another_does_not_reach_the_model(
    link: WeightLink, receiver: GatedReceiver
) -> None:
    model, waits, other_has_loaded = Model(), threading.Event(), threading.Event()

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        waits.set()
        assert other_has_loaded.wait(PATIENCE_S)
        model.load(weights)

    receiver.gate.set()
    link.begin_paused(MANIFEST, load)
    assert ended(link) == (READY, "")
    link.permit()
    assert waits.wait(PATIENCE_S)
    link.leave()
    other_has_loaded.set()
    assert ended(link)[0] == FAILED
    assert model.loaded == {}


def test_permission_is_for_one_version(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    receiver.gate.set()
    for _ in range(2):
        link.begin_paused(MANIFEST, model.load)
        assert ended(link) == (READY, "")
        link.permit()
        assert ended(link) == (DONE, "")


def test_an_engine_that_does_not_stop_sampling_is_not_waited_for_for_ever(receiver: GatedReceiver) -> None:
    link, model = WeightLink(receiver, ON_CPU, HostShadow(is_pinned=False), permit_s=0.01), Model()
    receiver.gate.set()
    link.begin_paused(MANIFEST, model.load)
    while link.poll()[0] in (BUSY, READY):
        threading.Event().wait(0.001)
    assert "did not stop sampling" in link.poll()[1]
    assert model.loaded == {}
    assert receiver.has_refused


@pytest.mark.parametrize("error_after", range(1, 4))
def test_what_is_torn_after_some_of_it_was_loaded_is_told(
    link: WeightLink, receiver: GatedReceiver, error_after: int
) -> None:
    model = Model()
    receiver.error, receiver.error_after = TornWeights("bad sum"), error_after
    receiver.gate.set()
    link.begin_paused(MANIFEST, model.load)
    assert ended(link) == (READY, "")
    link.permit()
    assert ended(link) == (TORN, "bad sum")
    assert len(model.loaded) == error_after


def test_a_model_that_cannot_load_refuses_the_version(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    model.error = MemoryError("no room for a layer")
    receiver.gate.set()
    link.begin_paused(MANIFEST, model.load)
    assert ended(link) == (READY, "")
    link.permit()
    assert ended(link) == (FAILED, "MemoryError('no room for a layer')")
    assert receiver.has_refused


def test_a_model_that_leaves_tensors_out_has_not_loaded_the_version(link: WeightLink, receiver: GatedReceiver) -> None:
    receiver.gate.set()
    link.begin_paused(MANIFEST, lambda weights: print(next(weights)))
    assert ended(link) == (READY, "")
    link.permit()
    assert ended(link)[0] == TORN


def test_a_receiver_works_on_its_workers_gpu_and_on_a_stream_of_its_own(
    receiver: GatedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(receiver, "join", lambda group, rank: seen.append(cuda.here()))
    scope = DeviceScope(torch.device("cuda", 3))
    shadow = HostShadow(is_pinned=False)
    for _ in range(2):  # two epochs of one worker
        link = WeightLink(receiver, scope, shadow, permit_s=PATIENCE_S)
        link.begin_join(GROUP, 1)
        assert ended(link) == (DONE, "")
    assert seen == [(3, "stream 0 of cuda:3")] * 2  # one stream for life: its freed blocks are found again
    assert cuda.here() == (0, "default")  # the engine's thread is left as it was
    assert cuda.synchronized == ["stream 0 of cuda:3"] * 2  # done is said when the copies have ended
