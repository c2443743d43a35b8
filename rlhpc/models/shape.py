"""Tensors of a model and numbers of its parameters, from its config.json alone: in total, and on each rank of a layout.

Input: the content of config.json and a ParallelLayout.  Output: names, shapes, counts.  No torch, no weights.
Legend: H hidden size, A heads, K key heads, D size of a head, F width of the MLP, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config.tables import TrainerConfig
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------ megatron models
#
# Models that the layers of rlhpc/training/megatron compute as transformers does, judged by config.json alone.
#
# Input: the content of config.json, with or without transformers' defaults filled in.  Models that would be computed
# differently are refused.  Needs no torch, so that `rlhpc check` and the trainer share it.

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3")  # others rescale attention or depend on the length of the row
# Keys with only one supported value; missing or null means the same.
_ONLY: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}
_ONLY_WITH_EXPERTS: Mapping[str, object] = {"mlp_only_layers": [], "decoder_sparse_step": 1}  # in every layer


def refuse_unsupported(model: Mapping[str, Any], place: object) -> None:
    """Raise ConfigError for an unsupported model, naming key, value and legal values; place: of the config."""
    for key, value, legal in _unsupported(model):
        raise ConfigError(
            f"{place}: {key}={value!r}, which trainer.backend='megatron' does not compute; legal: {legal}, or "
            "trainer.backend='deepspeed', which trains any model of transformers"
        )


def _unsupported(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Key, value and what is supported instead."""
    family = model.get("model_type")
    if family not in FAMILIES:
        yield "model_type", family, ", ".join(FAMILIES)
        return
    for key, only in {**_ONLY, **(_ONLY_WITH_EXPERTS if family == "qwen3_moe" else {})}.items():
        if (value := model.get(key)) is not None and value != only:
            yield key, value, f"{only!r}"
    if others := {*(model.get("layer_types") or ())} - {"full_attention"}:
        yield "layer_types", sorted(others), "'full_attention' in every layer"
    yield from _unsupported_rotation(model)
    if family == "qwen3_moe" and model.get("num_experts_per_tok") == 1 and model.get("norm_topk_prob"):
        yield "num_experts_per_tok", 1, "2 or more where norm_topk_prob is true"


