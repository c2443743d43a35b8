"""Common parts of trainer backends: one device, copies of the parameters, a state that is saved and loaded.

Input: parts that a backend opens.  Output: the methods of the contract that all backends share.  StatefulBackend is
independent of layouts; an OptimizerBackend steps an optimiser of ours; on a ReplicatedBackend every rank is a replica
of the model, however its state is sharded.
"""

from __future__ import annotations

import base64
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.protocol.contracts import PolicyLoss, StepGate, StepResult, TrainerBackend
from rlhpc.protocol.types import AdapterForm, PackedMicrobatch, TensorSpec
from rlhpc.training.checkpoint_tensors import ShardedTensorSpec
from rlhpc.training.logprob import (
    FoundTokens,
    MetricSums,
    all_but_first,
    all_ranks_agree,
    of_row,
    sums_over_ranks,
    token_row,
)
from rlhpc.training.route_replay import HfReplay, without_routes
from rlhpc.training.trainer_state import STATE_KINDS, TrainerCheckpoint, on_all_ranks, read_checkpoint

# ---------------------------------------------------------------------------------------------------------- determinism
#
# Make this process compute the same bits from the same inputs: for run.deterministic.
#
# CPU results are the same anyway, with the same number of threads.  On CUDA some kernels add up in the order in which
# threads arrive, and cuBLAS and NCCL choose algorithms at run time.  An operation that has no deterministic
# implementation raises RuntimeError, which names it.


# Read by libraries when first used.  Values set by the user are kept: they may know their interconnect.
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # one of the two values that torch accepts
    "NCCL_ALGO": "Ring",  # sums in the order of ranks, whatever the size of a message
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # TransformerEngine's attention
}


def compute_deterministically() -> None:
    """Compute deterministically for the rest of this process.  Call it before anything is computed on a GPU."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nobody reads it
    torch.use_deterministic_algorithms(True)


# -------------------------------------------------------------------------------------------------------- pinned memory
#
# Page-locked host memory of exactly the requested size, for direct copies from and to a GPU.
#
# torch's own pinned memory is rounded up to powers of two, up to twice the requested size.


def pin(buffer: Tensor) -> int:
    """Pin a buffer of the host; return its address, for unpin()."""
    address = buffer.data_ptr()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, buffer.numel() * buffer.element_size(), 0))  # type: ignore[no-untyped-call]
    return address


def unpin(address: int) -> None:
    """Undo pin(), before the buffer is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------------ held parameters
#
# A frozen copy of a model's parameters (the reference), swapped with them while it computes.
#
# Input: this rank's tensors, as its backend keeps them.  Output: the same tensors, holding the copy's numbers
# meanwhile. Guarantees: extra memory besides model and copy is one tensor of the largest size; it is allocated before
# anything changes, so that swapping back cannot run out of memory; after swapping back every bit is restored.

ALIGNMENT = 512  # bytes at which a tensor begins in the copy


class HeldParameters:
    """Copies of all tensors in one buffer; empty at first."""

    def __init__(
        self, live: Callable[[], Sequence[Tensor]], around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """live: the tensors, each once, always in the same order.  around: context in which to write to them."""
        self._live, self._around = live, around
        self._held: list[Tensor] = []
        self._pinned: int | None = None  # address

    @torch.no_grad()
    def hold(self, memory: str) -> None:
        """Copy the parameters as they are now; memory: "device" (theirs) or "host".  Replaces an earlier copy."""
        live = self._live()
        device = torch.device("cpu") if memory == "host" else live[0].device
        if not self._held or self._held[0].device != device:
            self._allocate(live, device)
        for tensor, held in zip(live, self._held, strict=True):
            held.copy_(tensor)

    def _allocate(self, live: Sequence[Tensor], device: torch.device) -> None:
        self.release()
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in live]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._held = [_like(tensor, part) for tensor, part in zip(live, buffer.split_with_sizes(sizes), strict=True)]
        if device.type == "cpu" and live[0].is_cuda:
            self._pinned = pin(buffer)

    @contextmanager
    def in_place(self, is_wanted: bool = True) -> Iterator[None]:
        """Swap the copy in for the block, if wanted, and out again at the end, even if it raises."""
        if not is_wanted:
            yield
            return
        assert self._held, "no reference is held"
        live = self._live()
        largest = max(live, key=lambda tensor: tensor.nbytes)
        spare = torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)
        self._exchange(spare)
        try:
            yield
        finally:
            self._exchange(spare)

    @torch.no_grad()
    def _exchange(self, spare: Tensor) -> None:
        """Exchange the numbers, in order on the device's stream; the host does not wait."""
        with self._around():
            for tensor, held in zip(self._live(), self._held, strict=True):
                between = _like(tensor, spare).copy_(tensor)
                tensor.copy_(held, non_blocking=True)
                held.copy_(between, non_blocking=True)

    def release(self) -> None:
        """Forget the copy.  Idempotent."""
        if self._pinned is not None:
            torch.cuda.synchronize()
            unpin(self._pinned)
        self._held, self._pinned = [], None


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """The beginning of uint8 memory, as a tensor of the same dtype and shape."""
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


