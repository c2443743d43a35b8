"""Megatron's configuration of a model and its training, from the model's config.json and the run file.

Input: a model's configuration and the [trainer] table.  Output: a TransformerConfig, and the parts of its layers that
are not Megatron's own.  Families: those of models/shape.py.  Guarantees: a model that Megatron would compute
differently from transformers is refused with ConfigError, never trained wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import FAMILIES, FULL, SLIDING, ParallelLayout, num_experts, refuse_unsupported
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.layer_functions import (
    ALIGNED_ELEMENTS,
    PLAIN_NORM,
    NormStyle,
    expert_linear,
    gated_gelu,
    gated_silu,
    grouped_linear,
    has_grouped_kernel,
    rms_norm,
    rotated_heads,
    rotation_of,
    weighted_gated_silu,
)

# ------------------------------------------------------------------------------------------------------ grouped experts
#
# All experts of a rank by two grouped matrix products, where Megatron's SequentialMLP makes two for each expert.
#
# Input: tokens sorted by expert, as the dispatcher hands them over.  Output: the same tokens, through their experts.
# Guarantees: parameters, their names and their order are those of SequentialMLP, and so is everything that is made of
# them (checkpoints, optimiser, HF names); every parameter gets a gradient, zeros where its expert saw no token.
# Nothing here waits for the device (Megatron's dispatcher does before it, once a layer).
# Megatron's own grouped layers need the package grouped_gemm or TransformerEngine; this one needs torch alone.


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core is untyped
    """SequentialMLP with SwiGLU, computed at once.  Experts must be whole on their rank, and have no biases."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        """Signature given by Megatron."""
        super().__init__(num_local_experts, config, submodules, pg_collection)
        assert config.gated_linear_unit, "computed here: SwiGLU"
        assert config.activation_func is functional.silu, "computed here: SwiGLU"
        assert config.expert_tensor_parallel_size == 1, "an expert that is cut up needs sums over ranks"
        assert not config.add_bias_linear, "experts' biases are not added here"
        assert not config.moe_apply_probs_on_input, "probabilities are applied between the two products"

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return [T, H] and no bias.  tokens: [T, H]; tokens_per_expert: [E], on any device; probabilities: [T]."""
        ranks = [each.rank for each in self._adapters("linear_fc1") + self._adapters("linear_fc2")]
        if self.num_local_experts == 1 or any(rank % ALIGNED_ELEMENTS for rank in ranks):
            one_by_one: tuple[Tensor, Tensor | None] = super().forward(tokens, tokens_per_expert, probabilities)
            return one_by_one
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_and_up = self._product("linear_fc1", tokens, ends)
        return self._product("linear_fc2", weighted_gated_silu(gate_and_up, probabilities), ends), None

    def _product(self, name: str, tokens: Tensor, ends: Tensor) -> Tensor:
        """Output of the layers `name` of all experts, adapters included."""
        output = grouped_linear(tokens, ends, [getattr(each, name).weight for each in self.local_experts])
        adapters = self._adapters(name)
        return adapters[0].beside_others(adapters, tokens, output, ends) if adapters else output

    def _adapters(self, name: str) -> list[Any]:
        """lora.ParallelAdapter of the layer `name` of each expert; empty: there are none."""
        layers = [getattr(each, name) for each in self.local_experts]
        return [layer.adapter for layer in layers if hasattr(layer, "adapter")]


# --------------------------------------------------------------------------------------------------------------- layers
#
# Megatron's norm, self-attention and activation function, with the operations between matrix products fused.
#
# Input and output: Megatron's activations [L, 1, ...].  Guarantees: parameters, their names and their order are those
# of Megatron's own layers.  What is computed is in layer_functions.py: kernels on a GPU, torch's operations elsewhere.


class RMSNorm(nn.Module):
    """RMSNorm that rounds like transformers; every tensor rank has the whole weight."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, style: NormStyle = PLAIN_NORM, **_: Any
    ) -> None:
        """Signature given by Megatron, but for style, which a layer's ModuleSpec has."""
        super().__init__()
        self.eps, self.style = eps, style
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank sees only a part of the row: Megatron sums the gradients of parameters with this mark.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """See layer_functions.rms_norm."""
        return rms_norm(hidden, self.weight, self.eps, self.style)


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a projection together, of which each tensor rank has some, with their weights."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int, **_: Any) -> None:
        """Signature given by Megatron, hidden_size: of one head; num_heads: of the whole model."""
        super().__init__()
        self.eps, self._group = eps, parallel_state.get_tensor_model_parallel_group()
        size = num_heads * hidden_size // self._group.size()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """heads: [L, G, R, D], those of this rank; the shape stays."""
        norm: Callable[..., Tensor] = _ProjectionNorm.apply
        return norm(heads.flatten(1), self.weight, self.eps, self._group).view(heads.shape)


