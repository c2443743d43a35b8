"""The policy as a Megatron model whose last pipeline stage makes log-probabilities, never logits.

Input: LocalRows.  Output: [L] log-probabilities of the next tokens, or hidden states for the next stage.
Legend: L tokens of this context rank, W of them wanted, H hidden size.

Layers are Megatron's own with its own linear layers, which need no TransformerEngine; the names of parameters are the
same whether it is there or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.routes import MixtureForm
from rlhpc.models.shape import FAMILIES, ParallelLayout, layer_windows
from rlhpc.training.layer_functions import NormStyle
from rlhpc.training.logprob import VocabularyShard, head_logprobs, token_values
from rlhpc.training.megatron.attention import LocalRow, PackedCoreAttention, core_attention
from rlhpc.training.megatron.hf_layout import has_value_head
from rlhpc.training.megatron.model_config import (
    FusedExperts,
    GatedGelu,
    GatedSilu,
    GroupedExperts,
    ModelConfig,
    NormedAddition,
    PackedSelfAttention,
    ProjectionNorm,
    RMSNorm,
    Rotations,
    norm_style,
)
from rlhpc.training.route_replay import StageReplay, choice


@dataclass(frozen=True, slots=True)
class HeadRequest:
    """Log-probabilities and entropies from the hidden states of one row, on the last stage."""

    temperature: float
    chunk_tokens: int
    want_entropy: bool
    has_entropy_gradient: bool = False


class _ValueHead(nn.Module):
    """Stands in the place of the output layer; every tensor rank has the whole weight."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Passed through GPTModel.forward as its `labels`, which it hands to _postprocess unread."""

    row: LocalRow
    request: HeadRequest