# ------------------------------------------------------------------------------------------------------------------ rng
#
# The state of torch's random number generators, as text that fits a JSON file.


def read_rng(device: torch.device) -> dict[str, str]:
    """Return the generators' states by device type, base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def write_rng(states: dict[str, str], device: torch.device) -> None:
    """Restore the states of read_rng; states of a device type that is missing here are skipped."""
    for name, text in states.items():
        state = torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == device.type == "cuda":
            torch.cuda.set_rng_state(state, device)


# ------------------------------------------------------------------------------------------------------- weight average
#
# An exponential moving average of float32 master weights, sharded over ranks like those of a checkpoint.
#
# Input: this rank's live shards of masters, as its backend keeps them.  Output: float32 shards of the average, for a
# checkpoint.  With weights w_v after version v and decay d: e_v = d · e_(v−1) + (1 − d) · w_v, and e = w where it
# begins (Polyak & Juditsky 1992; Tarvainen & Valpola 2017, arXiv:1703.01780), so that there is no bias to correct.
# Guarantees: each number of the average is on one rank, even if replicas keep the same masters; no communication; the
# same bits in every layout that has the same masters.

log = logging.getLogger("rlhpc.training")
AVERAGE = "average"  # kind of tensors in a checkpoint, beside optimizer.STATE_KINDS


class WeightAverage:
    """Moving average of this rank's shards; empty at first."""

    def __init__(self, items: Sequence[ShardedTensorSpec], own: Callable[[int], Sequence[Tensor]]) -> None:
        """own(index): this rank's live float32 masters of items[index], as for a BackgroundSaver."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._live = own
        self._mine = [i for i, item in enumerate(items) if any(shard.rank == rank for shard in item.shards)]
        self._held: dict[int, list[Tensor]] = {}
        self.is_held = False

    def hold(self, memory: str) -> None:
        """Begin at the weights as they are now; memory: where, "device" (theirs) or "host"."""
        self._held = {
            index: [
                live.detach().to("cpu" if memory == "host" else live.device, copy=True) for live in self._live(index)
            ]
            for index in self._mine
        }
        self.is_held = True

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """Update the average with the current weights."""
        assert self.is_held, "no average is held"
        for held, live in self._pairs():
            held.lerp_(live.to(held.device), 1 - decay)

    def own(self, index: int) -> Sequence[Tensor]:
        """This rank's live shards."""
        return self._held[index]

    def restore(self, kinds: Collection[str], read_weights: Callable[[str], None]) -> None:
        """Continue from a checkpoint with these kinds of tensors, if there is an average.

        read_weights(kind): fill this rank's masters from tensors of a kind.  At the end the masters are the
        checkpoint's weights, whatever they were before.
        """
        if self.is_held and AVERAGE in kinds:
            read_weights(AVERAGE)
            self._begin()
        read_weights("weights")
        if self.is_held and AVERAGE not in kinds:
            log.info("the checkpoint has no weight average: the average begins at the weights of this checkpoint")
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        for held, live in self._pairs():
            held.copy_(live)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [pair for i in self._mine for pair in zip(self._held[i], self._live(i), strict=True)]


# -------------------------------------------------------------------------------------------------------------- merging
#
# Low-rank adapters added to their base weight, and base weights in 4 bits: numbers of the normal distribution ("nf4",
# Dettmers et al. 2023, arXiv:2305.14314), 64 to a scale, and the scales in 8 bits; bitsandbytes, an optional
# dependency, packs and unpacks them.


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B A, added in float32 and rounded once to the dtype of W, which is not changed."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


# ----------------------------------------------------------------------------------------------------- stateful backend

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
    """Sums over the micro-batches of a step, besides their gradient."""

    divisor: int  # of every micro-batch's loss: the number of loss tokens of the step, or an estimate of it
    metrics: MetricSums = field(default_factory=MetricSums)


