"""Broadcast weights over a process group, and receive them: the trainer's end and an engine worker's.

In this file: the votes of the receivers; the publisher; the receiver.

Input: a WeightManifest and an iterator of tensors, or memory.  Two blocks of bytes alternate: one is filled while the
other is sent, so that the extra memory is two buckets.  Protocol of one publication, from rank 0 unless noted: header,
and the identity of the base version for deltas; a sum in which every receiver says whether it can take the version,
whether it will keep it, and whether it has the base version; blocks, or deltas if all have it (deltas.py);
checksums of the whole buckets; a sum in which every receiver says whether its checksums agree.  A publication that
returns has arrived everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.base.host_address import host_address
from rlhpc.protocol.contracts import Allocate, WeightPublisher, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import (
    FIELDS,
    SIGN_SHIFT,
    Bucket,
    buckets_of,
    check_header,
    check_sums,
    header_of,
    identity_of,
    manifest_bytes,
)
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.deltas import NOTHING, DeltaArrivals, HostImage, OutOfStep, send_deltas
from rlhpc.weights.group import SideGroup, file_of, find_store, is_on_this_machine, open_store, remove_left_over
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
        """Return the counts encoded in the sum of all votes."""
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


# ------------------------------------------------------------------------------------------------------- group receiver
#
# Output: one block of bytes after the other; the next one is received while the last is used.  Failures on this side
# (no room, another version than announced, a consumer that gives up) are reported in one of the two votes of the
# protocol, so that no other rank has to wait for a time-out.


class GroupReceiver(WeightReceiver):
    """A rank above 0 of a gloo or NCCL group."""

    def __init__(self, backend: str, device: torch.device, timeout_s: float) -> None:
        """backend: "gloo" or "nccl".  device: the engine worker's, with its index."""
        self._backend, self._device, self._timeout_s = backend, device, timeout_s
        self._epoch = -1
        self._group: SideGroup | None = None
        self._identity = 0

    def join(self, group: WeightGroup, rank: int) -> None:
        """Join the group; see WeightReceiver."""
        self.leave()
        store = find_store(group.address, group.world_size, self._timeout_s)
        host = "" if is_on_this_machine(group.address) else host_address()
        self._group = SideGroup(
            self._backend, store, rank, group.world_size, self._timeout_s, device=self._device, host=host
        )
        self._epoch = group.epoch

    def receive(
        self, manifest: WeightManifest, allocate: Allocate, held: int | None = None
    ) -> Generator[Tensor, None, None]:
        """Receive, verify at the end; see WeightReceiver.

        After a vote against the version the group stays usable; after any other failure this rank has left it.
        """
        group, self._identity = self._group, 0
        if group is None or self._epoch != manifest.epoch:
            raise GroupFailed(f"not a member of epoch {manifest.epoch}")
        incoming = _Incoming(group, manifest, allocate, held)
        try:
            incoming.agree_to_begin()
            for _ in incoming.sizes:
                yield from self._next_block(incoming)
            self._identity = incoming.verify()
        except _Lost as error:
            self.leave()
            raise GroupFailed(str(error)) from error
        finally:
            incoming.forget()

    def _next_block(self, incoming: _Incoming) -> Generator[Tensor, None, None]:
        """Yield one block.  If there is no memory for another, or the consumer stops here, refuse the rest."""
        try:
            yield incoming.next_block()
        except _Lost:
            raise
        except BaseException:
            try:
                incoming.refuse_the_rest()
            except (_Lost, GroupFailed):
                self.leave()
            raise

    def identity(self) -> int:
        """See WeightReceiver."""
        return self._identity

    def lost(self) -> str:
        """The publisher is gone, or this rank has left; see WeightReceiver."""
        return self._group.lost() if self._group is not None else "not a member of a group"

    def leave(self) -> None:
        """Cut the connections; see WeightReceiver."""
        if self._group is not None:
            self._group.close()
        self._group, self._epoch = None, -1


class _Lost(Exception):
    """The connection to the others failed; no collective of this group will match any more."""


