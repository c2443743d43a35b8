"""Gated DeltaNet layers on the segments of a packed row: Qwen3-Next, Qwen3.5, Qwen3.6 (Yang et al., arXiv:2412.06464).

Input: a transformers model and, in each call, the row's SegmentPlan.  Output: the model's layers, which begin their
causal convolution and their recurrent state anew at each segment; transformers itself lets both run across borders.
Layers that are called without a plan compute as transformers does.

The state S [Dk, Dv] of a head after token t, and its output; α = exp(g) decays, β is the learning rate:

    S_t = α_t · S_(t−1) + β_t · k_t (v_t − α_t · S_(t−1)ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √Dk

Computed in chunks (arXiv:2406.06484, §3): within a chunk by products of matrices and one triangular system, from chunk
to chunk by the state.  Segments are padded to whole chunks only, and step i of the scan takes chunk i of every segment
that has one, so that its steps are those of the longest segment.  On CUDA in half precision the kernels of
flash-linear-attention do it, if they are installed.

Legend: T tokens of a row, C tokens of a chunk, N chunks, A heads of values, Dk and Dv sizes of a key and of a value.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from rlhpc.models.layer_forms import is_delta_net
from rlhpc.training.logprob import on_device
from rlhpc.training.packed_attention import Padding, SegmentPlan, pad, unpad

log = logging.getLogger("rlhpc.training")

CHUNK_TOKENS = 64  # as in flash-linear-attention
SHORTEST_CHUNK = 16
EPSILON = 1e-6  # of the norm of queries and keys, as in every implementation
_FUNCTIONS = frozenset({"causal_conv1d_fn", "torch_chunk_gated_delta_rule"})  # of transformers, which wraps them


# --------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class ConvolutionPlan:
    """The places of a row's tokens between zeros, by which a convolution sees no other segment."""

    places: Tensor  # int64 [T], on the device
    length: int

    @classmethod
    def of(cls, segments: SegmentPlan, width: int) -> ConvolutionPlan:
        """Plan `width` − 1 zeros between segments; a convolution of this width sees so many tokens back."""
        lengths = np.diff(segments.borders)
        number = np.repeat(np.arange(len(lengths)), lengths)
        places = np.arange(len(number)) + (width - 1) * number
        return cls(on_device(places, segments.cu_seqlens.device), int(places[-1]) + 1)


@dataclass(frozen=True)
class DeltaPlan(Padding):
    """The chunks of a row's segments, ordered by their number in the segment, then by the segment's length."""

    chunk_tokens: int
    steps: tuple[int, ...]  # chunks in each step of the scan; never more than in the step before

    @classmethod
    def of(cls, segments: SegmentPlan) -> DeltaPlan:
        """Plan chunks of CHUNK_TOKENS, or shorter ones where all segments are short."""
        starts, ends = segments.borders[:-1].astype(np.int64), segments.borders[1:].astype(np.int64)
        size = min(CHUNK_TOKENS, max(SHORTEST_CHUNK, 1 << (segments.max_tokens - 1).bit_length()))
        counts = -(-(ends - starts) // size)
        order = np.argsort(-counts, kind="stable")
        steps = tuple(int((counts > step).sum()) for step in range(int(counts.max())))
        gathers: list[NDArray[np.int64]] = []
        scatter = np.empty(int(ends[-1]), dtype=np.int64)
        for step, count in enumerate(steps):
            chosen = order[:count, None]
            rows = starts[chosen] + step * size + np.arange(size)
            is_token = rows < ends[chosen]
            scatter[rows[is_token]] = size * sum(steps[:step]) + np.flatnonzero(is_token)
            gathers.append(np.where(is_token, rows, starts[chosen]).ravel())
        return cls(segments.cu_seqlens.device, np.concatenate(gathers), scatter, size, steps)

    @cached_property
    def num_chunks(self) -> int:
        """N."""
        return sum(self.steps)


# -------------------------------------------------------------------------------------------------------------- layers


def pack_delta_nets(module: nn.Module) -> None:
    """Let the Gated DeltaNet layers of a transformers model compute packed rows."""
    for layer in module.modules():
        if is_delta_net(layer):
            layer.forward = partial(_forward, layer, layer.forward)


@contextmanager
def by_transformers_alone(module: nn.Module) -> Iterator[None]:
    """A block in which a model's layers, called without a plan, compute on a CPU, too.

    Where flash-linear-attention is installed, transformers takes its kernels for every device.
    """
    files = {sys.modules[type(layer).__module__] for layer in module.modules() if is_delta_net(layer)}
    with ExitStack() as undo:
        for file in files:
            for name in _FUNCTIONS.intersection(vars(file)):
                function = getattr(file, name)
                undo.callback(setattr, file, name, function)
                setattr(file, name, inspect.unwrap(function))
        yield


def _forward(
    layer: Any, plain: Callable[..., Tensor], hidden_states: Tensor, *args: Any, segments: SegmentPlan | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Hidden states [1, T, H] → [1, T, H]; with a plan, caches and masks are not looked at."""
    if segments is None:
        return plain(hidden_states, *args, **options)
    mixed, gate, beta, decay = _projected(layer, hidden_states)
    mixed = packed_convolution(layer.conv1d, mixed, ACT2FN[layer.activation], segments)
    keys, values = layer.head_k_dim * layer.num_k_heads, layer.head_v_dim * layer.num_v_heads
    query, key, value = torch.split(mixed, [keys, keys, values], dim=1)
    query, key = (tensor.view(len(mixed), -1, layer.head_k_dim) for tensor in (query, key))
    value = value.view(len(mixed), -1, layer.head_v_dim)
    repeats = layer.num_v_heads // layer.num_k_heads
    if repeats > 1:
        query, key = (tensor.repeat_interleave(repeats, dim=1) for tensor in (query, key))
    log_decay = -layer.A_log.float().exp() * functional.softplus(decay.float() + layer.dt_bias)
    output = packed_delta_rule(query, key, value, log_decay, beta.sigmoid(), segments)
    normed = layer.norm(output.flatten(0, 1), gate.reshape(-1, layer.head_v_dim))
    result: Tensor = layer.out_proj(normed.view(1, len(output), -1))
    return result


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project to the input of the convolution [T, channels], the gate [T, A·Dv], and unbounded β and decay [T, A]."""
    if hasattr(layer, "in_proj_qkvz"):
        parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states))
        query, key, value, gate, beta, decay = (part.flatten(2)[0] for part in parts)
        return torch.cat((query, key, value), dim=1), gate, beta, decay
    projections = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    mixed, gate, beta, decay = (projection(hidden_states)[0] for projection in projections)
    return mixed, gate, beta, decay


