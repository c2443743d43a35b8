"""Routing replay: a mixture's routers take the experts that the engine chose, with weights of their own.

Input: the routes of a packed row.  Output: the same forward pass, but for the choice of experts.  The weights of the
chosen experts are computed from this model's logits, with their gradient, as R3 does it (Ma et al. 2025,
arXiv:2510.11370, §4).  A token without routes (the last one of each segment, padding, rollouts that have lost theirs)
is routed by this model.

Which passes replay, the caller decides by the rows: those of the policy do, with gradient or without; those of a
reference have no routes (backends.py), because its probabilities must not depend on another model's router.
Layers that are computed again in backward replay the same, since a row's routes stay set until the next row's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlhpc.models.routes import UNKNOWN, MixtureForm
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.logprob import on_device

# -------------------------------------------------------------------------------------------------------- row's routes


def row_experts(microbatch: PackedMicrobatch, form: MixtureForm, num_tokens: int = 0) -> NDArray[np.int16] | None:
    """Experts of a row's tokens, int16 [T, layers, k], UNKNOWN where its samples have none; None: no sample has any.

    num_tokens: T, if padding follows the row's own.  Raises RoleFailed for routes of another model.
    """
    if not any(each is not None for each in microbatch.routes):
        return None
    shape = max(num_tokens, len(microbatch.token_ids)), len(form.layers), form.top_k
    found = np.full(shape, UNKNOWN, np.int16)
    borders = microbatch.cu_seqlens.tolist()
    for place, routes in enumerate(microbatch.routes):
        if routes is None:
            continue
        start, end = borders[place : place + 2]
        try:
            experts = form.unpack(routes)
        except ValueError as error:
            raise RoleFailed(f"the routes of a sample do not fit the trainer's model: {error}") from error
        if len(experts) > end - start:
            raise RoleFailed(f"a sample of {end - start} tokens has routes of {len(experts)}")
        found[start : start + len(experts)] = experts
    return found


def without_routes(microbatches: Sequence[PackedMicrobatch]) -> list[PackedMicrobatch]:
    """The rows for a reference, whose own routers choose."""
    return [replace(row, routes=()) if row.routes else row for row in microbatches]


def choice(own: Tensor, given: Tensor) -> Tensor:
    """Experts of each token, int64 [..., k]: the given ones, the router's own where they are UNKNOWN.

    own: int64 [..., k]; given: int16, of the same tokens.
    """
    given = given.view(own.shape)
    return torch.where(given == UNKNOWN, own, given.long())


# ------------------------------------------------------------------------------------------------ hugging face models
#
# The routers of transformers differ in what they make of logits (softmax before or after the choice, sigmoid, a bias,
# groups), and agree in how they choose: the last torch.topk over all experts.  That call is answered here.


class HfReplay:
    """The routes of the row that a transformers model computes."""

    def __init__(self, module: nn.Module, form: MixtureForm) -> None:
        """Attach to the mixtures of a model, in its order.  Raises ConfigError if they are not those of its config."""
        self.form = form
        self._row: tuple[Tensor, ...] | None = None  # int16 [T, k] of each layer
        self._num_choices = [0] * len(form.layers)  # that were answered in the trial, of each layer
        mixtures = [part for part in module.modules() if isinstance(getattr(part, "experts", None), nn.Module)]
        if len(mixtures) != len(form.layers):
            raise ConfigError(
                f"algorithm.routing_replay=true: {type(module).__name__} has {len(mixtures)} mixtures of experts, its "
                f"config.json names {len(form.layers)}; legal: algorithm.routing_replay=false"
            )
        for place, mixture in enumerate(mixtures):
            mixture.forward = self._replaying(place, mixture.forward)

    def begin_row(self, microbatch: PackedMicrobatch, device: torch.device) -> None:
        """Set the routes for the forward passes to come, and for what is computed again in their backward passes."""
        experts = row_experts(microbatch, self.form)
        self._row = None if experts is None else on_device(experts.transpose(1, 0, 2), device).unbind(0)

    def answer(self, place: int, scores: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """(values, ids) [..., k] of the choice of a layer's router among scores [..., E]."""
        assert self._row is not None
        self._num_choices[place] += 1
        chosen = choice(own, self._row[place])
        return scores.gather(-1, chosen), chosen

    def refuse_deaf(self, run: Callable[[], object], num_tokens: int, device: torch.device, path: object) -> None:
        """Raise ConfigError unless each router asks once for its experts in run(), a forward pass of num_tokens."""
        own = torch.full((num_tokens, self.form.top_k), UNKNOWN, dtype=torch.int16, device=device)
        self._row, self._num_choices = (own,) * len(self.form.layers), [0] * len(self.form.layers)
        with torch.no_grad():
            run()
        self._row = None
        if odd := [layer for layer, n in zip(self.form.layers, self._num_choices, strict=True) if n != 1]:
            raise ConfigError(
                f"algorithm.routing_replay=true: model.path={path}: the router of layer {odd[0]} does not choose "
                f"{self.form.top_k} of {self.form.num_experts} experts by one torch.topk; legal: "
                "algorithm.routing_replay=false"
            )

    def _replaying(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replaying(*args: Any, **kwargs: Any) -> Any:
            if self._row is None:
                return forward(*args, **kwargs)
            with _AnsweredChoice(self, place):
                return forward(*args, **kwargs)

        return replaying


class _AnsweredChoice(TorchFunctionMode):
    """Answers the router's torch.topk over all experts."""

    def __init__(self, replay: HfReplay, place: int) -> None:
        super().__init__()
        self._replay, self._place = replay, place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        form, own = self._replay.form, result[1]
        if scores.dim() != 2 or own.shape[-1] != form.top_k or scores.shape[-1] != form.num_experts:
            return result  # of groups of experts, or within them
        return torch.return_types.topk(self._replay.answer(self._place, scores, own))


# ------------------------------------------------------------------------------------------------------ stage's layers
#
# Several rows are under way at a time in a pipeline, and their layers are computed again in any order: each row carries
# its routes to the layers, so that nothing is to be set or reset.


@dataclass(frozen=True, slots=True)
class StageReplay:
    """The mixtures that one rank computes."""

    form: MixtureForm  # of the whole model
    layers: tuple[int, ...]  # on this rank

    def of_row(
        self, microbatch: PackedMicrobatch, num_tokens: int, tokens: NDArray[np.int64], device: torch.device
    ) -> dict[int, Tensor]:
        """Experts int16 [L, k] of each layer of this rank; {}: no sample has routes.

        num_tokens: of the padded row; tokens: [L] those of it that the rank computes.
        """
        experts = row_experts(microbatch, self.form, num_tokens)
        if experts is None:
            return {}
        places = [self.form.layers.index(layer) for layer in self.layers]
        own = on_device(experts[tokens][:, places].transpose(1, 0, 2), device)
        return dict(zip(self.layers, own.unbind(0), strict=True))
