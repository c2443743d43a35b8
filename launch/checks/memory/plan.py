"""Memory of the trainer's ranks, calculated: what a layout needs before any GPU is requested.

Input: a Config and a ModelShape.  Output: RankMemory for every pipeline stage.  Pure, without torch, microseconds.
These are formulas, and two constants at the top that are guesses.  On an H100 seven layouts of 0.35 billion parameters
took from 1 % more to 9 % less than planned, the allowance apart (docs/log.md).

Legend: Ψ parameters of a rank, b bytes of model.dtype, N data-parallel × context-parallel ranks.
    Megatron    parameters b·Ψ, gradients 4·Ψ (summed in float32), optimiser 12·Ψ (master, two moments; float32),
                divided by N with the distributed optimiser.  In float32 the parameters are the master: 8·Ψ.  Experts
                are divided by their own replicas, ranks of a stage / expert_parallel.
    DeepSpeed   the same three terms; stage 1 divides the optimiser by N, stage 2 gradients too, stage 3 parameters too
                (Rajbhandari et al. 2020, arXiv:1910.02054, §5; there gradients are 2·Ψ, here they are float32).
    reference   4·Ψ master, 4·Ψ gradients, 8·Ψ moments, and b·Ψ of a copy below float32; every rank holds all.
    With algorithm.kl_coefficient b·Ψ once more (divided by N in ZeRO stage 3) for the frozen reference, on GPU or host.
    With a critic all of this but the reference twice; it is taken to be of the policy's size.
Activations and the head: activations.py.
Host memory while a model is loaded: DeepSpeed has all Ψ on every rank in float32 and then in model.dtype too, before
anything is cut; the reference has them in float32.  Megatron reads slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from launch.checks.memory.activations import RowMemory
from rlhpc.config import Config
from rlhpc.model_shape import ModelShape, RankParameters
from rlhpc.parallel_layout import ParallelLayout
from rlhpc.types import TensorSpec
from rlhpc.weights.buckets import plan_buckets

GIB = 1 << 30
FIXED_ALLOWANCE = 2 * GIB  # guess: CUDA context, cuBLAS workspaces and NCCL's buffers; grows with the groups
FRAGMENTATION = 0.05  # guess: of everything else
_ZERO_BUCKET = 64 << 20  # numbers; BUCKET_ELEMENTS of training/deepspeed/engine.py, which needs DeepSpeed to be read
_ZERO_LIVE = 1_000_000_000  # numbers; DeepSpeed's default of stage3_max_live_parameters
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage.  Resident are the first five; the moments after them never meet."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    buckets: int  # DeepSpeed's buffers for collectives, and parameters gathered for use
    reference: int  # the reference's copy of the parameters
    average: int  # of the float32 weights
    activations: int  # of the rows in flight
    head: int  # logits, log-probabilities, the head's gradient
    export: int  # buffers of the rank that sends new weights
    optimizer_scratch: int  # DeepSpeed's second copy of gradients
    is_on_gpu: bool
    host_loading: int  # the whole model, before it is cut; gone before a checkpoint is written
    host_optimizer: int  # what offload moves to host memory
    host_snapshot: int  # weights, moments and average, while a checkpoint is written
    host_reference: int  # the reference's copy, where it lies there
    host_average: int  # the same of the average
    host_image: int  # the weights as they were sent, where only changes travel

    @property
    def resident(self) -> int:
        """There all the time."""
        return self.parameters + self.gradients + self.optimizer + self.buckets + self.reference + self.average

    @property
    def allowance(self) -> int:
        """For what no tensor accounts for; a guess."""
        return FIXED_ALLOWANCE + int(FRAGMENTATION * (self.resident + self.moment)) if self.is_on_gpu else 0

    @property
    def peak(self) -> int:
        """The fullest moment: a row in work, the optimiser's step, or the export of weights."""
        return self.resident + self.moment + self.allowance

    @property
    def moment(self) -> int:
        """What comes on top at the fullest moment."""
        return max(self.activations + self.head, self.export, self.optimizer_scratch)

    @property
    def host(self) -> int:
        """Host memory at its fullest moment, beyond what every process takes: loading, or training."""
        return max(self.host_loading, self.host_training)

    @property
    def host_training(self) -> int:
        """While it trains and saves."""
        copies = self.host_reference + self.host_average + self.host_image
        return self.host_optimizer + self.host_snapshot + copies


