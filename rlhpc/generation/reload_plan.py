"""Where each tensor of a version goes in vLLM's running model, so that later versions are loaded by copies alone.

vLLM's layerwise reload costs 0.3 to 0.9 ms of Python for each tensor, whatever its size, while nobody samples, and two
copies of each.  In a model that only moves its tensors (unquantised, no experts, no layer that computes something from
its weights) the places are always the same.  They are found by letting the model's own loaders work on tensors without
memory, and looking at every operation on them (reload_trace.py); whatever is no plain data movement means no plan.

Input: a vLLM model that holds a version, and that version.  Output: a ReloadPlan, or NoPlan with the reason.
Guarantee: finding a plan changes nothing of the model, also when it fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.platforms import current_platform

from rlhpc.generation.reload_trace import Copied, LoadTrace, NoPlan, Parameter
from rlhpc.generation.vllm_layers import put_back, unwrap_loaders
from rlhpc.weights.shadow import NamedTensors

Specs = tuple[tuple[str, torch.Size, torch.dtype], ...]
KNOWN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # keep weights as they are; repack them on a CPU
# What loaders raise that ask a tensor without memory for its values, or expect something else of it.
FAILS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
PIECE = 1 << 24  # elements that are compared at once
NUM_PROBES = 4  # rows that a repacked layer is asked for


@dataclass(frozen=True, slots=True)
class _Form:
    """A parameter as loaders fill it, of a layer whose kernel keeps only a repacked one."""

    shape: torch.Size
    dtype: torch.dtype
    has_zeros: bool  # in places that no tensor comes for

    def made(self) -> Tensor:
        make = torch.zeros if self.has_zeros else torch.empty
        return make(self.shape, dtype=self.dtype)


def find_plan(model: Any, model_config: Any, weights: NamedTensors) -> ReloadPlan:
    """Trace a load on tensors without memory.  Raises NoPlan."""
    _refuse_unknown(model)
    held, specs = dict(_parameters(model)), specs_of(weights)
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in specs}
    try:
        initialize_layerwise_reload(model)
        unwrap_loaders(model)
        traced = dict(_parameters(model))
        buffers = [buffer for layer in model.modules() for buffer in layer.buffers(recurse=False)]
        with LoadTrace(traced, buffers, sources) as trace:
            model.load_weights(iter(sources.items()))
        filled = dict(trace.filled())
        forms = dict(_forms(held, traced, filled))
    except FAILS as error:
        raise NoPlan(f"{type(error).__name__}: {error}") from error
    finally:
        put_back(model, model_config)
    return ReloadPlan(model, model_config.dtype, specs, trace.copies, forms)


def specs_of(weights: NamedTensors) -> Specs:
    """What a version must share with another one to be loaded in the same way."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in weights)


