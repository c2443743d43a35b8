"""LoRA adapters beside Megatron's parallel layers, sharded as the layers are.

Input: chunks of layers, and the HF modules that are adapted.  Output: the same chunks, whose layers add
scale · B A x to their outputs (Hu et al. 2021, arXiv:2106.09685), and the ParameterMaps of all A and B.
Guarantees: all parameters but A and B are frozen and never written to; with adapters switched off, the model is the
base, bit for bit.

A layer that Megatron makes of several HF modules (q, k, v; gate, up) has an A and a B for each of them:

    columns cut (QKV, GATE_UP)    A whole on every tensor rank, B's rows cut like those of the HF matrix
    the head (VOCABULARY)         the same, B padded like the head
    rows cut (COLUMNS)            A's columns cut like those of the HF matrix, B whole on every tensor rank
    an expert's                   A and B whole, on the ranks that have the expert: nothing crosses any

Tensor ranks exchange A x, `rank` numbers a token for each module:

    columns cut, the head    A x is the same on every rank; its gradient, a part on each, is summed;
                             with sequence parallelism A x is gathered over tokens, its gradient reduce-scattered
    rows cut                 each rank has a part of A x; the parts are summed, with sequence parallelism
                             reduce-scattered

So without sequence parallelism all tensor ranks have the same gradient of a parameter that each holds whole.  With it,
each has the gradient of its own tokens: such parameters are marked, and Megatron sums their gradients over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from rlhpc.config.rules import Config
from rlhpc.models.adapter import (
    A,
    B,
    adapter_specs,
    base_digest,
    chosen_layers,
    refuse_idle_stages,
    refuse_merged_tied_head,
)
from rlhpc.models.shape import ParallelLayout
from rlhpc.training.backends import merged
from rlhpc.training.layer_functions import grouped_linear
from rlhpc.training.lora import Lora, Switch, initial_tensors
from rlhpc.training.megatron.hf_layout import (
    EMBEDDING,
    HEAD,
    HfTensor,
    Kind,
    ParameterMap,
    parameter_maps,
    tensor_specs,
    to_local,
)

# ----------------------------------------------------------------------------------------------------------------- maps

WEIGHT = ".weight"


def adapter_maps(maps: Sequence[ParameterMap], chosen: Collection[str], rank: int) -> tuple[ParameterMap, ...]:
    """Make the maps of A and B of all parameters in `maps`, in their order, A before B.

    chosen: HF modules.
    """
    return tuple(
        part
        for base in maps
        for tensor in base.tensors
        if _module(tensor) in chosen
        for part in _pair(base, tensor, rank)
    )


def _pair(base: ParameterMap, tensor: HfTensor, rank: int) -> tuple[ParameterMap, ParameterMap]:
    rows, columns = tensor.shape
    is_cut_by_inputs = base.kind is Kind.COLUMNS
    kind_of_b = Kind.VOCABULARY if base.kind is Kind.VOCABULARY else Kind.ROWS

    def part(suffix: str, shape: tuple[int, int], here: tuple[int, int], kind: Kind) -> ParameterMap:
        return replace(
            base,
            name=base.name.removesuffix(WEIGHT) + f".adapter.{_leaf(tensor)}{suffix}",
            kind=kind,
            tensors=(HfTensor(_module(tensor) + suffix, shape),),
            shard_shape=here,
            ranks=base.ranks[:1] if kind is Kind.REPLICATED else base.ranks,
        )

    return (
        part(A, (rank, columns), (rank, base.shard_shape[1]), Kind.COLUMNS if is_cut_by_inputs else Kind.REPLICATED),
        part(B, (rows, rank), (_rows_here(base, tensor), rank), Kind.REPLICATED if is_cut_by_inputs else kind_of_b),
    )


def _module(tensor: HfTensor) -> str:
    return tensor.name.removesuffix(WEIGHT)


def _leaf(tensor: HfTensor) -> str:
    return _module(tensor).rpartition(".")[2]


def _rows_here(base: ParameterMap, tensor: HfTensor) -> int:
    """Number of rows of an HF matrix in one shard of its Megatron parameter."""
    if base.kind in (Kind.COLUMNS, Kind.VOCABULARY):
        return base.shard_shape[0]
    return tensor.shape[0] // base.num_shards


# ------------------------------------------------------------------------------------------------------------- adapters


class ModuleAdapter(nn.Module):
    """This rank's part of A and B of one HF module, float32."""

    def __init__(self, inputs: int, outputs: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device=device, dtype=torch.float32)


