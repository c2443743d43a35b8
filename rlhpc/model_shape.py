"""Tensors of a model and numbers of its parameters, from its config.json alone: in total, and on each rank of a layout.

Input: the content of config.json and a ParallelLayout.  Output: names, shapes, counts.  No torch, no weights.
Legend: H hidden size, A heads, K key heads, D size of a head, F width of the MLP, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.megatron_models import FAMILIES
from rlhpc.parallel_layout import ParallelLayout, num_experts

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank holds; experts apart, because other ranks share their optimiser state."""

    shared: int
    experts: int

    @property
    def total(self) -> int:
        """Both."""
        return self.shared + self.experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one decoder of the families in FAMILIES."""

    num_layers: int
    hidden: int
    num_heads: int
    num_key_heads: int
    head_size: int
    mlp_width: int
    vocabulary: int
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    num_experts: int
    experts_per_token: int
    expert_width: int
    expert_layers: frozenset[int]  # the others are dense

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> ModelShape | None:
        """Read config.json; None for a family whose layers are not known here.  Raises KeyError: a size is missing."""
        family = model.get("model_type")
        if family not in FAMILIES:
            return None
        heads, layers, experts = model["num_attention_heads"], model["num_hidden_layers"], num_experts(model)
        has_bias = bool(model.get("attention_bias", False))
        return cls(
            num_layers=layers,
            hidden=model["hidden_size"],
            num_heads=heads,
            num_key_heads=model.get("num_key_value_heads") or heads,
            head_size=model.get("head_dim") or (128 if family == "qwen3" else model["hidden_size"] // heads),
            mlp_width=model["intermediate_size"],
            vocabulary=model["vocab_size"],
            is_tied=bool(model.get("tie_word_embeddings", False)),
            has_qkv_bias=family == "qwen2" or has_bias,
            has_output_bias=family != "qwen2" and has_bias,
            has_mlp_bias=family == "llama" and bool(model.get("mlp_bias", False)),
            has_qk_norm=family.startswith("qwen3"),
            num_experts=experts,
            experts_per_token=model.get("num_experts_per_tok", 0),
            expert_width=model.get("moe_intermediate_size", 0),
            expert_layers=_expert_layers(model, layers) if experts else frozenset(),
        )

    @property
    def num_parameters(self) -> int:
        """Of the checkpoint, a tied head counted once."""
        head = 0 if self.is_tied else self.vocabulary * self.hidden
        layers = sum(self._layer(layer, 1) + self._experts(layer) for layer in range(self.num_layers))
        return self.vocabulary * self.hidden + layers + self.hidden + head

    @property
    def largest_tensor(self) -> int:
        """Numbers in the largest tensor of the checkpoint."""
        return self.hidden * max(self.vocabulary, self.mlp_width, self.num_heads * self.head_size)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the checkpoint by its name, in the order in which weights are broadcast."""
        vocabulary: tuple[int, ...] = (self.vocabulary, self.hidden)
        shapes = {EMBEDDING: vocabulary}
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            shapes |= self._attention_tensors(f"{name}self_attn.") | self._mlp_tensors(layer, f"{name}mlp.")
            shapes |= {f"{name}{norm}_layernorm.weight": (self.hidden,) for norm in ("input", "post_attention")}
        return shapes | {"model.norm.weight": (self.hidden,)} | ({} if self.is_tied else {HEAD: vocabulary})

    @property
    def largest_module(self) -> int:
        """Numbers in the largest matrix that an engine puts together from several tensors."""
        key_heads = self.num_key_heads * self.head_size
        sizes = [self.hidden * (self.num_heads * self.head_size + 2 * key_heads)]
        sizes += [self._experts(layer) or 2 * self.hidden * self.mlp_width for layer in range(self.num_layers)]
        return max(sizes)

    def _attention_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        heads, key_heads = self.num_heads * self.head_size, self.num_key_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {}
        for part, width in {"q": heads, "k": key_heads, "v": key_heads}.items():
            shapes[f"{name}{part}_proj.weight"] = (width, self.hidden)
            if self.has_qkv_bias:
                shapes[f"{name}{part}_proj.bias"] = (width,)
        shapes[f"{name}o_proj.weight"] = (self.hidden, heads)
        if self.has_output_bias:
            shapes[f"{name}o_proj.bias"] = (self.hidden,)
        return shapes | {f"{name}{part}_norm.weight": (self.head_size,) for part in "qk" * self.has_qk_norm}

    def _mlp_tensors(self, layer: int, name: str) -> dict[str, tuple[int, ...]]:
        if layer in self.expert_layers:
            shapes: dict[str, tuple[int, ...]] = {f"{name}gate.weight": (self.num_experts, self.hidden)}
            for expert in range(self.num_experts):
                shapes |= self._matrices(f"{name}experts.{expert}.", self.expert_width, has_bias=False)
            return shapes
        return self._matrices(name, self.mlp_width, has_bias=self.has_mlp_bias)

    def _matrices(self, name: str, width: int, *, has_bias: bool) -> dict[str, tuple[int, ...]]:
        sizes = {"gate": (width, self.hidden), "up": (width, self.hidden), "down": (self.hidden, width)}
        shapes: dict[str, tuple[int, ...]] = {}
        for part, (rows, columns) in sizes.items():
            shapes[f"{name}{part}_proj.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{name}{part}_proj.bias"] = (rows,)
        return shapes

    def on_rank(self, layout: ParallelLayout, stage: int) -> RankParameters:
        """What Megatron holds on each rank of a pipeline stage.

        Matrices are shared over the tensor ranks; norms, the router and the bias behind a sum are held by each of
        them; experts are whole, num_experts / expert_parallel of them a rank.  First and last stage each hold an
        embedding matrix, padded to the tensor ranks; a model that is tied holds one where the two are one stage.
        """
        layers = layers_of_stage(layout, self.num_layers, stage)
        shared = sum(self._layer(layer, layout.tensor) for layer in layers)
        experts = sum(self._experts(layer) // layout.expert for layer in layers)
        embedding = layout.padded_vocabulary(self.vocabulary) // layout.tensor * self.hidden
        is_first, is_last = stage == 0, stage == layout.pipeline - 1
        if is_first:
            shared += embedding
        if is_last:
            shared += self.hidden + (0 if self.is_tied and is_first else embedding)
        return RankParameters(shared, experts)

    def _layer(self, layer: int, tensor: int) -> int:
        """One layer's part on one of `tensor` ranks, experts left out."""
        heads, key_heads = self.num_heads * self.head_size, self.num_key_heads * self.head_size
        qkv = (heads + 2 * key_heads) * (self.hidden + self.has_qkv_bias)
        replicated = 2 * self.hidden + 2 * self.head_size * self.has_qk_norm + self.hidden * self.has_output_bias
        if layer in self.expert_layers:
            return (qkv + heads * self.hidden) // tensor + replicated + self.num_experts * self.hidden
        mlp = 3 * self.hidden * self.mlp_width + 2 * self.mlp_width * self.has_mlp_bias
        return (qkv + heads * self.hidden + mlp) // tensor + replicated + self.hidden * self.has_mlp_bias

    def _experts(self, layer: int) -> int:
        return 3 * self.hidden * self.expert_width * self.num_experts if layer in self.expert_layers else 0


def layers_of_stage(layout: ParallelLayout, num_layers: int, stage: int) -> list[int]:
    """Layers of a pipeline stage: `chunks` blocks of equal length, `pipeline` blocks apart."""
    length = num_layers // (layout.pipeline * layout.chunks)
    blocks = range(stage, layout.pipeline * layout.chunks, layout.pipeline)
    return [block * length + index for block in blocks for index in range(length)]


def _expert_layers(model: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    every, dense = model.get("decoder_sparse_step") or 1, set(model.get("mlp_only_layers") or ())
    return frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0)
