"""Broadcast weights over a process group: the trainer's end.

Input: a WeightManifest and an iterator of tensors.  Two blocks of bytes alternate: one is filled while the other is
sent, so that the extra memory is two buckets.  Protocol of one publication, from rank 0 unless noted: header, and the
identity of the base version for deltas; a sum in which every receiver says whether it can take the version, whether it
will keep it, and whether it has the base version; blocks, or deltas if all have it (deltas.py);
checksums of the whole buckets; a sum in which every receiver says whether its checksums agree.  A publication that
returns has arrived everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.protocol.contracts import WeightPublisher
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import SIGN_SHIFT, Bucket, buckets_of, header_of, manifest_bytes
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.deltas import NOTHING, HostImage, send_deltas
from rlhpc.weights.group import SideGroup, file_of, open_store, remove_left_over
from rlhpc.weights.memory import exhaust, fill_block, give_back_unused, room_for

# ---------------------------------------------------------------------------------------------------------- group votes
#
# The receivers' votes on a version before its first bucket, as one sum over all ranks.
#
# Input: three yes/no votes of every receiver, as one integer; output: how many said yes to each.  All ranks get the
# same counts, so that all know without another message whether deltas follow.


_BITS = 20  # for counts of fewer than a million receivers
_MASK = (1 << _BITS) - 1


def vote(*, keeps: bool, holds: bool) -> int:
    """The vote of a receiver that takes the version; one that does not votes 0.

    keeps: it will still have the bytes when the next version comes.  holds: it has those of the offered base version.
    """
    return 1 | keeps << _BITS | holds << 2 * _BITS


@dataclass(frozen=True, slots=True)
class Votes:
    """Number of receivers for each vote."""

    taking: int
    keeping: int
    holding: int

    @classmethod
    def of(cls, total: int) -> Votes:
        """Return the counts that the sum of all votes spells."""
        return cls(total & _MASK, total >> _BITS & _MASK, total >> 2 * _BITS & _MASK)

    def mean_a_delta(self, offered: int, world_size: int) -> bool:
        """True if the version is sent as deltas.  offered: identity of the base version, 0 for none."""
        return bool(offered) and self.holding == world_size - 1


# ------------------------------------------------------------------------------------------------------ group publisher


class GroupPublisher(WeightPublisher):
    """Rank 0 of a gloo or NCCL group."""

    def __init__(
        self,
        backend: str,
        directory: Path,
        timeout_s: float,
        *,
        device: torch.device,
        host: str = "",
        image: HostImage | None = None,
    ) -> None:
        """backend: "gloo" or "nccl".  device: the trainer's, with its index.

        host: address at which other machines reach this one; "": all members are on this machine and use a file of
        `directory` as rendezvous.  image: for deltas, over gloo; None: every version is sent whole.
        """
        self._backend, self._directory, self._timeout_s = backend, directory, timeout_s
        self._device, self._host = device, host
        self._opened: WeightGroup | None = None
        self._store: Any = None
        self._group: SideGroup | None = None
        self._image = image

    def open(self, group: WeightGroup) -> WeightGroup:
        """Open a file or a port; see WeightPublisher."""
        self.dissolve()
        name = f"epoch_{group.epoch:06d}"
        self._store, address = open_store(self._directory, name, self._host, group.world_size, self._timeout_s)
        self._opened = replace(group, address=address)
        return self._opened

    def form(self) -> None:
        """Wait for the receivers; see WeightPublisher."""
        if self._opened is None:
            raise GroupFailed("no rendezvous is open")
        if self._backend == "nccl":
            give_back_unused(self._device)  # NCCL's buffers are outside torch's memory
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
        """Broadcast and wait for every vote; see WeightPublisher.

        Raises ValueError if `weights` does not match the manifest; the receivers then fail too.
        """
        try:
            self._publish(manifest, weights)
        except Exception:
            # Whatever the cause: waiting receivers must fail now, not at their time-out.
            self._cut()
            raise
        finally:
            exhaust(weights)

    def dissolve(self) -> None:
        """Leave the group, remove its file; see WeightPublisher."""
        self._cut()
        if self._opened is not None and self._opened.address.startswith("file://"):
            remove_left_over(file_of(self._opened.address))
        self._store = self._opened = None

    def _publish(self, manifest: WeightManifest, weights: Iterator[tuple[str, Tensor]]) -> None:
        group = self._group
        if group is None or self._opened is None or self._opened.epoch != manifest.epoch:
            raise GroupFailed(f"epoch {manifest.epoch} is not formed")
        image, buckets = self._image, buckets_of(manifest)
        offered = NOTHING if image is None else image.offer(manifest)
        group.broadcast(torch.tensor([*header_of(manifest), offered], dtype=torch.int64, device=group.device))
        votes = Votes.of(group.total(0))
        _require_all(group, votes.taking, manifest, "cannot take it: no room, or another version is expected")
        num_receivers, by_delta = group.world_size - 1, votes.mean_a_delta(offered, group.world_size)
        sent_bytes = manifest_bytes(manifest)
        if image is not None and by_delta:
            image.forget()
            sums, sent_bytes = send_deltas(group, buckets, weights, image.blocks)
            image.became(manifest, sums, by_delta=True)
        elif image is not None and votes.keeping == num_receivers and image.make_room(manifest):
            sums = _send_blocks(group, buckets, weights, image.blocks)
            image.became(manifest, sums, by_delta=False)
        else:
            sums = _send_blocks(group, buckets, weights, _blocks_in_turn(group, buckets))
        signed = [value - SIGN_SHIFT for value in sums]
        group.broadcast(torch.tensor(signed, dtype=torch.int64, device=group.device))
        _require_all(group, group.total(0), manifest, "found the weights torn, or could not load them")
        self.sent_share = sent_bytes / max(1, manifest_bytes(manifest))

    def _cut(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


def _blocks_in_turn(group: SideGroup, buckets: tuple[Bucket, ...]) -> list[Tensor]:
    sizes = [bucket.num_bytes for bucket in buckets]
    with room_for(f"two buckets, the largest of {max(sizes, default=0)} bytes, on the trainer"):
        turns = [max(sizes[start::2]) for start in range(len(sizes[:2]))]
        return [torch.zeros(size, dtype=torch.uint8, device=group.device) for size in turns]


def _send_blocks(
    group: SideGroup, buckets: tuple[Bucket, ...], weights: Iterator[tuple[str, Tensor]], blocks: list[Tensor]
) -> list[int]:
    """Fill a block while the previous one is sent.  Returns the checksums."""
    sums: list[int] = []
    arrivals: list[Callable[[], None]] = []
    try:
        for index, bucket in enumerate(buckets):
            if index > 1:
                arrivals[index - 2]()  # its block is now reused
            block = blocks[index % len(blocks)][: bucket.num_bytes]
            fill_block(bucket, weights, block)
            arrivals.append(group.begin_broadcast(block))
            sums.append(checksum64(block))
        for wait in arrivals[-2:]:
            wait()
    finally:
        # A broadcast in progress keeps its connections open, and the traceback of a failure would keep it alive.
        arrivals.clear()
    return sums


def _require_all(group: SideGroup, num_in_favour: int, manifest: WeightManifest, otherwise: str) -> None:
    """Raises GroupFailed unless all receivers are in favour."""
    num_receivers = group.world_size - 1
    if num_in_favour != num_receivers:
        against = f"{num_receivers - num_in_favour} of {num_receivers} receivers"
        raise GroupFailed(f"version {manifest.policy_version}: {against} {otherwise}")
