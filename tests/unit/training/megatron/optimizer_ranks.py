"""What one rank of a small Megatron trainer does in the tests of the optimiser: gradients, norm, steps, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.megatron.backend import Schedule, Work, close_groups, open_groups
from rlhpc.training.megatron.model import HeadRequest, build_chunks
from rlhpc.training.megatron.model_config import transformer_config
from rlhpc.training.megatron.optimizer import MegatronAdamW, OptimizerSettings, wrap_chunks
from rlhpc.training.trainer_state import STATE_KINDS
from tests.unit.training.megatron.weights_of_rank import give_weights

CPU = torch.device("cpu")
REQUEST = HeadRequest(temperature=1.0, chunk_tokens=16, want_entropy=False)
LEARNING_RATE, WEIGHT_DECAY = 0.1, 0.5


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    checkpoint: Path
    trainer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Seen:
    """What one rank saw.  Tensors by the parameter's name."""

    norm: float
    before: dict[str, Tensor]
    after_decay: dict[str, Tensor]  # a step with gradients of zero
    after_gradient: dict[str, Tensor]  # and one with real ones, right after it
    ranges: list[tuple[str, int, int]]  # what this rank's optimiser keeps
    starts_from_zeros: bool  # moments, before the first step
    mains_are_published: bool  # after the last step every kept range equals the parameter, rounded
    steps: list[float]  # after setting them to 7 and one step


def watch(rank: int, world_size: int, cases: list[Case], rows: list[PackedMicrobatch]) -> list[Seen]:
    """One case after the other, groups closed and opened in between."""
    return [_watch_case(rank, world_size, case, rows) for case in cases]


def _watch_case(rank: int, world_size: int, case: Case, rows: list[PackedMicrobatch]) -> Seen:
    trainer = TrainerConfig(backend="megatron", token_budget=4096, num_ranks=world_size, **case.trainer)
    layout = ParallelLayout.of(trainer)
    open_groups(layout, rank=rank, device=CPU)
    model = AutoConfig.from_pretrained(case.checkpoint)
    chunks = build_chunks(model, transformer_config(model, trainer, case.dtype), trainer, CPU)
    reference = AutoModelForCausalLM.from_pretrained(case.checkpoint, dtype=case.dtype)
    for chunk in chunks:
        give_weights(chunk, dict(reference.state_dict()))
    settings = OptimizerSettings(
        dtype=case.dtype,
        betas=(0.9, 0.95),
        eps=1e-3,
        is_distributed=trainer.distributed_optimizer,
        overlap_grad_reduce=trainer.overlap_grad_reduce,
        is_offloaded=False,
    )
    wrapped = wrap_chunks(chunks, settings)
    optimizer = MegatronAdamW(wrapped, settings)
    schedule = Schedule(wrapped, layout, CPU)
    mine = [Work(row, row.loss_mask) for row in rows[parallel_state.get_data_parallel_rank() :: layout.data]]
    names = {id(parameter): name for chunk in chunks for name, parameter in chunk.named_parameters()}

    def accumulate() -> float:
        optimizer.zero_gradients()
        schedule.forward_backward(mine, REQUEST, lambda index, row, entropy: row.sum())
        return optimizer.gradient_norm()

    def copied() -> dict[str, Tensor]:
        return {name: p.detach().clone() for chunk in chunks for name, p in chunk.named_parameters()}

    norm, before = accumulate(), copied()
    starts_from_zeros = not any(shard.tensor(kind).any() for shard in optimizer.shards for kind in STATE_KINDS[1:])
    optimizer.zero_gradients()
    assert optimizer.gradient_norm() == 0.0
    optimizer.step(learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    after_decay = copied()
    optimizer.clip(accumulate(), 1.0)
    optimizer.num_steps_applied = 7
    optimizer.step(learning_rate=LEARNING_RATE, weight_decay=0.0)
    assert optimizer.num_steps_applied == 8
    seen = Seen(
        norm=norm,
        before=before,
        after_decay=after_decay,
        after_gradient=copied(),
        ranges=[(names[id(shard.parameter)], shard.start, shard.end) for shard in optimizer.shards],
        starts_from_zeros=starts_from_zeros,
        mains_are_published=all(
            torch.equal(
                shard.parameter.detach().view(-1)[shard.start : shard.end], shard.tensor("weights").to(case.dtype)
            )
            for shard in optimizer.shards
        ),
        steps=[float(shard.state["step"]) for shard in optimizer.shards],
    )
    close_groups()
    return seen
