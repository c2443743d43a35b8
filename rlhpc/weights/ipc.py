"""Move weights between processes that share a GPU, by CUDA IPC.

NCCL refuses two ranks on one device; here the publisher fills two shared blocks in turn and tells every receiver over a
unix socket in the run directory; before it fills a block again all have copied it.  Messages are lines of JSON:

    receiver → publisher   {"rank": 1}                              joins
    publisher → receiver   {"header": [...], "blocks": [handle, …]}  once per publication
    receiver → publisher   {"refused": ""}                          or why it cannot take it
    publisher → receiver   {"bucket": 0}                            a block is full …
    receiver → publisher   {"copied": 0}                            … and may be overwritten
    publisher → receiver   {"checksums": ["…", …]}                  after the last bucket
    receiver → publisher   {"whole": true}

A process that dies closes its socket, so that the others fail at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.contracts import Allocate, WeightPublisher, WeightReceiver
from rlhpc.deadline import Deadline
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import check_header, check_sums, header_of
from rlhpc.weights.buckets import Bucket, buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, fill_block
from rlhpc.weights.out_of_memory import room_for
from rlhpc.weights.rendezvous_file import file_of
from rlhpc.weights.shared_block import discard_block, make_block, open_block


class IpcPublisher(WeightPublisher):
    """Fills the shared block."""

    def __init__(self, directory: Path, device: torch.device, timeout_s: float) -> None:
        """directory: of the socket file; device: of the block, the GPU both sides see."""
        self._directory, self._device, self._timeout_s = directory, device, timeout_s
        self._opened: WeightGroup | None = None
        self._listener: socket.socket | None = None
        self._receivers: dict[int, _Line] = {}

    def open(self, group: WeightGroup) -> WeightGroup:
        """Listen on a socket file; see WeightPublisher."""
        self.dissolve()
        path = self._directory / f"epoch_{group.epoch:06d}.sock"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            with _short_path(path) as short:
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
                line = _Line(self._listener.accept()[0], self._timeout_s)
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
            # Whatever the cause: receivers that wait for more must fail now, not at their time-out.
            self._hang_up()
            raise
        finally:
            exhaust(weights)

    def dissolve(self) -> None:
        """Disconnect and remove the socket file; see WeightPublisher."""
        self._hang_up()
        if self._listener is not None:
            self._listener.close()
        if self._opened is not None:
            file_of(self._opened.address).unlink(missing_ok=True)
        self._listener = self._opened = None

    def _publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._opened is None or self._opened.epoch != manifest.epoch:
            raise GroupFailed(f"epoch {manifest.epoch} is not formed")
        if len(self._receivers) != self._opened.world_size - 1:
            raise GroupFailed(f"epoch {manifest.epoch} is not whole: form it, or another one")
        buckets = buckets_of(manifest)
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        name, shared = f"epoch_{manifest.epoch:06d}", []
        try:
            with room_for(f"two buckets of {size} bytes on the trainer"):
                for index in range(len(buckets[:2])):
                    shared.append(make_block(size, self._device, self._directory, f"{name}_{index}"))
            self._tell({"header": header_of(manifest), "blocks": [handle for _, handle in shared]})
            self._require_none("refused", manifest)
            sums = self._send_blocks(buckets, [block for block, _ in shared], weights)
            self._tell({"checksums": [f"{value:016x}" for value in sums]})
            torn = [rank for rank, whole in self._hear("whole").items() if not whole]
        finally:
            for _, handle in shared:
                discard_block(handle)
        if torn:
            raise GroupFailed(f"version {manifest.policy_version}: ranks {torn} found the weights torn")

    def _send_blocks(
        self, buckets: tuple[Bucket, ...], blocks: list[Tensor], weights: Iterator[tuple[str, Tensor]]
    ) -> list[int]:
        """Fill one block while the receivers copy the other.  Returns the checksums."""
        sums: list[int] = []
        for index, bucket in enumerate(buckets):
            if index > 1:
                self._hear("copied")  # of the bucket before the last: its block is filled again
            block = blocks[index % 2][: bucket.num_bytes]
            fill_block(bucket, weights, block)
            _finish_copies(self._device)
            self._tell({"bucket": index})
            sums.append(checksum64(block))
        for _ in buckets[:2]:
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
        self._line: _Line | None = None

    def join(self, group: WeightGroup, rank: int) -> None:
        """Connect; see WeightReceiver."""
        self.leave()
        connection = socket.socket(socket.AF_UNIX)
        try:
            with _short_path(file_of(group.address)) as short:
                connection.connect(short)
        except OSError as error:
            connection.close()
            raise GroupFailed(f"no rendezvous at {group.address!r}: {error}") from error
        self._line = _Line(connection, self._timeout_s)
        self._line.write({"rank": rank})
        self._epoch = group.epoch

    def receive(self, manifest: WeightManifest, allocate: Allocate) -> Generator[Tensor, None, None]:
        """Copy, verify at the end; see WeightReceiver."""
        if self._line is None or self._epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        incoming = _Incoming(self._line, manifest, allocate, self._device)
        try:
            incoming.open_blocks()
            while incoming.num_left:
                yield from self._next_block(incoming)
            incoming.verify()
        except _Lost as error:
            self.leave()
            raise GroupFailed(str(error)) from error

    def _next_block(self, incoming: _Incoming) -> Generator[Tensor, None, None]:
        """Yield one block.  If there is no memory for it, or it is the last that is wanted, refuse the rest."""
        try:
            yield incoming.next_block()
        except _Lost:
            raise
        except BaseException:
            try:
                incoming.refuse_the_rest()
            except _Lost:
                self.leave()
            raise

    def leave(self) -> None:
        """Disconnect; see WeightReceiver."""
        if self._line is not None:
            self._line.close()
        self._line, self._epoch = None, -1


class _Incoming:
    """One publication, as it arrives."""

    def __init__(self, line: _Line, manifest: WeightManifest, allocate: Allocate, device: torch.device) -> None:
        self._line, self._manifest, self._allocate, self._device = line, manifest, allocate, device
        self._buckets = buckets_of(manifest)
        self._shared: list[Tensor] = []
        self._first: Tensor | None = None  # memory for the first bucket, allocated before the version is accepted
        self._sums: list[int] = []
        self._num_heard = 0  # buckets that were announced and answered

    @property
    def num_left(self) -> int:
        """Buckets still to come."""
        return len(self._buckets) - self._num_heard

    def open_blocks(self) -> None:
        """Check the header and reply whether the version can be received.  Raises TornWeights, GroupFailed."""
        opening = self._line.read()
        try:
            check_header(self._manifest, opening["header"])
            self._shared = [self._opened(handle) for handle in opening["blocks"]]
            self._first = self._allocate(0, self._device) if self._buckets else None
        except (TornWeights, GroupFailed) as error:
            self._line.write({"refused": str(error)})
            raise
        self._line.write({"refused": ""})

    def next_block(self) -> Tensor:
        """Copy the next bucket, acknowledge it, and take the copy's checksum."""
        index = self._line.read()["bucket"]
        own, self._first = (self._first if index == 0 else None), None
        try:
            own = self._allocate(index, self._device) if own is None else own
            own.copy_(self._shared[index % 2][: self._buckets[index].num_bytes])
            _finish_copies(self._device)
        finally:
            self._num_heard += 1
            self._line.write({"copied": index})
        self._sums.append(checksum64(own))
        return own

    def verify(self) -> None:
        """Compare checksums and report the result.  Raises TornWeights."""
        published = [int(value, 16) for value in self._line.read()["checksums"]]
        self._line.write({"whole": published == self._sums})
        check_sums(self._manifest, published, self._sums)

    def refuse_the_rest(self) -> None:
        """Skip the rest, and report that this member does not have the version."""
        while self.num_left:
            self._line.write({"copied": self._line.read()["bucket"]})
            self._num_heard += 1
        self._line.read()
        self._line.write({"whole": False})

    def _opened(self, handle: dict[str, Any]) -> Tensor:
        try:
            return open_block(handle, self._device)
        except (RuntimeError, OSError) as error:
            raise GroupFailed(f"the shared block could not be opened: {error}") from error


class _Lost(GroupFailed):
    """The other end of a connection is gone, or did not reply."""


class _Line:
    """A socket that carries lines of JSON.  Every failure is a _Lost."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def write(self, message: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            raise _Lost(f"a member of the group is gone: {error}") from error

    def read(self) -> dict[str, Any]:
        try:
            text = self._file.readline()
        except (OSError, ValueError) as error:
            raise _Lost(f"a member of the group did not answer: {error}") from error
        if not text.endswith(b"\n"):
            raise _Lost("a member of the group is gone")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # bytes left to flush to a peer that is gone
            self._file.close()
        self._connection.close()


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """A name of `path` below the 107 bytes of a socket address, however deep the run directory lies (Linux)."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _finish_copies(device: torch.device) -> None:
    """Kernels of two processes are not ordered by streams: wait for ours before the other side is notified.

    Ours are on the calling thread's stream; to wait for the device would be to wait for the engine's decoding too.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
