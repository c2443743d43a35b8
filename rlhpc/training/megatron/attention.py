"""Attention inside the segments of a packed row, as a part of Megatron's layers, over one or several context ranks.

Input: queries, keys and values [L, 1, heads, D], and a RowPlan, which Megatron passes on unread as packed_seq_params.
Output: [L, 1, heads · D].
Guarantees: no token attends across a segment border; no mask of the whole row is ever made.
Legend: L tokens of this context rank, P of the padded row.

Context ranks gather all keys and values of the row, which costs less than it seems where key heads are few, and needs
no kernel of its own; the gradient of that gather is summed back to its owners.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlhpc.config_sections import TrainerConfig
from rlhpc.errors import ConfigError
from rlhpc.training.megatron.row_plan import ChunkPlan, RowPlan
from rlhpc.training.packed_attention import SegmentPlan, grouped_attention, packed_attention, varlen_causal


class PackedCoreAttention(nn.Module):
    """The core_attention of a layer's ModuleSpec; it has no parameters."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **_: Any) -> None:
        """Signature given by Megatron, which passes more than is needed here."""
        super().__init__()
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
        plan = packed_seq_params
        if plan.whole is not None:
            output = _segment_attention(query[:, 0], key[:, 0], value[:, 0], plan.whole, self._scaling)
            return output.flatten(1)[:, None]
        keys_and_values = gather_from_sequence_parallel_region(
            torch.stack([key[:, 0], value[:, 0]], 1), group=self._context_group
        ).index_select(0, plan.order)
        outputs = [
            chunk_attention(part, keys_and_values, chunk, self._scaling)
            for part, chunk in zip(query[:, 0].chunk(2), plan.chunks, strict=True)
        ]
        return torch.cat(outputs).flatten(1)[:, None]


class TransformerEngineAttention(nn.Module):
    """The same through TransformerEngine's kernels, for rows that are not cut.  Never run: that was not available."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **others: Any) -> None:
        """Signature given by Megatron."""
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
        """As PackedCoreAttention.forward."""
        borders, longest = packed_seq_params.borders, packed_seq_params.max_tokens
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        output: Tensor = self._kernels(
            query[:, 0], key[:, 0], value[:, 0], None, self._mask_type, packed_seq_params=packed
        )
        return output.reshape(len(query), 1, -1)


def core_attention(trainer: TrainerConfig) -> type[nn.Module]:
    """The class for a layer's ModuleSpec; raises ConfigError for trainer.transformer_engine if it is not available."""
    if not trainer.transformer_engine:
        return PackedCoreAttention
    if find_spec("transformer_engine") is None:
        raise ConfigError("trainer.transformer_engine=true, but TransformerEngine is not installed")
    if trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.transformer_engine=true with trainer.context_parallel={trainer.context_parallel}: "
            "TransformerEngine cuts every sample of a row, this trainer the row; legal: context_parallel=1"
        )
    return TransformerEngineAttention


def chunk_attention(query: Tensor, keys_and_values: Tensor, chunk: ChunkPlan, scaling: float) -> Tensor:
    """query [chunk's tokens, heads, D], keys_and_values [P, 2, key heads, D] → [chunk's tokens, heads, D]."""
    key, value = keys_and_values[chunk.key_start : chunk.key_end].unbind(1)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return varlen_causal(
            query,
            key,
            value,
            (chunk.query_borders, chunk.key_borders),
            (chunk.max_queries, chunk.max_keys),
            scaling,
        )
    continued, begun = chunk.num_continued, len(query) - chunk.num_continued
    outputs = []
    if continued:
        num_keys = len(key) - begun
        outputs.append(_lower_right(query[:continued], key[:num_keys], value[:num_keys], scaling))
    if chunk.begun is not None:
        outputs.append(_segment_attention(query[-begun:], key[-begun:], value[-begun:], chunk.begun, scaling))
    return torch.cat(outputs)


def _segment_attention(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scaling: float) -> Tensor:
    """[tokens, heads, D] each."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output, _ = packed_attention(None, q, k, v, None, segments=segments, scaling=scaling)
    return output[0]


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The last query attends to all keys, the one before to all but one, and so on; [tokens, heads, D] each."""
    mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return grouped_attention(q, k, v, attn_mask=mask, scale=scaling)[0].transpose(0, 1)
