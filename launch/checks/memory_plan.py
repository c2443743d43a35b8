"""Calculate the memory of the trainer's ranks for a layout, before any GPU is requested.

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
    For kl_coefficient or "dpo" b·Ψ once more (divided by N in ZeRO stage 3) for the frozen reference, on GPU or host.
    With a critic all of this but the reference twice; it is taken to be of the policy's size.
    adapters    of [lora], φ numbers: b·Ψ frozen (divided by N in ZeRO stage 3), and for φ the terms above for Ψ in
                float32, with DeepSpeed in model.dtype; Megatron's are not divided, except those of experts, which are
                divided like experts.  The reference is the frozen model.
                With lora.quantization 0.516 bytes instead of b for attention and MLP, and one matrix unpacked.
Activations and the head: below.
Host memory while a model is loaded: DeepSpeed has all Ψ on every rank in float32 and then in model.dtype too, before
anything is cut; the reference has them in float32.  Megatron reads slices.  With adapters both have model.dtype alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from rlhpc.config.rules import Config
from rlhpc.config.tables import TrainerConfig
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.models.adapter import (
    HEAD_MODULE,
    adapter_specs,
    chosen_layers,
    is_quantised,
    matrices_of,
    projection_of,
    room_for,
    sends_adapters,
)
from rlhpc.models.layer_forms import DeltaNet
from rlhpc.models.shape import LOGPROB_CHUNK_TOKENS, ModelShape, ParallelLayout, RankParameters, layers_of_stage
from rlhpc.protocol.types import TensorSpec
from rlhpc.weights.buckets import plan_buckets

# ---------------------------------------------------------------------------------------------------------- activations
#
# Bytes that one packed row leaves on a rank between forward and backward, and while its tokens pass the head.
#
# Input: ModelShape, ParallelLayout and the relevant keys of [trainer].  Output: bytes.  Every number is an estimate: it
# counts the tensors that autograd keeps (tests compare it with autograd on CPU), not the allocator's overhead, nor
# memory of kernels.
#
# The method is that of Korthikanti et al. 2022 (arXiv:2205.05198), §4, for one row of T tokens (batch 1), with these
# differences: (1) SwiGLU instead of GeLU; (2) grouped-query attention; (3) flash attention: no term in T²; (4) no
# dropout, so no masks; (5) RMSNorm; (6) context parallelism.
# Legend: T tokens of a rank, t tensor ranks, b bytes of the dtype, H, A, K, D, F, V, E as in models/shape.py.
#
# Kept of a dense layer, bytes a token (u = t under sequence parallelism, otherwise 1):
#     norms, two            2·n·H / u                       Megatron: the input, n = b; in transformers' layers 4 + b
#     inputs of matrices    2·b·H / u                       of the projections to q, k, v and of the MLP
#     attention             2·b·(A + K)·D / t + 4·A / t     q, k, v, result; row sums
#     … of a shared row     b·(3·A + 2·K·c)·D / t + 4·A / t q, k and v of all c context ranks, result twice
#     norms of heads        n·(A + K)·D / t                 where the family has them: q and k before their norms
#     … with Megatron       b·(A + 2·K)·D / t               q, k and v as the fused projection gives them
#     SwiGLU                m·b·F / t                       gate, up, silu(gate), product, m = 4; Megatron: 3, no silu
#     adapters              b·r                             A x of each module that has one, of rank r; and below
#                                                           float32 A and B themselves, cast.  Norms are frozen: n = 4
# Of a mixture the SwiGLU term is b·(4·F_expert + 2·H) for each token that is routed here, Megatron's one H less, plus
# 12·E for the router, with latents its input in float32; experts that all tokens pass are an MLP, and b·H for a gate.
# Norms in float32 have n = 8.  A gate of attention keeps 2·b·A·D: itself and its product.
# Latents (flash attention pads values to the D = rope + nope of keys, and rank counts queries' latents, too):
#     latents, norms of them  (n + b)·rank                  and in place of q, k, v and the result b·A·(4·D + value)
# A Gated DeltaNet, of X channels before it is cut into heads (training/packed_delta_net.py), C = 64 tokens of a chunk:
#     convolution           3·b·X                           with zeros between segments, before and after
#     norm, gate, result    (12 + 3·b)·A·Dv                 gate and normed values in float32
#     kernels, if installed b·A·(2·Dk + Dv + C) + 16·A      of flash-linear-attention, in bfloat16
#     … without them        4·A·(12·Dk + 3·Dv + 5·C + Dk·Dv / C) + 40·A   operands of products of matrices, in float32
# Recompute "selective" keeps 2·b·(A + K)·D / t of attention in either case: little is gained unless rows are shared.
# "full" keeps b·H / u of every layer, and the whole sum of the one layer that is being recomputed.
# Matrices of experts lie side by side while a product of Megatron's (bfloat16) takes them: 2·b·H·F_expert·E of a rank.

_CHUNK_TOKENS = 64  # CHUNK_TOKENS of training/packed_delta_net.py, which needs torch to be read
ROUTING_IMBALANCE = 1.5  # tokens of the fullest rank of experts over the mean; a guess, routing is not bounded


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Bytes of activations of one row, as one rank sees it."""

    shape: ModelShape
    layout: ParallelLayout
    trainer: TrainerConfig
    element_bytes: int
    is_head_trained: bool = True
    adapter_rank: int = 0  # of each module, summed over those of a layer that have adapters
    adapter_numbers: int = 0  # of A and B of a layer
    head_rank: int = 0
    has_delta_kernels: bool = False  # flash-linear-attention is installed

    @property
    def has_adapters(self) -> bool:
        """True if only adapters are trained, and all else is frozen."""
        return self.adapter_rank + self.head_rank > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a full row on one context rank, padding included."""
        multiple = self.layout.row_multiple
        return -(-self.trainer.token_budget // multiple) * multiple // self.layout.context

    @property
    def _norm_share(self) -> int:
        return self.layout.tensor if self.layout.is_sequence_parallel else 1

    @property
    def _norm_bytes(self) -> int:
        """Bytes kept for each number of a norm's input: Megatron keeps it alone, transformers a float32 copy, too.

        A frozen norm of transformers keeps the copy alone.
        """
        if self._is_megatron:
            return self.element_bytes
        normed = 4 if self.shape.traits.is_norm_in_float32 else self.element_bytes
        return 4 + normed * (not self.has_adapters)

    @property
    def _is_megatron(self) -> bool:
        return self.trainer.backend == "megatron"

    @property
    def _layer_input(self) -> int:
        return self.num_tokens * self.element_bytes * self.shape.hidden // self._norm_share

    def of_layer(self, layer: int) -> int:
        """Bytes that one layer keeps of a row until its backward."""
        return self._layer_input if self.trainer.recompute_activations == "full" else self._layer(layer)

    def kept(self, stage: int, head: int = 0) -> int:
        """Activations at the fullest moment of a pipeline stage: rows in flight, and the current layer.

        head: bytes that the head has freed when a layer is recomputed; only the layer's bytes beyond them count.
        With adapters also when it goes backward: no gradient of the head waits for the embedding's.
        """
        layers = layers_of_stage(self.layout, self.shape.num_layers, stage)
        row = sum(self.of_layer(layer) for layer in layers)
        again = max(map(self._layer, layers)) if self.trainer.recompute_activations == "full" else 0
        backward = max(map(self._gradients, layers))
        later = max(0, again + backward - head) if self.has_adapters else max(0, again - head) + backward
        return int(row * rows_in_flight(self.layout, stage)) + later

    def _layer(self, layer: int) -> int:
        """Bytes that one layer keeps of a row if at most attention is recomputed."""
        shape, b = self.shape, self.element_bytes
        norms = (shape.num_norms * self._norm_bytes + 2 * b) * shape.hidden // self._norm_share
        attention = self._delta_net(shape.delta_net) if shape.is_recurrent(layer) else self._attention()
        adapters = self.num_tokens * b * self.adapter_rank + b * self.adapter_numbers * (b < 4)
        return self.num_tokens * (norms + attention) + adapters + self._mlp(layer)

    def _attention(self) -> int:
        """Bytes a token of attention to keys and values, the projections' inputs left out."""
        shape, b, t = self.shape, self.element_bytes, self.layout.tensor
        is_uncast = b == 4  # then a norm of a part, gate or turned part beside it, keeps the whole
        if latents := shape.latents:
            rank = latents.rank + (latents.query_rank or 0)
            kept = 4 * latents.queries + latents.num_heads * latents.value_size
            return (self._norm_bytes + b) * rank + b * (kept + latents.rope_size * is_uncast) + 4 * latents.num_heads
        heads, key_heads = shape.num_heads * shape.head_size, shape.num_key_heads * shape.head_size
        is_selective = self.trainer.recompute_activations == "selective"
        is_own = is_selective or self.layout.context == 1
        attention = b * (2 * (heads + key_heads) if is_own else 3 * heads + 2 * self.layout.context * key_heads) // t
        attention += 0 if is_selective else 4 * shape.num_heads // t
        if shape.has_qk_norm:
            of_keys = 2 * key_heads if self._is_megatron else key_heads
            attention += self._norm_bytes * (heads + of_keys) // t
        return attention + (2 + is_uncast) * b * heads * shape.traits.has_gate

    def _delta_net(self, net: DeltaNet | None) -> int:
        """Bytes a token of a Gated DeltaNet, the projections' inputs left out."""
        assert net is not None
        b, heads, key, value = self.element_bytes, net.num_heads, net.key_size, net.value_size
        if self.has_delta_kernels and b == 2 and self.trainer.device != "cpu":
            rule = b * (2 * key + value + _CHUNK_TOKENS) + 16
        else:
            rule = 4 * (12 * key + 3 * value + 5 * _CHUNK_TOKENS + key * value // _CHUNK_TOKENS) + 40
        return 3 * b * net.channels + (12 + 3 * b) * net.values + heads * rule

    def _mlp(self, layer: int) -> int:
        shape, b = self.shape, self.element_bytes
        if layer not in shape.expert_layers:
            copies = 3 if self._is_megatron else 4
            return self.num_tokens * copies * b * shape.mlp_width // self.layout.tensor
        kept = b * (4 * shape.expert_width + (1 if self._is_megatron else 2) * shape.hidden)
        of_all = b * (4 * shape.shared_width + shape.hidden * (shape.delta_net is not None and shape.shared_width > 0))
        router = 12 * shape.num_experts + 4 * shape.hidden * (shape.latents is not None and b < 4)
        return int(self._num_routed * kept) + self.num_tokens * of_all + self.num_tokens // self._norm_share * router

    @property
    def _num_routed(self) -> float:
        """Copies of tokens on the fullest rank of experts; every rank sends as many as it has."""
        imbalance = ROUTING_IMBALANCE if self.layout.expert > 1 else 1.0
        return self.num_tokens / self._norm_share * self.shape.experts_per_token * imbalance

    def _gradients(self, layer: int) -> int:
        """Bytes of gradients at once in one layer's backward: two whole rows of H; of gate, up and product."""
        shape, b = self.shape, self.element_bytes
        residual = 2 * self.num_tokens * b * shape.hidden  # whole, also with sequence parallelism: gathered for the MLP
        if layer in shape.expert_layers:
            routed = int(self._num_routed * b * (3 * shape.expert_width + shape.hidden))
            return residual + routed + self._side_by_side
        return residual + self.num_tokens * 3 * b * shape.mlp_width // self.layout.tensor

    @property
    def _side_by_side(self) -> int:
        """The larger matrices of a rank's experts, or their gradients, while one grouped product takes all of them."""
        shape, b = self.shape, self.element_bytes
        can_be_grouped = self._is_megatron and b == 2
        return b * 2 * shape.hidden * shape.expert_width * shape.num_experts // self.layout.expert * can_be_grouped

    def head(self) -> int:
        """Logits, log-probabilities and the head's gradient on the last stage (rlhpc/training/logprob.py).

        Forward 1⅛·C·V/t float32 numbers of a chunk of C tokens; backward C·V/t and the head's gradient V·H/t, or in
        bfloat16 ¼·C·V/t and 1⅝·V·H/t; around them the last norm and three copies of the hidden states.  A CPU
        multiplies bfloat16 as float32: there V·H/t more.
        """
        shape, b = self.shape, self.element_bytes
        vocabulary = self.layout.padded_vocabulary(shape.vocabulary) // self.layout.tensor
        logits = 4 * min(LOGPROB_CHUNK_TOKENS, self.num_tokens) * vocabulary
        factor = vocabulary * (shape.hidden + self.head_rank)  # an adapter's B lies beside a copy of the weight
        weight = 4 * factor * self.is_head_trained
        backward = logits + weight if b == 4 else logits // 4 + weight * 13 // 8
        hidden = self.num_tokens * shape.hidden
        around = hidden * self._norm_bytes // self._norm_share + 3 * hidden * b
        copies = b * factor * (self.head_rank > 0) + 4 * factor * (b == 2 and self.trainer.device == "cpu")
        return max(logits * 9 // 8, backward) + around + copies


def rows_in_flight(layout: ParallelLayout, stage: int) -> float:
    """Rows whose activations a stage holds at once, in rows of all its layers (Korthikanti et al. 2022, §4.2.3).

    1F1B: pipeline − stage.  Interleaved: 2·(pipeline − stage − 1) + (chunks − 1)·pipeline + 1 blocks of 1/chunks of
    the stage's layers each.  A step of fewer rows holds less.
    """
    if layout.chunks == 1:
        return float(layout.pipeline - stage)
    blocks = 2 * (layout.pipeline - stage - 1) + (layout.chunks - 1) * layout.pipeline + 1
    return blocks / layout.chunks


# ----------------------------------------------------------------------------------------------------------------- plan

GIB = 1 << 30
FIXED_ALLOWANCE = 2 * GIB  # guess: CUDA context, cuBLAS workspaces and NCCL's buffers; grows with the groups
FRAGMENTATION = 0.05  # guess: of everything else
_ZERO_BUCKET = 64 << 20  # numbers; BUCKET_ELEMENTS of training/deepspeed/engine.py, which needs DeepSpeed to be read
_ZERO_LIVE = 1_000_000_000  # numbers; DeepSpeed's default of stage3_max_live_parameters
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
NF4_BYTES = (4 + (8 + 32 / 256) / 64) / 8  # of a number: 64 have a scale of 8 bits, and 256 of those one in float32


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank of a pipeline stage.  The first five are resident; the others never coincide."""

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
    host_loading: int  # the whole model, before sharding; freed before a checkpoint is written
    host_optimizer: int  # moved to host memory by offload
    host_snapshot: int  # weights, moments and average, while a checkpoint is written
    host_reference: int  # the reference's copy, if in host memory
    host_average: int  # the average, if in host memory
    host_image: int  # the weights sent last, if only changes are sent

    @property
    def resident(self) -> int:
        """Bytes that are always allocated."""
        return self.parameters + self.gradients + self.optimizer + self.buckets + self.reference + self.average

    @property
    def allowance(self) -> int:
        """Guess for memory outside of tensors."""
        return FIXED_ALLOWANCE + int(FRAGMENTATION * (self.resident + self.moment)) if self.is_on_gpu else 0

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment: a row, the optimiser's step, or the export of weights."""
        return self.resident + self.moment + self.allowance

    @property
    def moment(self) -> int:
        """Bytes beyond `resident` at the fullest moment."""
        return max(self.activations + self.head, self.export, self.optimizer_scratch)

    @property
    def host(self) -> int:
        """Host memory at the fullest moment, loading or training, without a process's own."""
        return max(self.host_loading, self.host_training)

    @property
    def host_training(self) -> int:
        """Host memory while it trains and saves."""
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
    """RankMemory of each pipeline stage, first to last.  The layout must have passed ParallelLayout.refuse_unfit."""
    layout = ParallelLayout.of(config.trainer)
    return tuple(_rank_memory(config, shape, layout, stage) for stage in range(layout.pipeline))


def fullest(plan: tuple[RankMemory, ...]) -> RankMemory:
    """The rank that needs most; the earliest stage among equals."""
    return max(plan, key=lambda rank: rank.peak)


def _rank_memory(config: Config, shape: ModelShape, layout: ParallelLayout, stage: int) -> RankMemory:
    held = shape.on_rank(layout, stage)
    state = _STATES[config.trainer.backend](config, layout, held)
    if config.lora.rank:
        state = _beside_adapters(config, shape, layout, stage)
    num_models = 2 if config.has_critic else 1
    reference = _reference_bytes(config, layout, held)
    is_far = config.trainer.reference_memory == "host" or config.trainer.parameter_offload
    average = 0 if config.trainer.ema_decay == "off" else 4 * state.num_owned
    is_average_far = config.trainer.ema_memory == "host"
    row = _row_memory(config, shape, layout)
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
        host_loading=state.host_loading + (num_models - 1) * state.host_optimizer,  # a critic is loaded second
        host_optimizer=num_models * state.host_optimizer,
        host_snapshot=num_models * 12 * state.num_owned + average,
        host_reference=reference if is_far else 0,
        host_average=average if is_average_far else 0,
        host_image=_image_bytes(config, shape) if stage == 0 else 0,
    )


def _row_memory(config: Config, shape: ModelShape, layout: ParallelLayout) -> RowMemory:
    """Adapters in the mean over layers, that of the head apart."""
    row = RowMemory(
        shape, layout, config.trainer, ELEMENT_BYTES[config.model.dtype], has_delta_kernels=_has_delta_kernels()
    )
    if not config.lora.rank:
        return row
    rank, layers = config.lora.rank, _adapted(shape, tuple(config.lora.targets))
    of_head = layers.get(HEAD_MODULE, ())
    of_experts = {projection_of(name) for name in layers} - {""}
    others, in_experts = _adapter_numbers(config, shape)
    num_others = sum(not projection_of(name) for name in layers) - bool(of_head)
    return replace(
        row,
        is_head_trained=bool(of_head),
        head_rank=rank * bool(of_head),
        adapter_rank=rank * (num_others + shape.experts_per_token * len(of_experts)) // shape.num_layers,
        adapter_numbers=(others + in_experts // layout.expert - rank * sum(of_head)) // shape.num_layers,
    )


def _has_delta_kernels() -> bool:
    return importlib.util.find_spec("fla") is not None


def bucket_sizes(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """Bytes of every bucket of new weights."""
    if sends_adapters(config):
        return _adapter_bucket_sizes(shape, tuple(config.lora.targets), config.lora.rank, config.weights.bucket_bytes)
    return _bucket_sizes(shape, config.model.dtype, config.weights.bucket_bytes)


def num_adapter_parameters(config: Config, shape: ModelShape) -> int:
    """Numbers of all A and B.  Raises ConfigError for targets that are no layers of the model."""
    return sum(_adapter_numbers(config, shape))


@cache  # as below
def _adapter_bucket_sizes(shape: ModelShape, targets: tuple[str, ...], rank: int, bucket_bytes: int) -> tuple[int, ...]:
    specs = adapter_specs(_adapted(shape, targets), rank)
    sizes, ends = [4 * prod(spec.shape) for spec in specs], plan_buckets(specs, bucket_bytes)
    return tuple(sum(sizes[start:end]) for start, end in zip((0, *ends), ends, strict=False))


def _adapter_numbers(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Numbers of A and B beside all layers but experts, and beside experts."""
    layers, numbers = _adapted(shape, tuple(config.lora.targets)), [0, 0]
    for name, sizes in layers.items():
        numbers[bool(projection_of(name))] += config.lora.rank * sum(sizes)
    return numbers[0], numbers[1]


@cache
def _adapted(shape: ModelShape, targets: tuple[str, ...]) -> Mapping[str, tuple[int, int]]:
    return chosen_layers(LoraConfig(rank=1, targets=targets), matrices_of(shape.tensors))


@cache  # a mixture has 20,000 tensors, and advice tries dozens of settings with the same buckets
def _bucket_sizes(shape: ModelShape, dtype: str, bucket_bytes: int) -> tuple[int, ...]:
    sizes = [prod(each) for each in shape.tensors.values()]
    ends = plan_buckets([TensorSpec("", dtype, (size,)) for size in sizes], bucket_bytes)
    return tuple(ELEMENT_BYTES[dtype] * sum(sizes[start:end]) for start, end in zip((0, *ends), ends, strict=False))


def _reference_bytes(config: Config, layout: ParallelLayout, held: RankParameters) -> int:
    """A copy of the forward pass's parameters, sharded alike; during a swap one tensor exists twice."""
    if not config.has_reference or config.lora.rank:
        return 0
    is_cut = config.trainer.backend == "deepspeed" and config.trainer.zero_stage == 3
    return ELEMENT_BYTES[config.model.dtype] * (-(-held.total // layout.data) if is_cut else held.total)


def _image_bytes(config: Config, shape: ModelShape) -> int:
    """Image with which the sending rank compares new weights (rlhpc/weights/deltas.py); "auto" is NCCL on GPUs."""
    weights, b = config.weights, 4 if sends_adapters(config) else ELEMENT_BYTES[config.model.dtype]
    return b * shape.num_parameters if weights.sends_changes and weights.staging != "paused" and b == 2 else 0


def _export_bytes(config: Config, shape: ModelShape) -> int:
    """Two alternating buckets and the largest tensor, on the sending rank; also its parts, if it is gathered."""
    trainer, buckets = config.trainer, bucket_sizes(config, shape)
    is_joined = trainer.tensor_parallel > 1 or (trainer.backend == "deepspeed" and trainer.zero_stage == 3)
    largest = ELEMENT_BYTES[config.model.dtype] * shape.largest_tensor * (2 if is_joined else 1)
    if sends_adapters(config):
        largest = 4 * num_adapter_parameters(config, shape) * is_joined
    elif config.lora.rank:  # a sum of two float32 matrices
        largest += 8 * shape.largest_tensor
    return max(buckets[0::2], default=0) + max(buckets[1::2], default=0) + largest


def _megatron(config: Config, layout: ParallelLayout, held: RankParameters) -> _ModelState:
    """State of Megatron.  Offload steps on the host; the float32 master stays on the GPU, too (megatron-core 0.16.1).

    Masters and gradients are pinned on the host one by one, in blocks of powers of two.  How Megatron fuses and cuts
    tensors is not known here, so that each counts twice, the bound; for Qwen2.5-7B it is 1.9 times.
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
    gradients_on_host = gradients if stage >= 2 and trainer.optimizer_offload else 0  # beside their optimiser
    state_on_host = 12 * share if trainer.optimizer_offload else 0
    on_host = state_on_host + gradients_on_host + parameters_on_host
    beside_masters = 0 if b == 4 else max(b * psi, on_host)  # cast parameters are freed before offloaded state is made
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
    """State of the reference backend, on which only rank 0 saves."""
    b = ELEMENT_BYTES[config.model.dtype]
    return _ModelState(
        parameters=0 if b == 4 else b * held.total,
        gradients=4 * held.total,
        optimizer=12 * held.total,
        num_owned=held.total,
        host_loading=0 if config.trainer.device == "cpu" else 4 * held.total,
    )


def _beside_adapters(config: Config, shape: ModelShape, layout: ParallelLayout, stage: int) -> _ModelState:
    """State with adapters: the frozen model once, and the adapters' state, not sharded by Megatron and reference.

    Experts' adapters are: a rank of Megatron has those of its experts, and a distributed optimiser divides their state.
    """
    trainer, b, held = config.trainer, ELEMENT_BYTES[config.model.dtype], shape.on_rank(layout, stage)
    shared, of_experts = _adapter_numbers(config, shape)
    adapters = RankParameters(shared, of_experts)
    is_cut = trainer.backend == "deepspeed" and trainer.zero_stage == 3
    frozen = b * (-(-held.total // layout.data) if is_cut else held.total)
    unpacked = 0
    if config.lora.quantization != "off":
        sizes = [rows * columns for name, (rows, columns) in matrices_of(shape.tensors).items() if is_quantised(name)]
        frozen, unpacked = frozen - int((b - NF4_BYTES) * sum(sizes)), b * max(sizes)
    if trainer.backend == "deepspeed":
        state = _deepspeed(config, layout, adapters)
        buckets = b * min(held.total, _ZERO_LIVE) if is_cut else 0
    else:
        here, owned = of_experts, of_experts
        if trainer.backend == "megatron" and of_experts:
            mixtures = len(shape.expert_layers.intersection(layers_of_stage(layout, shape.num_layers, stage)))
            here = of_experts * mixtures // len(shape.expert_layers) // layout.expert
            replicas = max(1, layout.tensor * layout.data * layout.context // layout.expert)
            owned = -(-here // replicas) if trainer.distributed_optimizer else here
        state = _ModelState(0, 4 * (shared + here), 12 * shared + 4 * here + 8 * owned, shared + owned)
        buckets = 0
    is_far = is_cut and trainer.parameter_offload
    is_loaded_whole = trainer.backend != "megatron" and (trainer.backend, trainer.device) != ("reference", "cpu")
    return replace(
        state,
        parameters=state.parameters + (0 if is_far else frozen),
        buckets=state.buckets + buckets + unpacked,
        host_loading=b * held.total if is_loaded_whole else 0,
        host_optimizer=state.host_optimizer + (frozen if is_far else 0),
    )


_STATES = {"megatron": _megatron, "deepspeed": _deepspeed, "reference": _reference}


# --------------------------------------------------------------------------------------------------------------- engine
#
# Memory of a generator's GPUs: the engine, and staging of a new version of the weights.
#
# Input: a Config and a ModelShape.  Output: EngineMemory.  Pure, without torch.  Legend: Ψ parameters of the model, t
# engine ranks, b bytes of model.dtype, B the buckets of weights.bucket_bytes, larger if a single tensor is larger.
#
#   weights    b·Ψ / t; with adapters b·φ more, of the rank that vLLM has room for.  Of latents every rank has the
#              matrices that make them, and those that read them once more, multiplied out
#   KV cache   given by generation.kv_cache_bytes; otherwise at least one sequence of the maximum length,
#              2·b·L·K·D·tokens / t; of latents b·L·(rank + rope)·tokens on each; of Gated DeltaNets their states, two
#              of each with prefix caching.  What a model sees by is not loaded
#   staging    shadow: two buckets (the version itself is in host memory).  paused: three buckets, one being filled, one
#              being loaded, one whose tensor a loader still references; and the largest module that is assembled from
#              several tensors, both as received and as this rank's shard.  auto may become either.

ENGINE_ALLOWANCE = 2 * GIB  # guess: CUDA context, graphs, activations of a step
STAGING_ALLOWANCE = GIB // 2  # guess: NCCL's buffers of the weights' group, fragments
_BLOCK_TOKENS = 128  # of the KV cache; as large as any that vLLM chooses
_STATE_TOKENS = 32  # a block that has to cover a state is a multiple of it


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of a replica."""

    weights: int
    kv_cache: int  # given, or the smallest useful size
    staging: int  # while a version arrives
    allowance: int

    @property
    def engine(self) -> int:
        """Bytes that vLLM counts as its own."""
        return self.weights + self.kv_cache + self.allowance

    @property
    def beside(self) -> int:
        """Bytes that vLLM does not count."""
        return self.staging + STAGING_ALLOWANCE

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.engine + self.beside


def plan_engine(config: Config, shape: ModelShape) -> EngineMemory:
    """Least memory of one GPU of a replica."""
    generation, b = config.generation, ELEMENT_BYTES[config.model.dtype]
    tokens = generation.max_tokens
    return EngineMemory(
        weights=_engine_weights(shape, b, generation.tensor_parallel) + _slot_bytes(config, shape),
        kv_cache=generation.kv_cache_bytes or _cache_bytes(config, shape, tokens),
        staging=staging_bytes(config, shape),
        allowance=ENGINE_ALLOWANCE,
    )


def _engine_weights(shape: ModelShape, element_bytes: int, ranks: int) -> int:
    if (latents := shape.latents) is None:
        return element_bytes * shape.num_parameters // ranks
    on_each = shape.num_layers * shape.hidden * ((latents.query_rank or 0) + latents.token_width)
    again = shape.num_layers * latents.num_heads * (latents.nope_size + latents.value_size) * latents.rank
    return element_bytes * (on_each + (shape.num_parameters - on_each + again) // ranks)


def _slot_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of the adapters in an engine, as if every rank had all of them."""
    if not sends_adapters(config):
        return 0
    per_column = num_adapter_parameters(config, shape) // config.lora.rank
    return ELEMENT_BYTES[config.model.dtype] * per_column * room_for(config.lora.rank)


def least_cache_bytes(config: Config, shape: ModelShape) -> int:
    """The smallest generation.kv_cache_bytes with which vLLM starts: blocks for one sequence, and a spare one."""
    tokens, net = config.generation.max_tokens, shape.delta_net
    if net is None:
        return _cache_bytes(config, shape, (-(-tokens // _BLOCK_TOKENS) + 1) * _BLOCK_TOKENS)
    # All layers share one pool: a state takes a block of equally many layers, of as many tokens as cover it.  On a CPU
    # it is in float32.
    net = replace(net, has_float32_state=net.has_float32_state or config.trainer.device != "cuda")
    b, ranks = ELEMENT_BYTES[config.model.dtype], config.generation.tensor_parallel
    recurrent, attending = len(net.layers), max(1, shape.num_layers - len(net.layers))
    of_token, of_state = shape.token_bytes(b, ranks) // attending, net.state_bytes(b) // ranks
    block = of_token * _STATE_TOKENS * -(-of_state // (of_token * _STATE_TOKENS))
    few, many = sorted((recurrent, attending))
    layers = many if many < 1.5 * few else few
    blocks = -(-attending // layers) * -(-of_token * tokens // block) + -(-recurrent // layers) * _num_states(config)
    return layers * block * (blocks + 1)


def _num_states(config: Config) -> int:
    """States of a request in each layer: vLLM keeps the one before, where prompts may share their beginnings."""
    return 2 if config.generation.prefix_caching else 1


def _cache_bytes(config: Config, shape: ModelShape, num_tokens: int) -> int:
    b, ranks = ELEMENT_BYTES[config.model.dtype], config.generation.tensor_parallel
    return shape.token_bytes(b, ranks) * num_tokens + shape.request_bytes(b, ranks) * _num_states(config)


def staging_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes that an update stages on each GPU of an engine, at its fullest moment."""
    buckets = bucket_sizes(config, shape)
    module = 0 if sends_adapters(config) else ELEMENT_BYTES[config.model.dtype] * shape.largest_module
    shadow = max(buckets[0::2], default=0) + max(buckets[1::2], default=0)
    three = max((sum(buckets[start : start + 3]) for start in range(len(buckets))), default=0)
    paused = three + module + module // config.generation.tensor_parallel
    return {"shadow": shadow, "paused": paused, "auto": max(shadow, paused)}[config.weights.staging]


def indivisible(shape: ModelShape, ranks: int) -> str:
    """Key of config.json whose size tensor_parallel does not divide; "" if all divide.

    Heads and the width of MLPs are split; with more ranks than key heads, key heads are copied to equally many ranks.
    """
    keys, net = shape.num_key_heads, shape.delta_net
    if shape.num_heads % ranks:
        return f"num_attention_heads={shape.num_heads}"
    if net and (net.num_key_heads % ranks or net.num_heads % ranks):
        return f"linear_num_key_heads={net.num_key_heads}"
    if shape.latents is None and keys % ranks and ranks % keys:
        return f"num_key_value_heads={keys}"
    if shape.num_layers > len(shape.expert_layers) and shape.mlp_width % ranks:
        return f"intermediate_size={shape.mlp_width}"
    if shape.expert_layers and shape.expert_width % ranks:
        return f"moe_intermediate_size={shape.expert_width}"
    if shape.shared_width % ranks:
        return f"shared_expert_intermediate_size={shape.shared_width}"
    return ""


def legal_ranks(shape: ModelShape) -> tuple[int, ...]:
    """Every generation.tensor_parallel with which vLLM accepts the model."""
    return tuple(ranks for ranks in range(1, shape.num_heads + 1) if not indivisible(shape, ranks))
