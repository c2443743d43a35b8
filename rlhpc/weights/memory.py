"""Memory of weights on their way: devices, blocks of bytes, and where arriving buckets wait until they are loaded.

In this file: names of devices; work on one device; tensors in a block of bytes; out of memory; a shadow in host memory,
or blocks that are freed after use.

Input of the last: a WeightReceiver and a manifest; output: named tensors, or memory for a receiver to receive into.
Guarantee: a shadow never puts more than two buckets of a version into GPU memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.buckets import Bucket, buckets_of, layout_digest, tensor_bytes
from rlhpc.weights.choice import CPU, HOST, MIG

# ------------------------------------------------------------------------------------------------------------ device id
#
# Name a device, so that two processes can tell whether they use the same one.
#
# Input: a torch device.  Output: "" for a CPU, else the UUID of a GPU, or the name of a GPU partition (MIG); behind it,
# where NCCL_HOSTID is set, "@" and the host that this process is to NCCL (choice.py).


def device_id(device: torch.device | str) -> str:
    """The name.  Initialises CUDA for a CUDA device."""
    device = torch.device(device)
    if device.type == "cpu":
        return CPU
    index = device.index if device.index is not None else torch.cuda.current_device()
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    word = words[index].strip() if index < len(words) else ""
    # Partitions of a GPU may report the UUID of the whole; their processes know them by name.
    name = word if word.startswith(MIG) else f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    host = os.environ.get("NCCL_HOSTID", "")
    return f"{name}{HOST}{host}" if host else name


# --------------------------------------------------------------------------------------------------------- device scope
#
# Run the work of a thread on one device, and on a separate CUDA stream.
#
# Input: a device; output: a context to work in.  A thread does not inherit the current CUDA device of the one that
# started it: it begins on cuda:0 and on the legacy default stream, which waits for every other stream and makes them
# wait.  Guarantee: when the context ends, everything that was launched in it has completed, so that other threads may
# read its results without waiting for an event.


class DeviceScope:
    """One device and a stream for the thread that enters.  Kept for the life of a process.

    The caching allocator keeps freed blocks for the stream that they were allocated on: with a new stream each time
    the earlier buffers could not be reused.
    """

    def __init__(self, device: torch.device) -> None:
        """device: with its index if it is a GPU."""
        self.device = device
        self._stream: Any = None  # torch's stream classes come without types

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make device and stream the calling thread's, and wait for the stream at the end.  On CPU: nothing."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self.device)
        stream = self._own_stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _own_stream(self) -> Any:
        if self._stream is None:
            make_stream: Any = torch.cuda.Stream
            self._stream = make_stream(self.device)
        return self._stream


def indexed(device: str | torch.device) -> torch.device:
    """The device with its index: "cuda" is the calling thread's current GPU."""
    wanted = torch.device(device)
    if str(wanted) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


# --------------------------------------------------------------------------------------------------------- flat tensors
#
# Lay tensors into a block of bytes and read them back as views.
#
# Input: (name, tensor) in manifest order.  Output: a flat uint8 buffer, filled bucket by bucket; the reverse copies
# nothing.


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def fill_block(bucket: Bucket, weights: Iterator[tuple[str, Tensor]], block: Tensor) -> None:
    """Copy the bucket's tensors, drawn from `weights`, into uint8 [bucket.num_bytes] on any device.

    Raises ValueError if `weights` yields anything but the bucket's tensors in their order (a bug of the exporter).
    """
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        _, tensor = next_weight(spec, weights)
        size = tensor_bytes(spec)
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        block[offset : offset + size].copy_(flat)


