"""Transfer weights between processes that share a GPU, by CUDA IPC, or that share the memory of one host.

NCCL refuses two ranks on one device, and gloo would copy through sockets what is in the same memory.  Here
the publisher fills a few shared blocks in turn and tells every receiver over a unix socket in the run directory; before
it fills a block again, all have copied it.  A bucket is sent in one span on a GPU, and on CPU in spans that fit into
the cache, where the other side finds them.  Messages are lines of JSON:

    receiver → publisher   {"rank": 1}                              joins
    publisher → receiver   {"header": [...], "blocks": [handle, …], "span": bytes}   once per publication
    receiver → publisher   {"refused": ""}                          or why it cannot take it
    publisher → receiver   {"full": 0}                              a block is full: span 0 of all …
    receiver → publisher   {"copied": 0}                            … and may be overwritten
    publisher → receiver   {"checksums": ["…", …]}                  after the last bucket
    receiver → publisher   {"whole": true}

A dying process closes its socket, so that the others fail at once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import socket
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.base.patience import Deadline
from rlhpc.protocol.contracts import Allocate, WeightPublisher, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import Bucket, buckets_of, check_header, check_sums, header_of
from rlhpc.weights.checksums import RunningChecksum
from rlhpc.weights.group import file_of, remove_left_over
from rlhpc.weights.memory import exhaust, filled_spans, give_back_unused, num_spans, room_for

# ---------------------------------------------------------------------------------------------------------------- lines
#
# Messages between processes of one machine: lines of JSON over a unix socket.
#
# Input: a connected socket; output: messages, in order.  Every failure is the same error: the other end is lost.


class Lost(GroupFailed):
    """The other end of a connection is gone, or did not reply."""


class Line:
    """A socket that carries lines of JSON.  Every failure is a Lost."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: of every read and write."""
        connection.settimeout(timeout_s)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def write(self, message: dict[str, Any]) -> None:
        """Raises Lost."""
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            raise Lost(f"a member of the group is gone: {error}") from error

    def read(self) -> dict[str, Any]:
        """The next message.  Raises Lost, also at the time-out."""
        try:
            text = self._file.readline()
        except (OSError, ValueError) as error:
            raise Lost(f"a member of the group did not answer: {error}") from error
        if not text.endswith(b"\n"):
            raise Lost("a member of the group is gone")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """Close the socket (thread-safe): a thread blocked in read or write raises Lost.  Idempotent."""
        with contextlib.suppress(OSError):  # not connected any more; close() alone would wait for a blocked reader
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # bytes left to flush to a peer that is gone
            self._file.close()
        self._connection.close()


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for `path` below the 107 bytes of a socket address, however deep the run directory is (Linux)."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------- shared block
#
# A block of bytes shared by several processes of a machine.
#
# On CUDA: device memory, which others open by its IPC handle.  On CPU: an unnamed file (memfd), which others open
# through /proc and which vanishes with the last process that has it open, however that ends.  A handle is JSON;
# nothing is pickled.


