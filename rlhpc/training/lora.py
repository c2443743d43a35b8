"""LoRA adapters on a model of transformers; only their parameters are trained.

Input: a CausalLM, the table [lora], the directory of the base.  Output: the same CausalLM, whose parameters are A and B
of each adapted layer, in float32, and whose weights are frozen in the dtype of the forward pass.
Guarantees: the frozen weights are never written to, also when adapters are merged or switched off; with adapters
switched off, the model is the base, bit for bit.

In this file: a base in four bits; adapters; adapters of experts.

Products with A and B are in the dtype of the activations, as in the engines, and are added to the layer's output in one
operation; the optimiser's owner sums gradients of A and B in float32.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.models.adapter import (
    EXPERTS,
    HEAD_MODULE,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    A,
    B,
    adapter_specs,
    base_digest,
    base_name,
    chosen_layers,
    is_quantised,
    projection_of,
    record_of,
    refuse_merged_tied_head,
    refuse_other_adapter,
    refuse_packed_base,
)
from rlhpc.models.weights import object_in
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import AdapterForm, TensorSpec
from rlhpc.training.backends import HeldParameters, merged
from rlhpc.training.checkpoint_tensors import TensorSource
from rlhpc.training.hf_model import CausalLM, load_trained
from rlhpc.training.layer_functions import expert_linear
from rlhpc.training.logprob import all_ranks_agree
from rlhpc.training.ranks import DTYPES
from rlhpc.weights.four_bits import in_four_bits, unpacked
from rlhpc.weights.hf_names import is_as_on_disk, named_on_disk, on_disk

log = logging.getLogger("rlhpc.training")


# ---------------------------------------------------------------------------------------------------- base in four bits
#
# The frozen matrices of attention and MLP, packed (weights/four_bits.py).  A matrix is unpacked for each product, to
# the same bits every time, and for each merged version that is sent; engines with adapters unpack it at their start.


class QuantisedLinear(nn.Module):
    """A linear layer whose weight is frozen and packed."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        """layer: in the dtype of the forward pass; its weight is packed on the device."""
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        # Not buffers: casting the module would cast the scales.
        self.packed, self.scales = in_four_bits(layer.weight.detach().to(device))

    @property
    def weight(self) -> Tensor:
        """Unpack the weight, [out, in]; writing to the result has no effect."""
        return unpacked(self.packed, self.scales)

    def forward(self, states: Tensor) -> Tensor:
        """Compute as nn.Linear; the unpacked weight is not kept for the backward pass."""
        multiply: Any = _FrozenProduct.apply
        product: Tensor = multiply(states, self)
        return product if self.bias is None else product + self.bias


class _FrozenProduct(torch.autograd.Function):
    """states · Wᵀ, with a gradient for the states alone."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(states, layer.weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.weight, None


def quantise(model: CausalLM, device: torch.device) -> CausalLM:
    """Pack the matrices of attention and MLP, one after the other; afterwards they are not parameters."""
    modules = dict(model.module.named_modules())
    for name, layer in modules.items():
        if isinstance(layer, nn.Linear) and is_quantised(name):
            parent, _, last = name.rpartition(".")
            setattr(modules[parent], last, QuantisedLinear(layer, device))
    left = {id(parameter) for parameter in model.module.parameters()}
    return replace(model, parameters={name: each for name, each in model.parameters.items() if id(each) in left})


# ------------------------------------------------------------------------------------------------------------- adapters


@dataclass(slots=True)
class Switch:
    """Switches the adapters of a model on and off."""

    is_on: bool = True


class _Adapter(nn.Module):
    """A and B of one layer; a module of its own, so that ZeRO-3 gathers them when it is called."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, switch: Switch) -> None:
        """a [rank, in], b [out, rank], float32."""
        super().__init__()
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)
        self._scale, self._switch = scale, switch


class LayerAdapter(_Adapter):
    """Adapter of a layer whose output is computed."""

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """output + scale · B A states; states [..., in], output [..., out]."""
        if not self._switch.is_on:  # checked here: ZeRO-3 requires the same order of module calls every time
            return output
        low = functional.linear(states, self.lora_a.to(states.dtype))
        b = self.lora_b.to(low.dtype)
        flat, low = output.flatten(end_dim=-2), low.flatten(end_dim=-2)
        return torch.addmm(flat, low, b.t(), alpha=self._scale).view_as(output)  # rounded once, in one pass


class HeadAdapter(_Adapter):
    """Adapter of a head whose logits are never materialised (chunked_logprobs): there is no output to add to."""

    def forward(self, hidden: Tensor, head_weight: Tensor) -> tuple[Tensor, Tensor]:
        """[h, scale · A h] and [W, B], whose product is the adapted logits; hidden [N, H], head_weight [V, H]."""
        if not self._switch.is_on:
            return hidden, head_weight
        low = functional.linear(hidden, self.lora_a.to(hidden.dtype)) * self._scale
        return torch.cat([hidden, low], dim=1), torch.cat([head_weight, self.lora_b.to(head_weight.dtype)], dim=1)


class AdaptedHead(nn.Module):
    """The function of a head, with its adapter."""

    def __init__(self, function: Callable[..., Any], adapter: HeadAdapter) -> None:
        super().__init__()
        self._function, self.adapter = function, adapter

    def forward(self, hidden: Tensor, head_weight: Tensor, *rest: Any, **options: Any) -> Any:
        """Call the function with the factors that the adapter has widened."""
        return self._function(*self.adapter(hidden, head_weight), *rest, **options)


def _apply_adapter(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook: add the adapter's product with the layer's input to the layer's output."""
    result: Tensor = layer.adapter(inputs[0], output)
    return result


