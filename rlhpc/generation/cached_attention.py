"""Attention of one step over transformers' paged cache: each request's queries see the keys of that request alone.

Input: queries of all requests of a step, end to end, and the cache.  Output: what a transformers layer's attention
returns.  Transformers' own function for torch's kernels makes every query see the keys of all requests, and masks most:
with 64 requests 64 times the work, and a mask of [batch tokens, cache tokens].  Here requests of similar length are
padded into one call, and the groups of a key head are queries side by side, so that no key is repeated.

Layers with a sliding window of W tokens attend to the token itself and the W − 1 before it (arXiv:2310.06825, §2).

S requests, T their queries in all, K their keys; H heads, G key heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

CACHED_ATTENTION = "rlhpc_cached"
MIN_FILL = 0.7  # of a bucket of single queries: the fewest keys over the most


@dataclass(slots=True)
class KeyPadding:
    """Requests with equally many queries, whose keys are padded on the right."""

    queries: Tensor  # int64 [n, q] places among the step's queries
    keys: Tensor  # int64 [n, k] places among the step's keys; padding repeats the first
    num_keys: Tensor  # int64 [n] without padding
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, size: int, window: int | None) -> Tensor:
        """True where a query sees a key, bool [n, 1, size · q, k]; size: queries of a key head at one place."""
        if (size, window) not in self._masks:
            (_, num_queries), device = self.queries.shape, self.queries.device
            own = self.num_keys[:, None] - num_queries + torch.arange(num_queries, device=device)  # a query's own key
            behind = own[:, :, None] - torch.arange(self.keys.shape[1], device=device)
            seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
            self._masks[size, window] = seen.repeat(1, size, 1)[:, None]
        return self._masks[size, window]


def buckets_of(num_queries: Sequence[int], num_keys: Sequence[int], device: torch.device) -> list[KeyPadding]:
    """Sort the requests of a step into buckets; num_queries, num_keys: of each request, in the step's order."""
    first_query, first_key = _starts(num_queries), _starts(num_keys)
    order = sorted(range(len(num_queries)), key=lambda index: (num_queries[index], -num_keys[index]))
    members = list[list[int]]()
    for index in order:
        if members and _fits(num_queries, num_keys, members[-1][0], index):
            members[-1].append(index)
        else:
            members.append([index])
    return [
        KeyPadding(
            _places([first_query[each] for each in own], num_queries[own[0]], device),
            _padded([(first_key[each], num_keys[each]) for each in own], num_keys[own[0]], device),
            torch.tensor([num_keys[each] for each in own], device=device),
        )
        for own in members
    ]


def _fits(num_queries: Sequence[int], num_keys: Sequence[int], first: int, index: int) -> bool:
    """Return whether a request may be padded to the length of a bucket's first one."""
    if num_queries[first] != num_queries[index]:
        return False
    least = MIN_FILL * num_keys[first] if num_queries[first] == 1 else num_keys[first]
    return num_keys[index] >= least


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _places(starts: Sequence[int], length: int, device: torch.device) -> Tensor:
    return (torch.tensor(starts)[:, None] + torch.arange(length)).to(device)


def _padded(runs: Sequence[tuple[int, int]], length: int, device: torch.device) -> Tensor:
    starts = torch.tensor([start for start, _ in runs])[:, None]
    ends = torch.tensor([start + own for start, own in runs])[:, None]
    places = starts + torch.arange(length)
    return torch.where(places < ends, places, starts).to(device)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The buckets of a step, by kind of layer as the cache calls it; one row without a paged cache has none."""

    buckets: Mapping[str, list[KeyPadding]]
    places: Mapping[int, int]  # of the model's layers with attention in the cache

    def of_layer(
        self, module: Any, cache: Any, num_queries: int, num_keys: int, device: torch.device
    ) -> list[KeyPadding]:
        """The buckets for a layer."""
        if cache is None:
            return buckets_of([num_queries], [num_keys], device)
        return self.buckets[cache.layer_to_allocator[self.places[module.layer_idx]].layer_type]


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: StepPlan,
    cache: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that layers call: query [1, H, T, D], key and value [1, G, T, D] → [1, T, H, D].

    `step` has no default, so that a call that lost it fails.  cache: transformers' paged cache; None: key and value are
    those of the whole row, [1, G, K, D].  softcap: of the scores; s_aux: sinks [H].
    """
    value_size = value.shape[-1]
    if cache is not None:
        key, value = _cached(cache, key, value, step.places, module, options)
    (_, heads, num_queries, _), device = query.shape, query.device
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, H, D], [K, G, D]
    output = query.new_empty(num_queries, heads, value_size)
    for bucket in step.of_layer(module, cache, num_queries, key.shape[2], device):
        output[bucket.queries] = _attend(rows, bucket, scaling, sliding_window, softcap, s_aux)
    return output[None], None


def _cached(
    cache: Any, key: Tensor, value: Tensor, places: Mapping[int, int], module: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Add keys and values to the cache; return all of the step's requests.

    The heads of a cache are of one size: those of keys, or of values where they are larger (latent attention).
    """
    sizes = key.shape[-1], value.shape[-1]
    padded = (functional.pad(each, (0, max(sizes) - each.shape[-1])) for each in (key, value))
    found = cache.update(*padded, layer_idx=places[module.layer_idx], kwargs=options)
    return found[0][..., : sizes[0]], found[1][..., : sizes[1]]


def _attend(
    rows: Sequence[Tensor],
    bucket: KeyPadding,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, q, H, D] of one bucket."""
    (number, length), (_, heads, size), key_heads = bucket.queries.shape, rows[0].shape, rows[1].shape[1]
    group = heads // key_heads
    # The queries of a key head, one of its heads after the other: [n, G, H / G · q, D].
    query = rows[0][bucket.queries].view(number, length, key_heads, group, size).permute(0, 2, 3, 1, 4)
    query = query.reshape(number, key_heads, group * length, size)
    key, value = (each[bucket.keys].transpose(1, 2) for each in rows[1:])
    mask = bucket.mask(group, window)
    if softcap is None and sinks is None:
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    else:
        found = _scored(query, key, value, mask, scaling, softcap, sinks)
    found = found.view(number, key_heads, group, length, -1).permute(0, 3, 1, 2, 4)
    return found.reshape(number, length, heads, -1)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention whose scores are capped or have a sink, in float32; shapes as in _attend."""
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:  # [H] → one for every query of a key head
        own = sinks.float().view(key.shape[1], -1, 1).expand(-1, -1, query.shape[2] * key.shape[1] // len(sinks))
        scores = torch.cat([scores, own.reshape(1, key.shape[1], -1, 1).expand(len(query), -1, -1, 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.float()).to(query.dtype)


AttentionInterface.register(CACHED_ATTENTION, cached_attention)