class PolicyModel(GPTModel):  # type: ignore[misc]  # megatron-core is untyped
    """A chunk of layers, with the embedding before the first and the head after the last."""

    def __init__(self, model: ModelConfig, config: TransformerConfig, device: torch.device, **options: Any) -> None:
        """options: those of GPTModel that depend on the stage."""
        super().__init__(
            config,
            max_sequence_length=model.max_position_embeddings,
            share_embeddings_and_output_weights=bool(model.tie_word_embeddings),
            position_embedding_type="none",  # Megatron's own does not restart positions at borders
            **options,
        )
        self._is_critic = has_value_head(model)
        if self._is_critic and self.post_process:
            self.output_layer = _ValueHead(config)
        self._real_vocabulary = model.vocab_size
        self._padding_token: int | None = model.pad_token_id
        self._softcap: float | None = getattr(model, "final_logit_softcapping", None)
        scale = config.hidden_size**0.5 if FAMILIES[model.model_type].is_embedding_scaled else None
        # Rounded as transformers rounds it.
        self._embedding_scale = None if scale is None else torch.tensor(scale, dtype=config.params_dtype).item()
        # Not a buffer: Megatron's conversion to half precision would round it, and with it every angle.
        self._rotations = Rotations.of(model).to(device)

    def forward(self, row: LocalRow, request: HeadRequest) -> Tensor:
        """Return float32 [2, L], log-probabilities and entropies, on the last stage; elsewhere hidden states.

        With soft targets [3, L]: their log-probabilities last.

        The entry of the token before a wanted one is the wanted one's log-probability, and the entropy of its
        distribution if that is wanted; all others are 0.  The same on all ranks of the tensor group.
        """
        output: Tensor = super().forward(
            input_ids=row.token_ids[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            labels=_Wanted(row, request),
            packed_seq_params=row.packed,
        )
        return output

    def _preprocess(self, *, position_ids: Tensor, **inputs: Any) -> tuple[Any, ...]:
        """Megatron's, with the rotations [K, 2, L, head size / 2] of every token in the place of Megatron's angles."""
        decoder_input, _, *others = super()._preprocess(position_ids=position_ids, **inputs)
        if self.pre_process and not self.embedding.word_embeddings.weight.requires_grad:
            decoder_input = _plain_leaf(decoder_input)
        elif self.pre_process and self._padding_token is not None:
            is_padding = torch.eq(inputs["input_ids"][0], self._padding_token)
            decoder_input = self._without_gradient(decoder_input, is_padding)
        if self.pre_process and self._embedding_scale is not None:
            decoder_input = decoder_input * self._embedding_scale
        rotation = self._rotations.turned(position_ids[0], self.config.params_dtype)
        return (decoder_input, rotation, *others)

    def _without_gradient(self, embedded: Tensor, is_padding: Tensor) -> Tensor:
        """Cut the gradient of the padding token, as transformers does (padding_idx).

        Its row is often all zeros, for which the gradient of the first norm is a thousand times as large as for others.
        """
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            is_padding = is_padding.chunk(group.size())[group.rank()]
        return torch.where(is_padding[:, None, None], embedded.detach(), embedded)

    def _postprocess(self, *, hidden_states: Tensor, labels: _Wanted, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        row, request = labels.row, labels.request
        hidden = self._on_every_tensor_rank(hidden_states)[:, 0]
        if self._is_critic:
            values, none = token_values(hidden.index_select(0, row.predictors), self.output_layer.weight)[:2]
            return self._at(row, torch.stack([values, none]))
        weight: Tensor = self.head_weight
        if (adapter := getattr(self.output_layer, "adapter", None)) is not None:
            hidden, weight = adapter.widened(hidden_states, hidden, weight)
        # Runs even if nothing is wanted: backward must reach the collectives that other ranks wait in.
        logprobs, entropy, soft = head_logprobs(
            hidden.index_select(0, row.predictors),
            weight,
            row.targets,
            temperature=request.temperature,
            chunk_tokens=request.chunk_tokens,
            want_entropy=request.want_entropy,
            has_entropy_gradient=request.has_entropy_gradient,
            shard=self._shard(),
            soft=row.soft,
            softcap=self._softcap,
        )
        found = [logprobs, torch.zeros_like(logprobs) if entropy is None else entropy]
        return self._at(row, torch.stack(found if soft is None else [*found, soft]))

    @staticmethod
    def _at(row: LocalRow, wanted: Tensor) -> Tensor:
        """[n, W] → [n, L], 0 elsewhere.  One tensor, because Megatron reads its device in a mixture of experts."""
        return wanted.new_zeros(len(wanted), len(row.token_ids)).index_copy(1, row.predictors, wanted)

    @property
    def head_weight(self) -> nn.Parameter:
        """[rows of this tensor rank, H]; the embedding's if the two are tied and both on this stage."""
        tied = self.share_embeddings_and_output_weights
        weight: nn.Parameter = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def _on_every_tensor_rank(self, hidden: Tensor) -> Tensor:
        """[L, 1, H]; a critic's gradient is whole on every rank, that of a head in shards is summed on the way back."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=not self._is_critic, group=group
            )
        elif self._is_critic:
            whole = hidden
        else:
            whole = copy_to_tensor_model_parallel_region(hidden, group=group)
        return whole

    def _shard(self) -> VocabularyShard | None:
        group = self.pg_collection.tp
        if group.size() == 1:
            return None
        return VocabularyShard.of(group, len(self.head_weight), self._real_vocabulary)


def _plain_leaf(embedded: Tensor) -> Tensor:
    """Output of a frozen embedding as input of layers with adapters: contiguous, and requiring a gradient.

    With the strides of a transposed tensor torch would multiply it token by token.  The gradient is not read, but
    layers that are recomputed in backward have one only if their input has.
    """
    return embedded.clone(memory_format=torch.contiguous_format).requires_grad_(torch.is_grad_enabled())


def build_chunks(
    model: ModelConfig, config: TransformerConfig, trainer: TrainerConfig, device: torch.device
) -> list[PolicyModel]:
    """This stage's chunks of layers, several where stages interleave.  Process groups must be open.

    Parameters are on `device` and uninitialised: to be loaded.
    """
    _name_what_is_missing()
    layout = ParallelLayout.of(trainer)
    chunks = []
    for stage_chunk in range(layout.chunks) if layout.chunks > 1 else (None,):
        is_interleaved = {"ignore_virtual": False, "vp_stage": stage_chunk} if stage_chunk is not None else {}
        chunk = PolicyModel(
            model,
            config,
            device,
            transformer_layer_spec=_block(model, config, trainer, stage_chunk),
            vocab_size=layout.padded_vocabulary(model.vocab_size),
            pre_process=parallel_state.is_pipeline_first_stage(**is_interleaved),
            post_process=parallel_state.is_pipeline_last_stage(**is_interleaved),
            vp_stage=stage_chunk,
        ).to(device)
        for module in chunk.modules():
            _mark(module)
        chunks.append(chunk)
    return chunks


# ------------------------------------------------------------------------------------------------------- routing replay
#
# The routes of a row reach each layer with its RowPlan; the layer tells its router, at the seam where Megatron's own
# replay has its place (megatron.core.transformer.moe.router_replay).  Megatron's keeps a list for the process, a queue
# for layers that are computed again, and a mode to be switched between forward and backward: none is needed here.


class _GivenRoutes:
    """Stands in the place of Megatron's RouterReplay in one router."""

    def __init__(self) -> None:
        self.experts: Tensor | None = None  # int16 [tokens of the router, k] of the row under way; None: not replayed

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (values, ids) of the experts [tokens, k]; choose: Megatron's own choice.  Signature by Megatron."""
        values, own = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return values, own
        chosen = choice(own, self.experts)
        return scores.gather(1, chosen), chosen


def attach_replay(chunks: Sequence[Any], form: MixtureForm) -> StageReplay:
    """Have the routers of this rank's chunks obey the routes of rows."""
    found = []
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router.router_replay = _GivenRoutes()
            layer.register_forward_pre_hook(_tell_router, with_kwargs=True)
            found.append(layer.layer_number - 1)
    return StageReplay(form, tuple(found))


def _tell_router(layer: Any, _: Any, kwargs: dict[str, Any]) -> None:
    """Called before a layer's forward pass, also when it is computed again."""
    experts: Tensor | None = kwargs["packed_seq_params"].experts.get(layer.layer_number - 1)
    if experts is not None and layer.config.sequence_parallel:
        group = layer.pg_collection.tp
        experts = experts.chunk(group.size())[group.rank()]
    layer.mlp.router.router_replay.experts = experts


# Modules with parts of parameters; PackedCoreAttention has those of sinks.
_CUT = (
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, ProjectionNorm, PackedCoreAttention, FusedExperts,
)  # fmt: skip


def _mark(module: nn.Module) -> None:
    """Set the attributes of a module's own parameters by which Megatron sums gradients and computes their norm.

    Megatron sets them itself only when it initialises weights (for tensor-parallel parameters), and only when experts
    are distributed (for parameters of experts): with tensor ranks and without expert ranks, each tensor rank sees other
    tokens of the same expert.
    """
    if not isinstance(module, _CUT):
        return
    dimension = 1 if isinstance(module, RowParallelLinear) else 0
    parameters: Any = module.named_parameters(recurse=False)
    for name, parameter in parameters:
        if isinstance(module, RowParallelLinear) and name == "bias":
            continue  # it is added behind the sum over tensor ranks, and whole on each
        for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(parameter, attribute):
                delattr(parameter, attribute)
        set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
        if getattr(module, "is_expert", False) or isinstance(module, FusedExperts):
            parameter.allreduce = False


def _block(
    model: ModelConfig, config: TransformerConfig, trainer: TrainerConfig, stage_chunk: int | None
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, stage_chunk)
    numbers = range(first, first + get_num_layers_to_build(config, stage_chunk))
    windows, rotations = layer_windows(model.to_dict()), Rotations.of(model).of_layers
    return TransformerBlockSubmodules(
        layer_specs=[_layer(model, config, trainer, windows[number], rotations[number]) for number in numbers],
        layer_norm=_norm(norm_style(model)),
    )


def _norm(style: NormStyle) -> ModuleSpec:
    return ModuleSpec(RMSNorm, params={"style": style})


def _layer(
    model: ModelConfig, config: TransformerConfig, trainer: TrainerConfig, window: int | None, rotation: int
) -> ModuleSpec:
    """window: see layer_windows; rotation: see Rotations.of_layers."""
    family, style = FAMILIES[model.model_type], norm_style(model)
    norm, addition = _norm(style), ModuleSpec(NormedAddition, params={"config": config, "style": style})
    query_norm, key_norm = _head_norms(model, norm)
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=_core_attention(model, trainer, window),
        linear_proj=RowParallelLinear,
        q_layernorm=query_norm,
        k_layernorm=key_norm,
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if family.norm_before_attention else IdentityOp,
            self_attention=ModuleSpec(
                PackedSelfAttention,
                params={"attn_mask_type": AttnMaskType.causal, "rotation": rotation},
                submodules=attention,
            ),
            self_attn_bda=addition if family.norm_after_attention else get_bias_dropout_add,
            pre_mlp_layernorm=norm if family.norm_before_mlp else IdentityOp,
            mlp=_mlp(model, config),
            mlp_bda=addition if family.norm_after_mlp else get_bias_dropout_add,
        ),
    )


