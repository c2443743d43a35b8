"""Policies of Megatron on ranks of a group: what each computes, and its part of weights given whole."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.megatron.attention import LocalRow, whole_row
from rlhpc.training.megatron.backend import close_groups, open_groups
from rlhpc.training.megatron.model import HeadRequest, build_chunks
from rlhpc.training.megatron.model_config import GatedSilu, GroupedExperts, transformer_config

CPU = torch.device("cpu")
GRADIENT_TOLERANCE = 5e-5  # of numbers up to about 50, in float32
REQUEST = HeadRequest(temperature=1.0, chunk_tokens=16, want_entropy=True)


@dataclass(frozen=True)
class Case:
    """One layout of one model, one pass forward and backward."""

    checkpoint: Path
    trainer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    groups_experts: bool = False  # although no GPU asks for it


@dataclass(frozen=True)
class Seen:
    """What one rank saw: on the last stage rows by index → (log-probabilities, entropies) [T]; and its gradients.

    wrong_gradients: parameters whose gradient differs from that of transformers by more than the tolerance.
    """

    rows: dict[int, tuple[Tensor, Tensor]]
    wrong_gradients: list[tuple[str, float]]


def mixed_row(seed: int, vocabulary: int, lengths: tuple[int, ...]) -> PackedMicrobatch:
    """Segments of these lengths; every token but the first of each is a loss token."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths)).astype(np.int32)
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    mask = np.ones(len(tokens), dtype=bool)
    mask[borders[:-1]] = False
    zeros = np.zeros(len(tokens), dtype=np.float32)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    weights = np.ones(len(borders) - 1, np.float32)
    return PackedMicrobatch(tokens, positions, borders, mask, zeros, zeros, np.zeros(len(tokens), np.int32), weights)


def rank_results(rank: int, world_size: int, cases: list[Case], rows: list[PackedMicrobatch]) -> list[Seen]:
    """One case after the other, groups closed and opened in between."""
    return [_one_case(rank, world_size, case, rows) for case in cases]


def _one_case(rank: int, world_size: int, case: Case, rows: list[PackedMicrobatch]) -> Seen:
    trainer = TrainerConfig(backend="megatron", token_budget=4096, num_ranks=world_size, **case.trainer)
    layout = ParallelLayout.of(trainer)
    open_groups(layout, rank=rank, device=CPU)
    config = transformer_config(AutoConfig.from_pretrained(case.checkpoint), trainer, case.dtype)
    config.moe_grouped_gemm = case.groups_experts
    chunks = build_chunks(AutoConfig.from_pretrained(case.checkpoint), config, trainer, CPU)
    assert case.groups_experts == any(isinstance(each, GroupedExperts) for c in chunks for each in c.modules())
    reference = transformers_model(case.checkpoint, torch.float32)
    for chunk in chunks:
        give_weights(chunk.to(case.dtype), dict(reference.state_dict()))
    own = range(parallel_state.get_data_parallel_rank(), len(rows), layout.data)
    seen = _forward_backward(chunks, config, layout, {index: rows[index] for index in own})
    for row in rows:
        (unpacked_logprobs(reference, row) * loss_factors(row)).sum().backward()
    wrong = _wrong_gradients(chunks, {name: weight.grad for name, weight in reference.named_parameters()})
    close_groups()
    return Seen(seen, wrong)


