"""What each context rank's tokens attend to: the plan of causal attention over a packed row that is cut in chunks.

Input: segment borders.  Output: a RowPlan that travels to every layer.  Needs no process group.
Legend: P tokens of the padded row, C context ranks; the row is cut into 2·C equal chunks, and rank r holds chunks r and
2·C − 1 − r, in that order.

The row is cut, not each segment: a chunk may begin in the middle of a segment.  Its queries then attend to the keys
from the start of that segment on.  Every later segment of the chunk starts inside it, so that only the chunk's first
piece has more keys than queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.training.packed_attention import SegmentPlan


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One contiguous chunk of the row: its queries, and the keys of the whole row that they attend to."""

    key_start: int  # keys [key_start, key_end) of the row
    key_end: int  # also where the queries end
    num_continued: int  # queries of a segment that began before the chunk; 0 where the chunk starts at a border
    begun: SegmentPlan | None  # the segments that start inside the chunk
    query_borders: Tensor  # int32 [S + 1] on the device, from 0 to the number of queries
    key_borders: Tensor  # int32 [S + 1] from 0 to key_end − key_start; the same segments, from their own beginning
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, borders: NDArray[np.int32], start: int, end: int, device: torch.device) -> ChunkPlan:
        """Plan the chunk [start, end) of the row with these segment borders."""
        first = int(np.searchsorted(borders, start, side="right")) - 1
        last = int(np.searchsorted(borders, end, side="left"))
        key_start = int(borders[first])
        keys = np.minimum(borders[first : last + 1], end) - key_start
        queries = np.clip(borders[first : last + 1], start, end) - start
        num_continued = int(queries[1]) if key_start < start else 0
        own = queries[1:] - num_continued if num_continued else queries
        return cls(
            key_start=key_start,
            key_end=end,
            num_continued=num_continued,
            begun=SegmentPlan.of(own.astype(np.int32), device) if len(own) > 1 else None,
            query_borders=torch.from_numpy(queries.astype(np.int32)).to(device),
            key_borders=torch.from_numpy(keys.astype(np.int32)).to(device),
            max_queries=int(np.diff(queries).max()),
            max_keys=int(np.diff(keys).max()),
        )


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One rank's part of the attention of one row: `whole` where the row is not cut, else two `chunks`."""

    borders: Tensor  # int32 [S + 1] of the whole row, on the device
    max_tokens: int  # of its longest segment
    whole: SegmentPlan | None
    chunks: tuple[ChunkPlan, ...]
    order: Tensor | None  # int64 [P] see row_order

    @classmethod
    def of(cls, borders: NDArray[np.int32], num_ranks: int, rank: int, device: torch.device) -> RowPlan:
        """Plan for context rank `rank`; the row's length is a multiple of 2 · num_ranks if there are several."""
        longest = int(np.diff(borders).max())
        if num_ranks == 1:
            plan = SegmentPlan.of(borders, device)
            return cls(borders=plan.cu_seqlens, max_tokens=longest, whole=plan, chunks=(), order=None)
        num_tokens = int(borders[-1])
        size, remainder = divmod(num_tokens, 2 * num_ranks)
        assert not remainder, f"a row of {num_tokens} tokens is not cut by {num_ranks} context ranks"
        return cls(
            borders=torch.from_numpy(borders.astype(np.int32)).to(device),
            max_tokens=longest,
            whole=None,
            chunks=tuple(
                ChunkPlan.of(borders, index * size, (index + 1) * size, device) for index in held(num_ranks, rank)
            ),
            order=row_order(num_tokens, num_ranks, device),
        )


def held(num_ranks: int, rank: int) -> tuple[int, int]:
    """The two chunks of a rank: an early one and a late one, because a late query attends to more keys."""
    return rank, 2 * num_ranks - 1 - rank


def held_tokens(num_tokens: int, num_ranks: int, rank: int) -> NDArray[np.int64]:
    """Row indices of the tokens that a context rank holds, in the order that it holds them."""
    if num_ranks == 1:
        return np.arange(num_tokens)
    return np.arange(num_tokens).reshape(2 * num_ranks, -1)[list(held(num_ranks, rank))].ravel()


def row_order(num_tokens: int, num_ranks: int, device: torch.device) -> Tensor:
    """int64 [P]: where each token of the row lies when the ranks' parts are laid end to end."""
    parts = np.concatenate([held_tokens(num_tokens, num_ranks, rank) for rank in range(num_ranks)])
    return torch.from_numpy(np.argsort(parts, kind="stable")).to(device)