class _Incoming:
    """One publication, as it arrives."""

    def __init__(self, group: SideGroup, manifest: WeightManifest, allocate: Allocate, held: int | None) -> None:
        self._group, self._manifest, self._allocate, self._held = group, manifest, allocate, held
        self.sizes = [bucket.num_bytes for bucket in buckets_of(manifest)]
        self._sums: list[int] = []
        self._coming: tuple[Tensor, Callable[[], None]] | None = None
        self._ready: list[Tensor] = []  # memory for the first two buckets, allocated before this rank votes
        self._deltas: DeltaArrivals | None = None  # if the version is sent as deltas

    def agree_to_begin(self) -> None:
        """Check the header, allocate memory for two buckets, and vote on whether both succeeded.

        Raises TornWeights or GroupFailed if not, or if another member voted against it.
        """
        header = torch.zeros(len(FIELDS) + 1, dtype=torch.int64, device=self._group.device)
        self._broadcast(header)
        *fields, offered = header.tolist()
        keeps = self._held is not None and self._group.device.type == "cpu"
        holds = keeps and offered != 0 and self._held == offered
        deltas: DeltaArrivals | None = None
        problem: Exception | None = None
        try:
            check_header(self._manifest, fields)
            self._ready = [self._memory(index) for index in range(len(self.sizes[:2]))]
            deltas = DeltaArrivals(self._broadcast, max(self.sizes, default=0)) if holds else None
        except (TornWeights, GroupFailed) as error:
            problem = error
        if problem is not None:
            self._vote(0)
            raise problem
        votes = Votes.of(self._vote(vote(keeps=keeps, holds=holds)))
        if votes.taking != self._group.world_size - 1:
            raise GroupFailed(f"version {self._manifest.policy_version}: another member of the group cannot take it")
        if votes.mean_a_delta(offered, self._group.world_size):
            self._deltas = deltas
        elif self._ready:
            first = self._ready.pop(0)
            self._coming = first, self._begin(first)

    def next_block(self) -> Tensor:
        """The next bucket: received whole, or as a delta applied to the old one."""
        return self._next_whole() if self._deltas is None else self._next_delta(self._deltas)

    def _next_whole(self) -> Tensor:
        """Wait for a bucket, start the next one, then take this one's checksum."""
        assert self._coming is not None
        block, wait = self._coming
        self._wait(wait)
        self._sums.append(0)
        self._coming = None
        following = len(self._sums)
        if following < len(self.sizes):
            memory = self._ready.pop(0) if self._ready else self._memory(following)
            self._coming = memory, self._begin(memory)
        self._sums[-1] = checksum64(block)
        return block

    def _next_delta(self, deltas: DeltaArrivals) -> Tensor:
        block = self._ready.pop(0) if self._ready else self._memory(len(self._sums))
        put = self._put(deltas, block)
        self._sums.append(0)
        put()
        self._sums[-1] = checksum64(block)
        return block

    def verify(self) -> int:
        """Compare checksums and vote.  Returns the version's identity.  Raises TornWeights."""
        published = self._published_sums()
        self._vote(published == self._sums)
        check_sums(self._manifest, published, self._sums)
        return identity_of(self._manifest, published)

    def refuse_the_rest(self) -> None:
        """Take part in the remaining broadcasts, so that the others are not disturbed, and vote against the version."""
        if self._coming is not None:
            self._wait(self._coming[1])
            self._coming = None
            self._sums.append(0)
        rest = self.sizes[len(self._sums) :]
        if rest:
            with room_for("buckets that are discarded here"):
                scratch = torch.empty(max(rest), dtype=torch.uint8, device=self._group.device)
            for size in rest:
                if self._deltas is None:
                    self._broadcast(scratch[:size])
                else:
                    self._put(self._deltas, scratch[:size])
        self._published_sums()
        self._vote(False)

    def forget(self) -> None:
        """A broadcast in progress keeps its connections open, and the traceback of a failure would keep it alive."""
        self._coming, self._ready = None, []

    def _memory(self, index: int) -> Tensor:
        return self._allocate(index, self._group.device)

    def _put(self, deltas: DeltaArrivals, block: Tensor) -> Callable[[], None]:
        try:
            return deltas.receive(block)
        except OutOfStep as error:
            raise _Lost(str(error)) from error

    def _published_sums(self) -> list[int]:
        published = torch.zeros(len(self.sizes), dtype=torch.int64, device=self._group.device)
        self._broadcast(published)
        return [value + SIGN_SHIFT for value in published.tolist()]

    def _vote(self, value: int) -> int:
        try:
            return self._group.total(int(value))
        except GroupFailed as error:
            raise _Lost(str(error)) from error

    def _begin(self, block: Tensor) -> Callable[[], None]:
        try:
            return self._group.begin_broadcast(block)
        except GroupFailed as error:
            raise _Lost(str(error)) from error

    def _wait(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except GroupFailed as error:
            raise _Lost(str(error)) from error

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(self._begin(tensor))