def _unsupported_rotation(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """transformers 4 wrote rope_scaling, with "type" at first; 5 writes rope_parameters."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(table := model.get(name), Mapping):
            continue
        key = "rope_type" if "rope_type" in table else "type"
        if table.get(key, "default") not in ROPE_TYPES:
            yield f"{name}.{key}", table[key], ", ".join(map(repr, ROPE_TYPES))
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            yield f"{name}.partial_rotary_factor", table["partial_rotary_factor"], "1.0"


# ------------------------------------------------------------------------------------------------------ parallel layout
#
# Sharding of a model over the ranks of the trainer, and the check whether a model allows it.
#
# Input: the [trainer] table and a model's config.json.  Models that cannot be sharded this way are refused.  Needs no
# torch, so that the planner on a login node and the trainer on its GPUs share it.
#
# Rank order, fastest first: tensor, context, data, pipeline.  Experts are distributed over the ranks of one pipeline
# stage, consecutive ones first; each expert is whole on one rank.


# Rows of logits that a rank holds at once.  Fewer would save little: with a bfloat16 model backward needs most, ¼ of a
# chunk's logits and 1⅝ times the head's gradient (training/logprob.py), which are 85 % of it at a hidden size of 896.
LOGPROB_CHUNK_TOKENS = 1024
LAYER_TYPES = {"full_attention", "linear_attention", "sliding_attention"}  # supported layer_types of config.json


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Numbers of ranks along each axis; `chunks`: blocks of layers that one pipeline stage interleaves."""

    tensor: int
    context: int
    data: int
    pipeline: int
    chunks: int
    expert: int
    is_sequence_parallel: bool

    @classmethod
    def of(cls, trainer: TrainerConfig) -> ParallelLayout:
        """Read the layout from a validated run file."""
        return cls(
            tensor=trainer.tensor_parallel,
            context=trainer.context_parallel,
            data=trainer.data_parallel,
            pipeline=trainer.pipeline_parallel,
            chunks=trainer.chunks_per_stage,
            expert=trainer.expert_parallel,
            is_sequence_parallel=trainer.sequence_parallel,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks along all axes."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def row_multiple(self) -> int:
        """A packed row is padded to a multiple of this many tokens."""
        halves = 2 * self.context if self.context > 1 else 1  # each context rank takes an early and a late part
        return halves * (self.tensor if self.is_sequence_parallel else 1)

    def padded_vocabulary(self, size: int) -> int:
        """Rows of the embedding, the same number on every tensor rank; rows from `size` on are padding."""
        return -(-size // self.tensor) * self.tensor

    def refuse_unfit(self, model: Mapping[str, Any]) -> None:
        """Raise ConfigError naming the key if `model`, the content of config.json, cannot be sharded like this."""
        heads = model["num_attention_heads"]
        key_heads = model.get("num_key_value_heads") or heads
        layers, blocks = model["num_hidden_layers"], self.pipeline * self.chunks
        experts = num_experts(model)
        _must_divide("tensor_parallel", self.tensor, key_heads, "num_key_value_heads")
        _must_divide("tensor_parallel", self.tensor, heads, "num_attention_heads")
        if self.is_sequence_parallel:
            _must_divide("tensor_parallel", self.tensor, model["hidden_size"], "hidden_size")
        _must_divide("pipeline_parallel × chunks_per_stage", blocks, layers, "num_hidden_layers")
        if experts:
            _must_divide("expert_parallel", self.expert, experts, "num_experts")
            if self.tensor > 1 and not self.is_sequence_parallel:
                raise ConfigError(
                    f"trainer.tensor_parallel={self.tensor} with a mixture of experts needs "
                    "trainer.sequence_parallel=true: without it every tensor rank would route every token"
                )
            return
        _must_divide("tensor_parallel", self.tensor, model["intermediate_size"], "intermediate_size")
        if self.expert > 1:
            raise ConfigError(f"trainer.expert_parallel={self.expert}, but the model has no experts; legal: 1")


def num_experts(model: Mapping[str, Any]) -> int:
    """Experts per layer, 0 in a dense model; transformers 4 and 5 use different keys, and so does DeepSeek."""
    return int(model.get("num_experts") or model.get("num_local_experts") or model.get("n_routed_experts") or 0)


def _must_divide(key: str, value: int, number: int, name: str) -> None:
    if number % value:
        legal = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0 and n <= 64)
        raise ConfigError(f"trainer.{key} = {value} does not divide the model's {name} = {number}; legal: {legal}")


# ---------------------------------------------------------------------------------------------------------- model shape

TEXT = "text_config"  # table of config.json that describes the language model inside one that also sees
WRAPPED = {"qwen3_5", "qwen3_5_moe"}  # model_type of those whose language model alone is trained and sampled from
INNER = "language_model"  # its place in the names of tensors: model.language_model.layers.…


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Content of config.json; of a model that also sees, with the keys of its language model, for which it has none."""
    inner = config.get(TEXT)
    return {**(inner if isinstance(inner, Mapping) else {}), **config}


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one rank holds; experts apart, because other ranks share their optimiser state."""

    shared: int
    experts: int

    @property
    def total(self) -> int:
        """Sum of both."""
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
        """Read config.json; None for an unknown family.  Raises KeyError: a size is missing."""
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
        """Number of parameters of the checkpoint, a tied head counted once."""
        head = 0 if self.is_tied else self.vocabulary * self.hidden
        layers = sum(self._layer(layer, 1) + self._experts(layer) for layer in range(self.num_layers))
        return self.vocabulary * self.hidden + layers + self.hidden + head

    @property
    def largest_tensor(self) -> int:
        """Number of elements of the checkpoint's largest tensor."""
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
        """Number of elements of the largest matrix that an engine joins from several tensors."""
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
        """Parameters that Megatron holds on each rank of a pipeline stage.

        Matrices are split over the tensor ranks; norms, the router and the bias after an all-reduce are on each of
        them; experts are whole, num_experts / expert_parallel per rank.  The first and the last stage each hold an
        embedding matrix, padded to the tensor ranks; if they are the same stage, a tied model holds only one.
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
        """Parameters of one layer on one of `tensor` ranks, without experts."""
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
