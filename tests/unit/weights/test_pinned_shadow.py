"""Page-locked memory of a shadow, by what CUDA's runtime promises: nothing that is not registered may be unregistered,
and unregistering waits for no copy."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from rlhpc.protocol.contracts import Allocate
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.buckets import buckets_of, make_manifest
from rlhpc.weights.memory import HostShadow
from tests.unit.weights.test_shadow import MANIFEST, SPECS, Sender

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
