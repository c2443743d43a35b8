"""What one rank of a small Megatron trainer does in the tests of the model: open, load, run rows, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.megatron.attention import LocalRow, whole_row
from rlhpc.training.megatron.backend import close_groups, open_groups
from rlhpc.training.megatron.model import HeadRequest, build_chunks
from rlhpc.training.megatron.model_config import GroupedExperts, transformer_config
from tests.unit.training.megatron.weights_of_rank import give_weights, share_of

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
    reference = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=torch.float32)
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
