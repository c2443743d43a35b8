"""What trainer backends have in common: one device, copies of the parameters, a state that is saved and loaded.

Input: parts that a backend opens.  Output: the methods of the contract that are the same on them.  StatefulBackend
knows nothing of layouts; on a ReplicatedBackend every rank is a replica of the model, however its state is shared out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.contracts import PolicyLoss, TrainerBackend
from rlhpc.training.checkpoint.trainer_state import TrainerCheckpoint, on_all_ranks, read_checkpoint
from rlhpc.training.held_parameters import HeldParameters
from rlhpc.training.metric_sums import MetricSums, sums_over_ranks
from rlhpc.training.optimizer import STATE_KINDS
from rlhpc.training.rng import read_rng, write_rng
from rlhpc.training.row_tensors import all_but_first, of_row, token_row
from rlhpc.training.weight_average import AVERAGE, WeightAverage
from rlhpc.types import PackedMicrobatch

NoneOrRows = Sequence[Tensor] | None


class StateSaver(Protocol):
    """Writes the state of a model; BackgroundSaver is one."""

    def add(self, kind: str, own: Callable[[int], Sequence[Tensor]]) -> None:
        """Save tensors of another kind, too."""

    def save(self, directory: Path, *, num_steps_applied: int, rng: dict[str, str]) -> Future[dict[str, int]]:
        """See TrainerBackend.save."""

    def close(self) -> None:
        """Wait for a running save."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """What the micro-batches of a step add up to besides their gradient."""

    divisor: int  # of every micro-batch's loss: the number of loss tokens of the step, or an estimate of it
    metrics: MetricSums = field(default_factory=MetricSums)


class StatefulBackend(TrainerBackend):
    """Backends whose constructor sets these parts."""

    _device: torch.device
    _reference: HeldParameters
    _average: WeightAverage
    _saver: StateSaver
    _accumulated: StepSums | None = None  # of the parts of a step that its last part has yet to follow

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    def hold_reference(self, memory: str) -> None:
        """See TrainerBackend; every rank holds the parameters that it has."""
        self._reference.hold(memory)

    def hold_average(self, memory: str) -> None:
        """See TrainerBackend; every rank holds what it sends to a checkpoint."""
        self._average.hold(memory)
        self._saver.add(AVERAGE, self._average.own)

    def move_average(self, decay: float) -> None:
        """See TrainerBackend."""
        self._average.move(decay)

    def accumulate(
        self,
        microbatches: Sequence[PackedMicrobatch],
        loss: PolicyLoss,
        *,
        proximal: Sequence[Tensor] | None,
        reference: Sequence[Tensor] | None = None,
        has_entropy_gradient: bool = False,
        num_loss_tokens: int,
        is_first: bool,
    ) -> None:
        """See TrainerBackend; no rank waits for another replica except as it does within a step."""
        if is_first:
            self._zero_gradients()
            self._accumulated = StepSums(num_loss_tokens)
        assert self._accumulated, "the first part of a step says so"
        assert self._accumulated.divisor == num_loss_tokens, "the parts of a step have the same estimate"
        self._add_gradients(
            microbatches,
            loss,
            {"proximal": proximal, "reference": reference},
            self._accumulated,
            has_entropy_gradient=has_entropy_gradient,
            is_last_part=False,
        )

    def _begin_last_part(self, num_loss_tokens: int) -> StepSums:
        """Sums for the rest of a step, which is all of it if nothing is accumulated: gradients are then zero."""
        accumulated, self._accumulated = self._accumulated, None
        if accumulated is None:
            self._zero_gradients()
            return StepSums(num_loss_tokens)
        return accumulated

    def save(self, directory: Path) -> Future[dict[str, int]]:
        """See TrainerBackend; every number comes from the lowest rank that keeps it."""
        return self._saver.save(directory, num_steps_applied=self.num_steps_applied, rng=read_rng(self._device))

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """See TrainerBackend; every rank verifies its share of the files, and reads its own part of them.

        A file that is damaged between verifying and reading leaves the state mixed: CheckpointError then, too.
        """
        # Ranks share the reading: one alone would take longer than the others wait (72B at 0.5 GB/s: half an hour).
        share = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        read = partial(read_checkpoint, directory, self.tensor_specs(), share=share)
        checkpoint = on_all_ranks(read)
        on_all_ranks(partial(self._take, checkpoint))
        self._accumulated = None  # gradients of other weights
        self._continue_from(checkpoint.num_steps_applied, checkpoint.rng)

    def _take(self, checkpoint: TrainerCheckpoint) -> None:
        self._average.restore(checkpoint.kinds, lambda kind: self._read(checkpoint, kind, "weights"))
        for kind in STATE_KINDS[1:]:
            self._read(checkpoint, kind, kind)

    def _continue_from(self, num_steps_applied: int, rng: dict[str, str]) -> None:
        self._publish(num_steps_applied)
        write_rng(rng, self._device)

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Drop whatever is accumulated."""

    @abstractmethod
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
        """Add the gradient of the loss divided by sums.divisor, and the metrics.  is_last_part: the step follows."""

    @abstractmethod
    def _read(self, checkpoint: TrainerCheckpoint, kind: str, into: str) -> None:
        """Fill this rank's part of the state `into` with the checkpoint's tensors of `kind`."""

    @abstractmethod
    def _publish(self, num_steps_applied: int) -> None:
        """Copy the masters that were read into the parameters, and set the step counter."""


class ReplicatedBackend(StatefulBackend):
    """Backends with data parallelism alone."""

    _rank: int
    _world_size: int

    @property
    def dp_rank(self) -> int:
        """This process's rank: there is only data parallelism."""
        return self._rank

    @property
    def dp_size(self) -> int:
        """Number of processes."""
        return self._world_size

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0."""
        return self._rank == 0

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

    def sum_over_replicas(self, figures: Mapping[str, float]) -> dict[str, float]:
        """See TrainerBackend; every rank is a replica."""
        return sums_over_ranks(figures, self._device)

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
        for index, microbatch in enumerate(microbatches):
            current, entropy, entropy_sum = self._token_logprobs(
                microbatch, microbatch.loss_mask, want_entropy=True, has_entropy_gradient=has_entropy_gradient
            )
            of_this_row = {name: of_row(rows, index) for name, rows in anchors.items()}
            loss_sum, metrics = loss(current, token_row(microbatch, entropy, **of_this_row))
            is_last = is_last_part and index == len(microbatches) - 1
            self._backward(loss_sum, current, sums.divisor, is_last=is_last)
            sums.metrics.add({**metrics, "entropy": entropy_sum, "loss": loss_sum.detach()})

    @abstractmethod
    def _backward(self, loss_sum: Tensor, current: Tensor, divisor: int, *, is_last: bool) -> None:
        """Add the gradient of loss_sum / divisor.  is_last: no micro-batch of this step follows."""

    @abstractmethod
    def _token_logprobs(
        self,
        microbatch: PackedMicrobatch,
        wanted: NDArray[np.bool_],
        *,
        want_entropy: bool = False,
        has_entropy_gradient: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies float32 [T], 0 where not wanted, and the latter's sum, without gradient."""