@dataclass(frozen=True, slots=True)
class _ModelState:
    """Bytes that a backend keeps for a model, activations apart."""

    parameters: int
    gradients: int
    optimizer: int
    num_owned: int  # parameters whose optimiser state this rank steps and saves
    buckets: int = 0
    host_loading: int = 0
    host_optimizer: int = 0
    scratch: int = 0


def plan_memory(config: Config, shape: ModelShape) -> tuple[RankMemory, ...]:
    """One RankMemory per pipeline stage, first to last.  The layout must have passed ParallelLayout.refuse_unfit."""
    layout = ParallelLayout.of(config.trainer)
    return tuple(_rank_memory(config, shape, layout, stage) for stage in range(layout.pipeline))


def fullest(plan: tuple[RankMemory, ...]) -> RankMemory:
    """The rank that needs most; the earliest stage of equals."""
    return max(plan, key=lambda rank: rank.peak)


def _rank_memory(config: Config, shape: ModelShape, layout: ParallelLayout, stage: int) -> RankMemory:
    held = shape.on_rank(layout, stage)
    state = _STATES[config.trainer.backend](config, layout, held)
    b = ELEMENT_BYTES[config.model.dtype]
    num_models = 2 if config.has_critic else 1
    reference = _reference_bytes(config, layout, held)
    is_far = config.trainer.reference_memory == "host" or config.trainer.parameter_offload
    average = 0 if config.trainer.ema_decay == "off" else 4 * state.num_owned
    is_average_far = config.trainer.ema_memory == "host"
    row = RowMemory(shape, layout, config.trainer, b)
    head = row.head() if stage == layout.pipeline - 1 else 0
    return RankMemory(
        stage=stage,
        parameters=num_models * state.parameters,
        gradients=num_models * state.gradients,
        optimizer=num_models * state.optimizer,
        buckets=num_models * state.buckets,
        reference=0 if is_far else reference,
        average=0 if is_average_far else average,
        activations=row.kept(stage, head),
        head=head,
        export=_export_bytes(config, shape) if stage == 0 else 0,
        optimizer_scratch=state.scratch,
        is_on_gpu=config.trainer.device != "cpu",
        host_loading=state.host_loading + (num_models - 1) * state.host_optimizer,  # a critic is loaded after it
        host_optimizer=num_models * state.host_optimizer,
        host_snapshot=num_models * 12 * state.num_owned + average,
        host_reference=reference if is_far else 0,
        host_average=average if is_average_far else 0,
        host_image=_image_bytes(config, shape) if stage == 0 else 0,
    )


