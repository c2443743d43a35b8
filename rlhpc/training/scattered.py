"""Bring together, tensor by tensor, what lies in pieces over the ranks.

Eats flat pieces of parameters as a backend keeps them, makes whole tensors under their HF names on one rank.  One way
for weights on their way to the generators and for master weights and moments on their way into a checkpoint.
Promises: memory beyond what the ranks hold anyway is one bucket and the largest tensor; what is announced comes, in
order; every other rank only sends.
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
class Piece:
    """A flat run of numbers on one rank of the default process group."""

    rank: int
    num_elements: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """The HF tensors that come out of one parameter of a backend, and where its numbers lie."""

    specs: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    join: Callable[[Sequence[Tensor]], Iterable[Tensor]]  # flat pieces, in order → tensors in the order of specs

    @property
    def num_elements(self) -> int:
        """Of all pieces."""
        return sum(piece.num_elements for piece in self.pieces)


def gather_stream(
    items: Sequence[Scattered],
    own: Callable[[int], Sequence[Tensor]],
    *,
    to_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, whole tensor) on to_rank, in the order of items; yield nothing elsewhere.  A collective.

    own(index): this rank's pieces of items[index], flat, contiguous, of `dtype` on `device`, in the order of its pieces;
    asked once per item and only where there are any.  Every rank must run the iterator to its end; closing it early on
    to_rank takes what the others still send and throws it away.  A tensor is valid until the next one is asked for.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    buckets = iter(_buckets_of(items, bucket_elements))
    try:
        for bucket in buckets:
            yield from _gather(items, bucket, own, rank, to_rank, dtype, device, group)
    finally:
        for bucket in buckets:
            for _ in _gather(items, bucket, own, rank, to_rank, dtype, device, group):
                pass


def _buckets_of(items: Sequence[Scattered], bucket_elements: int) -> Iterator[list[int]]:
    """Cut indices, in order, into runs of at most bucket_elements; a larger item stands alone."""
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


def _gather(
    items: Sequence[Scattered],
    bucket: Sequence[int],
    own: Callable[[int], Sequence[Tensor]],
    rank: int,
    to_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> Iterator[tuple[str, Tensor]]:
    arrived: dict[int, list[Tensor]] = {}
    exchanges: list[Any] = []
    for index in bucket:
        pieces = items[index].pieces
        mine = iter(own(index) if any(piece.rank == rank for piece in pieces) else ())
        arrived[index] = []
        for piece in pieces:
            tensor = next(mine) if piece.rank == rank else None
            if rank == to_rank:
                if tensor is None:
                    tensor = torch.empty(piece.num_elements, dtype=dtype, device=device)
                    exchanges.append(dist.P2POp(dist.irecv, tensor, piece.rank, group))
                arrived[index].append(tensor)
            elif tensor is not None:
                assert tensor.numel() == piece.num_elements and tensor.dtype == dtype
                exchanges.append(dist.P2POp(dist.isend, tensor, to_rank, group))
    for exchange in dist.batch_isend_irecv(exchanges) if exchanges else ():
        exchange.wait()
    if rank != to_rank:
        return
    for index in bucket:
        joined = items[index].join(arrived.pop(index))
        for spec, tensor in zip(items[index].specs, joined, strict=True):
            yield spec.name, tensor
