"""The trainer contract on Megatron-Core: one model over tensor, context, data, pipeline and expert ranks.

Input: packed micro-batches.  Output: optimiser steps.  The forward pass runs in the model's dtype; log-probabilities,
loss, gradient sums, main weights and moments are float32.
Guarantees: every rank returns the same StepResult, and all of them apply or skip a step together; a skipped step
changes no bit of weights, moments or step counters.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.config.rules import Config
from rlhpc.models.routes import MixtureForm
from rlhpc.models.shape import LOGPROB_CHUNK_TOKENS, ParallelLayout
from rlhpc.protocol.contracts import PolicyLoss
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import PackedMicrobatch, TensorSpec
from rlhpc.training.backends import HeldParameters, NoneOrRows, OptimizerBackend, StepSums, WeightAverage
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_tensors import gather_stream
from rlhpc.training.logprob import MetricSums, all_but_first, of_row, plain_row, sums_over_ranks, token_row
from rlhpc.training.megatron.attention import LocalRow, whole_row
from rlhpc.training.megatron.checkpoint import (
    DistributedSaver,
    ShardedState,
    is_distributed_checkpoint,
    verify_distributed,
)
from rlhpc.training.megatron.cpu import prepare_cpu
from rlhpc.training.megatron.hf_weights import ModelSource, RankModel, RankState
from rlhpc.training.megatron.model import HeadRequest, attach_replay
from rlhpc.training.megatron.optimizer import MegatronAdamW, OptimizerSettings, wrap_chunks
from rlhpc.training.ranks import DTYPES, Exchange, RankContext, close_process_group, device_of, open_process_group
from rlhpc.training.route_replay import StageReplay, without_routes
from rlhpc.training.trainer_state import TrainerCheckpoint, fingerprint

# ------------------------------------------------------------------------------------------------------------- parallel
#
# Megatron's process groups: opened for a layout and closed again, any number of times in a process.
#
# Input: a ParallelLayout and the default process group, which must be initialised and have exactly the layout's ranks,
# even if that is one.  Megatron keeps the groups in its own module, so that one process can have one layout at a time.

SEED = 1  # unused: weights are loaded, and there is no dropout


def open_groups(layout: ParallelLayout, *, rank: int, device: torch.device) -> None:
    """Make the groups of tensor, context, data, pipeline and expert parallelism; a collective.

    Leaves megatron.core.parallel_state initialised, on a machine without CUDA prepared by prepare_cpu().
    """
    prepare_cpu()
    assert torch.distributed.get_world_size() == layout.num_ranks, "the default process group must hold the layout"
    assert torch.distributed.get_rank() == rank
    if parallel_state.model_parallel_is_initialized():
        close_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # Without a GPU there are no GPU generators to keep apart: use Megatron's tracker that tracks nothing.
    model_parallel_cuda_manual_seed(SEED, inference_rng_tracker=device.type != "cuda", force_reset_rng=True)


def close_groups() -> None:
    """Forget the groups; idempotent.  They end with the default process group."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()


# ------------------------------------------------------------------------------------------------------------- schedule
#
# Micro-batches through the stages of the model, forward alone or forward and backward, by Megatron's schedules.
#
# Input: packed micro-batches.  Output: the log-probabilities of whole rows, handed to the caller on the last pipeline
# stage, and gradients summed over micro-batches and ranks in the chunks' buffers. Guarantees: gradients are sums,
# never means; the loss of each micro-batch is computed exactly once on every rank of the last stage, in order; rows
# that only fill up the schedule are not shown to the caller.