@dataclass(frozen=True)
class Lora:
    """The adapters of one model, and its frozen weights."""

    settings: LoraConfig
    is_merged: bool  # whether versions are whole weights, with the adapters added
    digest: str  # of the base
    layers: dict[str, tuple[int, int]]  # adapted module → (out, in), in the model's order
    parameters: dict[str, nn.Parameter]  # A and B alternating, by their names
    specs: tuple[TensorSpec, ...]  # of `parameters`
    base_specs: tuple[TensorSpec, ...]  # of all frozen weights, in the model's order
    base: dict[str, nn.Parameter]  # frozen weights that are not quantised, by HF name
    quantised: dict[str, QuantisedLinear] = field(default_factory=dict)  # by HF name of the weight
    switch: Switch = field(default_factory=Switch)

    @property
    def form(self) -> AdapterForm | None:
        """Adapter fields of a version's manifest; None if whole weights are published."""
        return (
            None
            if self.is_merged
            else AdapterForm(self.settings.rank, self.settings.scale, base_name(self.settings, self.digest))
        )

    @property
    def record(self) -> dict[str, Any]:
        """Adapter settings and base digest for a checkpoint (adapter.record_of)."""
        return record_of(self.settings, self.digest)

    @contextmanager
    def off(self, is_wanted: bool = True) -> Iterator[None]:
        """Switch the adapters off within a `with` block, if is_wanted."""
        was_on, self.switch.is_on = self.switch.is_on, self.switch.is_on and not is_wanted
        try:
            yield
        finally:
            self.switch.is_on = was_on

    @property
    def published(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes of a version."""
        return tuple(each for spec in (self.base_specs if self.is_merged else self.specs) for each in on_disk(spec))

    def frozen(self, name: str) -> Tensor:
        """A weight of the base; not to be written to."""
        return self.quantised[name].weight if name in self.quantised else self.base[name].detach()

    def whole_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the frozen weights by their names on disk, on a rank that has all of them."""
        for spec in self.base_specs:
            yield from named_on_disk(spec, self.frozen(spec.name))

    @torch.no_grad()
    def version(
        self, adapters: Mapping[str, Tensor] | None = None, base: Iterable[tuple[str, Tensor]] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a version: A and B, or whole weights; not to be written to.

        adapters: A and B, float32; None: `parameters`.  base: the frozen weights, in their order; None: this rank's.
        Both by their names on disk.  With adapters switched off, B is zero and whole weights are the base.
        """
        if adapters is None:
            views = (named_on_disk(spec, self.parameters[spec.name].detach()) for spec in self.specs)
            adapters = dict(pair for each in views for pair in each)
        if not self.is_merged:
            for name, tensor in adapters.items():
                is_zero = name.endswith(B) and not self.switch.is_on
                yield name, torch.zeros_like(tensor) if is_zero else tensor
            return
        for name, weight in self.whole_base() if base is None else base:
            module = name.removesuffix(".weight")
            if module in self.layers and self.switch.is_on:
                yield name, merged(weight, adapters[module + A], adapters[module + B], self.settings.scale)
            else:
                yield name, weight


class AdapterReference(HeldParameters):
    """The reference of adapters: the model without them if every B is zero when it is held, else a copy of A and B."""

    def __init__(
        self,
        lora: Lora,
        live: Callable[[], Sequence[Tensor]],
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """live, around: as for HeldParameters; live: this rank's part of lora.parameters, in their order."""
        super().__init__(live, around)
        self._lora, self._is_base = lora, False

    def hold(self, memory: str) -> None:
        """See HeldParameters; nothing is copied while every B is zero, on all ranks.  Collective."""
        live = self._live()
        is_zero = not any(bool(b.any()) for b in live[1::2])  # A and B alternate
        self._is_base = all_ranks_agree(is_zero, live[0].device)
        if self._is_base:
            self.release()
        else:
            super().hold(memory)

    @contextmanager
    def in_place(self, is_wanted: bool = True) -> Iterator[None]:
        """See HeldParameters."""
        with self._lora.off(is_wanted and self._is_base), super().in_place(is_wanted and not self._is_base):
            yield


def load_policy(config: Config, device: torch.device, *, has_value_head: bool = False) -> tuple[CausalLM, Lora | None]:
    """Load the model of a run, or its critic, in float32; with adapters in model.dtype, and return the adapters, too.

    Raises ConfigError for a model that cannot be trained here, or that does not fit [lora].
    """
    if not config.lora.rank:
        return load_trained(config, device, has_value_head=has_value_head), None
    refuse_packed_base(config, object_in(config.model.path / "config.json"))
    dtype = DTYPES[config.model.dtype]
    model = load_trained(config, torch.device("cpu"), has_value_head=has_value_head, dtype=dtype)
    specs = model.tensor_specs()
    if config.lora.quantization != "off":
        model = quantise(model, device)
    model.module.to(device)
    return with_adapters(model, config, specs)


def with_adapters(model: CausalLM, config: Config, specs: tuple[TensorSpec, ...]) -> tuple[CausalLM, Lora]:
    """Freeze a model and give its layers adapters, in place; model: in the dtype of its forward pass.

    specs: of all its weights, quantised ones included.
    Raises ConfigError naming the key of [lora] that does not fit the model.
    """
    settings = config.lora
    kinds = (nn.Linear, QuantisedLinear)
    modules = {name: each for name, each in model.module.named_modules() if isinstance(each, kinds)}
    layers = chosen_layers(settings, _matrices(model.module))
    refuse_merged_tied_head(config, layers, is_tied=f"{HEAD_MODULE}.weight" not in model.parameters)
    given = initial_tensors(config, layers)
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)
    switch, parameters, head = Switch(), dict[str, nn.Parameter](), model.head
    for name in filter(modules.__contains__, layers):
        a, b = (given[name + each].to(model.head_weight.device) for each in (A, B))
        if modules[name].weight is model.head_weight:
            head = AdaptedHead(model.head, of_head := HeadAdapter(a, b, settings.scale, switch))
            adapter: _Adapter = of_head
        else:
            adapter = modules[name].adapter = LayerAdapter(a, b, settings.scale, switch)
            modules[name].register_forward_hook(_apply_adapter)
        parameters |= {name + A: adapter.lora_a, name + B: adapter.lora_b}
    for projection in dict.fromkeys(filter(None, map(projection_of, layers))):
        if any(spec.name.startswith(projection.rpartition(".")[0]) and is_as_on_disk(spec.name) for spec in specs):
            raise ConfigError(
                f"lora.targets={list(settings.targets)}: the experts of {config.model.path} are one tensor for each "
                "layer, to which their adapters are not added; legal: other lora.targets"
            )
        of_experts = _adapt_experts(model.module, projection, settings, given, switch)
        parameters |= {projection + A: of_experts.lora_a, projection + B: of_experts.lora_b}
    lora = Lora(
        settings=settings,
        is_merged=config.weights.form == "merged",
        digest=base_digest(config.model.path),
        layers=layers,
        parameters=parameters,
        specs=tuple(TensorSpec(name, "float32", tuple(each.shape)) for name, each in parameters.items()),
        base_specs=specs,
        base=model.parameters,
        quantised={f"{name}.weight": each for name, each in modules.items() if isinstance(each, QuantisedLinear)},
        switch=switch,
    )
    return replace(model, parameters=parameters, head=head), lora


def _matrices(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The matrices of a model's layers by their names on disk, in its order."""
    found = {}
    for name, each in module.named_modules():
        if isinstance(each, nn.Linear | QuantisedLinear):
            found[name] = (each.out_features, each.in_features)
        elif name.endswith(f".{EXPERTS}") and isinstance(getattr(each, "down_proj", None), nn.Parameter):
            count, hidden, width = each.down_proj.shape
            for expert in range(count):
                found |= {f"{name}.{expert}.{part}_proj": (width, hidden) for part in ("gate", "up")}
                found[f"{name}.{expert}.down_proj"] = (hidden, width)
    return found


def initial_tensors(
    config: Config, layers: Mapping[str, tuple[int, int]], wanted: Container[str] | None = None
) -> dict[str, Tensor]:
    """A and B by their names, float32, read from lora.initial or drawn.  wanted: names to return; None: all.

    Raises ConfigError.
    """
    if config.lora.initial is not None:
        return _read(config.lora, layers)
    return {name: each for name, each in _drawn(config, layers) if wanted is None or name in wanted}


def _drawn(config: Config, layers: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Draw A from a normal distribution of variance 1 / (3 · in), the variance of PEFT's default; B = 0.

    The size of A x then does not depend on the rank, so that learning rates carry over.  The same in every layout.
    """
    draw = torch.Generator().manual_seed(config.run.seed)
    for spec in adapter_specs(layers, config.lora.rank):
        tensor = torch.zeros(spec.shape)
        if spec.name.endswith(A):
            tensor.normal_(std=1 / math.sqrt(3 * spec.shape[1]), generator=draw)
        yield spec.name, tensor


def _read(settings: LoraConfig, layers: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Read A and B of the adapter at lora.initial, by their names."""
    assert settings.initial is not None
    dropout = refuse_other_adapter(settings, layers)
    if dropout:
        log.warning("lora.initial: the dropout of %g that it was trained with is not used", dropout)
    return read_adapter(settings.initial, [spec.name for spec in adapter_specs(layers, settings.rank)])


def read_adapter(directory: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read a PEFT adapter directory: float32 tensors, by their names in a version.  Raises ConfigError."""
    file = directory / PEFT_WEIGHTS
    with TensorSource.of_files({PEFT_PREFIX + name: file for name in names}) as source:
        return {name: source.read(PEFT_PREFIX + name, dtype=torch.float32).clone() for name in names}


# -------------------------------------------------------------------------------------------------- adapters of experts
#
# transformers holds the matrices of a layer's experts in two parameters, and multiplies within one function, which is
# replaced here.  Adapters are two parameters for each projection: A of all experts and B of all experts.
# Legend: T tokens of a row; C of the E experts chosen for each token; S = T · C pairs of token and expert, sorted by
# expert.


class ExpertsAdapter(_Adapter):
    """Adapter of one projection of all experts of a layer: A [E, rank, in], B [E, out, rank]."""

    def forward(self, tokens: Tensor, output: Tensor, ends: Tensor) -> Tensor:
        """output + scale · B A tokens; tokens [S, in], output [S, out], ends: see expert_linear."""
        if not self._switch.is_on:  # see LayerAdapter
            return output
        low = expert_linear(tokens, ends, self.lora_a.to(tokens.dtype))
        return torch.add(output, expert_linear(low, ends, self.lora_b.to(low.dtype)), alpha=self._scale)


def _adapt_experts(
    module: nn.Module, projection: str, settings: LoraConfig, given: Mapping[str, Tensor], switch: Switch
) -> ExpertsAdapter:
    """Add an adapter to a projection of experts; given: A and B by their names on disk."""
    name, _, last = projection.rpartition(".")
    experts: Any = module.get_submodule(name)
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    if {key: getattr(experts, key, None) for key in plain} != plain:
        raise ConfigError(
            f"lora.targets={list(settings.targets)}: {type(experts).__name__} computes experts in another way than "
            "W_down (act(W_gate x) · W_up x); legal: other lora.targets"
        )
    if not hasattr(experts, "adapters"):
        experts.adapters = nn.ModuleDict()
        experts.forward = partial(_experts_with_adapters, experts)
    a, b = (
        torch.stack([given[f"{name}.{expert}.{last}{part}"] for expert in range(len(experts.down_proj))])
        for part in (A, B)
    )
    device = experts.down_proj.device
    adapter = experts.adapters[last] = ExpertsAdapter(a.to(device), b.to(device), settings.scale, switch)
    return adapter


def _experts_with_adapters(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute [T, H] as transformers' grouped experts.  hidden_states [T, H]; indices and weights [T, C]."""
    count = top_k_index.shape[1]
    chosen, order = top_k_index.flatten().sort()
    numbers = torch.arange(len(experts.down_proj), device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)

    def adapted(name: str, tokens: Tensor, output: Tensor) -> Tensor:
        result: Tensor = experts.adapters[name](tokens, output, ends) if name in experts.adapters else output
        return result

    tokens = hidden_states[order // count]
    gate, up = expert_linear(tokens, ends, experts.gate_up_proj).chunk(2, -1)
    both = torch.cat([adapted("gate_proj", tokens, gate), adapted("up_proj", tokens, up)], -1)
    inner = experts._apply_gate(both)
    outer = adapted("down_proj", inner, expert_linear(inner, ends, experts.down_proj))
    weighted = outer * top_k_weights.flatten()[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return weighted[place].view(len(hidden_states), count, -1).sum(1).to(hidden_states.dtype)