def packed_convolution(
    convolution: Any, row: Tensor, activation: Callable[[Tensor], Tensor], segments: SegmentPlan
) -> Tensor:
    """A causal convolution of each channel within each segment; row [T, channels] → the same.

    convolution: an nn.Conv1d that pads by its width − 1; called as a module, for whoever shards its weight.
    """
    width = convolution.kernel_size[0]
    plan = segments.derived(ConvolutionPlan.of, width)
    spread = row.new_zeros(plan.length, row.shape[1]).index_copy(0, plan.places, row)
    convolved: Tensor = convolution(spread.t()[None])[0].t()
    return activation(convolved.index_select(0, plan.places))


# ---------------------------------------------------------------------------------------------------------- delta rule


def packed_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, segments: SegmentPlan
) -> Tensor:
    """The gated delta rule within each segment; see the head of this file.

    query, key [T, A, Dk], not yet of length 1; value [T, A, Dv]; log_decay (≤ 0, float32) and beta [T, A].
    Returns [T, A, Dv] in the dtype of value.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and (kernel := flash_delta_rule()) is not None:
        row = [tensor[None] for tensor in (query, key, value, log_decay, beta)]
        borders = segments.cu_seqlens.long()
        output: Tensor = kernel(*row, use_qk_l2norm_in_kernel=True, cu_seqlens=borders)[0]
        return output[0]
    plan = segments.derived(DeltaPlan.of)
    query, key = (tensor.float() for tensor in (query, key))
    query, key = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPSILON) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    chunks = _Chunks(
        *(_chunked(each.float(), plan) for each in (query, key, value, log_decay[..., None], beta[..., None]))
    )
    return unpad(_scan(chunks, plan.steps).transpose(1, 2).flatten(0, 1), plan).to(value.dtype)


class _Chunks(NamedTuple):
    """Chunks in the order of a DeltaPlan; queries are scaled."""

    query: Tensor  # [N, A, C, Dk]
    key: Tensor  # [N, A, C, Dk]
    value: Tensor  # [N, A, C, Dv]
    log_decay: Tensor  # [N, A, C, 1]
    beta: Tensor  # [N, A, C, 1]


def _chunked(row: Tensor, plan: DeltaPlan) -> Tensor:
    """[T, A, D] → [N, A, C, D]."""
    return pad(row, plan).view(plan.num_chunks, plan.chunk_tokens, *row.shape[1:]).transpose(1, 2)


def _scan(chunks: _Chunks, steps: tuple[int, ...]) -> Tensor:
    """[N, A, C, Dv], the outputs of these chunks."""
    query, key, value, log_decay, beta = chunks
    size = query.shape[2]
    decay = log_decay.cumsum(2)  # log, from the chunk's beginning to a token
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    between = (decay - decay.mT).masked_fill(later, -torch.inf).exp()  # from the column's token to the row's
    weighted = key * beta
    # unitriangular: the diagonal, and what lies above it, is not read
    system = (weighted @ key.mT) * between
    right = torch.cat([value * beta, weighted * decay.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    attention = (query @ key.mT) * between
    total = decay[:, :, -1:]
    query, key, total = query * decay.exp(), key * (total - decay).exp(), total.exp()
    state = value.new_zeros(steps[0], *key.shape[1:2], key.shape[-1], value.shape[-1])
    outputs = []
    of_steps = (torch.split(each, list(steps)) for each in (query, key, attention, written, read, total))
    for q, k, within, new, old, whole in zip(*of_steps, strict=True):
        state = state[: len(q)]
        change = new - old @ state
        outputs.append(q @ state + within @ change)
        state = state * whole + k.mT @ change
    return torch.cat(outputs)


@cache
def flash_delta_rule() -> Callable[..., Any] | None:
    """flash-linear-attention's kernel; None, and a warning, if it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # an extra; compiles kernels
    except ImportError as error:
        log.warning("Gated DeltaNet layers are computed by plain PyTorch, several times slower: %s", error)
        return None
    kernel: Callable[..., Any] = chunk_gated_delta_rule
    return kernel