def bucket_sizes(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """Bytes of every bucket that new weights travel in."""
    return _bucket_sizes(shape, config.model.dtype, config.weights.bucket_bytes)


@cache  # a mixture has 20,000 tensors, and advice tries dozens of settings that leave the buckets as they are
def _bucket_sizes(shape: ModelShape, dtype: str, bucket_bytes: int) -> tuple[int, ...]:
    sizes = [prod(each) for each in shape.tensors.values()]
    ends = plan_buckets([TensorSpec("", dtype, (size,)) for size in sizes], bucket_bytes)
    return tuple(ELEMENT_BYTES[dtype] * sum(sizes[start:end]) for start, end in zip((0, *ends), ends, strict=False))


def _reference_bytes(config: Config, layout: ParallelLayout, held: RankParameters) -> int:
    """A copy of the forward pass's parameters, cut as they are; while they change places one tensor is there twice."""
    if not config.algorithm.kl_coefficient:
        return 0
    is_cut = config.trainer.backend == "deepspeed" and config.trainer.zero_stage == 3
    return ELEMENT_BYTES[config.model.dtype] * (-(-held.total // layout.data) if is_cut else held.total)


def _image_bytes(config: Config, shape: ModelShape) -> int:
    """What the rank that sends compares new weights with (rlhpc/weights/host_image.py); "auto" is NCCL on GPUs."""
    weights, b = config.weights, ELEMENT_BYTES[config.model.dtype]
    return b * shape.num_parameters if weights.sends_changes and weights.staging != "paused" and b == 2 else 0


def _export_bytes(config: Config, shape: ModelShape) -> int:
    """Two buckets that take turns and the largest tensor, on the rank that sends; where it comes in parts, they too."""
    trainer, buckets = config.trainer, bucket_sizes(config, shape)
    is_joined = trainer.tensor_parallel > 1 or (trainer.backend == "deepspeed" and trainer.zero_stage == 3)
    largest = ELEMENT_BYTES[config.model.dtype] * shape.largest_tensor * (2 if is_joined else 1)
    return max(buckets[0::2], default=0) + max(buckets[1::2], default=0) + largest


def _megatron(config: Config, layout: ParallelLayout, held: RankParameters) -> _ModelState:
    """Offload moves the step to the host; the float32 master stays on the GPU too, as in megatron-core 0.16.1.

    Masters and gradients are pinned there one by one, in blocks of torch's that are powers of two.  How Megatron fuses
    and cuts tensors is not known here, so that each is counted twice, the bound; for Qwen2.5-7B it is 1.9 times.
    """
    trainer, b = config.trainer, ELEMENT_BYTES[config.model.dtype]
    owned = held.total
    if trainer.distributed_optimizer:
        replicas = layout.data * layout.context
        expert_replicas = max(1, layout.tensor * replicas // layout.expert)
        owned = -(-held.shared // replicas) + -(-held.experts // expert_replicas)
    master = 0 if b == 4 else 4
    moments = 0 if trainer.optimizer_offload else 8
    return _ModelState(
        parameters=b * held.total,
        gradients=4 * held.total,
        optimizer=(master + moments) * owned,
        num_owned=owned,
        host_optimizer=24 * owned if trainer.optimizer_offload else 0,  # twice master and gradient; moments
    )


def _deepspeed(config: Config, layout: ParallelLayout, held: RankParameters) -> _ModelState:
    trainer, b, psi = config.trainer, ELEMENT_BYTES[config.model.dtype], held.total
    stage, share = trainer.zero_stage, -(-held.total // layout.data)
    parameters = b * (share if stage == 3 else psi)
    parameters_on_host = parameters if trainer.parameter_offload else 0
    gradients = 4 * (share if stage >= 2 else psi)
    gradients_on_host = gradients if stage >= 2 and trainer.optimizer_offload else 0  # they follow their optimiser
    state_on_host = 12 * share if trainer.optimizer_offload else 0
    on_host = state_on_host + gradients_on_host + parameters_on_host
    beside_masters = 0 if b == 4 else max(b * psi, on_host)  # what is cast goes before what stays there comes
    bucket = min(psi, _ZERO_BUCKET)
    gathered = b * (min(psi, _ZERO_LIVE) if stage == 3 else bucket)
    return _ModelState(
        parameters=parameters - parameters_on_host,
        gradients=gradients - gradients_on_host,
        optimizer=12 * share - state_on_host,
        num_owned=share,
        buckets=gathered + (b + 4) * bucket,  # gradients are reduced in float32
        host_loading=4 * psi + beside_masters,
        host_optimizer=on_host,
        scratch=4 * share if stage < 3 and not trainer.optimizer_offload else 0,  # gradients once more, flat
    )


def _reference(config: Config, layout: ParallelLayout, held: RankParameters) -> _ModelState:
    """Only rank 0 saves."""
    b = ELEMENT_BYTES[config.model.dtype]
    return _ModelState(
        parameters=0 if b == 4 else b * held.total,
        gradients=4 * held.total,
        optimizer=12 * held.total,
        num_owned=held.total,
        host_loading=0 if config.trainer.device == "cpu" else 4 * held.total,
    )


_STATES = {"megatron": _megatron, "deepspeed": _deepspeed, "reference": _reference}