def make_block(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Allocate uint8 [num_bytes] and return it with its handle.  The caller keeps the tensor while others use it.

    On CPU all its pages are mapped afterwards: the first touch of fresh memory is ten times slower than a copy.
    """
    if device.type == "cuda":
        # A separate storage: an IPC handle opens a whole allocation, and the caching allocator packs small ones.
        block = torch.empty(max(num_bytes, 2 << 20), dtype=torch.uint8, device=device)
        return block[:num_bytes], {"num_bytes": num_bytes, "cuda": _cuda_handle(block)}
    descriptor = os.memfd_create("rlhpc-weights")
    try:
        os.ftruncate(descriptor, max(num_bytes, 1))
        block = _mapped(descriptor, num_bytes).fill_(0)
    except BaseException:
        os.close(descriptor)
        raise
    return block, {"num_bytes": num_bytes, "file": f"/proc/{os.getpid()}/fd/{descriptor}", "descriptor": descriptor}


def open_block(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Open a block of another process, uint8 [num_bytes].  Raises RuntimeError or OSError if the handle is stale."""
    num_bytes = int(handle["num_bytes"])
    if "file" in handle:
        descriptor = os.open(handle["file"], os.O_RDWR)
        try:
            return _mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    fields = [base64.b64decode(field[1:]) if isinstance(field, str) else field for field in handle["cuda"]]
    fields[0] = device.index or 0  # the same GPU may have another index in this process
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def discard_block(handle: dict[str, Any]) -> None:
    """Stop others from opening a block, in the process that made it.  Its tensors still keep the memory."""
    if "descriptor" in handle:
        os.close(handle["descriptor"])


def _cuda_handle(block: Tensor) -> list[Any]:
    """JSON of the arguments that torch.multiprocessing pickles for a CUDA storage: bytes become "b" + base64.

    Fails under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose memory has no classic IPC handle.
    """
    storage: Any = block.untyped_storage()
    fields = storage._share_cuda_()
    return ["b" + base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    """Raises OSError or ValueError if there is no such memory."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]


# ------------------------------------------------------------------------------------------------------------------ ipc


SPAN_BYTES = 4 << 20  # on CPU; a multiple of a checksum's rows
NUM_BLOCKS = {"cpu": 4, "cuda": 2}  # more than two: a side that is descheduled briefly does not stall the other


class IpcPublisher(WeightPublisher):
    """Fills the shared block."""

    def __init__(self, directory: Path, device: torch.device, timeout_s: float) -> None:
        """directory: of the socket file; device: of the block, the GPU both sides see."""
        self._directory, self._device, self._timeout_s = directory, device, timeout_s
        self._opened: WeightGroup | None = None
        self._listener: socket.socket | None = None
        self._receivers: dict[int, Line] = {}
        self._shared: list[tuple[Tensor, dict[str, Any]]] = []  # blocks and their handles

    def open(self, group: WeightGroup) -> WeightGroup:
        """Listen on a socket file; see WeightPublisher."""
        self.dissolve()
        path = self._directory / f"epoch_{group.epoch:06d}.sock"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            with short_path(path) as short:
                self._listener.bind(short)
            self._listener.listen(group.world_size)
        except OSError as error:
            raise GroupFailed(f"the rendezvous {path} could not be opened: {error}") from error
        self._opened = replace(group, address=f"file://{path}")
        return self._opened

    def form(self) -> None:
        """Accept every rank; see WeightPublisher."""
        if self._opened is None or self._listener is None:
            raise GroupFailed("no rendezvous is open")
        deadline = Deadline(self._timeout_s)
        try:
            while len(self._receivers) < self._opened.world_size - 1:
                self._listener.settimeout(max(deadline.left_s, 1e-3))
                line = Line(self._listener.accept()[0], self._timeout_s)
                self._receivers[int(line.read()["rank"])] = line
        except OSError as error:
            wanted = self._opened.world_size - 1
            raise GroupFailed(
                f"{len(self._receivers)} of {wanted} receivers connected within {self._timeout_s:g} s"
            ) from error

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Fill, announce and wait, bucket by bucket; see WeightPublisher."""
        try:
            self._publish(manifest, weights)
        except Exception:
            # Whatever the cause: waiting receivers must fail now, not at their time-out.
            self._hang_up()
            raise
        finally:
            exhaust(weights)

    def dissolve(self) -> None:
        """Disconnect and remove the socket file; see WeightPublisher."""
        self._hang_up()
        self._discard_blocks()
        if self._listener is not None:
            self._listener.close()
        if self._opened is not None:
            remove_left_over(file_of(self._opened.address))
        self._listener = self._opened = None

    def _publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._opened is None or self._opened.epoch != manifest.epoch:
            raise GroupFailed(f"epoch {manifest.epoch} is not formed")
        if len(self._receivers) != self._opened.world_size - 1:
            raise GroupFailed(f"epoch {manifest.epoch} is not whole: form it, or another one")
        buckets = buckets_of(manifest)
        largest = max((bucket.num_bytes for bucket in buckets), default=0)
        span_bytes = min(largest, SPAN_BYTES) if self._device.type == "cpu" else largest
        give_back_unused(self._device)  # the engine on this GPU loads and scores now, or starts again
        try:
            self._make_blocks(span_bytes, manifest)
            handles = [handle for _, handle in self._shared]
            self._tell({"header": header_of(manifest), "blocks": handles, "span": max(span_bytes, 1)})
            self._require_none("refused", manifest)
            sums = self._send_spans(buckets, max(span_bytes, 1), weights)
            self._tell({"checksums": [f"{value:016x}" for value in sums]})
            torn = [rank for rank, whole in self._hear("whole").items() if not whole]
        finally:
            if self._device.type == "cuda":  # the memory is wanted for training
                self._discard_blocks()
        if torn:
            raise GroupFailed(f"version {manifest.policy_version}: ranks {torn} found the weights torn")

    def _make_blocks(self, num_bytes: int, manifest: WeightManifest) -> None:
        """Reuse the previous blocks if they have this size: fresh memory costs more than the copy."""
        if self._shared and self._shared[0][0].numel() == num_bytes:
            return
        self._discard_blocks()
        spans = sum(num_spans(bucket, max(num_bytes, 1)) for bucket in buckets_of(manifest))
        number = min(NUM_BLOCKS[self._device.type], spans)
        with room_for(f"{number} shared blocks of {num_bytes} bytes on the trainer"):
            while len(self._shared) < number:
                self._shared.append(make_block(num_bytes, self._device))

    def _discard_blocks(self) -> None:
        for _, handle in self._shared:
            discard_block(handle)
        self._shared = []

    def _send_spans(
        self, buckets: tuple[Bucket, ...], span_bytes: int, weights: Iterator[tuple[str, Tensor]]
    ) -> list[int]:
        """Fill one block while the receivers copy others.  Returns the checksums of the buckets."""
        sums: list[int] = []
        number = num_copied = 0
        blocks = [block for block, _ in self._shared]

        def take(num_bytes: int) -> Tensor:
            nonlocal num_copied
            if number - num_copied == len(blocks):
                self._hear("copied")
                num_copied += 1
            return blocks[number % len(blocks)][:num_bytes]

        for bucket in buckets:
            running = RunningChecksum(self._device)
            for span in filled_spans(bucket, weights, span_bytes, take):
                _finish_copies(self._device)
                self._tell({"full": number})
                number += 1
                running.add(span)
            sums.append(running.value())
        for _ in range(number - num_copied):
            self._hear("copied")
        return sums

    def _require_none(self, key: str, manifest: WeightManifest) -> None:
        reasons = [f"rank {rank}: {reason}" for rank, reason in self._hear(key).items() if reason]
        if reasons:
            raise GroupFailed(f"version {manifest.policy_version} cannot be taken by {'; '.join(reasons)}")

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._receivers.values():
            line.write(message)

    def _hear(self, key: str) -> dict[int, Any]:
        return {rank: line.read()[key] for rank, line in self._receivers.items()}

    def _hang_up(self) -> None:
        for line in self._receivers.values():
            line.close()
        self._receivers = {}


class IpcReceiver(WeightReceiver):
    """Copies the shared block, bucket by bucket."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        """device: of the engine worker, the GPU both sides see."""
        self._device, self._timeout_s = device, timeout_s
        self._epoch = -1
        self._line: Line | None = None
        self._opened: dict[str, Tensor] = {}  # blocks of earlier versions in host memory, by file

    def join(self, group: WeightGroup, rank: int) -> None:
        """Connect; see WeightReceiver."""
        self.leave()
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(file_of(group.address)) as short:
                connection.connect(short)
        except OSError as error:
            connection.close()
            raise GroupFailed(f"no rendezvous at {group.address!r}: {error}") from error
        self._line = Line(connection, self._timeout_s)
        self._line.write({"rank": rank})
        self._epoch = group.epoch

    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Copy, verify at the end; see WeightReceiver."""
        if self._line is None or self._epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        incoming = _IncomingBlocks(self._line, manifest, allocate, self._device, self._opened)
        try:
            incoming.open_blocks()
            while incoming.num_left:
                yield from self._next_block(incoming)
            incoming.verify()
        except Lost as error:
            self.leave()
            raise GroupFailed(str(error)) from error

    def _next_block(self, incoming: _IncomingBlocks) -> Generator[Tensor, None, None]:
        """Yield one block.  If there is no memory for it, or the consumer stops here, refuse the rest."""
        try:
            yield incoming.next_block()
        except Lost:
            raise
        except BaseException:
            try:
                incoming.refuse_the_rest()
            except Lost:
                self.leave()
            raise

    def leave(self) -> None:
        """Disconnect; see WeightReceiver."""
        if self._line is not None:
            self._line.close()
        self._line, self._epoch, self._opened = None, -1, {}


class _IncomingBlocks:
    """One publication, as it arrives."""

    def __init__(
        self,
        line: Line,
        manifest: WeightManifest,
        allocate: Allocate,
        device: torch.device,
        opened: dict[str, Tensor],
    ) -> None:
        self._line, self._manifest, self._allocate, self._device = line, manifest, allocate, device
        self._buckets = buckets_of(manifest)
        self._opened = opened
        self._shared: list[Tensor] = []
        self._span_bytes = 1
        self._first: Tensor | None = None  # memory for the first bucket, allocated before the version is accepted
        self._sums: list[int] = []
        self._num_begun = 0  # buckets
        self._num_heard = 0  # spans that were announced and answered

    @property
    def num_left(self) -> int:
        """Buckets still to come."""
        return len(self._buckets) - self._num_begun

    def open_blocks(self) -> None:
        """Check the header and reply whether the version can be received.  Raises TornWeights, GroupFailed."""
        opening = self._line.read()
        try:
            check_header(self._manifest, opening["header"])
            self._shared = [self._block_of(handle) for handle in opening["blocks"]]
            self._span_bytes = opening["span"]
            self._first = self._allocate(0, self._device) if self._buckets else None
        except (TornWeights, GroupFailed) as error:
            self._line.write({"refused": str(error)})
            raise
        self._line.write({"refused": ""})

    def next_block(self) -> Tensor:
        """Copy the next bucket, acknowledge each span, and take the copy's checksum."""
        index = self._num_begun
        own, self._first = (self._first if index == 0 else None), None
        own = self._allocate(index, self._device) if own is None else own
        self._num_begun += 1
        running, is_on_cpu = RunningChecksum(self._device), self._device.type == "cpu"
        for span in torch.split(own, self._span_bytes) if own.numel() else [own]:
            number = self._line.read()["full"]
            full = self._shared[number % len(self._shared)][: span.numel()]
            if is_on_cpu:
                running.copy(full, span)
            else:
                span.copy_(full)
                _finish_copies(self._device)
            self._num_heard += 1
            self._line.write({"copied": number})
            if not is_on_cpu:  # the publisher need not wait for it
                running.add(span)
        self._sums.append(running.value())
        return own

    def verify(self) -> None:
        """Compare checksums and report the result.  Raises TornWeights."""
        published = [int(value, 16) for value in self._line.read()["checksums"]]
        self._line.write({"whole": published == self._sums})
        check_sums(self._manifest, published, self._sums)

    def refuse_the_rest(self) -> None:
        """Skip the rest, and report that this member does not have the version."""
        for _ in range(sum(num_spans(bucket, self._span_bytes) for bucket in self._buckets) - self._num_heard):
            self._line.write({"copied": self._line.read()["full"]})
        self._line.read()
        self._line.write({"whole": False})

    def _block_of(self, handle: dict[str, Any]) -> Tensor:
        known = self._opened.get(handle.get("file", ""))
        if known is not None and known.numel() == handle["num_bytes"]:
            return known
        try:
            block = open_block(handle, self._device)
        except (RuntimeError, OSError, ValueError) as error:
            raise GroupFailed(f"the shared block could not be opened: {error}") from error
        if "file" in handle:
            self._opened[handle["file"]] = block
        return block


def _finish_copies(device: torch.device) -> None:
    """Kernels of two processes are not ordered by streams: wait for ours before the other side is notified.

    Ours are on the calling thread's stream; to wait for the device would be to wait for the engine's decoding too.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
