"""Bytes that one packed row leaves on a rank between forward and backward, and while its tokens pass the head.

Input: ModelShape, ParallelLayout and the relevant keys of [trainer].  Output: bytes.  Every number is an estimate: it
counts the tensors that autograd keeps (tests hold it to what autograd keeps on CPU), not what an allocator makes of
them, nor what kernels take for themselves.

The method is that of Korthikanti et al. 2022 (arXiv:2205.05198), §4, for one row of T tokens (batch 1), with these
differences: (1) SwiGLU instead of GeLU; (2) grouped-query attention; (3) flash attention: no term in T²; (4) no
dropout, so no masks; (5) RMSNorm; (6) context parallelism.
Legend: T tokens of a rank, t tensor ranks, b bytes of the dtype, H, A, K, D, F, V, E as in model_shape.py.

Kept of a dense layer, bytes a token (u = t under sequence parallelism, otherwise 1):
    norms, two            2·n·H / u                       Megatron: the input, n = b; in transformers' layers 4 + b
    inputs of matrices    2·b·H / u                       of the projections to q, k, v and of the MLP
    attention             2·b·(A + K)·D / t + 4·A / t     q, k, v, result; row sums
    … of a shared row     b·(3·A + 2·K·c)·D / t + 4·A / t q, k and v of all c context ranks, result twice
    norms of heads        n·(A + K)·D / t                 where the family has them: q and k before their norms
    … with Megatron       b·(A + 2·K)·D / t               q, k and v as the fused projection gives them
    SwiGLU                m·b·F / t                       gate, up, silu(gate), product, m = 4; Megatron: 3, no silu
Of a mixture the SwiGLU term is b·(m·F_expert + H) for each token that is routed here, m = 6, with Megatron 4, plus 12·E
for the router.
Recompute "selective" keeps 2·b·(A + K)·D / t of attention in either case: little is gained unless rows are shared.
"full" keeps b·H / u of every layer, and the whole sum of the one layer that is being computed anew.
Matrices of experts lie side by side while a product of Megatron's (bfloat16) takes them: 2·b·H·F_expert·E of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhpc.config_sections import TrainerConfig
from rlhpc.model_shape import ModelShape, layers_of_stage
from rlhpc.parallel_layout import LOGPROB_CHUNK_TOKENS, ParallelLayout

ROUTING_IMBALANCE = 1.5  # tokens of the fullest rank of experts over the mean; a guess, routing is not bounded


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Bytes of activations of one row, as one rank sees it."""

    shape: ModelShape
    layout: ParallelLayout
    trainer: TrainerConfig
    element_bytes: int

    @property
    def num_tokens(self) -> int:
        """Of a full row on one context rank, padding included."""
        multiple = self.layout.row_multiple
        return -(-self.trainer.token_budget // multiple) * multiple // self.layout.context

    @property
    def _norm_share(self) -> int:
        return self.layout.tensor if self.layout.is_sequence_parallel else 1

    @property
    def _norm_bytes(self) -> int:
        """For each number of a norm's input: Megatron's layers keep it alone, transformers' a float32 copy, too."""
        return self.element_bytes if self._is_megatron else 4 + self.element_bytes

    @property
    def _is_megatron(self) -> bool:
        return self.trainer.backend == "megatron"

    @property
    def _layer_input(self) -> int:
        return self.num_tokens * self.element_bytes * self.shape.hidden // self._norm_share

    def of_layer(self, layer: int) -> int:
        """What one layer keeps of a row until its backward."""
        return self._layer_input if self.trainer.recompute_activations == "full" else self._layer(layer)

    def kept(self, stage: int, head: int = 0) -> int:
        """Activations at the fullest moment of a pipeline stage: rows in flight, and the layer in work.

        head: bytes that the head has given back when a layer is computed anew; what the layer takes beyond them counts.
        """
        layers = layers_of_stage(self.layout, self.shape.num_layers, stage)
        row = sum(self.of_layer(layer) for layer in layers)
        again = max(map(self._layer, layers)) if self.trainer.recompute_activations == "full" else 0
        return int(row * rows_in_flight(self.layout, stage)) + max(0, again - head) + max(map(self._gradients, layers))

    def _layer(self, layer: int) -> int:
        """What one layer keeps of a row if nothing of it is computed anew but attention."""
        shape, b, t = self.shape, self.element_bytes, self.layout.tensor
        heads, key_heads = shape.num_heads * shape.head_size, shape.num_key_heads * shape.head_size
        norms = (2 * self._norm_bytes + 2 * b) * shape.hidden // self._norm_share
        is_selective = self.trainer.recompute_activations == "selective"
        is_own = is_selective or self.layout.context == 1
        attention = b * (2 * (heads + key_heads) if is_own else 3 * heads + 2 * self.layout.context * key_heads) // t
        attention += 0 if is_selective else 4 * shape.num_heads // t
        if shape.has_qk_norm:
            of_keys = 2 * key_heads if self._is_megatron else key_heads
            attention += self._norm_bytes * (heads + of_keys) // t
        return self.num_tokens * (norms + attention) + self._mlp(layer)

    def _mlp(self, layer: int) -> int:
        shape, b = self.shape, self.element_bytes
        if layer not in shape.expert_layers:
            copies = 3 if self._is_megatron else 4
            return self.num_tokens * copies * b * shape.mlp_width // self.layout.tensor
        kept = b * ((4 if self._is_megatron else 6) * shape.expert_width + shape.hidden)
        return int(self._num_routed * kept) + self.num_tokens // self._norm_share * 12 * shape.num_experts

    @property
    def _num_routed(self) -> float:
        """Copies of tokens on the fullest rank of experts; every rank sends as many as it has."""
        imbalance = ROUTING_IMBALANCE if self.layout.expert > 1 else 1.0
        return self.num_tokens / self._norm_share * self.shape.experts_per_token * imbalance

    def _gradients(self, layer: int) -> int:
        """What lives at once inside one layer's backward: two whole rows of H; gradients of gate, up and product."""
        shape, b = self.shape, self.element_bytes
        residual = 2 * self.num_tokens * b * shape.hidden  # whole under sequence parallelism too: gathered for the MLP
        if layer in shape.expert_layers:
            routed = int(self._num_routed * b * (3 * shape.expert_width + shape.hidden))
            return residual + routed + self._side_by_side
        return residual + self.num_tokens * 3 * b * shape.mlp_width // self.layout.tensor

    @property
    def _side_by_side(self) -> int:
        """The larger matrices of a rank's experts, or their gradients, while one grouped product takes all of them."""
        shape, b = self.shape, self.element_bytes
        can_be_grouped = self._is_megatron and b == 2
        return b * 2 * shape.hidden * shape.expert_width * shape.num_experts // self.layout.expert * can_be_grouped

    def head(self) -> int:
        """Logits, log-probabilities and the head's gradient on the last stage (rlhpc/training/logprob.py).

        Forward 1⅛·C·V/t float32 numbers of a chunk of C tokens; backward C·V/t and the head's gradient V·H/t, or in
        bfloat16 ¼·C·V/t and 1⅝·V·H/t; around them the last norm and three copies of the hidden states.
        """
        shape, b = self.shape, self.element_bytes
        vocabulary = self.layout.padded_vocabulary(shape.vocabulary) // self.layout.tensor
        logits = 4 * min(LOGPROB_CHUNK_TOKENS, self.num_tokens) * vocabulary
        weight = 4 * vocabulary * shape.hidden
        backward = logits + weight if b == 4 else logits // 4 + weight * 13 // 8
        hidden = self.num_tokens * shape.hidden
        around = hidden * self._norm_bytes // self._norm_share + 3 * hidden * b
        return max(logits * 9 // 8, backward) + around


def rows_in_flight(layout: ParallelLayout, stage: int) -> float:
    """Rows whose activations a stage holds at once, in rows of all its layers (Korthikanti et al. 2022, §4.2.3).

    1F1B: pipeline − stage.  Interleaved: 2·(pipeline − stage − 1) + (chunks − 1)·pipeline + 1 blocks of 1/chunks of
    the stage's layers each.  A step of fewer rows holds less.
    """
    if layout.chunks == 1:
        return float(layout.pipeline - stage)
    blocks = 2 * (layout.pipeline - stage - 1) + (layout.chunks - 1) * layout.pipeline + 1
    return blocks / layout.chunks