# (index of the micro-batch, log-probabilities, entropies, and those of soft targets if there are any, float32 [T] with
# 0 where not wanted) → the loss to differentiate, a scalar
LossCallback = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch and the tokens whose log-probabilities are wanted, bool [T]."""

    microbatch: PackedMicrobatch
    wanted: NDArray[np.bool_]


class Schedule:
    """Runs one rank's part of forward and backward."""

    def __init__(
        self, chunks: Sequence[Any], layout: ParallelLayout, device: torch.device, replay: StageReplay | None = None
    ) -> None:
        """chunks: wrapped in DistributedDataParallel, in the order of this stage.  replay: None: routers choose."""
        self._chunks, self._layout, self._device, self._replay = list(chunks), layout, device, replay
        self._context_rank: int = parallel_state.get_context_parallel_rank()
        self._context_group = parallel_state.get_context_parallel_group()
        config = self._chunks[0].config
        config.finalize_model_grads_func = _finish_sums
        if self._chunks[0].ddp_config.overlap_grad_reduce:
            # Only the last micro-batch's backward may send: until then sums are incomplete.
            pauses = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]

    def forward_backward(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Add the gradients of the losses that `loss_callback` returns, then sum the buffers over ranks.  A collective;
        buffers hold nothing but what accumulate has added.
        """
        self._run(work, request, loss_callback, forward_only=False)

    def accumulate(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Add the gradients to the buffers and sum nothing over ranks: forward_backward follows.  A collective."""
        with self._summing_nothing():
            self._run(work, request, loss_callback, forward_only=False)

    @contextmanager
    def _summing_nothing(self) -> Iterator[None]:
        """A block in which every micro-batch's backward counts as followed by others."""
        config = self._chunks[0].config
        kept = config.no_sync_func, config.finalize_model_grads_func
        # Megatron's own pause ends before the last micro-batch, and would end this one too.
        config.no_sync_func = config.finalize_model_grads_func = None
        try:
            with ExitStack() as pauses:
                for chunk in self._chunks:
                    pauses.enter_context(chunk.no_sync())
                yield
        finally:
            config.no_sync_func, config.finalize_model_grads_func = kept

    @torch.no_grad()
    def forward(self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback) -> None:
        """Run forward alone; results of `loss_callback` are ignored.  A collective."""
        self._run(work, request, loss_callback, forward_only=True)

    def _run(
        self, work: Sequence[Work], request: HeadRequest, loss_callback: LossCallback, *, forward_only: bool
    ) -> None:
        rows = self._filled_up(work)
        local_rows = [
            LocalRow.of(row.microbatch, row.wanted, self._layout, self._context_rank, self._device, self._replay)
            for row in rows
        ]
        step = partial(self._step, request, partial(self._loss_of, work, request.has_entropy_gradient, loss_callback))
        iterators = [iter(enumerate(local_rows)) for _ in self._chunks]
        is_interleaved = self._layout.chunks > 1
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=self._chunks if is_interleaved else self._chunks[0],
            num_microbatches=len(rows),
            seq_length=1,  # rows differ: every stage announces the shapes that it sends
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _filled_up(self, work: Sequence[Work]) -> list[Work]:
        """Pad the work with one-token rows without loss to a multiple of the stages, as interleaving needs."""
        if self._layout.chunks == 1:
            return list(work)
        missing = -len(work) % self._layout.pipeline
        return [*work, *[Work(plain_row(np.zeros(1, np.int32)), np.zeros(1, dtype=bool))] * missing]

    @staticmethod
    def _step(
        request: HeadRequest, loss_of: Callable[..., Any], rows: Iterator[tuple[int, LocalRow]], chunk: Any
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Megatron's forward_step_func: the chunk's output, and the function applied to the last chunk's."""
        index, row = next(rows)
        return chunk(row, request), partial(loss_of, index)

    def _loss_of(
        self,
        work: Sequence[Work],
        has_entropy_gradient: bool,
        loss_callback: LossCallback,
        index: int,
        output: Tensor,
    ) -> tuple[Tensor, Tensor, None]:
        """Loss, number of tokens (not used: the caller has divided already), nothing to report."""
        logprobs, entropy, *soft = output
        no_tokens = torch.zeros((), dtype=torch.int, device=self._device)
        if index >= len(work):
            return logprobs.sum() * 0.0, no_tokens, None
        num_tokens = len(work[index].wanted)
        row, *others = (
            whole_row(part, self._layout, self._context_rank, self._context_group, num_tokens)
            for part in (logprobs, entropy if has_entropy_gradient else entropy.detach(), *soft)
        )
        loss = loss_callback(index, row, *others)
        # Earlier stages wait for a gradient, even of a loss that does not depend on the model.
        return loss if loss.requires_grad or not row.requires_grad else loss + row.sum() * 0.0, no_tokens, None


def _finish_sums(chunks: list[Any], num_tokens: Tensor | None, **keywords: Any) -> None:
    """Sum gradients over ranks; without a number of tokens Megatron does not divide."""
    finalize_model_grads(chunks, None, **keywords)


# -------------------------------------------------------------------------------------------------------------- backend

LEAD_RANK = 0


class MegatronBackend(OptimizerBackend):
    """A rank's part of the model; it owns the process groups of this process until close()."""

    _optimizer: MegatronAdamW

    def __init__(
        self, rank_model: RankModel, optimizer: MegatronAdamW, schedule: Schedule, temperature: float, saved_as: str
    ) -> None:
        """Take over a loaded model, and the optimizer and schedule made of its chunks.  A collective.

        saved_as: checkpoint.trainer_format.
        """
        self._model, self._optimizer, self._schedule = rank_model, optimizer, schedule
        self._temperature = temperature
        self._layout, self._device = rank_model.layout, rank_model.device
        self._rank = dist.get_rank()
        self._dp_rank: int = parallel_state.get_data_parallel_rank()
        self._exchange = Exchange()
        self._reference = HeldParameters(rank_model.parameters)
        self._lora = lora = None if rank_model.adapters is None else rank_model.adapters.lora
        if lora is not None:
            from rlhpc.training.lora import AdapterReference  # loads transformers: see model_config.py

            self._adapter_form, self._adapter_record = lora.form, lora.record
            self._reference = AdapterReference(lora, lambda: [p.detach() for p in lora.parameters.values()])
        # Losses are computed on the last stage; its first rank reports for all, being tensor, context and data rank 0.
        self._speaker = self._layout.num_ranks - self._layout.num_ranks // self._layout.pipeline
        self._state = RankState(rank_model, optimizer.shards, self._exchange)
        self._saver = self._open_saver(saved_as)
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
        logging.getLogger("megatron").setLevel(logging.WARNING)  # else every parameter, and its options in one line
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
            dtype=dtype if model.adapters is None else torch.float32,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_eps,
            is_distributed=trainer.distributed_optimizer,
            overlap_grad_reduce=trainer.overlap_grad_reduce,
            is_offloaded=trainer.optimizer_offload,
        )
        is_replayed = config.algorithm.routing_replay and not has_value_head
        replay = attach_replay(model.chunks, MixtureForm.of_replayed(config.model.path)) if is_replayed else None
        wrapped = wrap_chunks(model.chunks, settings)
        optimizer = MegatronAdamW(wrapped, settings)
        backend = cls(
            model,
            optimizer,
            Schedule(wrapped, model.layout, device, replay),
            config.generation.temperature,
            config.checkpoint.trainer_format,
        )
        if dtype != torch.float32 and model.adapters is None:
            # Main weights were copied from rounded ones; the checkpoint may have them in full precision.
            with ModelSource.of_model(config.model.path) as source:
                backend._state.read("weights", source)
        return backend

    def _open_saver(self, saved_as: str) -> BackgroundSaver | DistributedSaver:
        group = open_save_group()
        if saved_as == "megatron":
            sharded = ShardedState(self._model, self._optimizer.shards)
            return DistributedSaver(sharded, self._exchange, fingerprint=fingerprint(self._model.specs), group=group)
        return BackgroundSaver(
            self._state.items,
            self._state.own,
            device=self._device,
            group=group,
            lead_rank=LEAD_RANK,
            adapter=self._adapter_record,
        )

    @property
    def dp_rank(self) -> int:
        """Rank among the replicas of the model; all ranks of one replica share it."""
        return self._dp_rank

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self._layout.data

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

        def keep(index: int, row: Tensor, entropies: Tensor, *_: Tensor) -> Tensor:
            rows[index].copy_(row)
            return entropies.sum()

        shown = without_routes(microbatches) if of_reference else microbatches
        work = [Work(microbatch, all_but_first(microbatch)) for microbatch in shown]
        with self._reference.in_place(of_reference):
            self._schedule.forward(work, self._request(want_entropy=False, temperature=temperature), keep)
        if self._layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            for row in rows:
                dist.broadcast(row, last, group=group)
        return rows

    def _measured(self, sums: MetricSums) -> tuple[dict[str, float], float, float]:
        own_norm = self._optimizer.gradient_norm()
        metrics, grad_norm = self._exchange.from_rank(self._speaker, (self._summed(sums), own_norm))
        return metrics, grad_norm, own_norm

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
        def loss_callback(index: int, current: Tensor, entropies: Tensor, soft: Tensor | None = None) -> Tensor:
            of_this_row = {name: of_row(rows, index) for name, rows in anchors.items()}
            loss_sum, metrics = loss(current, token_row(microbatches[index], entropies, soft=soft, **of_this_row))
            sums.metrics.add({**metrics, "entropy": entropies.detach().sum(), "loss": loss_sum.detach()})
            return loss_sum / sums.divisor

        work = [Work(microbatch, microbatch.loss_mask) for microbatch in microbatches]
        request = self._request(want_entropy=True, has_entropy_gradient=has_entropy_gradient)
        run = self._schedule.forward_backward if is_last_part else self._schedule.accumulate
        run(work, request, loss_callback)

    def _request(
        self, *, want_entropy: bool, has_entropy_gradient: bool = False, temperature: float | None = None
    ) -> HeadRequest:
        temperature = self._temperature if temperature is None else temperature
        return HeadRequest(temperature, LOGPROB_CHUNK_TOKENS, want_entropy, has_entropy_gradient)

    def _summed(self, sums: MetricSums) -> dict[str, float]:
        """Sums over micro-batches and replicas, on the last stage; nothing on other stages."""
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

    def _state_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for item in self._state.items for spec in item.specs)

    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainerBackend; views of parameters that are whole on rank 0: not to be written to."""
        with self._reference.in_place(of_reference):
            yield from gather_stream(
                self._model.items, self._model.own, to_rank=LEAD_RANK, dtype=self._model.sent_dtype, device=self._device
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

    def close(self) -> None:
        """Wait for a running save, then leave the process groups.  Idempotent."""
        if self._is_open:
            self._is_open = False
            self._saver.close()
            self._reference.release()
            self._model.forget_last_tokens()
            del (
                self._saver,
                self._state,
                self._schedule,
                self._optimizer,
                self._reference,
                self._average,
                self._model,
                self._lora,
            )
            self._undo.close()
            # Megatron's modules, buffers and hooks refer to each other, and keep their groups' threads alive.
            gc.collect()


def _refuse_unfit(config: Config, device: torch.device) -> None:
    if config.trainer.optimizer_offload and device.type != "cuda":
        raise ConfigError("trainer.optimizer_offload=true needs a GPU to offload from; legal on a CPU: false")