def _forward_backward(
    chunks: list[Any], config: Any, layout: ParallelLayout, rows: dict[int, PackedMicrobatch]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Through Megatron's own schedule and buffers; gradients of the sum of log-probabilities times loss_factors."""
    seen = {}
    context_rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()

    def one_row(iterator, chunk):
        index, row = next(iterator)

        def judged(output):
            logprobs, entropy = (whole_row(part, layout, context_rank, group, len(row.token_ids)) for part in output)
            seen[index] = logprobs.detach(), entropy.detach()
            return (logprobs * loss_factors(row)).sum(), torch.tensor(0, dtype=torch.int), None

        return chunk(LocalRow.of(row, row.loss_mask, layout, context_rank, CPU), REQUEST), judged

    buffered = [
        DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
        for chunk in chunks
    ]
    config.finalize_model_grads_func = lambda model, _, **options: finalize_model_grads(model, None, **options)
    iterators = [iter(rows.items()) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=one_row,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=buffered if len(chunks) > 1 else buffered[0],
        num_microbatches=len(rows),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return seen


def _wrong_gradients(chunks: list[Any], expected: dict[str, Tensor]) -> list[tuple[str, float]]:
    differences = [
        (name, (weight.main_grad - share_of(chunk, name, expected)).abs().max().item())
        for chunk in chunks
        for name, weight in chunk.named_parameters()
    ]
    return [(name, difference) for name, difference in differences if not difference <= GRADIENT_TOLERANCE]


def transformers_model(checkpoint: Path, dtype: torch.dtype) -> Any:
    """With the attention that every family has, soft caps and sinks included."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager")


def loss_factors(row: PackedMicrobatch) -> Tensor:
    """Some weight for every token, so that no two gradients cancel by symmetry."""
    return torch.linspace(-1, 1, len(row.token_ids))


def unpacked_logprobs(reference: Any, row: PackedMicrobatch) -> Tensor:
    """[T] by transformers' own logits, segment by segment; 0 on the first token of each."""
    parts = []
    for start, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
        tokens = torch.from_numpy(row.token_ids[start:end].astype(np.int64))
        logits = reference(tokens[None], use_cache=False).logits[0].float()
        parts.append(torch.zeros(1))
        parts.append(logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0])
    return torch.cat(parts)


# ------------------------------------------------- Give a Megatron model of the tests its share of a transformers model

# Input: a state dict of transformers.  Output: the parameters of a PolicyModel, filled.  Kept apart from the trainer's
# own loading, so that a mistake there and a mistake in the model cannot cancel.


@torch.no_grad()
def give_weights(chunk, weights: dict[str, Tensor]) -> None:
    """Fill every parameter of this chunk, or fail."""
    for name, parameter in chunk.named_parameters():
        share = share_of(chunk, name, weights)
        assert share.shape == parameter.shape, (name, share.shape, parameter.shape)
        parameter.copy_(share)


def share_of(chunk, name: str, weights: dict[str, Tensor]) -> Tensor:
    """What this rank's parameter `name` must hold; `weights` may as well be gradients."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if name == "embedding.word_embeddings.weight":
        return _rows(weights["model.embed_tokens.weight"], tensor, rank)
    if name == "output_layer.weight":
        tied = "lm_head.weight" not in weights or chunk.share_embeddings_and_output_weights
        return _rows(weights["model.embed_tokens.weight" if tied else "lm_head.weight"], tensor, rank)
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, index, part = name.split(".", 3)
    layer = f"model.layers.{chunk.decoder.layers[int(index)].layer_number - 1}."
    return _in_layer(part, {key.removeprefix(layer): value for key, value in weights.items() if layer in key}, chunk)


def _in_layer(part: str, weights: dict[str, Tensor], chunk) -> Tensor:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    kind = part.rsplit(".", 1)[1]
    if part.startswith("self_attention.linear_qkv"):
        parts = [weights[f"self_attn.{x}_proj.{kind}"].unflatten(0, (2, -1)) for x in "qkv"]  # 2 heads of keys
        return torch.cat(parts, 1).flatten(0, 1).chunk(tensor)[rank]
    if part == "self_attention.core_attention.sinks":
        return weights["self_attn.sinks"].chunk(tensor)[rank]
    if part.startswith("mlp.experts.") and "local_experts" not in part:
        size = parallel_state.get_expert_model_parallel_world_size()
        return weights[part].chunk(size)[parallel_state.get_expert_model_parallel_rank()]
    if part == "self_attention.linear_proj.weight":
        return weights["self_attn.o_proj.weight"].chunk(tensor, 1)[rank]
    if part.startswith("mlp.experts"):
        local_index, linear = part.split(".")[3:5]
        expert = next(_experts_of_rank(chunk)) + int(local_index)
        return weights["mlp.experts.gate_up_proj" if linear == "linear_fc1" else "mlp.experts.down_proj"][expert]
    if part == "mlp.linear_fc1.weight":
        return torch.cat([weights[f"mlp.{x}_proj.weight"].chunk(tensor)[rank] for x in ("gate", "up")])
    if part == "mlp.linear_fc2.weight":
        return weights["mlp.down_proj.weight"].chunk(tensor, 1)[rank]
    if part in ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"):
        weight = weights[f"self_attn.{part.split('.')[1][0]}_norm.weight"]
        return weight if len(weight) == chunk.config.kv_channels else weight.chunk(tensor)[rank]  # of all heads
    before_mlp = next(x for x in ("pre_feedforward", "post_attention") if f"{x}_layernorm.weight" in weights)
    return weights[
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.weight": f"{before_mlp}_layernorm.weight",
            "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
            "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
            "mlp.router.weight": "mlp.gate.weight" if "mlp.gate.weight" in weights else "mlp.router.weight",
            "mlp.router.bias": "mlp.router.bias",
        }[part]
    ]


def _experts_of_rank(chunk) -> Iterator[int]:
    size = parallel_state.get_expert_model_parallel_world_size()
    yield parallel_state.get_expert_model_parallel_rank() * chunk.config.num_moe_experts // size


def _rows(weight: Tensor, tensor: int, rank: int) -> Tensor:
    padding = -len(weight) % tensor
    return torch.cat([weight, weight.new_zeros(padding, weight.shape[1])]).chunk(tensor)[rank]


# ---------------------------------------------------------------------------------- Experts twice with the same weights

SPREAD = 0.1  # of weights


def expert_pair(
    device: torch.device, dtype: torch.dtype, *, num_experts: int, hidden: int, width: int
) -> tuple[SequentialMLP, GroupedExperts]:
    """In the only rank of the default process group; Megatron's groups are opened, and the caller's to close.

    Drawn from torch's generator.  hidden: H; width: of the experts between their two matrices.
    """
    trainer = TrainerConfig(backend="megatron", token_budget=4096, device="auto")
    open_groups(ParallelLayout.of(trainer), rank=0, device=device)
    model = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=width, num_experts=num_experts, num_experts_per_tok=2
    )
    config = transformer_config(model, trainer, dtype)
    submodules = get_moe_module_spec(use_te=False, num_experts=num_experts).submodules.experts.submodules
    submodules.activation_func = GatedSilu
    made: list[Any] = [
        kind(num_experts, config, deepcopy(submodules), get_default_pg_collection()).to(device)
        for kind in (SequentialMLP, GroupedExperts)
    ]
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=SPREAD)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def draw_tokens(counts: list[int], hidden: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens [T, H], and probabilities [T] in float32, as Megatron's router makes them; both want gradients."""
    tokens = torch.randn(sum(counts), hidden, device=device).to(dtype)
    return tokens.requires_grad_(), torch.rand(sum(counts), device=device).requires_grad_()


def through(experts: SequentialMLP, counts: list[int], tokens: Tensor, probabilities: Tensor) -> dict[str, Tensor]:
    """Output, and gradients by name of a weighted sum of it: of the tokens, the probabilities, every parameter."""
    output, bias = experts(tokens, torch.tensor(counts), probabilities)
    assert bias is None
    factors = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=output.dtype).view_as(output)
    parameters = dict(experts.named_parameters())
    gradients = torch.autograd.grad(output, [tokens, probabilities, *parameters.values()], factors)
    return {"output": output.detach(), **dict(zip(("tokens", "probabilities", *parameters), gradients, strict=True))}
