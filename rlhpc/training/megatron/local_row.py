"""The part of a packed row that one context-parallel rank works on, and the way back to the whole row.

Input: packed micro-batches.  Output: LocalRows: padded to what the layout divides, cut, and on the device.
Legend: T tokens of the row, P tokens once padded, L = P / context tokens of one rank.

With C > 1 context ranks the padded row is cut into 2·C equal chunks, and rank r holds chunks r and 2·C − 1 − r: one
early and one late, because under a causal mask a late token costs more than an early one.  Padding is a segment of its
own at the end, so that nothing attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.parallel_layout import ParallelLayout
from rlhpc.training.megatron.row_plan import RowPlan, held, held_tokens, row_order
from rlhpc.training.row_tensors import on_device
from rlhpc.types import PackedMicrobatch


@dataclass(frozen=True, slots=True)
class LocalRow:
    """Input of the model for one micro-batch, the same on every pipeline stage and tensor rank."""

    token_ids: Tensor  # int64 [L] on the device
    position_ids: Tensor  # int64 [L] from 0 in every segment
    targets: Tensor  # int64 [W] the tokens whose log-probabilities are wanted and predicted here
    predictors: Tensor  # int64 [W] indices into the L tokens: the tokens right before the targets
    packed: RowPlan  # segment borders, for attention

    @classmethod
    def of(
        cls,
        microbatch: PackedMicrobatch,
        wanted: NDArray[np.bool_],
        layout: ParallelLayout,
        context_rank: int,
        device: torch.device,
    ) -> LocalRow:
        """Cut out the part of `context_rank`.

        wanted: bool [T], never True on the first token of a segment, which nothing predicts.
        """
        borders = _padded_borders(microbatch.cu_seqlens, layout.row_multiple)
        padding = int(borders[-1]) - len(microbatch.token_ids)
        token_ids = np.pad(microbatch.token_ids.astype(np.int64), (0, padding))
        position_ids = np.concatenate([microbatch.position_ids.astype(np.int64), np.arange(padding)])
        tokens = held_tokens(len(token_ids), layout.context, context_rank)
        is_predictor = np.pad(wanted[1:], (0, padding + 1))[tokens]
        predictors = np.flatnonzero(is_predictor)
        return cls(
            token_ids=on_device(token_ids[tokens], device),
            position_ids=on_device(position_ids[tokens], device),
            targets=on_device(token_ids[tokens[predictors] + 1], device),
            predictors=on_device(predictors, device),
            packed=RowPlan.of(borders, layout.context, context_rank, device),
        )


def whole_row(
    local: Tensor, layout: ParallelLayout, context_rank: int, context_group: dist.ProcessGroup, num_tokens: int
) -> Tensor:
    """[L] per predicting token, of every context rank → [T] where entry t describes token t; entry 0 is 0.

    A collective.  Backward gives every rank the gradient of its own part, and sums nothing: every rank computes the
    same loss of the whole row, and the gradients of parameters are summed over ranks later.
    """
    row = local
    if layout.context > 1:
        row = _Joined.apply(local, layout.context, context_rank, context_group)  # type: ignore[no-untyped-call]
    return torch.cat([row.new_zeros(1), row[: num_tokens - 1]])


def _padded_borders(borders: NDArray[np.int32], multiple: int) -> NDArray[np.int32]:
    end = int(borders[-1])
    padded_end = -(-end // multiple) * multiple
    return borders if padded_end == end else np.append(borders, np.int32(padded_end))


class _Joined(torch.autograd.Function):
    """[L] of every rank → [P] in row order on every rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, num_ranks: int, rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.num_ranks, ctx.rank = num_ranks, rank
        gathered = local.new_empty(num_ranks * len(local))
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return gathered.index_select(0, row_order(len(gathered), num_ranks, local.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        chunks = gradients[0].chunk(2 * ctx.num_ranks)
        return torch.cat([chunks[index] for index in held(ctx.num_ranks, ctx.rank)]), None, None, None
