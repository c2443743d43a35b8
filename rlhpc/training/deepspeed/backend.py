"""The trainer contract on DeepSpeed: ZeRO 1, 2 or 3 over a Hugging Face model.

Input: packed micro-batches.  Output: optimiser steps.  Every rank is a replica; ranks share the optimiser's state (1),
gradients too (2), parameters too (3).  Forward and backward run in the model's dtype; master weights, moments and
gradient sums are float32.
Guarantees: all ranks decide alike whether a step applies, and a skipped step changes nothing.  A loss that is
not finite makes its gradients nan, so that DeepSpeed's own check of the global norm sees both in one vote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.config.rules import Config
from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import LOGPROB_CHUNK_TOKENS
from rlhpc.protocol.contracts import StepGate, StepResult
from rlhpc.protocol.types import PackedMicrobatch, TensorSpec
from rlhpc.training.backends import HeldParameters, ReplicatedBackend, StepSums, WeightAverage
from rlhpc.training.background_save import BackgroundSaver, open_save_group
from rlhpc.training.checkpoint_tensors import BUCKET_ELEMENTS, TensorSource, gather_stream
from rlhpc.training.deepspeed.engine import (
    ZeroPolicy,
    ZeroState,
    accelerator_environment,
    frozen_items,
    own_frozen,
)
from rlhpc.training.hf_model import CausalLM, cast_parameters
from rlhpc.training.logprob import FoundTokens, SoftTargets, all_ranks_agree, on_device
from rlhpc.training.lora import AdapterReference, Lora, load_policy
from rlhpc.training.packed_attention import SegmentPlan
from rlhpc.training.ranks import DTYPES, RankContext, close_process_group, device_of, open_process_group
from rlhpc.training.trainer_state import TrainerCheckpoint
from rlhpc.weights.hf_names import named_on_disk, on_disk


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Settings that do not change between steps."""

    trainer: TrainerConfig
    dtype: torch.dtype
    temperature: float
    bucket_elements: int = BUCKET_ELEMENTS  # of weights() in stage 3


