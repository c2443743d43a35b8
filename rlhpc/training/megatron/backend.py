"""The trainer contract on Megatron-Core: one model over tensor, context, data, pipeline and expert ranks.

Input: packed micro-batches.  Output: optimiser steps.  The forward pass runs in the model's dtype; log-probabilities,
loss, gradient sums, main weights and moments are float32.
Guarantees: every rank returns the same StepResult, and all of them apply or skip a step together; a skipped step
changes no bit of weights, moments or step counters.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlhpc.config import Config
from rlhpc.contracts import PolicyLoss, StepGate, StepResult
from rlhpc.errors import ConfigError
from rlhpc.parallel_layout import LOGPROB_CHUNK_TOKENS, ParallelLayout
from rlhpc.training.checkpoint.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint.trainer_state import TrainerCheckpoint, fingerprint
from rlhpc.training.held_parameters import HeldParameters
from rlhpc.training.megatron.distributed_checkpoint import (
    DistributedSaver,
    is_distributed_checkpoint,
    verify_distributed,
)
from rlhpc.training.megatron.exchange import Exchange
from rlhpc.training.megatron.model import HeadRequest
from rlhpc.training.megatron.optimizer import MegatronAdamW, OptimizerSettings, wrap_chunks
from rlhpc.training.megatron.parallel import close_groups, open_groups
from rlhpc.training.megatron.rank_parts import ModelSource, RankModel, RankState
from rlhpc.training.megatron.schedule import Schedule, Work
from rlhpc.training.megatron.sharded_state import ShardedState
from rlhpc.training.metric_sums import MetricSums, sums_over_ranks
from rlhpc.training.process_group import (
    DTYPES,
    RankContext,
    close_process_group,
    device_of,
    open_process_group,
)
from rlhpc.training.row_tensors import all_but_first, of_row, token_row
from rlhpc.training.sharded_tensors import gather_stream
from rlhpc.training.stateful_backend import NoneOrRows, StatefulBackend, StepSums
from rlhpc.training.step_vote import all_ranks_agree
from rlhpc.training.weight_average import WeightAverage
from rlhpc.types import PackedMicrobatch, TensorSpec

LEAD_RANK = 0


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """Settings that do not change between steps."""

    temperature: float
    chunk_tokens: int
    trainer_format: str  # of checkpoints to be written


class MegatronBackend(StatefulBackend):
    """One rank's part of the model; the process groups of this process belong to it until close()."""

    def __init__(
        self, rank_model: RankModel, optimizer: MegatronAdamW, schedule: Schedule, settings: MegatronSettings
    ) -> None:
        """Take over a loaded model, and the optimizer and schedule made of its chunks.  A collective."""
        self._model, self._optimizer, self._schedule, self._settings = rank_model, optimizer, schedule, settings
        self._layout, self._device = rank_model.layout, rank_model.device
        self._rank = dist.get_rank()
        self._dp_rank: int = parallel_state.get_data_parallel_rank()
        self._exchange = Exchange()
        self._reference = HeldParameters(rank_model.parameters)
        # Losses are computed on the last stage; its first rank reports for all, being tensor, context and data rank 0.
        self._speaker = self._layout.num_ranks - self._layout.num_ranks // self._layout.pipeline
        self._state = RankState(rank_model, optimizer.shards, self._exchange)
        self._saver = self._open_saver()
        self._average = WeightAverage(self._state.items, partial(self._state.own, "weights"))
        self._is_open, self._undo = True, ExitStack()  # closes the groups that this backend has opened

    @classmethod
    def open(cls, config: Config, context: RankContext, *, has_value_head: bool = False) -> MegatronBackend:
        """Load config.model, sharded over all ranks, and connect to them.

        Groups that are already open, such as another backend's, are used and stay open.
        Raises ConfigError for a model or a layout that cannot be trained here, ChannelTimeout for ranks that do not
        appear; then nothing is left open.
        """
        device = device_of(config.trainer.device, context.rank)
        _refuse_unfit(config, device)
        torch.manual_seed(config.run.seed)
        with ExitStack() as undo:  # on any error: this process must be able to open another backend
            if not dist.is_initialized():
                open_process_group(context, device)
                undo.callback(close_process_group)
            if not parallel_state.model_parallel_is_initialized():  # they are open for a critic beside its policy
                open_groups(ParallelLayout.of(config.trainer), rank=context.rank, device=device)
                undo.callback(close_groups)
            backend = cls._on_open_groups(config, device, has_value_head=has_value_head)
            backend._undo = undo.pop_all()
            return backend

    @classmethod
    def _on_open_groups(cls, config: Config, device: torch.device, *, has_value_head: bool) -> MegatronBackend:
        trainer, dtype = config.trainer, DTYPES[config.model.dtype]
        model = RankModel.load(config, dtype, device, has_value_head=has_value_head)
        settings = OptimizerSettings(
            dtype=dtype,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_eps,
            is_distributed=trainer.distributed_optimizer,
            overlap_grad_reduce=trainer.overlap_grad_reduce,
            is_offloaded=trainer.optimizer_offload,
        )
        wrapped = wrap_chunks(model.chunks, settings)
        optimizer = MegatronAdamW(wrapped, settings)
        backend = cls(
            model,
            optimizer,
            Schedule(wrapped, model.layout, device),
            MegatronSettings(config.generation.temperature, LOGPROB_CHUNK_TOKENS, config.checkpoint.trainer_format),
        )
        if dtype != torch.float32:
            # Main weights were copied from rounded ones; the checkpoint may have them in full precision.
            with ModelSource.of_model(config.model.path) as source:
                backend._state.read("weights", source)
        return backend

    def _open_saver(self) -> BackgroundSaver | DistributedSaver:
        group = open_save_group()
        if self._settings.trainer_format == "megatron":
            sharded = ShardedState(self._model, self._optimizer.shards)
            return DistributedSaver(sharded, self._exchange, fingerprint=fingerprint(self._model.specs), group=group)
        return BackgroundSaver(
            self._state.items, self._state.own, device=self._device, group=group, lead_rank=LEAD_RANK
        )

    @property
    def dp_rank(self) -> int:
        """The same on all ranks that share one replica of the model."""
        return self._dp_rank

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self._layout.data

    @property
    def num_steps_applied(self) -> int:
        """Read from the optimiser, which skipped steps do not touch."""
        return self._optimizer.num_steps_applied

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0."""
        return self._rank == LEAD_RANK

    # --------------------------------------------------------------------------------------------- forward and step

    def logprobs(
        self, microbatches: Sequence[PackedMicrobatch], *, temperature: float | None = None, of_reference: bool = False
    ) -> list[Tensor]:
        """See TrainerBackend; one forward pass per micro-batch, whole rows on every rank of the replica."""
        rows = [torch.zeros(len(microbatch.token_ids), device=self._device) for microbatch in microbatches]

        def keep(index: int, row: Tensor, entropies: Tensor) -> Tensor:
            rows[index].copy_(row)
            return entropies.sum()

        work = [Work(microbatch, all_but_first(microbatch)) for microbatch in microbatches]
        with self._reference.in_place(of_reference):
            self._schedule.forward(work, self._request(want_entropy=False, temperature=temperature), keep)
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
        reference: Sequence[Tensor] | None = None,
        has_entropy_gradient: bool = False,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        may_apply: StepGate | None = None,
    ) -> StepResult:
        """See TrainerBackend; metrics are those of the loss, "loss" itself, and "entropy", all summed."""
        sums = self._begin_last_part(num_loss_tokens)
        anchors = {"proximal": proximal, "reference": reference}
        self._add_gradients(
            microbatches, loss, anchors, sums, has_entropy_gradient=has_entropy_gradient, is_last_part=True
        )
        if sums.divisor != num_loss_tokens:
            self._optimizer.scale_gradients(sums.divisor / num_loss_tokens)
        own_norm = self._optimizer.gradient_norm()
        metrics, grad_norm = self._exchange.from_rank(self._speaker, (self._summed(sums.metrics), own_norm))
        is_finite = all(map(math.isfinite, (own_norm, grad_norm, metrics["loss"])))
        is_allowed = may_apply is None or may_apply(metrics, grad_norm)
        applied = all_ranks_agree(is_finite and is_allowed, self._device)
        if applied:
            self._optimizer.clip(grad_norm, max_grad_norm)
            self._optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
        is_known = applied or (is_finite and not is_allowed)
        return StepResult(applied=applied, grad_norm=grad_norm if is_known else math.nan, metrics=metrics)

    def _zero_gradients(self) -> None:
        self._optimizer.zero_gradients()

    def _add_gradients(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: PolicyLoss,
        anchors: Mapping[str, NoneOrRows],
        sums: StepSums,
        *,
        has_entropy_gradient: bool,
        is_last_part: bool,
    ) -> None:
        def loss_callback(index: int, current: Tensor, entropies: Tensor) -> Tensor:
            of_this_row = {name: of_row(rows, index) for name, rows in anchors.items()}
            loss_sum, metrics = loss(current, token_row(microbatches[index], entropies, **of_this_row))
            sums.metrics.add({**metrics, "entropy": entropies.detach().sum(), "loss": loss_sum.detach()})
            return loss_sum / sums.divisor

        work = [Work(microbatch, microbatch.loss_mask) for microbatch in microbatches]
        request = self._request(want_entropy=True, has_entropy_gradient=has_entropy_gradient)
        run = self._schedule.forward_backward if is_last_part else self._schedule.accumulate
        run(work, request, loss_callback)

    def _request(
        self, *, want_entropy: bool, has_entropy_gradient: bool = False, temperature: float | None = None
    ) -> HeadRequest:
        temperature = self._settings.temperature if temperature is None else temperature
        return HeadRequest(temperature, self._settings.chunk_tokens, want_entropy, has_entropy_gradient)

    def _summed(self, sums: MetricSums) -> dict[str, float]:
        """Over micro-batches and replicas, on the last stage; nothing on other stages."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        return sums.over_ranks(self._device, group=parallel_state.get_data_parallel_group())

    def sum_over_replicas(self, figures: Mapping[str, float]) -> dict[str, float]:
        """See TrainerBackend."""
        return sums_over_ranks(figures, self._device, parallel_state.get_data_parallel_group())

    # ------------------------------------------------------------------------------------------- weights, checkpoints

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """See TrainerBackend; dtypes are those of the forward pass, a tied head is not listed."""
        return self._model.specs

    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainerBackend; views of parameters that are whole on rank 0: not to be written to."""
        with self._reference.in_place(of_reference):
            yield from gather_stream(
                self._model.items,
                self._model.own,
                to_rank=LEAD_RANK,
                dtype=self._model.dtype,
                device=self._device,
            )

    def load(self, directory: Path) -> None:
        """See TrainerBackend and StatefulBackend; the format is recognised from the directory."""
        if not is_distributed_checkpoint(directory, self._exchange):
            super().load(directory)
            return
        sharded = verify_distributed(directory, self._exchange, fingerprint=fingerprint(self._model.specs))
        sharded.read(ShardedState(self._model, self._optimizer.shards), self._exchange)
        self._continue_from(sharded.num_steps_applied, sharded.rng)

    def _read(self, checkpoint: TrainerCheckpoint, kind: str, into: str) -> None:
        with checkpoint.source(kind) as source:
            self._state.read(into, source)

    def _publish(self, num_steps_applied: int) -> None:
        self._optimizer.num_steps_applied = num_steps_applied
        self._optimizer.publish()

    def close(self) -> None:
        """Wait for a running save, then leave the process groups.  Idempotent."""
        if self._is_open:
            self._is_open = False
            self._saver.close()
            self._reference.release()
            self._model.forget_last_tokens()
            del self._saver, self._state, self._schedule, self._optimizer, self._reference, self._average, self._model
            self._undo.close()
            # Megatron's modules, buffers and hooks refer to each other, and keep their groups' threads alive.
            gc.collect()


def _refuse_unfit(config: Config, device: torch.device) -> None:
    if config.trainer.optimizer_offload and device.type != "cuda":
        raise ConfigError("trainer.optimizer_offload=true needs a GPU to offload from; legal on a CPU: false")
