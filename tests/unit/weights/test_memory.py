"""Memory of weights on their way: what a shadow holds, how much there is at once, who may write into it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.config.tables import WeightsConfig
from rlhpc.generation.weight_updates import BUSY, DONE, WeightLink
from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.broadcast import GroupPublisher, GroupReceiver
from rlhpc.weights.buckets import buckets_of, header_of, make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.group import SideGroup, open_store
from rlhpc.weights.memory import DeviceScope, HostShadow, blocks_in_turn, fresh_blocks, named_tensors
from tests.patience import PATIENCE_S

# --------------------------------------------------------------------------------------------------------------- shadow


CPU = torch.device("cpu")
SPECS = [TensorSpec(f"w{index}", "float32", (size,)) for index, size in enumerate((4, 4, 4, 4, 64, 4, 4))]
MANIFEST = make_manifest(1, 1, SPECS, 32)


class Sender(WeightReceiver):
    """Fills what it is given with the number of the bucket, and remembers what is alive."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.alive: list[int] = []
        self.held: list[int | None] = []
        self.own_identity = 77

    def join(self, group: WeightGroup, rank: int) -> None: ...

    def leave(self) -> None: ...

    def identity(self) -> int:
        return self.own_identity

    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        self.held.append(held)
        blocks: list[weakref.ref[torch.Tensor]] = []
        for index, bucket in enumerate(buckets_of(manifest)):
            block = allocate(index, CPU)
            assert block.shape == (bucket.num_bytes,)
            blocks.append(weakref.ref(block.untyped_storage()))
            self.alive.append(sum(block() is not None for block in blocks))
            yield block.view(torch.float32).fill_(index).view(torch.uint8)
            del block
        if self.error is not None:
            raise self.error


def values(tensors: list[tuple[str, torch.Tensor]]) -> list[float]:
    return [float(tensor[0]) for _, tensor in tensors]


def test_a_shadow_keeps_its_memory_from_version_to_version() -> None:
    shadow = HostShadow(is_pinned=False)
    addresses = []
    for _ in range(2):
        shadow.receive(Sender(), MANIFEST)
        tensors = shadow.take()
        assert [name for name, _ in tensors] == [spec.name for spec in SPECS]
        assert values(tensors) == [0, 0, 1, 1, 2, 3, 3]
        addresses.append([tensor.data_ptr() for _, tensor in tensors])
    assert addresses[0] == addresses[1]


def test_a_shadow_says_what_it_holds_and_after_a_torn_version_nothing() -> None:
    """What changed is put into these bytes: those of two versions must never be taken for one."""
    shadow = HostShadow(is_pinned=False)
    sender, torn = Sender(), Sender(TornWeights("bad"))
    shadow.receive(sender, MANIFEST)
    shadow.receive(sender, MANIFEST)
    with pytest.raises(TornWeights, match="bad"):
        shadow.receive(torn, MANIFEST)
    shadow.receive(sender, MANIFEST)
    assert sender.held == [0, 77, 0]
    assert torn.held == [77]


def test_a_version_that_was_dropped_while_it_arrived_counts_for_nothing() -> None:
    """An abandoned task may end after the one that took over: its version must not be taken for that."""

    class Overtaken(Sender):
        def identity(self) -> int:
            shadow.drop()
            shadow.receive(Sender(), other)
            return 13

    shadow, other = HostShadow(is_pinned=False), make_manifest(2, 1, SPECS[:3], 16)
    shadow.receive(Overtaken(), MANIFEST)
    assert values(shadow.take()) == [0, 1, 2]
    last = Sender()
    shadow.receive(last, other)
    assert last.held == [77]


