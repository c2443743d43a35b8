"""Attention inside the segments of a packed row, as a part of Megatron's layers, over one or several context ranks.

Input: queries, keys and values [L, 1, heads, D], and a RowPlan, which Megatron passes on unread as packed_seq_params.
Output: [L, 1, heads · D].
Guarantees: no token attends across a segment border; no mask of the whole row is ever made.
Legend: L tokens of this context rank, P of the padded row.

Context ranks gather all keys and values of the row, which costs less than it seems where key heads are few, and needs
no kernel of its own; the gradient of that gather is summed back to its owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.logprob import SoftTargets, on_device
from rlhpc.training.packed_attention import (
    SCORES_AT_ONCE,
    Scores,
    SegmentPlan,
    grouped_attention,
    packed_attention,
    scored_attention,
    varlen_causal,
)
from rlhpc.training.route_replay import StageReplay

# ------------------------------------------------------------------------------------------------------------- row plan
#
# The plan of causal attention over a packed row that is cut in chunks: the keys of each context rank's tokens.
#
# Input: segment borders.  Output: a RowPlan that travels to every layer.  Needs no process group.
# Legend: P tokens of the padded row, C context ranks; the row is cut into 2·C equal chunks, and rank r holds chunks r
# and 2·C − 1 − r, in that order.
#
# The row is cut, not each segment: a chunk may begin in the middle of a segment.  Its queries then attend to the keys
# from the start of that segment on.  Every later segment of the chunk starts inside it, so that only the chunk's first
# piece has more keys than queries.


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A contiguous chunk of the row: its queries, and the keys of the whole row that they attend to."""

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
            query_borders=on_device(queries.astype(np.int32), device),
            key_borders=on_device(keys.astype(np.int32), device),
            max_queries=int(np.diff(queries).max()),
            max_keys=int(np.diff(keys).max()),
        )


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A rank's part of the attention of one row: `whole` if the row is not cut, else two `chunks`."""

    borders: Tensor  # int32 [S + 1] of the whole row, on the device
    max_tokens: int  # of its longest segment
    whole: SegmentPlan | None
    chunks: tuple[ChunkPlan, ...]
    order: Tensor | None  # int64 [P] see row_order
    experts: Mapping[int, Tensor] = field(default_factory=dict)  # by layer, int16 [L, k] of route_replay.choice

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
            borders=on_device(borders.astype(np.int32), device),
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
    return on_device(np.argsort(parts, kind="stable"), device)


# ------------------------------------------------------------------------------------------------------------ local row
#
# The part of a packed row that one context-parallel rank works on, and the way back to the whole row.
#
# Input: packed micro-batches.  Output: LocalRows: padded to the layout's row_multiple, cut, and on the device.
# Legend: T tokens of the row, P tokens once padded, L = P / context tokens of one rank.
#
# With C > 1 context ranks the padded row is cut into 2·C equal chunks, and rank r holds chunks r and 2·C − 1 − r: one
# early and one late, because under a causal mask a late token costs more than an early one.  Padding is a segment of
# its own at the end, so that nothing attends to it.


@dataclass(frozen=True, slots=True)
class LocalRow:
    """Input of the model for one micro-batch, the same on every pipeline stage and tensor rank."""

    token_ids: Tensor  # int64 [L] on the device
    position_ids: Tensor  # int64 [L] from 0 in every segment
    targets: Tensor  # int64 [W] the tokens whose log-probabilities are wanted and predicted here
    predictors: Tensor  # int64 [W] indices into the L tokens: the tokens right before the targets
    packed: RowPlan  # segment borders, for attention
    soft: SoftTargets | None = None  # of the W targets; None: there is no teacher, or more than loss tokens are wanted

    @classmethod
    def of(
        cls,
        microbatch: PackedMicrobatch,
        wanted: NDArray[np.bool_],
        layout: ParallelLayout,
        context_rank: int,
        device: torch.device,
        replay: StageReplay | None = None,
    ) -> LocalRow:
        """Cut out the part of `context_rank`.

        wanted: bool [T], never True on the first token of a segment, which nothing predicts.  replay: None: the row's
        routes are not obeyed.
        """
        borders = _padded_borders(microbatch.cu_seqlens, layout.row_multiple)
        padding = int(borders[-1]) - len(microbatch.token_ids)
        token_ids = np.pad(microbatch.token_ids.astype(np.int64), (0, padding))
        position_ids = np.concatenate([microbatch.position_ids.astype(np.int64), np.arange(padding)])
        tokens = held_tokens(len(token_ids), layout.context, context_rank)
        is_predictor = np.pad(wanted[1:], (0, padding + 1))[tokens]
        predictors = np.flatnonzero(is_predictor)
        targets = tokens[predictors] + 1
        order = np.cumsum(wanted)[targets] - 1  # of each among the wanted tokens of the whole row
        experts = {} if replay is None else replay.of_row(microbatch, len(token_ids), tokens, device)
        return cls(
            token_ids=on_device(token_ids[tokens], device),
            position_ids=on_device(position_ids[tokens], device),
            targets=on_device(token_ids[targets], device),
            predictors=on_device(predictors, device),
            packed=replace(RowPlan.of(borders, layout.context, context_rank, device), experts=experts),
            soft=SoftTargets.of(microbatch, wanted, device, places=order),
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


# ------------------------------------------------------------------------------------------------------------ attention


class PackedCoreAttention(nn.Module):
    """The core_attention of a layer's ModuleSpec; its only parameters are the sinks of this rank's heads."""

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        softmax_scale: float | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        **_: Any,
    ) -> None:
        """Signature given by Megatron, which passes more than is needed here, but for the last three: see Scores."""
        super().__init__()
        self._window, self._softcap, self.sinks = window, softcap, None
        if has_sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self._scaling = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self._context_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: RowPlan,
        **_: Any,
    ) -> Tensor:
        """See the module's head.  packed_seq_params has no default: a call that lost it must fail."""
        plan, scores = packed_seq_params, Scores(self._scaling, self._window, self._softcap, self.sinks)
        if plan.whole is not None:
            output = _segment_attention(query[:, 0], key[:, 0], value[:, 0], plan.whole, scores)
            return output.flatten(1)[:, None]
        keys_and_values = gather_from_sequence_parallel_region(
            torch.stack([key[:, 0], value[:, 0]], 1), group=self._context_group
        ).index_select(0, plan.order)
        outputs = [
            chunk_attention(part, keys_and_values, chunk, scores)
            for part, chunk in zip(query[:, 0].chunk(2), plan.chunks, strict=True)
        ]
        return torch.cat(outputs).flatten(1)[:, None]


