"""Memory for arriving buckets until they are loaded: a shadow in host memory, or blocks that are freed after use.

Input: a WeightReceiver and a manifest; output: named tensors, or memory for a receiver to receive into.
Guarantee: a shadow never puts more than two buckets of a version into GPU memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing

import torch
from torch import Tensor

from rlhpc.contracts import Allocate, WeightReceiver
from rlhpc.errors import TornWeights
from rlhpc.types import WeightManifest
from rlhpc.weights.buckets import buckets_of, layout_digest
from rlhpc.weights.flat_tensors import tensors_in_block
from rlhpc.weights.out_of_memory import room_for

NamedTensors = list[tuple[str, Tensor]]


class HostShadow:
    """A whole version in host memory, which the next version reuses: allocating it costs a pass over it."""

    def __init__(self, *, is_pinned: bool) -> None:
        """is_pinned: register the memory with CUDA, so that copies to and from a GPU run at full speed."""
        self._is_pinned = is_pinned
        self._memory = _Memory(is_pinned=is_pinned)
        self._whole: WeightManifest | None = None
        self._identity = 0  # of the bytes in the memory; 0: no version
        self._receiving: _Memory | None = None  # that of the call whose version counts
        self._lock = threading.Lock()  # an abandoned call may still run, on its own thread

    def receive(self, receiver: WeightReceiver, manifest: WeightManifest) -> None:
        """Receive a version.  Raises TornWeights, GroupFailed (also if there is no room); `take` then has nothing.

        A call has the memory for itself: one that was abandoned must not write into the version of the next.  Memory
        that a receiver was given, and failed to fill, is not used again: gloo cannot cancel what it was to write there.
        """
        held, memory = self._begin()
        on_device, is_lent = blocks_in_turn(manifest), False

        def allocate(index: int, device: torch.device) -> Tensor:
            nonlocal is_lent
            memory.fit(manifest)
            is_lent |= device.type == "cpu"
            return memory.blocks[index] if device.type == "cpu" else on_device(index, device)

        try:
            with closing(receiver.receive(manifest, allocate, held)) as arriving:
                for index, block in enumerate(arriving):
                    own = memory.blocks[index]
                    if block.data_ptr() != own.data_ptr():
                        own.copy_(block, non_blocking=True)  # in stream order; readers wait for it
        except BaseException:
            if is_lent:
                memory.release()
            self._end(memory, None, 0)
            raise
        self._end(memory, manifest, receiver.identity())

    def take(self) -> NamedTensors:
        """The tensors of the version received last, in the manifest's order; valid until the next one is received.

        Raises TornWeights if there is none, or it was taken before.
        """
        manifest, self._whole = self._whole, None
        if manifest is None:
            raise TornWeights("no complete weights have been received")
        pairs = zip(buckets_of(manifest), self._memory.blocks, strict=True)
        return [named for bucket, block in pairs for named in tensors_in_block(bucket, block)]

    def drop(self) -> None:
        """Forget the version, also one that is still being received; the memory is kept."""
        with self._lock:
            self._whole = self._receiving = None

    def _begin(self) -> tuple[int, _Memory]:
        """Identity of what is held, and the memory of it."""
        with self._lock:
            held, memory = self._identity, self._memory
            self._whole, self._identity, self._receiving = None, 0, memory
            self._memory = _Memory(is_pinned=self._is_pinned)
        return held, memory

    def _end(self, memory: _Memory, whole: WeightManifest | None, identity: int) -> None:
        with self._lock:
            if self._receiving is memory:
                self._memory, self._whole, self._identity, self._receiving = memory, whole, identity, None
                return
        memory.release()


class _Memory:
    """A block of host memory for every bucket of a manifest."""

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._digest: int | None = None
        self.blocks: list[Tensor] = []

    def fit(self, manifest: WeightManifest) -> None:
        """Allocate, unless this layout was the last one's.  Raises GroupFailed."""
        digest = layout_digest(manifest)
        if self._digest == digest:
            return
        self.release()
        with room_for(f"version {manifest.policy_version}: a shadow of it in host memory"):
            for bucket in buckets_of(manifest):
                block = torch.empty(bucket.num_bytes, dtype=torch.uint8)
                if self._is_pinned:
                    _register(block.fill_(0))
                self.blocks.append(block)
        self._digest = digest

    def release(self) -> None:
        """Let go of it, once the copies into it that this thread has launched have ended."""
        self._digest = None
        if self._is_pinned and self.blocks:
            torch.cuda.current_stream().synchronize()
            for block in self.blocks:
                _unregister(block)
        self.blocks = []


def blocks_in_turn(manifest: WeightManifest) -> Allocate:
    """Two blocks, one after the other: a third bucket overwrites the first."""
    sizes = [bucket.num_bytes for bucket in buckets_of(manifest)]
    ring: list[Tensor] = []

    def allocate(index: int, device: torch.device) -> Tensor:
        if index < 2:
            largest = max(sizes[index::2])
            with room_for(f"version {manifest.policy_version}: a bucket of {largest} bytes on {device}"):
                ring.append(torch.empty(largest, dtype=torch.uint8, device=device))
        return ring[index % 2][: sizes[index]]

    return allocate


def fresh_blocks(manifest: WeightManifest) -> Allocate:
    """A separate block for every bucket: it is freed when no tensor refers to it any more.

    All except those of oversized tensors have the same size, so that the caching allocator can reuse them.
    """
    buckets = buckets_of(manifest)
    usual = max((bucket.num_bytes for bucket in buckets if len(bucket.tensors) > 1), default=0)

    def allocate(index: int, device: torch.device) -> Tensor:
        size = buckets[index].num_bytes
        with room_for(f"version {manifest.policy_version}: a bucket of {size} bytes on {device}"):
            return torch.empty(max(size, usual), dtype=torch.uint8, device=device)[:size]

    return allocate


def named_tensors(manifest: WeightManifest, blocks: Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of buckets as they arrive: views, which keep their block alive."""
    for bucket, block in zip(buckets_of(manifest), blocks, strict=True):
        yield from tensors_in_block(bucket, block)


def _register(block: Tensor) -> None:
    """Page-lock existing host memory.  torch's pin_memory() would round large blocks up to a power of two."""
    if block.numel():
        outcome = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)  # type: ignore[no-untyped-call]
        torch.cuda.check_error(outcome)


def _unregister(block: Tensor) -> None:
    """Undo _register: CUDA keeps an error of this for the thread's next kernel."""
    if block.numel():
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]
