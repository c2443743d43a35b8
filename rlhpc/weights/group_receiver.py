"""Receive weights over a process group: an engine worker's end.

Eats a WeightManifest, makes named tensors.  Every bucket arrives in a block of its own and the tensors are views of it:
nothing is copied, and the shadow is as large as the model.  Nothing is handed out before every checksum agrees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.contracts import WeightReceiver
from rlhpc.errors import GroupFailed, TornWeights
from rlhpc.host_address import host_address
from rlhpc.types import WeightGroup, WeightManifest
from rlhpc.weights.broadcast_header import FIELDS, SIGN_SHIFT, check_header, check_sums
from rlhpc.weights.buckets import buckets_of
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.flat_tensors import tensors_in_block
from rlhpc.weights.process_group import SideGroup, find_store, is_on_this_machine


class GroupReceiver(WeightReceiver):
    """A rank above 0 of a gloo or NCCL group."""

    def __init__(self, backend: str, device: torch.device, timeout_s: float) -> None:
        """backend: "gloo" or "nccl".  device: the engine worker's, with its index."""
        self._backend, self._device, self._timeout_s = backend, device, timeout_s
        self._epoch = -1
        self._group: SideGroup | None = None

    def join(self, group: WeightGroup, rank: int) -> None:
        """Meet the others; see WeightReceiver."""
        self.leave()
        store = find_store(group.address, group.world_size, self._timeout_s)
        host = "" if is_on_this_machine(group.address) else host_address()
        self._group = SideGroup(
            self._backend, store, rank, group.world_size, self._timeout_s, device=self._device, host=host
        )
        self._epoch = group.epoch

    def receive(self, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        """Receive, verify, then hand out; see WeightReceiver.

        After TornWeights because of a checksum the group lives on; after any other failure this rank has left it.
        """
        group = self._group
        if group is None or self._epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        try:
            return self._receive(group, manifest)
        except (GroupFailed, ValueError):
            self.leave()
            raise

    def leave(self) -> None:
        """Cut the connections; see WeightReceiver."""
        if self._group is not None:
            self._group.close()
        self._group, self._epoch = None, -1

    def _receive(self, group: SideGroup, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        header = torch.zeros(len(FIELDS), dtype=torch.int64, device=group.device)
        group.broadcast(header)
        try:
            check_header(manifest, header.tolist())
        except TornWeights:
            self.leave()  # what follows has sizes unknown here: no later collective of this group would match
            raise
        blocks: list[Tensor] = []
        for bucket in buckets_of(manifest):
            blocks.append(torch.empty(bucket.num_bytes, dtype=torch.uint8, device=group.device))
            group.broadcast(blocks[-1])
        computed = [checksum64(block) for block in blocks]
        published = torch.zeros(len(blocks), dtype=torch.int64, device=group.device)
        group.broadcast(published)
        sums = [value + SIGN_SHIFT for value in published.tolist()]
        group.total(1 if sums == computed else 0)
        check_sums(manifest, sums, computed)
        pairs = zip(buckets_of(manifest), blocks, strict=True)
        return [named for bucket, block in pairs for named in tensors_in_block(bucket, block)]
