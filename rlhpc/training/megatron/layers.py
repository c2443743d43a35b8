"""Megatron's norm, self-attention and activation function, with what lies between matrix products computed at once.

Input and output: Megatron's activations [L, 1, ...].  Guarantees: parameters, their names and their order are those of
Megatron's own layers.  What is computed is in layer_functions.py: kernels on a GPU, torch's operations elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from rlhpc.training.layer_functions import gated_silu, rms_norm, rotated_heads


class RMSNorm(nn.Module):
    """Rounded as transformers rounds it; every tensor rank has the whole weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Signature given by Megatron."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank sees only a part of the row: Megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """See layer_functions.rms_norm."""
        return rms_norm(hidden, self.weight, self.eps)


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]  # megatron-core is untyped
    """For training alone.  Key heads must divide by the number of tensor ranks (ParallelLayout.refuse_unfit)."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and no bias.  rotary_pos_emb: not Megatron's angles, but [2, L, D / 2] from rotation_of."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = rotated_heads(
            mixed.view(len(mixed), groups, -1, size),
            rotary_pos_emb,
            self._norm_weights(),
            self.config.layernorm_epsilon,
        )
        attend = self._checkpointed_attention_forward if self._is_computed_anew else self.core_attention
        output: tuple[Tensor, Tensor | None] = self.linear_proj(
            attend(*(part[:, None] for part in heads), attention_mask, packed_seq_params=packed_seq_params)
        )
        return output

    def _norm_weights(self) -> tuple[Tensor, Tensor] | None:
        return (self.q_layernorm.weight, self.k_layernorm.weight) if self.config.qk_layernorm else None

    @property
    def _is_computed_anew(self) -> bool:
        """Whether backward computes the attention once more: recompute_activations = "selective"."""
        return bool(self.checkpoint_core_attention and self.training)


class GatedSilu(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """The activation function of an MLP whose first matrix gives gate and up, [..., 2·F] → [..., F]."""

    def __init__(self, config: TransformerConfig) -> None:
        """Signature given by Megatron."""
        super().__init__(config)
        assert config.gated_linear_unit, "computed here: SwiGLU"
        assert config.activation_func is functional.silu, "computed here: SwiGLU"

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """See layer_functions.gated_silu."""
        return gated_silu(gate_and_up)
