"""States of Gated DeltaNet layers from step to step, one of each running request, in place of keys and values.

Input: the requests of a step.  Output: what a layer computes for them, each from its own state.  Transformers has no
paged cache for such layers.  Its own layer is called here, once for all requests that decode and once for each other
number of queries, with the states of those requests as its cache: nothing of the layer's arithmetic is written again.

A request that begins at its first token begins with a state of zeros, whatever it was before: thrown out of a full
cache, told to recompute, handed over with a prefix.  A state holds no place that another request could share, so that
prompts which were seen before are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from rlhpc.models.layer_forms import is_delta_net


@dataclass(frozen=True, slots=True)
class _Equals:
    """Requests of a step with equally many queries."""

    queries: Tensor  # int64 [n, q] places among the step's queries
    slots: Tensor  # int64 [n]


@dataclass(slots=True)
class _Stored:
    """The states of one layer, by slot."""

    convolution: Tensor  # [slots, channels, width] the last inputs of each channel
    recurrent: Tensor  # float32 [slots, heads, key size, value size]

    def grow(self) -> None:
        """Double the number of slots."""
        self.convolution, self.recurrent = (
            torch.cat([each, torch.zeros_like(each)]) for each in (self.convolution, self.recurrent)
        )


class RecurrentStates:
    """The states of all requests that run."""

    def __init__(self, module: nn.Module, num_requests: int) -> None:
        """Have the module's Gated DeltaNet layers take their states from here, unless they are called without a cache.

        num_requests: for which there is room at once; there will be room for more if they come.
        """
        self._layers = dict[int, _Stored]()
        self._slots = dict[str, int]()
        self._free = list(range(num_requests))
        self._equals = list[_Equals]()
        for layer in _delta_nets(module):
            convolution, recurrent = (torch.zeros(num_requests, *shape) for shape in _shapes(layer))
            weight = layer.out_proj.weight
            self._layers[layer.layer_idx] = _Stored(convolution.to(weight), recurrent.to(weight.device))
            layer.forward = partial(self._forward, layer.layer_idx, layer.forward)

    @staticmethod
    def bytes_of_request(module: nn.Module) -> int:
        """Size of a request's states; 0: the module has no such layer."""
        return sum(
            torch.Size(convolution).numel() * layer.out_proj.weight.itemsize + torch.Size(recurrent).numel() * 4
            for layer in _delta_nets(module)
            for convolution, recurrent in [_shapes(layer)]
        )

    def begin_step(
        self, running: Collection[str], requests: Sequence[str], num_queries: Sequence[int], is_first: Sequence[bool]
    ) -> None:
        """Plan the step of these requests, in the order of their queries.

        running: all that go on from their state, these included; others' slots are free.  is_first: whether a request
        begins at its first token.
        """
        for request_id in self._slots.keys() - set(running):
            self._free.append(self._slots.pop(request_id))
        for request_id in requests:
            if request_id not in self._slots:
                self._slots[request_id] = self._free_slot()
        slots = [self._slots[request_id] for request_id in requests]
        begun = [slot for slot, begins in zip(slots, is_first, strict=True) if begins]
        for stored in self._layers.values() if begun else ():
            stored.convolution[begun], stored.recurrent[begun] = 0, 0
        self._equals = self._by_length(slots, num_queries)

    def _free_slot(self) -> int:
        if not self._free:
            number = len(self._slots)
            for stored in self._layers.values():
                stored.grow()
            self._free.extend(range(number, 2 * number))
        return self._free.pop()

    def _by_length(self, slots: Sequence[int], num_queries: Sequence[int]) -> list[_Equals]:
        device = next(iter(self._layers.values())).recurrent.device
        starts, members = 0, dict[int, list[tuple[int, int]]]()  # (first query, slot) of each request, by its queries
        for slot, number in zip(slots, num_queries, strict=True):
            members.setdefault(number, []).append((starts, slot))
            starts += number
        return [
            _Equals(
                (torch.tensor([first for first, _ in own])[:, None] + torch.arange(number)).to(device),
                torch.tensor([slot for _, slot in own], device=device),
            )
            for number, own in members.items()
        ]

    def _forward(
        self, index: int, plain: Callable[..., Tensor], hidden_states: Tensor, *, cache_params: Any = None,
        cache: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Hidden states [1, T, H] → [1, T, H].  cache: the paged one, of a step; None: a row, perhaps with its own."""
        if cache is None:
            return plain(hidden_states, cache_params=cache_params)
        stored, output = self._layers[index], torch.empty_like(hidden_states)
        for equals in self._equals:
            state = LinearAttentionLayer()
            state.conv_states[0], state.recurrent_states[0] = (
                each[equals.slots] for each in (stored.convolution, stored.recurrent)
            )
            state.conv_kernel_size[0] = stored.convolution.shape[-1]
            for told in (
                state.is_conv_states_initialized, state.is_recurrent_states_initialized, state.has_previous_state,
            ):  # fmt: skip
                told[0] = True
            of_layers = Cache(layers=[state] * (index + 1))  # the layer asks for its own number
            output[0, equals.queries] = plain(hidden_states[0, equals.queries], cache_params=of_layers)
            stored.convolution[equals.slots], stored.recurrent[equals.slots] = (
                state.conv_states[0], state.recurrent_states[0],
            )  # fmt: skip
        return output


def _delta_nets(module: nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if is_delta_net(layer)]


def _shapes(layer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of one request's two states."""
    convolution = layer.conv1d.in_channels, layer.conv1d.kernel_size[0]
    return convolution, (layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
