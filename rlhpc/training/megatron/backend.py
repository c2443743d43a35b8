"""The trainer contract on Megatron-Core: one model over tensor, context, data, pipeline and expert ranks.

Eats packed micro-batches, makes optimiser steps.  The forward pass runs in the model's dtype; log-probabilities, loss,
gradient sums, main weights and moments are float32.
Promises: every rank returns the same StepResult, applies or skips a step together with all others, and a skipped step
changes no bit of weights, moments or step counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.config import Config
from rlhpc.contracts import PolicyLoss, StepResult, TrainerBackend
from rlhpc.errors import CheckpointError, ConfigError
from rlhpc.parallel_layout import ParallelLayout
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint import STATE_FILE, TrainerCheckpoint, read_checkpoint
from rlhpc.training.megatron.exchange import Exchange
from rlhpc.training.megatron.model import HeadRequest, build_chunks
from rlhpc.training.megatron.model_config import transformer_config
from rlhpc.training.megatron.optimizer import MegatronAdamW, OptimizerSettings, wrap_chunks
from rlhpc.training.megatron.parallel import close_groups, open_groups
from rlhpc.training.megatron.schedule import Schedule, Work
from rlhpc.training.optimizer import STATE_KINDS
from rlhpc.training.process_group import DTYPES, close_process_group, device_of, open_process_group
from rlhpc.training.rng import read_rng, write_rng
from rlhpc.training.step_vote import all_ranks_agree
from rlhpc.types import PackedMicrobatch, TensorSpec

LEAD_RANK = 0


class MegatronBackend(TrainerBackend):
    """One rank's part of the model; the process groups of this process belong to it until close()."""

    @property
    def dp_rank(self) -> int:
        """The same on all ranks that share one replica of the model."""
        return self._dp_rank

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self._layout.data

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def num_steps_applied(self) -> int:
        """Read from the optimiser, which skipped steps do not touch."""
        return self._optimizer.num_steps_applied

    @property
    def is_lead(self) -> bool:
        """True on rank 0."""
        return dist.get_rank() == LEAD_RANK

    # --------------------------------------------------------------------------------------------- forward and step

    def logprobs(self, microbatches: Sequence[PackedMicrobatch]) -> list[Tensor]:
        """See TrainerBackend; one forward pass per micro-batch, whole rows on every rank of the replica."""
        rows = [torch.zeros(len(microbatch.token_ids), device=self._device) for microbatch in microbatches]

        def keep(index: int, row: Tensor, entropy: Tensor) -> Tensor:
            rows[index].copy_(row)
            return entropy

        work = [Work(microbatch, _all_but_first(microbatch)) for microbatch in microbatches]
        self._schedule.forward(work, self._request(want_entropy=False), keep)
        if self._layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            for row in rows:
                dist.broadcast(row, last, group=group)
        return rows

    def step(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: PolicyLoss,
        *,
        proximal: Sequence[Tensor] | None,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> StepResult:
        """See TrainerBackend; metrics are those of the loss, "loss" itself, and "entropy", all summed."""
        self._optimizer.zero_gradients()
        sums = MetricSums()

        def judge(index: int, current: Tensor, entropy: Tensor) -> Tensor:
            loss_sum, metrics = loss(current, **self._loss_inputs(microbatches[index], proximal and proximal[index]))
            sums.add({**metrics, "entropy": entropy, "loss": loss_sum.detach()})
            return loss_sum / num_loss_tokens

        work = [Work(microbatch, microbatch.loss_mask) for microbatch in microbatches]
        self._schedule.forward_backward(work, self._request(want_entropy=True), judge)
        own_norm = self._optimizer.gradient_norm()
        metrics, grad_norm = self._exchange.from_rank(self._judge_rank, (sums.over_replicas(), own_norm))
        is_finite = all(map(math.isfinite, (own_norm, grad_norm, metrics["loss"])))
        applied = all_ranks_agree(is_finite, self._device)
        if applied:
            self._optimizer.clip(grad_norm, max_grad_norm)
            self._optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
        return StepResult(applied=applied, grad_norm=grad_norm if applied else math.nan, metrics=metrics)

    def _request(self, *, want_entropy: bool) -> HeadRequest:
        return HeadRequest(self._settings.temperature, self._settings.chunk_tokens, want_entropy)

    def _loss_inputs(self, microbatch: PackedMicrobatch, proximal: Tensor | None) -> dict[str, Tensor]:
        """Whole rows, on every rank that has whole log-probabilities."""
        loss_mask = self._on_device(microbatch.loss_mask)
        behaviour = self._on_device(microbatch.behaviour_logprobs)
        # current is 0 off the loss mask, so proximal must be too: exp(0 − (−100)) is inf, and inf · 0 is nan.
        start = behaviour if proximal is None else torch.where(loss_mask, proximal.to(self._device), 0.0)
        return {
            "behaviour": behaviour,
            "proximal": start,
            "advantages": self._on_device(microbatch.advantages),
            "loss_mask": loss_mask,
        }

    def _on_device(self, array: NDArray[np.generic]) -> Tensor:
        # A copy, because arrays of a message are read-only and torch cannot say so of a tensor.
        return torch.from_numpy(array.copy()).to(self._device)