def filled_spans(
    bucket: Bucket, weights: Iterator[tuple[str, Tensor]], span_bytes: int, take: Callable[[int], Tensor]
) -> Iterator[Tensor]:
    """Yield the bucket's block in spans of `span_bytes` (the last is shorter; an empty bucket has one) as they fill.

    span_bytes: a multiple of 16.  take: returns memory for a span of that size.  Raises ValueError as fill_block does.
    """
    start, span = 0, take(min(span_bytes, bucket.num_bytes))
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        _, tensor = next_weight(spec, weights)
        flat, position = tensor.detach().contiguous().view(-1).view(torch.uint8), offset
        while flat.numel():
            if position >= start + span.numel():
                yield span
                start += span.numel()
                span = take(min(span_bytes, bucket.num_bytes - start))
            piece = flat[: start + span.numel() - position]
            span[position - start : position - start + piece.numel()].copy_(piece)
            flat, position = flat[piece.numel() :], position + piece.numel()
    yield span


def num_spans(bucket: Bucket, span_bytes: int) -> int:
    """Number of spans that filled_spans yields."""
    return max(1, -(-bucket.num_bytes // span_bytes))


def next_weight(spec: TensorSpec, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor]:
    """Draw one tensor.  Raises ValueError if it is not the one specified."""
    name, tensor = next(weights, ("nothing more", None))
    if tensor is None or not is_as_specified(spec, name, tensor):
        found = name if tensor is None else f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"the manifest expects {spec.name} {spec.dtype} {tuple(spec.shape)}, weights yielded {found}")
    return name, tensor


def tensors_in_block(bucket: Bucket, block: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the bucket's tensors in uint8 [bucket.num_bytes]; they keep the block alive."""
    return [
        (spec.name, block[offset : offset + tensor_bytes(spec)].view(DTYPES[spec.dtype]).view(spec.shape))
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True)
    ]


def is_as_specified(spec: TensorSpec, name: str, tensor: Tensor) -> bool:
    """True if name, dtype and shape are the spec's."""
    return name == spec.name and tensor.dtype == DTYPES.get(spec.dtype) and tuple(tensor.shape) == tuple(spec.shape)


def exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Exhaust the iterator, so that a collective export on the trainer's side ends on all its ranks."""
    for _ in weights:
        pass


# -------------------------------------------------------------------------------------------------------- out of memory
#
# Out of memory: map torch's errors to ours, and return unused GPU memory to other processes.


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turn every out-of-memory error into GroupFailed: torch raises RuntimeError or a subclass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise GroupFailed(f"no room for {what}: {reason}") from error


def give_back_unused(device: torch.device) -> None:
    """Return the GPU memory that torch's allocator caches but no tensor uses to the driver.

    After steps of many lengths that can be a whole GPU, which no other process could use.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------------- shadow


NamedTensors = list[tuple[str, Tensor]]
Refuse = Callable[[WeightManifest], None]  # raises GroupFailed for a version that cannot be loaded


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

    def receive(
        self, receiver: WeightReceiver, manifest: WeightManifest, refuse: Refuse = lambda manifest: None
    ) -> None:
        """Receive a version.  Raises TornWeights, GroupFailed (also if there is no room); `take` then has nothing.

        refuse: raises GroupFailed for a version that cannot be loaded; asked before its first bucket.
        A call has the memory for itself: one that was abandoned must not write into the version of the next.  Memory
        that a receiver was given, and failed to fill, is not used again: gloo cannot cancel what it was to write there.
        """
        held, memory = self._begin()
        on_device, is_lent = blocks_in_turn(manifest), False

        def allocate(index: int, device: torch.device) -> Tensor:
            nonlocal is_lent
            if not index:
                refuse(manifest)
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
        """Identity of the bytes held, and their memory."""
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
        """Free the blocks, once the copies into them that this thread has launched have ended."""
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


def fresh_blocks(manifest: WeightManifest, refuse: Refuse = lambda manifest: None) -> Allocate:
    """A separate block for every bucket: it is freed when no tensor refers to it any more.

    All except those of oversized tensors have the same size, so that the caching allocator can reuse them.
    refuse: as of HostShadow.receive.
    """
    buckets = buckets_of(manifest)
    usual = max((bucket.num_bytes for bucket in buckets if len(bucket.tensors) > 1), default=0)

    def allocate(index: int, device: torch.device) -> Tensor:
        size = buckets[index].num_bytes
        if not index:
            refuse(manifest)
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