class ReloadPlan:
    """Of one model, for versions with the same tensors in the same order."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        specs: Specs,
        copies: Sequence[Copied],
        forms: Mapping[Parameter, _Form],
    ) -> None:
        """forms: of the parameters that are made anew for each version."""
        self._specs, self._forms, self._dtype = specs, forms, dtype
        self._copies: dict[str, list[Copied]] = {}
        for copied in copies:
            self._copies.setdefault(copied.source, []).append(copied)
        self._num_copies = Counter(copied.to[0] for copied in copies)
        on_cpu = current_platform.is_cpu()
        self._repacked: set[Any] = {layer for layer in self._num_copies if on_cpu and _method_of(layer)}
        self._attention: list[Any] = [module for module in model.modules() if _keeps_parameters(module)]

    def __str__(self) -> str:
        return f"{len(self._specs)} tensors in {self._num_copies.total()} copies, {len(self._repacked)} layers repacked"

    def fits(self, weights: NamedTensors) -> bool:
        """True if this version has the tensors that the plan was made for."""
        return specs_of(weights) == self._specs and all(tensor.is_contiguous() for _, tensor in weights)

    def load(self, weights: NamedTensors) -> None:
        """Copy a version that fits.  On CUDA copies may still be under way on the current stream."""
        left, anew = self._num_copies.copy(), dict[Parameter, Tensor]()
        for name, tensor in weights:
            for _, to, place, part in self._copies.get(name, ()):
                place.from_(self._target(to, anew)).copy_(part.from_(tensor), non_blocking=True)
                left[to[0]] -= 1
                if not left[to[0]] and to[0] in self._repacked:
                    _repack(to[0], anew)
        for attention in self._attention:
            attention.process_weights_after_loading(self._dtype)

    def prove(self, weights: NamedTensors) -> None:
        """Raise NoPlan if the model, which holds this version, is another one after loading it by the plan."""
        for name, tensor in weights:
            for _, to, place, part in self._copies.get(name, ()):
                if to not in self._forms and not _are_equal(place.from_(_held(to)), part.from_(tensor)):
                    raise NoPlan(f"{name} is changed on its way to {to[1]} of {type(to[0]).__name__}")
        before = self._answers()
        self.load(weights)
        for layer, answer in self._answers().items():
            if not torch.equal(answer, before[layer]):
                raise NoPlan(f"a {type(layer).__name__} that is repacked answers otherwise")

    def _target(self, to: Parameter, anew: dict[Parameter, Tensor]) -> Tensor:
        form = self._forms.get(to)
        if form is None:
            return _held(to)
        if to not in anew:
            anew[to] = form.made()
        return anew[to]

    def _answers(self) -> dict[nn.Module, Tensor]:
        """What repacked layers make of the same few rows."""
        made = {}
        for layer in self._repacked:
            form = self._forms.get((layer, "weight"))
            if form is not None and len(form.shape) == 2:
                rows = torch.linspace(-1, 1, NUM_PROBES * form.shape[1]).to(form.dtype).view(NUM_PROBES, -1)
                made[layer] = layer.quant_method.apply(layer, rows, layer._parameters.get("bias"))
        return made


def _refuse_unknown(model: nn.Module) -> None:
    """Raise NoPlan for a layer of which more may have to be done than to copy tensors."""
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise NoPlan(f"not tried on {current_platform.device_name}")
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method) not in KNOWN_METHODS:
            raise NoPlan(f"{type(layer).__name__} with {type(method).__name__}")
        if hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention:
            raise NoPlan(f"{type(layer).__name__} prepares its weights itself")


def _forms(
    held: Mapping[Parameter, Tensor], traced: Mapping[Parameter, Tensor], filled: Mapping[Parameter, bool]
) -> Iterator[tuple[Parameter, _Form]]:
    """Yield parameters that a plan must make anew.  Raises NoPlan where a parameter could keep something old."""
    renewed = {id(held[place]) for place in filled}
    for place, kept in held.items():
        layer, name = place
        if place not in filled:
            if id(kept) not in renewed:  # not tied to one that is filled
                raise NoPlan(f"no tensor comes for {name} of {type(layer).__name__}")
            continue
        fills = traced[place]
        if (kept.shape, kept.stride(), kept.dtype) == (fills.shape, fills.stride(), fills.dtype):
            continue
        if kept.shape == fills.shape and kept.is_contiguous():  # a bias that a kernel keeps in another precision
            continue
        if not (current_platform.is_cpu() and _method_of(layer)) or kept.numel():
            raise NoPlan(f"{name} of {type(layer).__name__} has another form in its kernel")
        yield place, _Form(fills.shape, fills.dtype, filled[place])


def _repack(layer: Any, anew: dict[Parameter, Tensor]) -> None:
    """Let a layer's kernel take over what has been copied; its parameters are those of before afterwards."""
    mine = {name: tensor for (of, name), tensor in anew.items() if of is layer}
    kept = {name: layer._parameters[name] for name in mine}
    for name, tensor in mine.items():
        layer._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        del anew[layer, name]
    try:
        layer.quant_method.process_weights_after_loading(layer)
    finally:
        layer._parameters.update(kept)


def _are_equal(held: Tensor, given: Tensor) -> bool:
    """Compare piece by piece: a GPU may have no room for a whole embedding."""
    if not held.dim():
        return torch.equal(held, given.to(held))
    num_rows = max(1, PIECE // max(1, held[:1].numel()))
    pieces = (slice(first, first + num_rows) for first in range(0, len(held), num_rows))
    return all(torch.equal(held[piece], given[piece].to(held)) for piece in pieces)


def _parameters(model: nn.Module) -> Iterator[tuple[Parameter, Tensor]]:
    for layer in model.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                yield (layer, name), parameter


def _held(place: Parameter) -> Tensor:
    layer, name = place
    parameter = layer._parameters[name]
    assert parameter is not None
    return parameter.data


def _method_of(layer: nn.Module) -> Any:
    return getattr(layer, "quant_method", None)


def _keeps_parameters(module: Any) -> bool:
    """True for attention whose kernel does something after a load: FlashInfer converts sinks."""
    return type(module) is Attention and "process_weights_after_loading" in _own_names(type(module.impl))


def _own_names(kind: type) -> set[str]:
    """Of a kernel's class and those above it, but for vLLM's base."""
    return {name for each in kind.__mro__ if not each.__name__.startswith("AttentionImpl") for name in vars(each)}