class _ProjectionNorm(torch.autograd.Function):
    """layer_functions.rms_norm, in float32, with sums over tensor ranks, which have whole columns of every row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        over_rms = _mean(rows.float().square(), group).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, over_rms)
        ctx.group = group
        return (rows.float() * over_rms * weight.float()).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, over_rms = ctx.saved_tensors
        normed, gradient = rows.float() * over_rms, gradients[0].float()
        of_weight = (gradient * normed).sum(0).to(weight.dtype)
        of_normed = gradient * weight.float()
        mean = _mean(of_normed * normed, ctx.group)
        return of_normed.addcmul_(normed, mean, value=-1).mul_(over_rms).to(rows.dtype), of_weight, None, None


def _mean(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, 1] over the columns of all ranks, which have the same number each."""
    total = columns.sum(1, keepdim=True)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.div_(columns.shape[1] * group.size())


class NormedAddition(nn.Module):
    """Norm the output of attention or an MLP, then add it: in the place of Megatron's "bias-dropout-add"."""

    def __init__(self, config: TransformerConfig, style: NormStyle) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon, style=style)

    def forward(self, *_: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return what Megatron calls with (output, bias), the residual and a probability of dropout, which is 0."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        output, bias = output_and_bias
        assert bias is None, "no model that is normed here has biases"
        normed: Tensor = self.norm(output)
        return residual + normed


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]  # megatron-core is untyped
    """Attention for training alone.  Key heads divide by the number of tensor ranks (ParallelLayout.refuse_unfit)."""

    def __init__(self, *inputs: Any, rotation: int = 0, **options: Any) -> None:
        """Signature given by Megatron, but for rotation, which a layer's ModuleSpec has: an index of rotary_pos_emb."""
        super().__init__(*inputs, **options)
        self._rotation = rotation

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and its bias.  rotary_pos_emb: not Megatron's angles, but [K, 2, L, D / 2] of Rotations."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        mixed = mixed.view(len(mixed), groups, -1, size)
        weights = self._fused_norms()
        heads = rotated_heads(
            self._normed(mixed) if weights is None else mixed,
            rotary_pos_emb[self._rotation],
            weights,
            self.config.layernorm_epsilon,
        )
        attend = self._checkpointed_attention_forward if self._is_computed_anew else self.core_attention
        output: tuple[Tensor, Tensor | None] = self.linear_proj(
            attend(*(part[:, None] for part in heads), attention_mask, packed_seq_params=packed_seq_params)
        )
        return output

    def _fused_norms(self) -> tuple[Tensor, Tensor] | None:
        """Weights of norms that rotated_heads computes, too."""
        norms = self.q_layernorm, self.k_layernorm
        is_fused = all(isinstance(norm, RMSNorm) and norm.style == PLAIN_NORM for norm in norms)
        return (norms[0].weight, norms[1].weight) if is_fused else None

    def _normed(self, mixed: Tensor) -> Tensor:
        """mixed [L, G, R + 2, D] with queries and keys normed."""
        if isinstance(self.q_layernorm, IdentityOp):
            return mixed
        query, key, value = torch.split(mixed, [mixed.shape[2] - 2, 1, 1], 2)
        return torch.cat([self.q_layernorm(query), self.k_layernorm(key), value], 2)

    @property
    def _is_computed_anew(self) -> bool:
        """True if backward recomputes the attention: recompute_activations = "selective"."""
        return bool(self.checkpoint_core_attention and self.training)


class FusedExperts(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """All experts of a rank in the tensors of gpt-oss: matrices [E, in, out], gate and up in turn, clamped, biases."""

    def __init__(
        self, num_local_experts: int, config: Any, pg_collection: Any = None, *, alpha: float, limit: float
    ) -> None:
        """Signature given by Megatron, but for swiglu_alpha and swiglu_limit, which a layer's ModuleSpec has."""
        super().__init__(config)
        self._alpha, self._limit = alpha, limit
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype))

        self.gate_up_proj, self.gate_up_proj_bias = parameter(hidden, 2 * width), parameter(2 * width)
        self.down_proj, self.down_proj_bias = parameter(width, hidden), parameter(hidden)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Return [T, H] and no bias; see GroupedExperts.forward."""
        counts = tokens_per_expert.to(tokens.device, non_blocking=True)
        ends = counts.cumsum(0, dtype=torch.int32)
        owners = torch.repeat_interleave(counts, output_size=len(tokens))  # int64 [T]: each token's expert
        gate_and_up = expert_linear(tokens, ends, self.gate_up_proj.mT) + self.gate_up_proj_bias[owners]
        inner = clamped_swiglu(gate_and_up, self._alpha, self._limit)
        output = expert_linear(inner, ends, self.down_proj.mT) + self.down_proj_bias[owners]
        return (output * probabilities[:, None]).to(tokens.dtype), None


def clamped_swiglu(gate_and_up: Tensor, alpha: float, limit: float) -> Tensor:
    """[T, 2·F], gate and up in turn → [T, F]: (up + 1) · gate · σ(alpha · gate), both clamped (arXiv:2508.10925)."""
    gate, up = gate_and_up[:, ::2].clamp(max=limit), gate_and_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


class GatedGelu(MegatronModule):  # type: ignore[misc]  # megatron-core is untyped
    """The activation function of Gemma's MLP, in the place of GatedSilu."""

    def forward(self, gate_and_up: Tensor) -> Tensor:
        """See layer_functions.gated_gelu."""
        return gated_gelu(gate_and_up)


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


