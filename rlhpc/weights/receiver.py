"""Receive weights over a process group: an engine worker's end.

Input: a WeightManifest and memory; output: one block of bytes after the other; the next one is received while the last
is used.  Failures on this side (no room, another version than announced, a consumer that gives up) are reported in one
of the two votes of the protocol (publisher.py), so that no other rank has to wait for a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from rlhpc.base.host_address import host_address
from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import WeightGroup, WeightManifest
from rlhpc.weights.buckets import FIELDS, SIGN_SHIFT, buckets_of, check_header, check_sums, identity_of
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.deltas import DeltaArrivals, OutOfStep
from rlhpc.weights.group import SideGroup, find_store, is_on_this_machine
from rlhpc.weights.memory import room_for
from rlhpc.weights.publisher import Votes, vote


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