def test_after_a_torn_version_there_is_nothing_to_take() -> None:
    shadow = HostShadow(is_pinned=False)
    shadow.receive(Sender(), MANIFEST)
    with pytest.raises(TornWeights, match="bad"):
        shadow.receive(Sender(TornWeights("bad")), MANIFEST)
    with pytest.raises(TornWeights):
        shadow.take()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("can't allocate")]
)
def test_memory_that_runs_out_is_a_failed_member(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def empty(*size: int, **kwargs: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(GroupFailed, match="no room for"):
        HostShadow(is_pinned=False).receive(Sender(), MANIFEST)
    for blocks in (fresh_blocks(MANIFEST), blocks_in_turn(MANIFEST)):
        with pytest.raises(GroupFailed, match="no room for"):
            blocks(0, CPU)


def test_blocks_in_turn_are_two() -> None:
    blocks = blocks_in_turn(MANIFEST)
    addresses = [blocks(index, CPU).data_ptr() for index in range(len(MANIFEST.bucket_ends))]
    assert len(set(addresses)) == 2
    assert addresses[0::2] == [addresses[0]] * len(addresses[0::2])


# -------------------------------------------------------------------------------------------------------- pinned shadow
#
# Page-locked memory of a shadow, by what CUDA's runtime promises: nothing that is not registered may be unregistered,
# and unregistering waits for no copy.


ON_A_GPU = torch.device("meta")  # has no bytes: those that arrive are the sender's
OTHER = make_manifest(2, 1, SPECS[:3], 16)


class Runtime:
    """Registers memory, and refuses the first time that it is asked for a block of `refused_bytes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused_bytes: int = -1) -> None:
        self.registered: set[int] = set()
        self.may_be_copying = False
        self._refused_bytes = refused_bytes
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "check_error", self._check)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: self)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if num_bytes == self._refused_bytes:
            self._refused_bytes = -1
            return 2
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert not self.may_be_copying, "the GPU writes into memory that is given up"
        self.registered.remove(address)  # KeyError: an error that the next kernel of this thread would report
        return 0

    def synchronize(self) -> None:
        self.may_be_copying = False

    @staticmethod
    def _check(outcome: int) -> None:
        if outcome:
            raise RuntimeError("CUDA error: out of memory")


class GpuSender(Sender):
    """Yields blocks of a GPU, whose copies to the host end some time later."""

    def __init__(self, runtime: Runtime, error: Exception | None = None, shadow: HostShadow | None = None) -> None:
        super().__init__(error)
        self._runtime, self._left = runtime, shadow

    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        for index, bucket in enumerate(buckets_of(manifest)):
            allocate(index, ON_A_GPU)
            yield torch.full((bucket.num_bytes,), index, dtype=torch.uint8)
            self._runtime.may_be_copying = True
        if self._left is not None:
            self._left.drop()  # by the engine, which leaves the group meanwhile
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [GroupFailed("left"), None])
def test_a_version_that_is_abandoned_keeps_its_memory_until_the_gpu_has_written_there(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    runtime, shadow = Runtime(monkeypatch), HostShadow(is_pinned=True)
    try:
        shadow.receive(GpuSender(runtime, error, shadow), MANIFEST)
    except GroupFailed:
        assert error is not None
    assert not runtime.registered


def test_memory_that_could_not_be_registered_is_not_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, shadow = Runtime(monkeypatch, buckets_of(MANIFEST)[2].num_bytes), HostShadow(is_pinned=True)
    with pytest.raises(GroupFailed, match="no room for"):
        shadow.receive(GpuSender(runtime), MANIFEST)
    shadow.receive(GpuSender(runtime), MANIFEST)
    assert len(runtime.registered) == len(buckets_of(MANIFEST))
    shadow.receive(GpuSender(runtime), OTHER)
    assert len(runtime.registered) == len(buckets_of(OTHER))


def test_a_bucket_without_bytes_is_neither_registered_nor_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, shadow = Runtime(monkeypatch), HostShadow(is_pinned=True)
    empty: Any = make_manifest(1, 1, [TensorSpec("none", "float32", (0,))], 32)
    with pytest.raises(TornWeights):
        shadow.receive(GpuSender(runtime, TornWeights("bad")), empty)
    shadow.receive(GpuSender(runtime), OTHER)
    assert len(runtime.registered) == len(buckets_of(OTHER))


# ------------------------------------------------------------------------------------------------------- bounded memory
#
# How much of a version is in memory at once while it is received and loaded by way of a real group.


NUM_BUCKETS = 30
THIRTY = [TensorSpec(f"w{index}", "float32", (16,)) for index in range(NUM_BUCKETS)]
IN_THIRTY = make_manifest(1, 1, THIRTY, 64)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Blocks are freed by counting references, or not in time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_loader_that_keeps_nothing_sees_three_buckets_at_most(
    transport: str, tmp_path: Path, no_collector: None
) -> None:
    publisher = make_publisher(WeightsConfig(transport=transport), directory=tmp_path, device="cpu")
    receiver = make_receiver(transport, device="cpu", timeout_s=60.0)
    group = publisher.open(WeightGroup(1, transport, "", ("g",), (1,)))
    joining = threading.Thread(target=receiver.join, args=(group, 1))
    joining.start()
    publisher.form()
    joining.join()
    weights = [(spec.name, torch.full(spec.shape, float(index))) for index, spec in enumerate(THIRTY)]
    publishing = threading.Thread(target=publisher.publish, args=(IN_THIRTY, iter(weights)))
    publishing.start()

    allocate, blocks, alive = fresh_blocks(IN_THIRTY), list[weakref.finalize](), list[int]()

    def counted(index: int, device: torch.device) -> torch.Tensor:
        block = allocate(index, device)
        blocks.append(weakref.finalize(block.untyped_storage(), int))
        alive.append(sum(each.alive for each in blocks))
        return block

    with closing(receiver.receive(IN_THIRTY, counted)) as arriving:
        loaded = [float(tensor[0]) for _, tensor in named_tensors(IN_THIRTY, arriving)]
    publishing.join()
    publisher.dissolve()
    assert loaded == list(range(NUM_BUCKETS))
    assert 1 <= max(alive) <= 3


def test_a_block_that_a_loader_holds_a_tensor_of_stays_alive(no_collector: None) -> None:
    allocate = fresh_blocks(IN_THIRTY)
    block = allocate(0, torch.device("cpu"))
    alive = weakref.finalize(block.untyped_storage(), int)
    (held,) = [tensor for _, tensor in named_tensors(make_manifest(1, 1, THIRTY[:1], 64), iter([block]))]
    del block
    assert alive.alive
    del held
    assert not alive.alive


def test_an_engine_on_the_trainers_gpu_finds_what_the_trainers_allocator_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    for device, wanted in (("cpu", []), ("cuda:0", [1, 1])):
        publisher = make_publisher(WeightsConfig(transport="ipc"), directory=tmp_path, device=device)
        publisher.open(WeightGroup(1, "ipc", "", (), ()))
        publisher.form()
        for version in range(2):
            publisher.publish(make_manifest(version, 1, (), 64), iter(()))
        publisher.dissolve()
        assert given_back == wanted


# -------------------------------------------------------------------------------------------------- abandoned receivers
#
# What an abandoned link still receives must not get into the version of the link that took over.


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
