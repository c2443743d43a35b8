"""Tensors of a model and numbers of its parameters, from its config.json alone: in total, and on each rank of a layout.

Input: the content of config.json and a ParallelLayout.  Output: names, shapes, counts.  No torch, no weights.
Legend: H hidden size, A heads, K key heads, D size of a head, F width of the MLP, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from rlhpc.base.hf_config import language_model
from rlhpc.config.tables import TrainerConfig
from rlhpc.models.layer_forms import LINEAR, DeltaNet, Latents
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------ megatron models
#
# Models that the layers of rlhpc/training/megatron compute as transformers does, judged by config.json alone.
#
# Input: the content of config.json, with or without transformers' defaults filled in.  Models that would be computed
# differently are refused.  Needs no torch, so that `rlhpc check` and the trainer share it.

FULL, SLIDING = "full_attention", "sliding_attention"  # layer_types of config.json
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # others depend on the length of the row


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of the layers of one model_type, where families differ; names are those of the checkpoint."""

    norm_before_attention: str | None = "input_layernorm"
    norm_after_attention: str | None = None  # of its output, before the residual is added
    norm_before_mlp: str | None = "post_attention_layernorm"
    norm_after_mlp: str | None = None
    head_norm: Literal["none", "head", "projection"] = "none"  # of queries and keys: each head's, or of all together
    is_norm_in_float32: bool = False  # rounded after the weight is multiplied, not before
    norm_offset: int = 0  # added to the weights of norms
    activation: tuple[str, str] = ("hidden_act", "silu")  # its key and only value
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_windows: bool = False  # some layers may attend to a window
    is_windowed: bool = False  # some do unless layer_types says otherwise
    has_sinks: bool = False  # of attention, one for each head
    has_fused_experts: bool = False  # one tensor for all, with biases, and the router has one, too
    is_embedding_scaled: bool = False  # by √H
    is_tied: bool = False  # unless config.json says so
    head_size: int | None = None  # unless config.json says so; None: H / A
    has_gate: bool = False  # of the result of attention, made by the projection of queries
    delta_nets: Literal["none", "by_key_head", "flat"] = "none"  # in most layers, and how their projections are ordered
    has_latents: bool = False  # in place of keys and values
    shared_experts: str = ""  # name of those that every token passes
    num_dense: int = 0  # first layers without experts, unless config.json says so
    has_stacked_experts: bool = False  # one tensor for all, without biases
    prefix: str = "model."  # of the names of tensors
    only: Mapping[str, object] = field(default_factory=dict)  # keys with one supported value; missing means the same

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of whole hidden states in one layer."""
        places = (self.norm_before_attention, self.norm_after_attention, self.norm_before_mlp, self.norm_after_mlp)
        return tuple(name for name in places if name)


_GEMMA = Family(
    norm_after_attention="post_attention_layernorm",
    norm_before_mlp="pre_feedforward_layernorm",
    norm_after_mlp="post_feedforward_layernorm",
    is_norm_in_float32=True,
    norm_offset=1,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    has_windows=True,
    is_windowed=True,
    is_embedding_scaled=True,
    is_tied=True,
    head_size=256,
    only={"use_bidirectional_attention": False},
)
FAMILIES: dict[str, Family] = {
    "llama": Family(only={"mlp_bias": False}),
    "mistral": Family(has_windows=True, only={"layer_types": None}),  # transformers gives every layer the same window
    "qwen2": Family(has_qkv_bias=True, has_windows=True),
    "qwen3": Family(head_norm="head", has_windows=True, head_size=128),
    "qwen3_moe": Family(
        head_norm="head",
        only={"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},  # experts in every layer
    ),
    "olmo3": Family(
        norm_before_attention=None,
        norm_after_attention="post_attention_layernorm",
        norm_before_mlp=None,
        norm_after_mlp="post_feedforward_layernorm",
        head_norm="projection",
        is_norm_in_float32=True,
        has_windows=True,
        is_windowed=True,
    ),
    "gemma2": _GEMMA,
    # transformers' Gemma 3 does not cap scores, whatever its config.json says.
    "gemma3_text": replace(_GEMMA, head_norm="head", only={**_GEMMA.only, "attn_logit_softcapping": None}),
    "gpt_oss": Family(
        is_norm_in_float32=True,
        has_qkv_bias=True,
        has_output_bias=True,
        has_windows=True,
        is_windowed=True,
        has_sinks=True,
        has_fused_experts=True,
        head_size=64,
    ),
}
_ONLY: Mapping[str, object] = {"partial_rotary_factor": 1.0}
WRAPPED = {"qwen3_5", "qwen3_5_moe"}  # model_type of those whose language model alone is trained and sampled from
INNER = "language_model"  # its place in the names of tensors: model.language_model.layers.…
_HYBRID = Family(head_norm="head", is_norm_in_float32=True, has_gate=True, delta_nets="flat", head_size=256)
_HYBRID_MIXTURE = replace(_HYBRID, shared_experts="shared_expert")
_LATENT = Family(has_latents=True, shared_experts="shared_experts")
# Families whose sizes are known, and which Megatron's layers here do not compute.
OTHERS: dict[str, Family] = {
    "qwen3_next": replace(_HYBRID_MIXTURE, delta_nets="by_key_head"),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID_MIXTURE,
    "qwen3_5": replace(_HYBRID, prefix=f"model.{INNER}."),
    "qwen3_5_moe": replace(_HYBRID_MIXTURE, prefix=f"model.{INNER}.", has_stacked_experts=True),
    "deepseek_v2": _LATENT,
    "deepseek_v3": replace(_LATENT, num_dense=3),
    "glm4_moe_lite": replace(_LATENT, num_dense=1),
}


def refuse_unsupported(model: Mapping[str, Any], place: object) -> None:
    """Raise ConfigError for an unsupported model, naming key, value and legal values; place: of the config."""
    for key, value, legal in _unsupported(model):
        raise ConfigError(
            f"{place}: {key}={value!r}, which trainer.backend='megatron' does not compute; legal: {legal}, or "
            "trainer.backend='deepspeed', which trains any model of transformers"
        )


def _unsupported(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Key, value and what is supported instead."""
    name = model.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        yield "model_type", name, ", ".join(FAMILIES)
        return
    family = FAMILIES[name]
    legal = {**_ONLY, "attention_bias": family.has_output_bias, **family.only} | dict([family.activation])
    for key, only in legal.items():
        if (value := model.get(key)) is not None and value != only:
            yield key, value, f"{only!r}"
    yield from _unsupported_windows(model, family)
    yield from _unsupported_rotation(model)
    is_normed = bool(model.get("norm_topk_prob")) if name == "qwen3_moe" else family.has_fused_experts
    if model.get("num_experts_per_tok") == 1 and is_normed:
        yield "num_experts_per_tok", 1, "2 or more where norm_topk_prob is true"


