"""Gather sharded tensors from the ranks, one by one.

Input: flat shards of parameters as a backend keeps them.  Output: whole tensors under their HF names on one rank.  Used
for weights that go to the generators, and for master weights and moments that go into a checkpoint.
Guarantees: extra memory is one bucket, or one item that is larger, and the tensors that one item is joined to; items
arrive as announced and in order; every other rank only sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.types import TensorSpec

BUCKET_ELEMENTS = 64 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A flat run of numbers on one rank of the default process group."""

    rank: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class ShardedTensorSpec:
    """The HF tensors that one parameter of a backend becomes, and the shards that it consists of."""

    specs: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    join: Callable[[Sequence[Tensor]], Iterable[Tensor]]  # flat shards, in order → tensors in the order of specs

    @property
    def num_elements(self) -> int:
        """Numbers of all shards."""
        return sum(shard.num_elements for shard in self.shards)


def gather_stream(
    items: Sequence[ShardedTensorSpec],
    own: Callable[[int], Sequence[Tensor]],
    *,
    to_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, whole tensor) on to_rank, in the order of items; yield nothing elsewhere.  A collective.

    own(index): this rank's shards of items[index], flat, contiguous, of `dtype` on `device`, in the order of its
    shards; called once per item and only if there are any.  group: of to_rank and all ranks that hold shards; NCCL
    needs a collective of the whole group before.  A tensor is valid until the next one is asked for, and may be the
    rank's own memory: it is not to be written to.

    Every rank must run the iterator to its end.  Closing it early on to_rank, or an error in join, receives what the
    others still send and discards it.  An error in own or of the network is raised at once: the ranks are out of step
    then, and the group cannot be used any more.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    here = _Here(items, own, rank, to_rank, dtype, device, group)
    buckets = _buckets_of(items, bucket_elements)
    for bucket in buckets:
        arrived = here.exchange(bucket)
        if rank != to_rank:
            continue
        try:
            yield from _joined(items, arrived)
        except BaseException:
            arrived.clear()
            for rest in buckets:
                here.exchange(rest)
            raise


def _buckets_of(items: Sequence[ShardedTensorSpec], bucket_elements: int) -> Iterator[list[int]]:
    """Cut indices, in order, into runs of at most bucket_elements; a larger item has its own."""
    bucket: list[int] = []
    room = bucket_elements
    for index, item in enumerate(items):
        if bucket and item.num_elements > room:
            yield bucket
            bucket, room = [], bucket_elements
        bucket.append(index)
        room -= item.num_elements
    if bucket:
        yield bucket


def _joined(items: Sequence[ShardedTensorSpec], arrived: dict[int, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join one item after the other, each leaving `arrived` as it is joined."""
    for index in tuple(arrived):
        item = items[index]
        yield from zip((spec.name for spec in item.specs), item.join(arrived.pop(index)), strict=True)


@dataclass(frozen=True, slots=True)
class _Here:
    """This rank's side of the stream."""

    items: Sequence[ShardedTensorSpec]
    own: Callable[[int], Sequence[Tensor]]
    rank: int
    to_rank: int
    dtype: torch.dtype
    device: torch.device
    group: Any

    def exchange(self, bucket: Sequence[int]) -> dict[int, list[Tensor]]:
        """Send this rank's shards; on to_rank return all shards of all items of the bucket, elsewhere nothing."""
        arrived: dict[int, list[Tensor]] = {}
        exchanges: list[dist.P2POp] = []
        for index in bucket:
            shards = self.items[index].shards
            mine = iter(self._own_pieces(index))
            if self.rank == self.to_rank:
                arrived[index] = [next(mine) if shard.rank == self.rank else self._room(shard) for shard in shards]
                exchanges += [
                    dist.P2POp(dist.irecv, tensor, shard.rank, self.group)
                    for shard, tensor in zip(shards, arrived[index], strict=True)
                    if shard.rank != self.rank and shard.num_elements
                ]
            else:
                exchanges += [dist.P2POp(dist.isend, t, self.to_rank, self.group) for t in mine if t.numel()]
        for exchange in dist.batch_isend_irecv(exchanges) if exchanges else ():
            exchange.wait()
        return arrived

    def _own_pieces(self, index: int) -> Sequence[Tensor]:
        announced = [shard.num_elements for shard in self.items[index].shards if shard.rank == self.rank]
        tensors = self.own(index) if announced else ()
        found = [tensor.numel() for tensor in tensors]
        assert found == announced, (
            f"{self.items[index].specs[0].name}: {found} numbers where {announced} were announced"
        )
        assert all(tensor.dtype == self.dtype for tensor in tensors)
        return tensors

    def _room(self, shard: Shard) -> Tensor:
        return torch.empty(shard.num_elements, dtype=self.dtype, device=self.device)
