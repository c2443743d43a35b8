"""How much of a version is in memory at once while it is received and loaded by way of a real group."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rlhpc.config.tables import WeightsConfig
from rlhpc.protocol.types import TensorSpec, WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.memory import fresh_blocks, named_tensors

NUM_BUCKETS = 30
SPECS = [TensorSpec(f"w{index}", "float32", (16,)) for index in range(NUM_BUCKETS)]
MANIFEST = make_manifest(1, 1, SPECS, 64)


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
    weights = [(spec.name, torch.full(spec.shape, float(index))) for index, spec in enumerate(SPECS)]
    publishing = threading.Thread(target=publisher.publish, args=(MANIFEST, iter(weights)))
    publishing.start()

    allocate, blocks, alive = fresh_blocks(MANIFEST), list[weakref.finalize](), list[int]()

    def counted(index: int, device: torch.device) -> torch.Tensor:
        block = allocate(index, device)
        blocks.append(weakref.finalize(block.untyped_storage(), int))
        alive.append(sum(each.alive for each in blocks))
        return block

    with closing(receiver.receive(MANIFEST, counted)) as arriving:
        loaded = [float(tensor[0]) for _, tensor in named_tensors(MANIFEST, arriving)]
    publishing.join()
    publisher.dissolve()
    assert loaded == list(range(NUM_BUCKETS))
    assert 1 <= max(alive) <= 3


def test_a_block_that_a_loader_holds_a_tensor_of_stays_alive(no_collector: None) -> None:
    allocate = fresh_blocks(MANIFEST)
    block = allocate(0, torch.device("cpu"))
    alive = weakref.finalize(block.untyped_storage(), int)
    (held,) = [tensor for _, tensor in named_tensors(make_manifest(1, 1, SPECS[:1], 64), iter([block]))]
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