class TransformerEngineAttention(nn.Module):
    """Core attention by TransformerEngine's kernels, for rows that are not cut.  Never run: it was not available."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        window: None,
        softcap: None,
        has_sinks: bool,
        **others: Any,
    ) -> None:
        """Signature given by Megatron, but for traits that core_attention refuses."""
        super().__init__()
        self._mask_type = attn_mask_type
        self._kernels = TEDotProductAttention(config, layer_number, attn_mask_type, attention_type, **others)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: RowPlan,
        **_: Any,
    ) -> Tensor:
        """Do what PackedCoreAttention.forward does."""
        borders, longest = packed_seq_params.borders, packed_seq_params.max_tokens
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        output: Tensor = self._kernels(
            query[:, 0], key[:, 0], value[:, 0], None, self._mask_type, packed_seq_params=packed
        )
        return output.reshape(len(query), 1, -1)


def core_attention(
    trainer: TrainerConfig, *, window: int | None = None, softcap: float | None = None, has_sinks: bool = False
) -> type[nn.Module]:
    """The class for a layer's ModuleSpec; raises ConfigError for trainer.transformer_engine if it cannot be used.

    window, softcap, has_sinks: of the layer, see Scores.
    """
    if not trainer.transformer_engine:
        return PackedCoreAttention
    if find_spec("transformer_engine") is None:
        raise ConfigError("trainer.transformer_engine=true, but TransformerEngine is not installed")
    if trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.transformer_engine=true with trainer.context_parallel={trainer.context_parallel}: "
            "TransformerEngine cuts every sample of a row, this trainer the row; legal: context_parallel=1"
        )
    if window is not None or softcap is not None or has_sinks:
        raise ConfigError(
            "trainer.transformer_engine=true, but layers of the model have windows, capped scores or sinks, which are "
            "computed without TransformerEngine here; legal: false"
        )
    return TransformerEngineAttention


def chunk_attention(query: Tensor, keys_and_values: Tensor, chunk: ChunkPlan, scores: Scores) -> Tensor:
    """query [chunk's tokens, heads, D], keys_and_values [P, 2, key heads, D] → [chunk's tokens, heads, D]."""
    key, value = keys_and_values[chunk.key_start : chunk.key_end].unbind(1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scores.is_plain:
        borders, longest = (chunk.query_borders, chunk.key_borders), (chunk.max_queries, chunk.max_keys)
        return varlen_causal(query, key, value, borders, longest, scores.scaling, scores.window)
    continued, begun = chunk.num_continued, len(query) - chunk.num_continued
    outputs: list[Tensor] = []
    if continued:
        last = len(key) - begun
        outputs += _lower_right(query[:continued], key[:last], value[:last], scores)
    if chunk.begun is not None:
        outputs.append(_segment_attention(query[-begun:], key[-begun:], value[-begun:], chunk.begun, scores))
    return torch.cat(outputs)


def _segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scores: Scores) -> Tensor:
    """[tokens, heads, D] each."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output, _ = packed_attention(
        None, q, k, v, None, segments=segments, scaling=scores.scaling, sliding_window=scores.window,
        softcap=scores.softcap, s_aux=scores.sinks,
    )  # fmt: skip
    return output[0]


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Iterator[Tensor]:
    """The last query attends to all keys, the one before to all but one, and so on; [tokens, heads, D] each.

    Yields blocks of queries, as few as packed_attention's limit allows; keys in no window are left out.
    """
    num_keys = len(key) if scores.window is None else min(len(key), len(query) + scores.window)
    step = len(query) if scores.is_plain else max(1, SCORES_AT_ONCE // (query.shape[1] * num_keys))
    behind = len(key) - len(query)  # keys before the first query
    for start in range(0, len(query), step):
        rows = slice(start, min(start + step, len(query)))
        first = 0 if scores.window is None else max(0, behind + start + 1 - scores.window)
        keys = slice(first, behind + rows.stop)
        mask = torch.ones(rows.stop - start, keys.stop - first, dtype=torch.bool, device=query.device)
        mask = mask.tril(behind + start - first)
        if scores.window is not None:
            mask = mask.triu(behind + start - first - scores.window + 1)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[rows], key[keys], value[keys]))
        if scores.is_plain:
            output = grouped_attention(q, k, v, attn_mask=mask, scale=scores.scaling)
        else:
            output = checkpoint(scored_attention, q, k, v, mask, scores, use_reentrant=False, preserve_rng_state=False)
        yield output[0].transpose(0, 1)