# ----------------------------------------------------------------------------------------------------------- model file
#
# A model's configuration for Megatron, read from its config.json.
#
# `import transformers` reads the sources of all its models: 3,000 files and half a second of CPU for each rank of a
# trainer, and longer on a shared file system.  A config.json of a known family that leaves nothing to defaults needs
# none of them.  Any other is read by transformers, which knows its defaults.

ModelConfig = Any  # of read_model: transformers' PretrainedConfig, or a ModelFile with the same names

_EVERY_MODEL = {
    "hidden_size": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "num_key_value_heads": int,
    "vocab_size": int,
    "rms_norm_eps": float,
    "hidden_act": str,
    "tie_word_embeddings": bool,
}
_EXPERTS = {
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "decoder_sparse_step": int,
    "norm_topk_prob": bool,
    "mlp_only_layers": list,
}
# Keys that the layers of each family read, besides keys whose absence means no: biases, pad_token_id, layer_types.
_KEYS: Mapping[str, Mapping[str, type]] = {
    "llama": _EVERY_MODEL,
    "qwen2": {**_EVERY_MODEL, "use_sliding_window": bool},
    "qwen3": {**_EVERY_MODEL, "use_sliding_window": bool, "head_dim": int},
    "qwen3_moe": {**_EVERY_MODEL, **_EXPERTS, "use_sliding_window": bool, "head_dim": int, "num_experts": int},
}


class ModelFile(SimpleNamespace):
    """Content of config.json, with transformers' names."""

    pad_token_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Do what PretrainedConfig.to_dict does."""
        return dict(vars(self))


def read_model(path: Path) -> ModelConfig:
    """The configuration of the model in a directory.  Raises ConfigError naming model.path."""
    try:
        document = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError):
        document = None  # transformers reports the fault
    rotation = _plain_rotation(document) if _says_everything(document) else None
    if rotation is not None:
        return ModelFile(**{**document, "rope_parameters": rotation})

    from transformers import AutoConfig  # see the top of the file

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path}: unknown to transformers: {error}") from error


def _says_everything(document: Any) -> bool:
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        return False
    keys = _KEYS.get(document["model_type"])
    if document.get("use_sliding_window"):
        return False  # which layers have one may be a default
    return keys is not None and all(type(document.get(key)) is kind for key, kind in keys.items())


def _plain_rotation(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """rope_parameters of an unscaled rotation, in the form of transformers 4 or 5; None for any other rotation."""
    if document.get("rope_scaling") or "partial_rotary_factor" in document:
        return None
    parameters = document.get("rope_parameters")
    if parameters is None and "rope_theta" in document:
        parameters = {"rope_type": "default", "rope_theta": document["rope_theta"]}
    if not isinstance(parameters, dict) or parameters.keys() != {"rope_type", "rope_theta"}:
        return None
    if parameters["rope_type"] != "default" or type(parameters["rope_theta"]) not in (int, float):
        return None
    return {**parameters, "rope_theta": float(parameters["rope_theta"])}


# --------------------------------------------------------------------------------------------------------- model config


def transformer_config(model: ModelConfig, trainer: TrainerConfig, dtype: torch.dtype) -> TransformerConfig:
    """dtype: of parameters and of activations between pipeline stages.

    Raises ConfigError naming model.path and the key of config.json whose value is not supported, or the key of
    [trainer] that does not fit the model.
    """
    refuse_unsupported(model.to_dict(), "model.path: config.json")
    layout = ParallelLayout.of(trainer)
    layout.refuse_unfit(model.to_dict())
    has_cuda = torch.cuda.is_available()
    if has_cuda and trainer.device == "cpu":
        raise ConfigError("trainer.device=cpu, but Megatron uses any GPU that it sees; hide it, or choose auto")
    return TransformerConfig(
        **_shape(model),
        **_experts(model, dtype),
        **_layout(layout),
        **_recomputation(trainer),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,  # the sampled policy has none
        attention_dropout=0.0,
        # Weights are loaded: initialising them first would cost minutes on a large model.
        perform_initialization=False,
        use_cpu_initialization=not has_cuda,
        calculate_per_token_loss=True,  # sums over micro-batches and ranks; the backend divides, once
        # Rows differ in length.  Megatron allows that with this dispatcher only, and checks it for dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # gloo may still be sending tensors that this would free.
        deallocate_pipeline_outputs=has_cuda,
        use_te_activation_func=True,  # whatever module a layer's MLPSubmodules name: layers.GatedSilu
        # Megatron's fused kernels need TransformerEngine, Apex or a compiler.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),  # run.deterministic
    )


@dataclass(frozen=True, slots=True)
class Rotations:
    """Speeds at which heads turn, of K kinds; layers of one kind turn alike."""

    frequencies: Tensor  # float32 [K, head size / 2] radians per token
    factors: Tensor  # float32 [K, 1, 1, 1] of cosines and sines: YaRN's, else 1
    of_layers: tuple[int, ...]  # the kind of each layer

    @classmethod
    def of(cls, model: ModelConfig) -> Rotations:
        """Read rope_parameters, of one of ROPE_TYPES each, as transformers does: one table, or one for each of
        layer_types.
        """
        found: Mapping[str, Any] = model.rope_parameters
        types = [FULL, SLIDING] if FULL in found else [None]
        of_layers = (
            [types.index(kind) for kind in model.layer_types] if FULL in found else [0] * model.num_hidden_layers
        )
        tables = [_rotation(model, kind) for kind in types]
        return cls(
            frequencies=torch.stack([frequencies for frequencies, _ in tables]),
            factors=torch.tensor([factor for _, factor in tables])[:, None, None, None],
            of_layers=tuple(of_layers),
        )

    def turned(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[K, 2, L, head size / 2]: see layer_functions.rotation_of; position_ids [L]."""
        angles = position_ids[:, None].float() * self.frequencies[:, None]
        return rotation_of(angles, dtype, self.factors)

    def to(self, device: torch.device) -> Rotations:
        """Copy them to a device."""
        return replace(self, frequencies=self.frequencies.to(device), factors=self.factors.to(device))