def _unsupported_windows(model: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Any, str]]:
    legal = (FULL, SLIDING) if family.has_windows else (FULL,)
    types = {*(model.get("layer_types") or ((SLIDING,) if family.is_windowed else ()))}
    if others := types - {*legal}:
        yield "layer_types", sorted(others), f"{' or '.join(map(repr, legal))} in every layer"
    window = model.get("sliding_window", 1)  # missing: transformers' default
    if family.has_windows and (SLIDING in types or window is not None) and not (isinstance(window, int) and window > 0):
        yield "sliding_window", window, "1 or more tokens"


def _unsupported_rotation(model: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """transformers 4 wrote rope_scaling, with "type" at first; 5 writes rope_parameters, some by layer_types."""
    for name in ("rope_scaling", "rope_parameters"):
        found: Mapping[str, Any] = value if isinstance(value := model.get(name), Mapping) else {}
        by_type = {f"{name}.{kind}": found[kind] for kind in (FULL, SLIDING) if isinstance(found.get(kind), Mapping)}
        for place, table in (by_type or {name: found}).items():
            key = "rope_type" if "rope_type" in table else "type"
            if table.get(key, "default") not in ROPE_TYPES:
                yield f"{place}.{key}", table[key], ", ".join(map(repr, ROPE_TYPES))
            if table.get("partial_rotary_factor", 1.0) != 1.0:
                yield f"{place}.partial_rotary_factor", table["partial_rotary_factor"], "1.0"


def layer_windows(model: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Tokens that each layer attends to at most, the token itself included; None: to all before it.

    model: with transformers' defaults filled in.
    """
    num_layers: int = model["num_hidden_layers"]
    window: int | None = model.get("sliding_window")
    if model["model_type"] == "mistral":
        return (window,) * num_layers
    types = model.get("layer_types") or (FULL,) * num_layers
    return tuple(window if kind == SLIDING else None for kind in types)


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
LAYER_TYPES = {FULL, LINEAR, SLIDING}  # supported layer_types of config.json


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
    """The sizes of one decoder of a known family; of a model that also sees, those of its language model."""

    family: str
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
    num_experts: int
    experts_per_token: int
    expert_width: int
    expert_layers: frozenset[int]  # the others are dense
    shared_width: int = 0  # of the experts that every token passes
    delta_net: DeltaNet | None = None
    latents: Latents | None = None

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> ModelShape | None:
        """Read config.json; None for an unknown family.  Raises KeyError: a size is missing."""
        model = language_model(model)
        family = model.get("model_type")
        traits = (FAMILIES | OTHERS).get(family) if isinstance(family, str) else None
        if traits is None:
            return None
        heads, layers, experts = model["num_attention_heads"], model["num_hidden_layers"], num_experts(model)
        has_bias, mixtures = bool(model.get("attention_bias", False)), _expert_layers(model, layers, traits.num_dense)
        is_all_mixed = bool(experts and traits.shared_experts and len(mixtures) == layers)
        return cls(
            family=str(family),
            num_layers=layers,
            hidden=model["hidden_size"],
            num_heads=heads,
            num_key_heads=model.get("num_key_value_heads") or heads,
            head_size=model.get("head_dim") or traits.head_size or model["hidden_size"] // heads,
            mlp_width=model.get("intermediate_size", 0) if is_all_mixed else model["intermediate_size"],
            vocabulary=model["vocab_size"],
            is_tied=bool(model.get("tie_word_embeddings", traits.is_tied)),
            has_qkv_bias=traits.has_qkv_bias or has_bias,
            has_output_bias=traits.has_output_bias or (family != "qwen2" and has_bias),
            has_mlp_bias=family == "llama" and bool(model.get("mlp_bias", False)),
            num_experts=experts,
            experts_per_token=model.get("num_experts_per_tok", 0),
            expert_width=model["intermediate_size"]
            if traits.has_fused_experts
            else model.get("moe_intermediate_size", 0),
            expert_layers=mixtures if experts else frozenset(),
            shared_width=_shared_width(model, traits) if experts and traits.shared_experts else 0,
            delta_net=None
            if traits.delta_nets == "none"
            else DeltaNet.of(model, is_by_key_head=traits.delta_nets == "by_key_head"),
            latents=Latents.of(model) if traits.has_latents else None,
        )

    @property
    def traits(self) -> Family:
        """Traits of its family."""
        return (FAMILIES | OTHERS)[self.family]

    def is_recurrent(self, layer: int) -> bool:
        """True for a Gated DeltaNet, which keeps a state in place of keys and values."""
        return self.delta_net is not None and layer in self.delta_net.layers

    def token_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Bytes of a token on each rank of an engine; ranks beyond the key heads have copies, all of latents."""
        attending = self.num_layers - (len(self.delta_net.layers) if self.delta_net else 0)
        if self.latents:
            return element_bytes * attending * self.latents.token_width
        numbers = 2 * element_bytes * attending * self.num_key_heads * self.head_size
        return numbers // min(ranks, self.num_key_heads)

    def request_bytes(self, element_bytes: int, ranks: int = 1) -> int:
        """Bytes of a request on each rank of an engine, however long it is: the states of Gated DeltaNets."""
        net = self.delta_net
        return len(net.layers) * net.state_bytes(element_bytes) // ranks if net else 0

    @property
    def num_norms(self) -> int:
        """Norms of whole hidden states in a layer."""
        return len(self.traits.norms)

    @property
    def has_qk_norm(self) -> bool:
        """True where queries and keys are normed."""
        return self.traits.head_norm != "none"

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Numbers of the weights of the norms of queries and of keys; zeros where there are none."""
        heads = {"none": (0, 0), "head": (1, 1), "projection": (self.num_heads, self.num_key_heads)}
        queries, keys = heads[self.traits.head_norm]
        return queries * self.head_size, keys * self.head_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the checkpoint, a tied head counted once."""
        head = 0 if self.is_tied else self.vocabulary * self.hidden
        layers = sum(self._layer(layer, 1) + self._experts(layer) for layer in range(self.num_layers))
        return self.vocabulary * self.hidden + layers + self.hidden + head

    @property
    def largest_tensor(self) -> int:
        """Number of elements of the checkpoint's largest tensor."""
        is_one = self.traits.has_fused_experts or self.traits.has_stacked_experts
        experts = 2 * self.expert_width * self.num_experts if is_one else self.expert_width
        layers = [prod(shape) for layer in range(self.num_layers) for shape in self._shared_tensors(layer).values()]
        return max(self.hidden * self.vocabulary, self.hidden * experts, *layers)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of the checkpoint by its name, in the order in which weights are broadcast."""
        vocabulary: tuple[int, ...] = (self.vocabulary, self.hidden)
        prefix = self.traits.prefix
        shapes = {f"{prefix}embed_tokens.weight": vocabulary}
        for layer in range(self.num_layers):
            shapes |= self._shared_tensors(layer) | self._expert_tensors(layer, f"{prefix}layers.{layer}.mlp.")
        return shapes | {f"{prefix}norm.weight": (self.hidden,)} | ({} if self.is_tied else {HEAD: vocabulary})

    @property
    def largest_module(self) -> int:
        """Number of elements of the largest matrix that an engine joins from several tensors."""
        sizes = [self.hidden * (self._queries + 2 * self.num_key_heads * self.head_size)]
        if net := self.delta_net:
            sizes.append(self.hidden * (net.channels + net.values))
        sizes += [self._experts(layer) or 2 * self.hidden * self.mlp_width for layer in range(self.num_layers)]
        return max(sizes)

    @property
    def _queries(self) -> int:
        """Rows of the projection of queries."""
        return self.num_heads * self.head_size * (2 if self.traits.has_gate else 1)

    def _shared_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name of a layer without its experts, which ranks of experts divide."""
        name = f"{self.traits.prefix}layers.{layer}."
        shapes = self._attention_tensors(layer, name) | self._mlp_tensors(layer, f"{name}mlp.")
        return shapes | {f"{name}{norm}.weight": (self.hidden,) for norm in self.traits.norms}

    def _attention_tensors(self, layer: int, name: str) -> dict[str, tuple[int, ...]]:
        if self.delta_net and self.is_recurrent(layer):
            return self.delta_net.tensors(f"{name}linear_attn.", self.hidden)
        name += "self_attn."
        if self.latents:
            return self.latents.tensors(name, self.hidden)
        heads, key_heads = self.num_heads * self.head_size, self.num_key_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {}
        for part, width in {"q": self._queries, "k": key_heads, "v": key_heads}.items():
            shapes[f"{name}{part}_proj.weight"] = (width, self.hidden)
            if self.has_qkv_bias:
                shapes[f"{name}{part}_proj.bias"] = (width,)
        shapes[f"{name}o_proj.weight"] = (self.hidden, heads)
        if self.has_output_bias:
            shapes[f"{name}o_proj.bias"] = (self.hidden,)
        if self.traits.has_sinks:
            shapes[f"{name}sinks"] = (self.num_heads,)
        sizes = zip("qk", self.qk_norm_sizes, strict=True)
        return shapes | {f"{name}{part}_norm.weight": (size,) for part, size in sizes if size}

    def _mlp_tensors(self, layer: int, name: str) -> dict[str, tuple[int, ...]]:
        """An MLP; or what stands beside the experts: the router, and experts that every token passes."""
        if layer not in self.expert_layers:
            return self._matrices(name, self.mlp_width, has_bias=self.has_mlp_bias)
        router = (self.num_experts, self.hidden)
        if self.traits.has_fused_experts:
            return {f"{name}router.weight": router, f"{name}router.bias": (self.num_experts,)}
        shapes: dict[str, tuple[int, ...]] = {f"{name}gate.weight": router}
        if self.shared_width:
            shapes |= self._matrices(f"{name}{self.traits.shared_experts}.", self.shared_width, has_bias=False)
        if self.shared_width and self.delta_net:
            shapes[f"{name}{self.traits.shared_experts}_gate.weight"] = (1, self.hidden)
        return shapes

    def _expert_tensors(self, layer: int, name: str) -> dict[str, tuple[int, ...]]:
        if layer not in self.expert_layers:
            return {}
        if self.traits.has_fused_experts:
            return self._fused_experts(name)
        experts, hidden, width = self.num_experts, self.hidden, self.expert_width
        if self.traits.has_stacked_experts:
            return {
                f"{name}experts.gate_up_proj": (experts, 2 * width, hidden),
                f"{name}experts.down_proj": (experts, hidden, width),
            }
        shapes: dict[str, tuple[int, ...]] = {}
        for expert in range(experts):
            shapes |= self._matrices(f"{name}experts.{expert}.", width, has_bias=False)
        return shapes

    def _fused_experts(self, name: str) -> dict[str, tuple[int, ...]]:
        experts, hidden, width = self.num_experts, self.hidden, self.expert_width
        return {
            f"{name}experts.gate_up_proj": (experts, hidden, 2 * width),
            f"{name}experts.gate_up_proj_bias": (experts, 2 * width),
            f"{name}experts.down_proj": (experts, width, hidden),
            f"{name}experts.down_proj_bias": (experts, hidden),
        }

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
        if self.family in OTHERS:  # which no backend splits over tensor ranks
            return sum(map(prod, self._shared_tensors(layer).values()))
        heads, key_heads = self.num_heads * self.head_size, self.num_key_heads * self.head_size
        qkv = (heads + 2 * key_heads) * (self.hidden + self.has_qkv_bias)
        of_norms = sum(self.qk_norm_sizes) // (tensor if self.traits.head_norm == "projection" else 1)
        replicated = (self.num_norms + self.has_output_bias) * self.hidden + of_norms
        traits = self.traits
        qkv += self.num_heads * traits.has_sinks
        if layer in self.expert_layers:
            router = self.num_experts * (self.hidden + traits.has_fused_experts)
            return (qkv + heads * self.hidden) // tensor + replicated + router
        mlp = 3 * self.hidden * self.mlp_width + 2 * self.mlp_width * self.has_mlp_bias
        return (qkv + heads * self.hidden + mlp) // tensor + replicated + self.hidden * self.has_mlp_bias

    def _experts(self, layer: int) -> int:
        biases = 2 * self.expert_width + self.hidden if self.traits.has_fused_experts else 0
        one = 3 * self.hidden * self.expert_width + biases
        return one * self.num_experts if layer in self.expert_layers else 0


def layers_of_stage(layout: ParallelLayout, num_layers: int, stage: int) -> list[int]:
    """Layers of a pipeline stage: `chunks` blocks of equal length, `pipeline` blocks apart."""
    length = num_layers // (layout.pipeline * layout.chunks)
    blocks = range(stage, layout.pipeline * layout.chunks, layout.pipeline)
    return [block * length + index for block in blocks for index in range(length)]


def _expert_layers(model: Mapping[str, Any], num_layers: int, num_dense: int) -> frozenset[int]:
    if kinds := model.get("mlp_layer_types"):
        return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    first, every = model.get("first_k_dense_replace", num_dense), model.get("decoder_sparse_step") or 1
    dense = {*range(first), *(model.get("mlp_only_layers") or ())}
    return frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0)


def _shared_width(model: Mapping[str, Any], traits: Family) -> int:
    if traits.has_latents:
        return int(model["n_shared_experts"] or 0) * int(model["moe_intermediate_size"])
    return int(model["shared_expert_intermediate_size"] or 0)
