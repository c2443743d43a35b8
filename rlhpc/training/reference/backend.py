"""The trainer contract in plain PyTorch: every rank holds the whole model, gradients are summed over ranks.

Input: packed micro-batches.  Output: optimiser steps.  The reference that other backends are compared with, and the
trainer for models that fit one GPU or for tests on CPU.  Forward and backward run in the model's dtype on copies of
float32 master weights; log-probabilities, loss, gradient sums and moments are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.config import Config
from rlhpc.contracts import PolicyLoss, StepGate, StepResult, TrainerBackend
from rlhpc.parallel_layout import LOGPROB_CHUNK_TOKENS
from rlhpc.training.checkpoint.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint.trainer_state import TrainerCheckpoint, on_all_ranks, read_checkpoint
from rlhpc.training.held_parameters import HeldParameters
from rlhpc.training.hf_model import CausalLM, cast_parameters, load_causal_lm, with_value_head
from rlhpc.training.hf_names import named_on_disk, on_disk, sharded_on_disk
from rlhpc.training.metric_sums import MetricSums, sums_over_ranks
from rlhpc.training.optimizer import STATE_KINDS, FlatAdamW
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.process_group import (
    DTYPES,
    RankContext,
    close_process_group,
    device_of,
    open_process_group,
)
from rlhpc.training.rng import read_rng, write_rng
from rlhpc.training.row_tensors import all_but_first, of_row, on_device, scattered, token_row
from rlhpc.training.sharded_tensors import Shard
from rlhpc.training.step_vote import all_ranks_agree
from rlhpc.training.weight_average import AVERAGE, WeightAverage
from rlhpc.types import PackedMicrobatch, TensorSpec


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """Settings that do not change between steps."""

    dtype: torch.dtype
    temperature: float
    chunk_tokens: int
    betas: tuple[float, float]
    eps: float


class ReferenceBackend(TrainerBackend):
    """Data parallelism by one all-reduce of one flat float32 gradient."""

    def __init__(
        self, model: CausalLM, settings: ReferenceSettings, *, rank: int, world_size: int, owns_group: bool = False
    ) -> None:
        """Take over a float32 model; with more than one rank the default process group must be up.

        owns_group: whether that ends with this.
        """
        self._model, self._settings = model, settings
        self._rank, self._world_size, self._owns_group = rank, world_size, owns_group
        self._device = model.head_weight.device
        self._optimizer = FlatAdamW(model.parameters, betas=settings.betas, eps=settings.eps)
        if settings.dtype != torch.float32:
            cast_parameters(model, settings.dtype)
        self._reference = HeldParameters(lambda: [p.detach() for p in model.parameters.values()])
        names = list(model.parameters)
        items = [
            sharded_on_disk(TensorSpec(name, "float32", tuple(parameter.shape)), [Shard(0, parameter.numel())])
            for name, parameter in model.parameters.items()
        ]
        self._saver = BackgroundSaver(
            items,
            lambda kind, index: (self._optimizer.state(kind)[names[index]],),
            device=self._device,
            group=open_save_group(),
        )
        self._average = WeightAverage(items, lambda index: (self._optimizer.state("weights")[names[index]],))

    @classmethod
    def open(cls, config: Config, context: RankContext, *, has_value_head: bool = False) -> ReferenceBackend:
        """Load config.model on this rank's device and connect to the other ranks.

        An existing default process group is used, and not closed in the end.
        Raises ConfigError for a model that cannot be trained here, ChannelTimeout for ranks that do not appear.
        """
        device = device_of(config.trainer.device, context.rank)
        torch.manual_seed(config.run.seed)
        model = load_causal_lm(
            config.model.path, device=device, recompute_activations=config.trainer.recompute_activations == "full"
        )
        model = with_value_head(model) if has_value_head else model
        owns_group = context.world_size > 1 and not dist.is_initialized()
        if owns_group:
            open_process_group(context, device)
        settings = ReferenceSettings(
            dtype=DTYPES[config.model.dtype],
            temperature=config.generation.temperature,
            chunk_tokens=LOGPROB_CHUNK_TOKENS,
            betas=(config.trainer.adam_beta1, config.trainer.adam_beta2),
            eps=config.trainer.adam_eps,
        )
        return cls(model, settings, rank=context.rank, world_size=context.world_size, owns_group=owns_group)

    @property
    def dp_rank(self) -> int:
        """This process's rank: there is only data parallelism."""
        return self._rank

    @property
    def dp_size(self) -> int:
        """Number of processes."""
        return self._world_size

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def num_steps_applied(self) -> int:
        """Read from the optimiser, which skipped steps do not touch."""
        return self._optimizer.num_steps_applied

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0."""
        return self._rank == 0

    def hold_reference(self, memory: str) -> None:
        """See TrainerBackend; every rank holds all."""
        self._reference.hold(memory)

    def hold_average(self, memory: str) -> None:
        """See TrainerBackend; rank 0 holds all."""
        self._average.hold(memory)
        self._saver.add(AVERAGE, self._average.own)

    def move_average(self, decay: float) -> None:
        """See TrainerBackend."""
        self._average.move(decay)

    @torch.no_grad()
    def logprobs(
        self, microbatches: Sequence[PackedMicrobatch], *, temperature: float | None = None, of_reference: bool = False
    ) -> list[Tensor]:
        """See TrainerBackend; one forward pass per micro-batch, nothing kept for backward."""
        with self._reference.in_place(of_reference):
            return [
                self._token_logprobs(microbatch, all_but_first(microbatch), temperature=temperature)[0]
                for microbatch in microbatches
            ]

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
        self._optimizer.zero_gradients()
        sums = MetricSums()
        for index, microbatch in enumerate(microbatches):
            anchors = {"proximal": of_row(proximal, index), "reference": of_row(reference, index)}
            sums.add(self._accumulate(microbatch, loss, anchors, num_loss_tokens, has_entropy_gradient))
        metrics = sums.over_ranks(self._device)
        self._sum_gradients()
        grad_norm = self._optimizer.gradient_norm()
        is_finite = math.isfinite(grad_norm) and math.isfinite(metrics["loss"])
        is_allowed = may_apply is None or may_apply(metrics, grad_norm)
        applied = all_ranks_agree(is_finite and is_allowed, self._device)
        if applied:
            self._optimizer.clip(grad_norm, max_grad_norm)
            self._optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
        is_known = applied or (is_finite and not is_allowed)
        return StepResult(applied=applied, grad_norm=grad_norm if is_known else math.nan, metrics=metrics)

    def _accumulate(
        self,
        microbatch: PackedMicrobatch,
        loss: PolicyLoss,
        anchors: Mapping[str, Tensor | None],
        num_loss_tokens: int,
        has_entropy_gradient: bool,
    ) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch's share of the loss; return its metric sums."""
        current, entropy, entropy_sum = self._token_logprobs(
            microbatch, microbatch.loss_mask, want_entropy=True, has_entropy_gradient=has_entropy_gradient
        )
        loss_sum, metrics = loss(current, token_row(microbatch, entropy, **anchors))
        if loss_sum.requires_grad:  # not so for a row without loss tokens
            (loss_sum / num_loss_tokens).backward()  # type: ignore[no-untyped-call]
        return {**metrics, "entropy": entropy_sum, "loss": loss_sum.detach()}

    def _token_logprobs(
        self,
        microbatch: PackedMicrobatch,
        wanted: NDArray[np.bool_],
        *,
        want_entropy: bool = False,
        has_entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies float32 [T], 0 where not wanted, and the latter's sum, without gradient.

        Only wanted tokens pass through the head, which costs as much as many layers if the vocabulary is large.
        """
        positions = np.flatnonzero(wanted)
        if not len(positions):
            nothing = torch.zeros(len(microbatch.token_ids), device=self._device)
            return nothing, nothing, nothing.sum()
        token_ids = on_device(microbatch.token_ids.astype(np.int64), self._device)
        hidden = self._model.hidden_states(
            token_ids,
            on_device(microbatch.position_ids.astype(np.int64), self._device),
            SegmentPlan.of(microbatch.cu_seqlens, self._device),
        )
        tokens = on_device(positions, self._device)
        logprobs, entropy = self._model.head(
            hidden.index_select(0, tokens - 1),  # the state before a token predicts it
            self._model.head_weight,
            token_ids.index_select(0, tokens),
            temperature=self._settings.temperature if temperature is None else temperature,
            chunk_tokens=self._settings.chunk_tokens,
            want_entropy=want_entropy,
            has_entropy_gradient=has_entropy_gradient,
        )
        return scattered(logprobs, entropy, tokens, len(microbatch.token_ids))

    def sum_over_replicas(self, figures: Mapping[str, float]) -> dict[str, float]:
        """See TrainerBackend; every rank is a replica."""
        return sums_over_ranks(figures, self._device)

    def _sum_gradients(self) -> None:
        if self._world_size > 1:
            dist.all_reduce(self._optimizer.gradients)

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """See TrainerBackend; dtypes are those of the forward pass, a tied head is not listed."""
        return tuple(spec for parameter in self._model.tensor_specs() for spec in on_disk(parameter))

    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainerBackend; views of the parameters themselves, no copies: not to be written to."""
        with self._reference.in_place(of_reference):
            for parameter in self._model.tensor_specs() if self.is_rank_zero else ():
                yield from named_on_disk(parameter, self._model.parameters[parameter.name].detach())

    def save(self, directory: Path) -> Future[dict[str, int]]:
        """See TrainerBackend; every rank has everything, and rank 0 writes its copy."""
        return self._saver.save(
            directory, num_steps_applied=self._optimizer.num_steps_applied, rng=read_rng(self._device)
        )

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """See TrainerBackend; every rank reads everything, rank 0 verifies.

        A file that is damaged between verifying and reading leaves the state mixed: CheckpointError then, too.
        """
        # Rank 0 reads every byte; the others rely on its result and read only what they load.
        read = partial(read_checkpoint, directory, self.tensor_specs(), verify_content=self.is_rank_zero)
        checkpoint = on_all_ranks(read, directory, self._device)
        on_all_ranks(partial(self._take, checkpoint), directory, self._device)
        self._optimizer.num_steps_applied = checkpoint.num_steps_applied
        self._optimizer.publish()
        write_rng(checkpoint.rng, self._device)

    def _take(self, checkpoint: TrainerCheckpoint) -> None:
        self._average.restore(checkpoint.kinds, lambda kind: self._read(checkpoint, kind, "weights"))
        for kind in STATE_KINDS[1:]:
            self._read(checkpoint, kind, kind)

    def _read(self, checkpoint: TrainerCheckpoint, kind: str, into: str) -> None:
        parameters = self._optimizer.state(into)
        here = dict(pair for spec in self._model.tensor_specs() for pair in named_on_disk(spec, parameters[spec.name]))
        for _, name, tensor in checkpoint.tensors(kind):
            here[name].copy_(tensor)

    def close(self) -> None:
        """Wait for a running save, then leave the process group.  Idempotent."""
        self._saver.close()
        self._reference.release()
        if self._owns_group:
            close_process_group()