def _rotation(model: ModelConfig, layer_type: str | None) -> tuple[Tensor, float]:
    parameters = model.rope_parameters if layer_type is None else model.rope_parameters[layer_type]
    if parameters["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow: see model_config.py

        which = {} if layer_type is None else {"layer_type": layer_type}
        scaled = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, factor = scaled(model, device=torch.device("cpu"), **which)
        return frequencies, float(factor)
    head_size = _head_size(model)
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    return 1.0 / torch.pow(parameters["rope_theta"], exponents), 1.0


def norm_style(model: ModelConfig) -> NormStyle:
    """Return the style of the model's norms."""
    family = FAMILIES[model.model_type]
    return NormStyle(is_in_float32=family.is_norm_in_float32, offset=family.norm_offset)


def _shape(model: ModelConfig) -> dict[str, Any]:
    family = FAMILIES[model.model_type]
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": _head_size(model),
        "ffn_hidden_size": model.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu if family.activation[1] == "silu" else functional.gelu,
        "softmax_scale": (getattr(model, "query_pre_attn_scalar", None) or _head_size(model)) ** -0.5,
        "add_bias_linear": family.has_output_bias,
        "add_qkv_bias": family.has_qkv_bias,
        # Only of norms of single heads are gradients summed over tensor ranks.
        "qk_layernorm": family.head_norm == "head",
    }


_ROUTER: Mapping[str, Any] = {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"}


def _experts(model: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    if FAMILIES[model.model_type].has_fused_experts:
        return {
            **_ROUTER,
            "num_moe_experts": num_experts(model.to_dict()),
            "moe_router_topk": model.num_experts_per_tok,
            "moe_ffn_hidden_size": model.intermediate_size,
        }
    if model.model_type != "qwen3_moe":
        return {}
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return {
        **_ROUTER,
        "num_moe_experts": num_experts(model.to_dict()),
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        # Softmax of the chosen logits is the softmax of all, normalised over the chosen.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_grouped_gemm": has_grouped_kernel(capability, dtype, (model.hidden_size, model.moe_intermediate_size)),
    }


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    is_interleaved = layout.chunks > 1
    # Of two interleaved stages each is before and behind the other: messages of both directions mix.  With
    # more, single messages hang on NCCL (NVIDIA/Megatron-LM#5240): it connects pair by pair.
    is_sent_alone = is_interleaved and layout.pipeline == 2
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if is_interleaved else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": layout.is_sequence_parallel,
        "overlap_p2p_comm": is_sent_alone,
        "batch_p2p_comm": not is_sent_alone,
    }


def _recomputation(trainer: TrainerConfig) -> dict[str, Any]:
    if trainer.recompute_activations == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if trainer.recompute_activations == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _head_size(model: ModelConfig) -> int:
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