class DeepSpeedBackend(ReplicatedBackend):
    """A DeepSpeed engine, the table of its state, and copies for saves, the reference and the average."""

    def __init__(
        self, model: CausalLM, settings: ZeroSettings, *, device: torch.device, lora: Lora | None = None
    ) -> None:
        """Take over a float32 model on the host, or one with adapters; the default process group must be up.

        A collective.
        """
        self._stage, self._device = settings.trainer.zero_stage, device
        self._bucket_elements = settings.bucket_elements
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._parameters, self._replay = model.parameters, model.replay
        masters: dict[str, Tensor] = {}
        if settings.dtype != torch.float32:
            masters = {name: parameter.detach() for name, parameter in model.parameters.items()}
            cast_parameters(model, settings.dtype)
        self._specs, self._lora = model.tensor_specs(), lora
        if lora is not None:
            self._adapter_form, self._adapter_record = lora.form, lora.record
        policy = ZeroPolicy(model, temperature=settings.temperature, chunk_tokens=LOGPROB_CHUNK_TOKENS)
        with ExitStack() as undo:
            undo.enter_context(accelerator_environment(device))
            # DeepSpeed reads the environment while it is imported, once for the process.
            from rlhpc.training.deepspeed.engine import NormGate, close_engine, forget_gradients, open_engine

            self._engine: Any = open_engine(
                policy, model.parameters, settings.trainer, dtype=settings.dtype, device=device
            )
            undo.callback(close_engine, self._engine)
            self._forget_gradients = forget_gradients
            self._gate = NormGate(self._engine.optimizer)
            undo.callback(self._gate.leave)
            self._state = ZeroState(self._engine.optimizer, model.parameters, stage=self._stage)
            if masters:  # DeepSpeed made its masters from the rounded parameters
                self._state.fill(lambda kind, spec, start, stop: masters[spec.name].view(-1)[start:stop], "weights")
            live, around = self._state.own_parameters, self._state.partitioned
            self._reference = HeldParameters(live, around) if lora is None else AdapterReference(lora, live, around)
            undo.callback(self._reference.release)
            self._saver = BackgroundSaver(
                self._state.items(),
                self._state.own,
                device=self._state.device,
                group=open_save_group(),
                adapter=self._adapter_record,
            )
            undo.callback(self._saver.close)
            self._average = WeightAverage(self._state.items(), partial(self._state.own, "weights"))
            self._undo = undo.pop_all()

    @classmethod
    def open(cls, config: Config, context: RankContext, *, has_value_head: bool = False) -> DeepSpeedBackend:
        """Load config.model, connect to the other ranks, and shard the model.

        An existing default process group is used and stays open.  The model is loaded whole into host memory, in
        float32, on every rank.
        Raises ConfigError for a model that cannot be trained here, ChannelTimeout for ranks that do not appear.
        """
        device = device_of(config.trainer.device, context.rank)
        torch.manual_seed(config.run.seed)
        model, lora = load_policy(config, torch.device("cpu"), has_value_head=has_value_head)
        settings = ZeroSettings(config.trainer, DTYPES[config.model.dtype], config.generation.temperature)
        if dist.is_initialized():
            return cls(model, settings, device=device, lora=lora)
        with ExitStack() as undo:
            open_process_group(context, device)
            undo.callback(close_process_group)
            backend = cls(model, settings, device=device, lora=lora)
            undo.push(backend._undo.pop_all())
            backend._undo = undo.pop_all()
        return backend

    @property
    def num_steps_applied(self) -> int:
        """Read from the optimiser, which skipped steps do not touch."""
        return self._state.num_steps_applied

    # --------------------------------------------------------------------------------------------- forward and step

    def _apply(
        self,
        sums: StepSums,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        may_apply: StepGate | None,
    ) -> StepResult:
        """See StatefulBackend; the vote is a part of DeepSpeed's step.

        Every rank must have had the same number of micro-batches: ZeRO communicates in each.
        """
        zero = self._engine.optimizer
        for group in zero.optimizer.param_groups:
            group.update(lr=learning_rate, weight_decay=weight_decay if group["decays"] else 0.0)
        zero.clip_grad = max_grad_norm
        metrics = sums.metrics.over_ranks(self._device)
        with self._gate.asking(
            lambda norm: all_ranks_agree(may_apply is None or may_apply(metrics, norm), self._device),
            scale=num_loss_tokens / sums.divisor,
        ):
            self._engine.step()
        return StepResult(applied=not zero.overflow, grad_norm=self._gate.norm, metrics=metrics)

    def _zero_gradients(self) -> None:
        self._forget_gradients(self._engine.optimizer, self._stage)

    def _backward(self, loss_sum: Tensor, current: Tensor, divisor: int, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed divides by the number of ranks.
        share = (loss_sum + 0.0 * current.sum()) * (self._world_size / divisor)
        # A loss can be infinite while its gradient is finite: then none of the gradient may count.
        poison = torch.where(loss_sum.detach().isfinite(), 1.0, math.nan)
        self._engine.backward(share * poison, scale_wrt_gas=False)

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

        A row without wanted tokens also passes through the model: other ranks wait for this one in every layer.
        """
        tokens = on_device(np.flatnonzero(wanted), self._device)
        found, entropy = self._engine(
            token_ids=on_device(microbatch.token_ids.astype(np.int64), self._device),
            position_ids=on_device(microbatch.position_ids.astype(np.int64), self._device),
            segments=SegmentPlan.of(microbatch.cu_seqlens, self._device),
            tokens=tokens,
            want_entropy=want_entropy,
            has_entropy_gradient=has_entropy_gradient,
            temperature=temperature,
            soft=SoftTargets.of(microbatch, wanted, self._device),
        )
        logprobs, soft = (found, None) if found.dim() == 1 else found
        return FoundTokens.scattered(logprobs, entropy, soft, tokens, len(microbatch.token_ids))

    # ------------------------------------------------------------------------------------------- weights and state

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """See TrainerBackend; dtypes are those of the forward pass, a tied head is not listed."""
        return self._state_specs() if self._lora is None else self._lora.published

    def _state_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for parameter in self._specs for spec in on_disk(parameter))

    def weights(self, *, of_reference: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See TrainerBackend; in stages 1 and 2 rank 0 has them all: views, not to be written to."""
        with self._reference.in_place(of_reference):
            if self._lora is None:
                yield from self._stream()
                return
            adapters = {name: tensor.clone() for name, tensor in self._adapters(of_reference=of_reference)}
            base = self._sharded_base(self._lora) if self._stage == 3 and self._lora.is_merged else None
            if self.is_rank_zero:
                yield from self._lora.version(adapters, base)
            elif base is not None:
                yield from base  # nothing: it sends

    def _adapters(self, *, of_reference: bool) -> Iterator[tuple[str, Tensor]]:
        """A and B on rank 0, float32: the masters, or their replacement in the forward pass."""
        if of_reference:
            return ((name, tensor.float()) for name, tensor in self._stream())
        return gather_stream(
            self._state.items(),
            lambda index: tuple(each.to(self._device) for each in self._state.own("weights", index)),
            to_rank=0,
            dtype=torch.float32,
            device=self._device,
        )

    def _sharded_base(self, lora: Lora) -> Iterator[tuple[str, Tensor]]:
        items = frozen_items(lora.base_specs, lora.base)
        parameters = [lora.base[spec.name] for spec in lora.base_specs]
        return gather_stream(
            items,
            lambda index: own_frozen(parameters[index], items[index].shards, self._device),
            to_rank=0,
            dtype=parameters[0].dtype,
            device=self._device,
            bucket_elements=self._bucket_elements,
        )

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        if self._stage == 3:
            yield from gather_stream(
                self._state.items(self._specs[0].dtype),
                partial(self._state.own_parameter, device=self._device),
                to_rank=0,
                dtype=next(iter(self._parameters.values())).dtype,
                device=self._device,
                bucket_elements=self._bucket_elements,
            )
        elif self.is_rank_zero:
            for parameter in self._specs:
                yield from named_on_disk(parameter, self._parameters[parameter.name].detach())

    def _read(self, checkpoint: TrainerCheckpoint, kind: str, into: str) -> None:
        with checkpoint.source(kind) as source:
            self._state.fill(lambda _, *place: _read_range(source, *place), into)

    def _publish(self, num_steps_applied: int) -> None:
        self._state.num_steps_applied = num_steps_applied
        self._state.publish()

    def close(self) -> None:
        """Wait for a running save, free the model, and leave the process group if open() made it.  Idempotent."""
        self._undo.close()  # the second call has nothing to undo
        self._engine = None
        for part in ("_state", "_saver", "_parameters", "_gate", "_reference", "_average", "_lora", "_replay"):
            self.__dict__.pop(part, None)


def _read_range(source: TensorSource, spec: TensorSpec, start: int, stop: int) -> Tensor:
    """Numbers [start, stop) of the flattened parameter `spec`; reads only the rows that contain them."""
    pieces = []
    begin = 0  # offset in the parameter of the current tensor on disk
    for part in on_disk(spec):
        end = begin + math.prod(part.shape)
        first, last = max(start, begin) - begin, min(stop, end) - begin
        if first < last:
            width = math.prod(part.shape[1:])
            rows = slice(first // width, -(-last // width))
            numbers = source.read(part.name, dtype=torch.float32, index=(rows,)).reshape(-1)
            pieces.append(numbers[first - rows.start * width : last - rows.start * width])
        begin = end
    return torch.cat(pieces)
