"""Broadcast weights over a process group: the trainer's end.

Eats a WeightManifest and an iterator of tensors; every bucket goes through one reused block of bytes, so that the extra
memory is one bucket.  Protocol of one publication, all from rank 0: header, blocks, checksums; then a sum in which
every receiver says whether its checksums agree.  A publication that returns has arrived everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.contracts import WeightPublisher
from rlhpc.errors import GroupFailed
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import SIGN_SHIFT, header_of
from rlhpc.weights.buckets import Bucket, buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import exhaust, fill_block
from rlhpc.weights.process_group import SideGroup, open_store


class GroupPublisher(WeightPublisher):
    """Rank 0 of a gloo or NCCL group."""

    def __init__(
        self, backend: str, directory: Path, timeout_s: float, *, device: torch.device, host: str = ""
    ) -> None:
        """backend: "gloo" or "nccl".  device: the trainer's, with its index.

        host: address under which other machines reach this one; "": all members are on this machine and meet in a file
        of `directory`.
        """
        self._backend, self._directory, self._timeout_s = backend, directory, timeout_s
        self._device, self._host = device, host
        self._opened: WeightGroup | None = None
        self._store: Any = None
        self._group: SideGroup | None = None

    def open(self, group: WeightGroup) -> WeightGroup:
        """Open a file or a port; see WeightPublisher."""
        self.dissolve()
        name = f"epoch_{group.epoch:06d}"
        self._store, address = open_store(self._directory, name, self._host, group.world_size, self._timeout_s)
        self._opened = replace(group, address=address)
        return self._opened

    def form(self) -> None:
        """Meet the receivers; see WeightPublisher."""
        if self._opened is None:
            raise GroupFailed("no meeting place is open")
        self._group = SideGroup(
            self._backend,
            self._store,
            0,
            self._opened.world_size,
            self._timeout_s,
            device=self._device,
            host=self._host,
        )

    def publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Broadcast and wait for everyone's word; see WeightPublisher.

        Raises ValueError if `weights` does not match the manifest; the receivers then fail too.
        """
        try:
            self._publish(manifest, weights)
        except Exception:
            # Whatever the cause: receivers that wait for more must fail now, not at their time-out.
            self._cut()
            raise
        finally:
            exhaust(weights)

    def dissolve(self) -> None:
        """Leave the group, remove its file; see WeightPublisher."""
        self._cut()
        if self._opened is not None and self._opened.address.startswith("file://"):
            Path(self._opened.address.removeprefix("file://")).unlink(missing_ok=True)
        self._store = self._opened = None

    def _publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        group = self._group
        if group is None or self._opened is None or self._opened.epoch != manifest.epoch:
            raise GroupFailed(f"epoch {manifest.epoch} is not formed")
        buckets = buckets_of(manifest)
        group.broadcast(torch.tensor(header_of(manifest), dtype=torch.int64, device=group.device))
        sums = self._send_blocks(group, buckets, weights)
        signed = [value - SIGN_SHIFT for value in sums]
        group.broadcast(torch.tensor(signed, dtype=torch.int64, device=group.device))
        num_whole = group.total(0)
        if num_whole != group.world_size - 1:
            raise GroupFailed(
                f"version {manifest.policy_version}: {group.world_size - 1 - num_whole} of {group.world_size - 1} "
                "receivers found the weights torn"
            )

    def _send_blocks(
        self, group: SideGroup, buckets: tuple[Bucket, ...], weights: Iterator[tuple[str, Tensor]]
    ) -> list[int]:
        size = max((bucket.num_bytes for bucket in buckets), default=0)
        buffer = torch.zeros(size, dtype=torch.uint8, device=group.device)
        sums: list[int] = []
        for bucket in buckets:
            block = buffer[: bucket.num_bytes]
            fill_block(bucket, weights, block)
            group.broadcast(block)
            sums.append(checksum64(block))
        return sums

    def _cut(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None
