"""Move weights between processes that share a GPU, by CUDA IPC.

NCCL refuses two ranks on one device; here the publisher fills one shared block, tells every receiver over a unix socket
in the run directory, and waits until all have copied it before it fills it again.  Messages are lines of JSON:

    receiver → publisher   {"rank": 1}                             joins
    publisher → receiver   {"header": [...], "block": handle}      once per publication
    publisher → receiver   {"bucket": 0, "checksum": "…"}          the block is full …
    receiver → publisher   {"copied": 0}                           … and may be overwritten
    receiver → publisher   {"whole": true}                         after the last bucket

A process that dies closes its socket, so that the others fail at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.contracts import WeightPublisher, WeightReceiver
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import check_header, check_sums, header_of
from rlhpc.weights.buckets import buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, fill_block, tensors_in_block
from rlhpc.weights.meeting_file import file_of
from rlhpc.weights.shared_block import discard_block, make_block, open_block


class IpcPublisher(WeightPublisher):
    """Fills the shared block."""

    def __init__(self, directory: Path, device: torch.device, timeout_s: float) -> None:
        """directory: where the socket lives; device: of the block, the GPU both sides see."""
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
            raise GroupFailed(f"the meeting place {path} could not be opened: {error}") from error
        self._opened = replace(group, address=f"file://{path}")
        return self._opened

    def form(self) -> None:
        """Accept every rank; see WeightPublisher."""
        if self._opened is None or self._listener is None:
            raise GroupFailed("no meeting place is open")
        deadline = time.monotonic() + self._timeout_s
        try:
            while len(self._receivers) < self._opened.world_size - 1:
                self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                line = _Line(self._listener.accept()[0], self._timeout_s)
                self._receivers[int(line.read()["rank"])] = line
        except OSError as error:
            wanted = self._opened.world_size - 1
            raise GroupFailed(
                f"{len(self._receivers)} of {wanted} receivers came within {self._timeout_s:g} s"
            ) from error

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Fill, tell, wait, bucket by bucket; see WeightPublisher."""
        try:
            self._publish(manifest, weights)
        except Exception:
            # Whatever the cause: receivers that wait for more must fail now, not at their time-out.
            self._hang_up()
            raise
        finally:
            exhaust(weights)

    def dissolve(self) -> None:
        """Hang up and remove the socket file; see WeightPublisher."""
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
        name = f"epoch_{manifest.epoch:06d}"
        block, handle = make_block(size, self._device, self._directory, name)
        try:
            self._tell({"header": header_of(manifest), "block": handle})
            for index, bucket in enumerate(buckets):
                fill_block(bucket, weights, block[: bucket.num_bytes])
                _finish_copies(self._device)
                self._tell({"bucket": index, "checksum": f"{checksum64(block[: bucket.num_bytes]):016x}"})
                self._hear("copied")
            torn = [rank for rank, whole in self._hear("whole").items() if not whole]
        finally:
            discard_block(handle)
        if torn:
            raise GroupFailed(f"version {manifest.policy_version}: ranks {torn} found the weights torn")

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
            raise GroupFailed(f"no meeting place at {group.address!r}: {error}") from error
        self._line = _Line(connection, self._timeout_s)
        self._line.write({"rank": rank})
        self._epoch = group.epoch

    def receive(self, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        """Copy, verify, then hand out; see WeightReceiver."""
        if self._line is None or self._epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        try:
            return self._receive(self._line, manifest)
        except GroupFailed:
            self.leave()
            raise

    def leave(self) -> None:
        """Hang up; see WeightReceiver."""
        if self._line is not None:
            self._line.close()
        self._line, self._epoch = None, -1

    def _receive(self, line: _Line, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        opening = line.read()
        try:
            check_header(manifest, opening["header"])
        except TornWeights:
            self.leave()  # what follows has sizes unknown here
            raise
        try:
            block = open_block(opening["block"], self._device)
        except (RuntimeError, OSError) as error:
            raise GroupFailed(f"the shared block could not be opened: {error}") from error
        copies: list[Tensor] = []
        published: list[int] = []
        for bucket in buckets_of(manifest):
            full = line.read()
            published.append(int(full["checksum"], 16))
            copies.append(block[: bucket.num_bytes].clone())
            _finish_copies(self._device)
            line.write({"copied": full["bucket"]})
        computed = [checksum64(copy) for copy in copies]
        line.write({"whole": computed == published})
        check_sums(manifest, published, computed)
        pairs = zip(buckets_of(manifest), copies, strict=True)
        return [named for bucket, copy in pairs for named in tensors_in_block(bucket, copy)]


class _Line:
    """A socket that carries lines of JSON.  Every failure is a GroupFailed."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def write(self, message: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            raise GroupFailed(f"a member of the group has gone: {error}") from error

    def read(self) -> dict[str, Any]:
        try:
            text = self._file.readline()
        except (OSError, ValueError) as error:
            raise GroupFailed(f"a member of the group did not answer: {error}") from error
        if not text.endswith(b"\n"):
            raise GroupFailed("a member of the group has gone")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):  # bytes left to flush to a peer that has gone
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
    """Kernels of two processes are not ordered by streams: wait for ours before the other side is told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
