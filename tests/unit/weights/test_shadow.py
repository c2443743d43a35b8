from __future__ import annotations

import gc
import weakref
from collections.abc import Generator
from contextlib import closing

import pytest
import torch

from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightGroup, WeightManifest
from rlhpc.weights.buckets import buckets_of, make_manifest
from rlhpc.weights.memory import HostShadow, blocks_in_turn, fresh_blocks, named_tensors

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


def test_a_shadow_follows_a_model_of_another_layout() -> None:
    shadow = HostShadow(is_pinned=False)
    shadow.receive(Sender(), MANIFEST)
    other = make_manifest(2, 1, SPECS[:3], 16)
    shadow.receive(Sender(), other)
    assert values(shadow.take()) == [0, 1, 2]


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


def test_loading_what_arrives_holds_a_few_buckets_and_never_the_model() -> None:
    specs = [TensorSpec(f"w{index}", "float32", (8,)) for index in range(40)]
    manifest = make_manifest(1, 1, specs, 32)
    sender = Sender()
    gc.disable()  # blocks are freed by counting references, or not in time
    try:
        with closing(sender.receive(manifest, fresh_blocks(manifest))) as arriving:
            loaded = [float(tensor[0]) for _, tensor in named_tensors(manifest, arriving)]
    finally:
        gc.enable()
    assert loaded == list(range(40))
    assert max(sender.alive) <= 3