def _head_norms(model: ModelConfig, norm: ModuleSpec) -> tuple[Any, Any]:
    """Return the norms of queries and of keys."""
    match FAMILIES[model.model_type].head_norm:
        case "none":
            return IdentityOp, IdentityOp
        case "head":
            return norm, norm
        case "projection":
            counts = model.num_attention_heads, model.num_key_value_heads
            queries, keys = (ModuleSpec(ProjectionNorm, params={"num_heads": count}) for count in counts)
            return queries, keys


def _core_attention(model: ModelConfig, trainer: TrainerConfig, window: int | None) -> ModuleSpec:
    has_sinks = FAMILIES[model.model_type].has_sinks
    traits: dict[str, Any] = {
        "window": window,
        "softcap": getattr(model, "attn_logit_softcapping", None),
        "has_sinks": has_sinks,
    }
    return ModuleSpec(core_attention(trainer, **traits), params=traits)


def _mlp(model: ModelConfig, config: TransformerConfig) -> ModuleSpec:
    if config.num_moe_experts is None:
        is_silu = FAMILIES[model.model_type].activation[1] == "silu"
        gate = GatedSilu if is_silu else GatedGelu
        return ModuleSpec(MLP, submodules=MLPSubmodules(ColumnParallelLinear, gate, RowParallelLinear))
    mlp = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if FAMILIES[model.model_type].has_fused_experts:
        numbers = {"alpha": model.swiglu_alpha, "limit": model.swiglu_limit}
        mlp.submodules.experts = ModuleSpec(FusedExperts, params=numbers)
        return mlp
    mlp.submodules.experts.submodules.activation_func = GatedSilu
    if config.moe_grouped_gemm:
        mlp.submodules.experts.module = GroupedExperts  # has the same parts as the module that it replaces
    return mlp


def _name_what_is_missing() -> None:
    """Define a name that megatron-core 0.16.1's router reads, but defines only if TransformerEngine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