class ParallelAdapter(nn.Module):
    """The adapters of the HF modules that one parallel layer combines; some modules may have none."""

    def __init__(
        self, layer: Any, base: ParameterMap, chosen: Collection[str], lora: Lora, device: torch.device
    ) -> None:
        """layer: a ColumnParallelLinear or RowParallelLinear; base: the map of its weight; chosen: HF modules.

        A and B are uninitialised; _fill writes them.
        """
        super().__init__()
        self._base, self._lora, self._group = base, lora, layer.tp_group
        self._is_of_expert = bool(getattr(layer, "is_expert", False))
        self._is_cut_by_tokens = bool(layer.config.sequence_parallel) and not self._is_of_expert
        self._is_cut_by_inputs = base.kind is Kind.COLUMNS
        self._rows = [_rows_here(base, tensor) for tensor in base.tensors]
        # With grouped-query attention the layer's rows are q, k, v of each group in turn; else module after module.
        self._num_groups = base.num_key_groups // base.num_shards if base.kind is Kind.QKV else 1
        for tensor, rows in zip(base.tensors, self._rows, strict=True):
            if _module(tensor) in chosen:
                adapter = ModuleAdapter(base.shard_shape[1], rows, lora.settings.rank, device)
                self.add_module(_leaf(tensor), adapter)
                self._mark(adapter)

    def _mark(self, adapter: ModuleAdapter) -> None:
        """Set the attributes by which Megatron sums gradients over tensor ranks and computes their norm."""
        parts: tuple[Any, Any] = adapter.lora_A.weight, adapter.lora_B.weight
        whole, cut = reversed(parts) if self._is_cut_by_inputs else parts
        set_tensor_model_parallel_attributes(cut, True, 1 if self._is_cut_by_inputs else 0, 1)
        whole.sequence_parallel = self._is_cut_by_tokens
        if self._is_of_expert:  # as model.py marks the expert's weights
            set_tensor_model_parallel_attributes(whole, True, 0 if self._is_cut_by_inputs else 1, 1)
            cut.allreduce = whole.allreduce = False

    @property
    def rank(self) -> int:
        """The rank of A and B."""
        return self._lora.settings.rank

    def adapters(self) -> Iterator[tuple[int, ModuleAdapter]]:
        """Yield the existing adapters, each with its index among the HF modules of the layer."""
        for index, tensor in enumerate(self._base.tensors):
            adapter = self._modules.get(_leaf(tensor))
            if isinstance(adapter, ModuleAdapter):
                yield index, adapter

    def forward(self, states: Tensor, output: Tensor) -> Tensor:
        """output + scale · B A states, in their dtype.  states: the layer's input, [L, 1, in]."""
        adapters = list(self.adapters())
        inner = torch.split(self.inner(states), self._lora.settings.rank, -1)
        added = {
            index: functional.linear(part, adapter.lora_B.weight.to(part.dtype))
            for (index, adapter), part in zip(adapters, inner, strict=True)
        }
        return torch.add(output, self._side_by_side(added), alpha=self._lora.settings.scale)

    def beside_others(
        self, all_adapters: Sequence[ParallelAdapter], tokens: Tensor, output: Tensor, ends: Tensor
    ) -> Tensor:
        """Compute forward for all experts of this rank at once.

        all_adapters: adapters of this layer in every expert, this one included; ends: see grouped_linear.
        """
        if not self._lora.switch.is_on:
            return output
        each = [[module for _, module in adapter.adapters()] for adapter in all_adapters]
        a = torch.stack([torch.cat([module.lora_A.weight for module in modules]) for modules in each])
        inner = torch.split(grouped_linear(tokens, ends, a.to(tokens.dtype)), self.rank, -1)
        added = {}
        for place, ((index, _), part) in enumerate(zip(self.adapters(), inner, strict=True)):
            b = torch.stack([modules[place].lora_B.weight for modules in each])
            added[index] = grouped_linear(part, ends, b.to(part.dtype))
        return torch.add(output, self._side_by_side(added), alpha=self._lora.settings.scale)

    def inner(self, states: Tensor) -> Tensor:
        """A states of all modules, concatenated, on every tensor rank that multiplies them by its B."""
        factors = torch.cat([adapter.lora_A.weight for _, adapter in self.adapters()])
        here = functional.linear(states, factors.to(states.dtype))
        if self._is_cut_by_inputs and self._is_cut_by_tokens:
            whole: Tensor = reduce_scatter_to_sequence_parallel_region(here, group=self._group)
        elif self._is_cut_by_inputs:
            whole = reduce_from_tensor_model_parallel_region(here, group=self._group)
        elif self._is_cut_by_tokens:
            whole = gather_from_sequence_parallel_region(here, tensor_parallel_output_grad=True, group=self._group)
        else:
            whole = copy_to_tensor_model_parallel_region(here, group=self._group)
        return whole

    def _side_by_side(self, added: Mapping[int, Tensor]) -> Tensor:
        """Concatenate outputs in the layer's order; zeros for modules without adapter."""
        if len(self._rows) == 1:
            return added[0]
        some = next(iter(added.values()))
        parts = [
            added[index] if index in added else some.new_zeros(*some.shape[:-1], rows)
            for index, rows in enumerate(self._rows)
        ]
        # The last size is computed: for an expert without tokens, -1 would be ambiguous.
        groups = [part.view(*part.shape[:-1], self._num_groups, part.shape[-1] // self._num_groups) for part in parts]
        return torch.cat(groups, -1).flatten(-2)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return a new tensor: this rank's part of the weight plus the adapters, added in float32, in its dtype."""
        groups = weight.view(self._num_groups, -1, weight.shape[1])
        parts = list(torch.split(groups, [rows // self._num_groups for rows in self._rows], 1))
        for index, adapter in self.adapters():
            alone = parts[index].flatten(0, 1)
            with_adapter = merged(alone, adapter.lora_A.weight, adapter.lora_B.weight, self._lora.settings.scale)
            parts[index] = with_adapter.view(parts[index].shape)
        return torch.cat(parts, 1).flatten(0, 1)


class ParallelHeadAdapter(ParallelAdapter):
    """The adapter of the head: its logits, never materialised, are [h, scale · A h] · [W, B]ᵀ."""

    def widened(self, states: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden as [L, H + rank] and weight as [rows, H + rank]; both unchanged if adapters are off.

        states: [L, 1, H], the last layer's output; hidden: [L, H], the same on every tensor rank.
        """
        if not self._lora.switch.is_on:
            return hidden, weight
        (_, adapter), *_ = self.adapters()
        inner = self.inner(states)[:, 0] * self._lora.settings.scale
        return torch.cat([hidden, inner], 1), torch.cat([weight, adapter.lora_B.weight.to(weight.dtype)], 1)


# ---------------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True, slots=True)
class RankAdapters:
    """This rank's part of the adapters of a model."""

    lora: Lora  # parameters and base are this rank's parts; the base has Megatron's names
    maps: tuple[ParameterMap, ...]  # of all A and B of the whole model
    beside: Mapping[str, ParallelAdapter]  # this rank's adapters, by ParameterMap.name of the weight

    def weight(self, name: str, base: Tensor) -> Tensor:
        """This rank's part of a parameter of the model, merged with its adapters if they are on."""
        adapter = self.beside.get(name) if self.lora.switch.is_on else None
        return base if adapter is None else adapter.merged(base)

    def part(self, name: str, parameter: Tensor) -> Tensor:
        """This rank's part of an A or B, by the name of its map; B is zero if adapters are off."""
        return torch.zeros_like(parameter) if name.endswith(B) and not self.lora.switch.is_on else parameter


def attach_adapters(
    modules: Mapping[str, nn.Module], config: Config, model: Any, layout: ParallelLayout, device: torch.device
) -> RankAdapters:
    """Freeze this rank's part of a model, add adapters to its layers, and fill them.

    modules: from modules_of_rank.  Raises ConfigError naming the key of [lora] that does not fit model or layout.
    """
    untied = copy.deepcopy(model)
    untied.tie_word_embeddings = False  # the head of a tied model may have an adapter; its embedding has none
    bases = parameter_maps(untied, layout)
    matrices = {_module(t): (t.shape[0], t.shape[1]) for base in bases for t in base.tensors if _is_matrix(base, t)}
    layers = chosen_layers(config.lora, matrices)
    refuse_merged_tied_head(config, layers, is_tied=bool(model.tie_word_embeddings))
    refuse_idle_stages(config, layers, model.num_hidden_layers)
    lora = Lora(
        settings=config.lora,
        is_merged=config.weights.form == "merged",
        digest=base_digest(config.model.path),
        layers=layers,
        parameters={},
        specs=adapter_specs(layers, config.lora.rank),
        base_specs=tensor_specs(parameter_maps(model, layout), config.model.dtype),
        base={
            f"{name}.{own}": parameter
            for name, module in modules.items()
            for own, parameter in module.named_parameters(recurse=False)
        },
    )
    for frozen in lora.base.values():
        frozen.requires_grad_(False)
    beside = {}
    for base in bases:
        layer: Any = modules.get(base.name.removesuffix(WEIGHT))  # None: on another pipeline stage
        if layer is not None and any(_module(tensor) in layers for tensor in base.tensors):
            kind = ParallelHeadAdapter if base.name == HEAD else ParallelAdapter
            layer.adapter = beside[base.name] = kind(layer, base, layers, lora, device)
            if base.name != HEAD:
                layer.register_forward_hook(partial(_add, layer.adapter, lora.switch))
    adapters = RankAdapters(lora, adapter_maps(bases, layers, config.lora.rank), beside)
    _fill(adapters, config)
    return adapters


def _is_matrix(base: ParameterMap, tensor: HfTensor) -> bool:
    return len(tensor.shape) == 2 and base.name != EMBEDDING


@torch.no_grad()
def _fill(adapters: RankAdapters, config: Config) -> None:
    """Write this rank's part of A and B, drawn or read from lora.initial."""
    maps = {place.name: place for place in adapters.maps}
    parameters = {
        maps[name]: parameter
        for base, beside in adapters.beside.items()
        for name, parameter in beside.named_parameters(prefix=f"{base.removesuffix(WEIGHT)}.adapter")
    }
    given = initial_tensors(config, adapters.lora.layers, {place.tensors[0].name for place in parameters})
    for place, parameter in parameters.items():
        shard = place.shard_of(dist.get_rank())
        parameter.copy_(to_local(place, lambda key, index: given[key][index], shard, torch.float32))
        adapters.lora.parameters[place.tensors[0].name] = parameter


def _add(
    adapter: ParallelAdapter, switch: Switch, _: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any] | None:
    """Forward hook: add the adapters to the output of a parallel layer, which returns (output, bias to be added)."""
    return (adapter(inputs[0], output[0]), output[1]) if switch.is_on else None