class SteppedOptimizer(Protocol):
    """An optimiser whose step is voted on; FlatAdamW and MegatronAdamW are."""

    num_steps_applied: int

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients."""

    def publish(self) -> None:
        """Copy masters that were written from outside into the parameters."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients."""

    def clip(self, gradient_norm: float, max_norm: float) -> None:
        """Scale the gradients to the norm max_norm if theirs, `gradient_norm`, is larger."""

    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Apply the gradients."""


class StatefulBackend(TrainerBackend):
    """Backends whose constructor sets these parts."""

    _device: torch.device
    _reference: HeldParameters
    _average: WeightAverage
    _saver: StateSaver
    _adapter_form: AdapterForm | None = None  # of a version
    _adapter_record: Mapping[str, Any] | None = None  # a checkpoint's record of adapters; None: there are none
    _accumulated: StepSums | None = None  # of the parts of a step before its last one

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def adapter_form(self) -> AdapterForm | None:
        """See TrainerBackend."""
        return self._adapter_form

    def hold_reference(self, memory: str) -> None:
        """See TrainerBackend; every rank holds a copy of its own parameters."""
        self._reference.hold(memory)

    def hold_average(self, memory: str) -> None:
        """See TrainerBackend; every rank holds the average of its share of a checkpoint."""
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
        """See TrainerBackend; ranks wait for other replicas only as within a step."""
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
        sums, self._accumulated = self._accumulated, None
        if sums is None:
            self._zero_gradients()
            sums = StepSums(num_loss_tokens)
        anchors = {"proximal": proximal, "reference": reference}
        self._add_gradients(
            microbatches, loss, anchors, sums, has_entropy_gradient=has_entropy_gradient, is_last_part=True
        )
        return self._apply(sums, num_loss_tokens, learning_rate, weight_decay, max_grad_norm, may_apply)

    @abstractmethod
    def _apply(
        self,
        sums: StepSums,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        may_apply: StepGate | None,
    ) -> StepResult:
        """Vote, clip and step.  sums: of all parts, divided by their estimate of num_loss_tokens, the true number."""

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
        read = partial(read_checkpoint, directory, self._state_specs(), share=share, adapter=self._adapter_record)
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

    def _state_specs(self) -> tuple[TensorSpec, ...]:
        """Names and shapes of a checkpoint's tensors: the trained ones."""
        return self.tensor_specs()

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


class OptimizerBackend(StatefulBackend):
    """Backends that step an optimiser of ours, if every rank agrees."""

    _optimizer: SteppedOptimizer

    @property
    def num_steps_applied(self) -> int:
        """Read from the optimiser, which skipped steps do not touch."""
        return self._optimizer.num_steps_applied

    def _apply(
        self,
        sums: StepSums,
        num_loss_tokens: int,
        learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        may_apply: StepGate | None,
    ) -> StepResult:
        if sums.divisor != num_loss_tokens:
            self._optimizer.scale_gradients(sums.divisor / num_loss_tokens)
        metrics, grad_norm, own_norm = self._measured(sums.metrics)
        is_finite = all(map(math.isfinite, (own_norm, grad_norm, metrics["loss"])))
        is_allowed = may_apply is None or may_apply(metrics, grad_norm)
        applied = all_ranks_agree(is_finite and is_allowed, self._device)
        if applied:
            self._optimizer.clip(grad_norm, max_grad_norm)
            self._optimizer.step(learning_rate=learning_rate, weight_decay=weight_decay)
        is_known = applied or (is_finite and not is_allowed)
        return StepResult(applied=applied, grad_norm=grad_norm if is_known else math.nan, metrics=metrics)

    @abstractmethod
    def _measured(self, sums: MetricSums) -> tuple[dict[str, float], float, float]:
        """Metrics and gradient norm of the step, the same on all ranks, and the norm that this one has measured."""

    def _zero_gradients(self) -> None:
        self._optimizer.zero_gradients()

    def _publish(self, num_steps_applied: int) -> None:
        self._optimizer.num_steps_applied = num_steps_applied
        self._optimizer.publish()


class ReplicatedBackend(StatefulBackend):
    """Backends with data parallelism alone."""

    _rank: int
    _world_size: int
    _replay: HfReplay | None = None

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
        rows = without_routes(microbatches) if of_reference else microbatches
        with self._reference.in_place(of_reference):
            return [self._found(row, all_but_first(row), temperature=temperature).logprobs for row in rows]

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
            found = self._found(
                microbatch, microbatch.loss_mask, want_entropy=True, has_entropy_gradient=has_entropy_gradient
            )
            of_this_row = {name: of_row(rows, index) for name, rows in anchors.items()}
            row = token_row(microbatch, found.entropy, soft=found.soft, **of_this_row)
            loss_sum, metrics = loss(found.logprobs, row)
            is_last = is_last_part and index == len(microbatches) - 1
            self._backward(loss_sum, found.logprobs, sums.divisor, is_last=is_last)
            sums.metrics.add({**metrics, "entropy": found.entropy_sum, "loss": loss_sum.detach()})

    def _found(self, microbatch: PackedMicrobatch, wanted: NDArray[np.bool_], **options: Any) -> FoundTokens:
        if self._replay is not None:
            self._replay.begin_row(microbatch, self._device)
        return self._token_logprobs(microbatch, wanted, **options)

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
    ) -> FoundTokens:
        """Return the model's answer on the wanted tokens of a row."""
