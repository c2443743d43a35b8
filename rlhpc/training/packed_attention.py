"""Causal attention inside each segment of a packed row.

Layers with a sliding window of W tokens attend to the token itself and the W − 1 before it (arXiv:2310.06825, §2).
Scores z may be capped, cap · tanh(z / cap) (Gemma 2, arXiv:2408.00118, §2), or compete with a learned score of each
head to which no value belongs, its sink (gpt-oss, arXiv:2508.10925, §2.4).

Input: the borders of a row's segments.  Output: a SegmentPlan, and each layer's attention with it.
Guarantees: no token attends across a border, and no [T, T] mask is ever made.

On CUDA in half precision one variable-length flash kernel serves the whole row.  Elsewhere segments of similar length
are padded on the right into a dense [B, heads, L, head size] batch: causal attention never looks to the right, so that
padding cannot change a result, and one call serves many segments.  There a window is computed block by block, W queries
and the 2 W − 1 keys that they see.  Capped scores and sinks, for which torch has no kernel, are computed there on any
device, in float32 and block by block, and once more for backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from rlhpc.protocol.errors import ConfigError
from rlhpc.training.logprob import on_device

MIN_FILL = 0.8  # a bucket's shortest segment over its longest: padding costs at most a quarter more tokens
SHORT_TOKENS = 16  # segments up to this length share a bucket regardless of padding
SCORES_AT_ONCE = 1 << 26  # of capped ones or with sinks, 256 MiB
_VARLEN_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)  # it changes between versions of torch
HAS_WINDOWS = "window_size" in _VARLEN_PARAMETERS
Derived = TypeVar("Derived")


@dataclass(frozen=True)
class Padding:
    """Padded places of the tokens of a packed row; padding repeats a token of its own segment."""

    device: torch.device
    _gather: NDArray[np.int64]  # [P] row index of each padded position
    _scatter: NDArray[np.int64]  # [T] padded position of each row index

    # On the device only when the padded path is taken: the flash kernel does not need them.
    @cached_property
    def gather(self) -> Tensor:
        """int64 [P] on the device."""
        return on_device(self._gather, self.device)

    @cached_property
    def scatter(self) -> Tensor:
        """int64 [T] on the device."""
        return on_device(self._scatter, self.device)


@dataclass(frozen=True)
class SegmentPlan(Padding):
    """The place of each segment of a packed row, and how they are padded together.  Made once, used in every layer."""

    cu_seqlens: Tensor  # int32 [S + 1], on the device
    borders: NDArray[np.int32]  # the same, on the host
    max_tokens: int  # of the longest segment
    buckets: tuple[tuple[int, int], ...]  # (segments, padded length) of each dense batch, in order
    _derived: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cu_seqlens: NDArray[np.int32], device: torch.device) -> SegmentPlan:
        """Plan a row with these borders (from 0 to T, each segment at least one token)."""
        lengths = np.diff(cu_seqlens)
        members = _buckets_of(lengths)
        gather, scatter = _padding_of(cu_seqlens, members)
        return cls(
            cu_seqlens=on_device(cu_seqlens.astype(np.int32), device),
            borders=cu_seqlens,
            device=device,
            max_tokens=int(lengths.max()),
            buckets=tuple((len(bucket), int(lengths[bucket[0]])) for bucket in members),
            _gather=gather,
            _scatter=scatter,
        )

    @property
    def is_one_segment(self) -> bool:
        """True where the row needs no padding and no border."""
        return self.buckets[0] == (1, len(self._scatter))

    def derived(self, make: Callable[..., Derived], *args: Any) -> Derived:
        """make(self, *args), made once: what layers of another kind need to know of the row."""
        if (make, args) not in self._derived:
            self._derived[make, args] = make(self, *args)
        result: Derived = self._derived[make, args]
        return result


def _buckets_of(lengths: NDArray[np.integer[Any]]) -> list[list[int]]:
    """Segment indices, longest first, cut where the next is too short to be padded to the bucket's longest."""
    buckets: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        longest = lengths[buckets[-1][0]] if buckets else 0
        if buckets and (longest <= SHORT_TOKENS or lengths[index] >= MIN_FILL * longest):
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets


def _padding_of(
    cu_seqlens: NDArray[np.int32], buckets: Sequence[Sequence[int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (gather [P], scatter [T]) for these buckets."""
    starts, ends = cu_seqlens[:-1].astype(np.int64), cu_seqlens[1:].astype(np.int64)
    gathers: list[NDArray[np.int64]] = []
    scatter = np.empty(int(cu_seqlens[-1]), dtype=np.int64)
    num_padded = 0
    for bucket in buckets:
        padded_length = int(ends[bucket[0]] - starts[bucket[0]])
        rows = starts[list(bucket), None] + np.arange(padded_length)
        is_token = rows < ends[list(bucket), None]
        scatter[rows[is_token]] = num_padded + np.flatnonzero(is_token)
        gathers.append(np.where(is_token, rows, starts[list(bucket), None]).ravel())
        num_padded += rows.size
    return np.concatenate(gathers), scatter


def packed_attention(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: SegmentPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function HF layers call: query [1, heads, T, D], key [1, key heads, T, D], value [1, key heads, T, E] →
    [1, T, heads, E].

    `segments` has no default, so that a call that lost it fails instead of attending across samples.
    `module` is ignored.  So is dropout: log-probabilities must be those of the sampled policy.
    softcap: of the scores; s_aux: sinks [heads].
    """
    window = sliding_window if sliding_window is not None and sliding_window < segments.max_tokens else None
    scores = Scores(scaling, window, softcap, s_aux)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scores.is_plain:
        return _varlen(query, key, value, segments, scores)[None], None
    if segments.is_one_segment:
        return _causal(query, key, value, scores).transpose(1, 2), None
    return _padded(query, key, value, segments, scores)[None], None


@dataclass(frozen=True, slots=True)
class Scores:
    """The form of a layer's scores."""

    scaling: float | None  # of the products; None: 1 / √D
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]

    @property
    def is_plain(self) -> bool:
        """True where torch's kernels compute them."""
        return self.softcap is None and self.sinks is None


def _causal(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """[B, heads, L, E] of dense batches."""
    length, window = query.shape[2], scores.window
    is_windowed = window is not None and window < length
    if scores.is_plain and not is_windowed:
        return grouped_attention(query, key, value, scale=scores.scaling, is_causal=True)
    step = window if window is not None and is_windowed else length
    if not scores.is_plain:
        step = min(step, max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * min(length, 2 * step))))
    blocks = []
    for start in range(0, length, step):
        end, first = min(start + step, length), max(0, start - window + 1) if window is not None else 0
        behind = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        keys = slice(first, end)
        mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        seen = (query[:, :, start:end], key[:, :, keys], value[:, :, keys])
        if scores.is_plain:
            blocks.append(grouped_attention(*seen, scale=scores.scaling, attn_mask=mask))
        else:
            blocks.append(_recomputed(*seen, mask, scores))
    return torch.cat(blocks, dim=2)


def _recomputed(*inputs: Any) -> Tensor:
    """scored_attention, nothing of which is kept for backward."""
    output: Tensor = checkpoint(scored_attention, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def scored_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attention whose scores are capped or have a sink, in float32; scores.window is the mask's matter.

    query [B, heads, L, D], key [B, key heads, M, D], value [B, key heads, M, E], mask bool [L, M] → [B, heads, L, E].
    """
    batch, heads, length, size = query.shape
    key_heads = key.shape[1]
    scaling = size**-0.5 if scores.scaling is None else scores.scaling
    queries = query.float().reshape(batch, key_heads, -1, size)  # those of a key head side by side: nothing is repeated
    found = (queries @ key.float().transpose(2, 3) * scaling).view(batch, heads, length, -1)
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    found = found.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(batch, heads, length, 1)
        found = torch.cat([found, sinks], dim=-1)
    weights = found.softmax(-1)[..., : key.shape[2]].view(batch, key_heads, -1, key.shape[2])
    return (weights @ value.float()).view(batch, heads, length, -1).to(query.dtype)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's attention, query [B, heads, L, D], key and value [B, key heads, M, D]; a key head may have several heads.

    For these groups torch 2.13 has one kernel on CUDA in float32, which keeps all scores, [heads, L, M].
    """
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and query.is_cuda:
        return group_by_group(query, key, value, **options)
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=is_grouped, **options)


def group_by_group(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """grouped_attention without torch's groups: each group is a row of the batch and shares a key head, uncopied."""
    size = query.shape[1] // key.shape[1]  # of a group
    groups = query.reshape(-1, size, *query.shape[2:])
    key, value = (tensor.flatten(0, 1).unsqueeze(1).expand(-1, size, -1, -1) for tensor in (key, value))
    output = functional.scaled_dot_product_attention(groups, key, value, **options)
    return output.reshape(query.shape)


def _padded(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scores: Scores) -> Tensor:
    """[T, heads, E] by one dense call per bucket."""
    sizes = [count * length for count, length in segments.buckets]
    padded = [pad(_by_token(tensor), segments).split_with_sizes(sizes) for tensor in (query, key, value)]
    outputs = []
    for (count, length), *dense in zip(segments.buckets, *padded, strict=True):
        q, k, v = (tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in dense)
        outputs.append(_causal(q, k, v, scores).transpose(1, 2).flatten(0, 1))
    return unpad(torch.cat(outputs), segments)


def pad(tensor: Tensor, segments: Padding) -> Tensor:
    """[T, …] → [P, …]; the gradient of padding is not added to that of the token that it repeats."""
    padded: Tensor = _Pad.apply(tensor, segments)  # type: ignore[no-untyped-call]
    return padded


def unpad(padded: Tensor, segments: Padding) -> Tensor:
    """[P, …] → [T, …]."""
    tensor: Tensor = _Unpad.apply(padded, segments)  # type: ignore[no-untyped-call]
    return tensor


class _Pad(torch.autograd.Function):
    """[T, …] → [P, …].  The gradient of padding is exactly zero, so that backward is a gather too, not a sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, segments: Padding) -> Tensor:
        ctx.segments = segments
        return tensor.index_select(0, segments.gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.segments.scatter), None


class _Unpad(torch.autograd.Function):
    """[P, …] → [T, …]; backward leaves zeros on the padding."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, segments: Padding) -> Tensor:
        ctx.segments = segments
        return padded.index_select(0, segments.scatter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        padded = gradient.new_zeros(len(ctx.segments.gather), *gradient.shape[1:])
        return padded.index_copy_(0, ctx.segments.scatter, gradient), None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scores: Scores) -> Tensor:
    """[T, heads, E] by the flash kernel, which wants values as long as keys (DeepSeek's are shorter)."""
    borders, longest, size = segments.cu_seqlens, segments.max_tokens, value.shape[-1]
    value = functional.pad(value, (0, query.shape[-1] - size))
    rows = (_by_token(query), _by_token(key), _by_token(value))
    return varlen_causal(*rows, (borders, borders), (longest, longest), scores.scaling, scores.window)[..., :size]


def varlen_causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """The flash kernel, [tokens, heads, D] each; borders int32 [S + 1] and longest segment of queries and of keys.

    Where a segment has more keys than queries, its last query attends to all of them.  Causality is a window open to
    the left, `is_causal` in older versions, whose kernel knows no other one.
    """
    options: dict[str, Any] = {"scale": scaling}
    if HAS_WINDOWS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise ConfigError(
            f"model.path: layers with a window of {window} tokens need a newer torch on CUDA, such as 2.13"
        )
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in _VARLEN_PARAMETERS:
            options["enable_gqa"] = True
        else:
            key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    output = varlen_attn(query, key, value, *borders, *longest, **options)
    assert isinstance(output, Tensor)  # a pair only if auxiliary results are requested
    return output


def _by_token(tensor: Tensor) -> Tensor:
    """[1, heads, T, D] → [T, heads, D]."""
    return tensor[0].transpose(0, 1)
