"""The trainer contract in plain PyTorch: every rank holds the whole model, gradients are summed over ranks.

Input: packed micro-batches.  Output: optimiser steps.  The reference that other backends are compared with, and the
trainer for models that fit one GPU or for tests on CPU.  Forward and backward run in the model's dtype on copies of
float32 master weights; log-probabilities, loss, gradient sums and moments are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.config.rules import Config
from rlhpc.models.shape import LOGPROB_CHUNK_TOKENS
from rlhpc.protocol.types import PackedMicrobatch, TensorSpec
from rlhpc.training.backends import HeldParameters, OptimizerBackend, ReplicatedBackend, WeightAverage
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_tensors import Shard
from rlhpc.training.hf_model import CausalLM, cast_parameters, sharded_on_disk
from rlhpc.training.logprob import FoundTokens, MetricSums, SoftTargets, on_device
from rlhpc.training.lora import AdapterReference, Lora, load_policy
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.ranks import DTYPES, RankContext, close_process_group, device_of, open_process_group
from rlhpc.training.trainer_state import FlatAdamW, TrainerCheckpoint
from rlhpc.weights.hf_names import named_on_disk, on_disk


@dataclass(frozen=True, slots=True)
class ReferenceSettings:
    """Settings that do not change between steps."""

    dtype: torch.dtype
    temperature: float
    chunk_tokens: int
    betas: tuple[float, float]
    eps: float


class ReferenceBackend(OptimizerBackend, ReplicatedBackend):
    """Data parallelism by one all-reduce of one flat float32 gradient."""

    _optimizer: FlatAdamW

    def __init__(
        self,
        model: CausalLM,
        settings: ReferenceSettings,
        *,
        rank: int,
        world_size: int,
        owns_group: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """Take over a float32 model, or one with adapters; with more than one rank the default group must be up.

        owns_group: whether close() closes that group, too.
        """
        self._model, self._settings, self._lora = model, settings, lora
        self._rank, self._world_size, self._owns_group = rank, world_size, owns_group
        self._device, self._replay = model.head_weight.device, model.replay
        self._optimizer = FlatAdamW(model.parameters, betas=settings.betas, eps=settings.eps)
        if lora is not None:
            self._adapter_form, self._adapter_record = lora.form, lora.record
            self._reference = AdapterReference(lora, lambda: [p.detach() for p in lora.parameters.values()])
        else:
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
            adapter=self._adapter_record,
        )
        self._average = WeightAverage(items, lambda index: (self._optimizer.state("weights")[names[index]],))

    @classmethod
    def open(cls, config: Config, context: RankContext, *, has_value_head: bool = False) -> ReferenceBackend:
        """Load config.model on this rank's device and connect to the other ranks.

        An existing default process group is used and stays open.
        Raises ConfigError for a model that cannot be trained here, ChannelTimeout for ranks that do not appear.
        """
        device = device_of(config.trainer.device, context.rank)
        torch.manual_seed(config.run.seed)
        model, lora = load_policy(config, device, has_value_head=has_value_head)
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
        rank, world_size = context.rank, context.world_size
        return cls(model, settings, rank=rank, world_size=world_size, owns_group=owns_group, lora=lora)

    def _measured(self, sums: MetricSums) -> tuple[dict[str, float], float, float]:
        metrics = sums.over_ranks(self._device)
        if self._world_size > 1:
            dist.all_reduce(self._optimizer.gradients)
        grad_norm = self._optimizer.gradient_norm()
        return metrics, grad_norm, grad_norm

    def _backward(self, loss_sum: Tensor, current: Tensor, divisor: int, *, is_last: bool) -> None:
        if loss_sum.requires_grad:  # False for a row without loss tokens
            (loss_sum / divisor).backward()  # type: ignore[no-untyped-call]

    def _token_logprobs(
        self,
        microbatch: PackedMicrobatch,
        wanted: NDArray[np.bool_],
        *,
        want_entropy: bool = False,
        has_entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> FoundTokens:
        """See ReplicatedBackend.

        Only wanted tokens pass through the head, which costs as much as many layers if the vocabulary is large.
        """
        positions = np.flatnonzero(wanted)
        if not len(positions):
            nothing = torch.zeros(len(microbatch.token_ids), device=self._device)
            return FoundTokens(nothing, nothing, nothing.sum())
        token_ids = on_device(microbatch.token_ids.astype(np.int64), self._device)
        hidden = self._model.hidden_states(
            token_ids,
            on_device(microbatch.position_ids.astype(np.int64), self._device),
            SegmentPlan.of(microbatch.cu_seqlens, self._device),
        )
        tokens = on_device(positions, self._device)
        logprobs, entropy, soft = self._model.head(
            hidden.index_select(0, tokens - 1),  # the state before a token predicts it
            self._model.head_weight,
            token_ids.index_select(0, tokens),
            temperature=self._settings.temperature if temperature is None else temperature,
            chunk_tokens=self._settings.chunk_tokens,
            want_entropy=want_entropy,
            has_entropy_gradient=has_entropy_gradient,
            soft=SoftTargets.of(microbatch, wanted, self._device),
        )
        return FoundTokens.scattered(logprobs, entropy, soft, tokens, len(microbatch.token_ids))

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """See TrainerBackend; dtypes are those of the forward pass, a tied head is not listed."""
        return self._state_specs() if self._lora is None else self._lora.published

    def _state_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for parameter in self._model.tensor_specs() for spec in on_disk(parameter))

    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainerBackend; views of the parameters themselves, no copies: not to be written to."""
        with self._reference.in_place(of_reference):
            if self._lora is not None:
                yield from self._lora.version() if self.is_rank_zero else ()
                return
            for parameter in self._model.tensor_specs() if self.is_rank_zero else ():
                yield from named_on_disk(parameter, self._model.parameters[parameter.name].detach())

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
