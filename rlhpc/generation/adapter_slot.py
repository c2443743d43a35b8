"""Hold the policy's LoRA adapter in vLLM's running model: a version is A and B, written where kernels read them.

Input: manifests and tensors of versions in adapter form (protocol/types.py, AdapterForm).  Output: a model whose every
request is sampled with W + scale · B A.  vLLM keeps adapters in slots, one row of a stack of buffers in each adapted
layer, and would read a new one from files, under a new number that no running request has.  Here a version overwrites
the slot instead, between two decoding steps: requests go on, and tensors captured by CUDA graphs stay in place.
A layer's experts are one layer of vLLM, with three modules each (gate, down, up); its kernels for them need a GPU.

In this file: the slot; products with its adapter; a base in four bits.

Guarantees.  Before the first version the slot is zero: the base model.  A version that does not fit is refused by its
manifest, before anything has been received; a loaded version overwrites all of the one before.  The base is never
written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from vllm.lora.layers import FusedMoEWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from rlhpc.generation.adapter_tensors import POLICY, Pair, fitting_pairs, pairs_of
from rlhpc.generation.vllm_start import FOUR_BITS, MXFP4
from rlhpc.models.adapter import is_quantised
from rlhpc.models.shape import INNER
from rlhpc.protocol.errors import GroupFailed
from rlhpc.protocol.types import WeightManifest
from rlhpc.weights.four_bits import from_mxfp4, in_four_bits, unpacked

NUM_MATRICES, DOWN = 3, 1  # of an expert, in vLLM's order: gate, down, up
WARM_UP_RANK = 1  # of the zeros that it is registered with; vLLM keeps them in host memory


def adapter_request(number: int = POLICY) -> Any:
    """vLLM's LoRARequest for one of the adapters."""
    # No file: every worker has it under this number before the first request (AdapterSlot).
    return LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path="memory:")


class _SlotPart(NamedTuple):
    """The place in vLLM of one module's adapter."""

    layer: str  # vLLM's name, of a layer that may join several modules: qkv_proj
    part: int  # index among the joined modules
    num_parts: int


class AdapterSlot:
    """The policy's adapter in one worker, or several of the same modules, each in a slot."""

    def __init__(self, runner: Any, *, rank: int, modules: Iterable[str], base: str, num_adapters: int = 1) -> None:
        """Register adapters of zeros and put them into their slots.

        runner: the worker's model runner, of an engine that was started for adapters and has no requests yet.
        rank, modules: of every version.  base: digest of the weights that the engine holds; "": not known.
        Raises GroupFailed for a module for which vLLM holds no adapter.
        """
        numbers = range(POLICY, POLICY + num_adapters)
        for request in map(adapter_request, numbers):
            runner.lora_manager.add_dummy_lora(request, rank=WARM_UP_RANK)
            runner.lora_manager.add_adapter(request)
        manager = runner.get_model().lora_manager
        self._indices = {number: manager.lora_index_to_id.index(number) for number in numbers}
        self._layers: dict[str, Any] = dict(manager.modules)
        self._rank, self._modules, self._base = rank, frozenset(modules), base
        self._places = _as_on_disk(dict(_places(manager)), self._modules)
        if unserved := sorted(self._modules - self._places.keys()):
            raise GroupFailed(f"vLLM keeps no adapter of {', '.join(unserved)}; legal: weights.form='merged'")
        ours = [
            each
            for each in self._layers.values()
            if isinstance(each, LogitsProcessorWithLoRA)
            or (current_platform.is_cpu() and not isinstance(each, FusedMoEWithLoRA))
        ]
        if ours:  # all have one table: adapters are of the language model alone
            table = None if num_adapters == 1 else ours[0].punica_wrapper
            products = PlainProducts(tuple(self._indices.values()), table)
            for layer in ours:
                layer.set_mapping(products)

    def __str__(self) -> str:
        return f"copies to the adapter slot of {len(self._layers)} layers"

    def refuse_unfit(self, manifest: WeightManifest) -> None:
        """Raise GroupFailed, naming the module, unless a version of this manifest can be loaded; changes nothing."""
        name, pairs = (
            f"version {manifest.policy_version}",
            fitting_pairs(manifest, self._rank, self._base, self._modules),
        )
        for layer, parts in self._by_layer(pairs).items():
            self._refuse_shapes(name, layer, parts)

    def load(self, weights: Iterable[tuple[str, Tensor]], manifest: WeightManifest, number: int = POLICY) -> None:
        """Overwrite an adapter's slot by a version, once its last tensor has come.

        Raises GroupFailed as refuse_unfit does, and errors of the iterator; the slot is then unchanged.  On CUDA copies
        may still be under way on the current stream.
        """
        self.refuse_unfit(manifest)
        pairs, form = pairs_of(weights), manifest.adapter
        assert form is not None
        with torch.no_grad():
            for layer, parts in self._by_layer(pairs).items():
                self._write(self._layers[layer], self._indices[number], parts, form.scale)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the policy's slot, padding included."""
        for layer in self._layers.values():
            for pair in _buffers(layer):
                yield pair.a[self._indices[POLICY]]
                yield pair.b[self._indices[POLICY]]

    def _write(self, layer: Any, index: int, parts: Sequence[Pair | None], scale: float) -> None:
        """Zero the layer's part of the slot, then fill it with this rank's shares, as vLLM would."""
        to = _buffers(layer)[0].a.device
        a = [None if pair is None else pair.a.to(to, non_blocking=True) for pair in parts]
        # In float32: the slot's dtype may have eight bits.
        b = [None if pair is None else pair.b.to(to, torch.float32, non_blocking=True) * scale for pair in parts]
        if isinstance(layer, FusedMoEWithLoRA):
            a, b = _of_all_experts(a), _of_all_experts(b)
        if len(parts) == 1:
            layer.set_lora(index, a[0], b[0])
        else:
            layer.set_lora(index, a, b)

    def _by_layer(self, pairs: Mapping[str, Pair]) -> dict[str, list[Pair | None]]:
        """Adapters of the modules that each layer joins, None for modules without."""
        found: dict[str, list[Pair | None]] = {}
        for module, pair in pairs.items():
            place = self._places[module]
            found.setdefault(place.layer, [None] * place.num_parts)[place.part] = pair
        return {layer: self._cut(layer, parts) for layer, parts in found.items()}

    def _cut(self, name: str, parts: list[Pair | None]) -> list[Pair | None]:
        """Cut a module in vLLM's parts of it, which have A in common: queries, keys and values of a Gated DeltaNet."""
        counts = _CUT.get(name.rpartition(".")[2])
        if counts is None or len(counts) != len(parts):
            return parts
        rooms, cut = iter(_buffers(self._layers[name])), list[Pair | None]()
        ranks = getattr(self._layers[name], "tp_size", 1)
        for pair, count in zip(parts, counts, strict=True):
            sizes = [ranks * next(rooms).b.shape[-2] for _ in range(count)]
            if pair is not None and sum(sizes) != pair.b.shape[0]:
                return parts  # which _refuse_shapes tells of
            cut += [None] * count if pair is None else [Pair(pair.a, b) for b in pair.b.split(sizes)]
        return cut

    def _refuse_shapes(self, version: str, name: str, parts: Sequence[Pair | None]) -> None:
        layer = self._layers[name]
        names = {(place.layer, place.part): module for module, place in self._places.items()}
        buffers = cycle(_buffers(layer))  # of one expert as of the other
        for part, (given, own, room) in enumerate(zip(parts, _shares(layer, parts), buffers, strict=False)):
            if given is None or own is None:
                continue
            wanted = [self._rank, room.a.shape[-1]], [room.b.shape[-2], self._rank]
            if (list(own.a.shape), list(own.b.shape)) != wanted:
                raise GroupFailed(
                    f"{version}: A and B of {names.get((name, part), name)} are {list(given.a.shape)} and "
                    f"{list(given.b.shape)}; this worker has room for its share, {wanted[0]} and {wanted[1]}"
                )


class PlainProducts:
    """Products with adapters in their slots, each for the rows of a step that are its own.

    Replaces vLLM's in two cases.  On CPU vLLM's copies A and B out of the stack for each token: a third of the tokens
    per second at rank 8.  At the head, on any device, it takes one row per request, which is wrong when a row is
    scored and every token of a prompt has logits.
    """

    def __init__(self, indices: Sequence[int], table: Any = None) -> None:
        """indices: of the slots.  table: vLLM's, of the slot of each row; None: all rows are of the only one."""
        self._indices, self._table = indices, table
        self._rows = dict[bool, list[tuple[int, Any]]]()  # by whether they are those of the head
        if table is not None:
            update = table.update_metadata

            def updated(*args: Any, **options: Any) -> None:
                self._rows.clear()
                update(*args, **options)

            table.update_metadata = updated

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **_: Any,
    ) -> None:
        """y[:, slice] += scale · x Aᵀ Bᵀ for each of a layer's modules; x [tokens, in], y [tokens, out]."""
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for index, rows in self._shares(is_head=False):
            own, start = x[rows], 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                _add(y[:, start : start + size], rows, functional.linear(own, a[index, 0]), b[index, 0], scale)
                start += size

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **_: Any
    ) -> None:
        """y += scale · x Aᵀ Bᵀ in the dtype of the logits y [rows, vocabulary or more]; x [rows, hidden]."""
        for index, rows in self._shares(is_head=True):
            a, b = (stacked[index, 0].to(y.dtype) for stacked in (lora_a_stacked, lora_b_stacked))
            _add(y[:, : len(b)], rows, functional.linear(x[rows].to(y.dtype), a), b, scale)

    def _shares(self, *, is_head: bool) -> list[tuple[int, Any]]:
        """Slots that a step has rows of, and which: an index of rows."""
        if self._table is None:
            return [(self._indices[0], slice(None))]
        if is_head not in self._rows:
            slots = self._table.sampler_indices if is_head else self._table.token_lora_indices
            rows = [(index, (slots == index).nonzero()[:, 0]) for index in self._indices]
            self._rows[is_head] = [(index, own) for index, own in rows if len(own)]
        return self._rows[is_head]


def _add(y: Tensor, rows: Any, low: Tensor, b: Tensor, scale: float) -> None:
    """y[rows] += scale · low Bᵀ; y: may be a part of others' columns."""
    if isinstance(rows, slice):
        y[rows].addmm_(low, b.t(), alpha=scale)
    else:
        y[rows] = torch.addmm(y[rows], low, b.t(), alpha=scale)


def _places(manager: Any) -> Iterator[tuple[str, _SlotPart]]:
    """Yield the modules' names in a checkpoint, each with its place."""
    for layer in manager.modules:
        modules = manager.packed_modules.get(layer, [layer])
        for part, module in enumerate(modules):
            yield module, _SlotPart(layer, part, len(modules))


_CUT: Mapping[str, tuple[int, ...]] = {"in_proj_qkvz": (3, 1)}  # vLLM's layer → its parts of each joined module


def _as_on_disk(places: Mapping[str, _SlotPart], modules: Iterable[str]) -> dict[str, _SlotPart]:
    """Places by the modules' names in a checkpoint, in which the language model may stand inside a larger one."""
    inside = {module: module.replace(f".{INNER}.", ".", 1) for module in modules if f".{INNER}." in module}
    return {**places, **{module: places[name] for module, name in inside.items() if name in places}}


def _shares(layer: Any, parts: Sequence[Pair | None]) -> list[Pair | None]:
    """This rank's share of the adapters of a layer's modules, as vLLM slices them."""
    if getattr(layer, "tp_size", 1) == 1:
        return list(parts)
    if isinstance(layer, FusedMoEWithLoRA):
        return [pair and _share_of_expert(layer, pair, place % NUM_MATRICES) for place, pair in enumerate(parts)]
    a, b = [pair and pair.a for pair in parts], [pair and pair.b for pair in parts]
    if len(parts) == 1:
        own = layer.slice_lora_a(a[0]), layer.slice_lora_b(b[0])
        return list(parts) if own[0] is None else [Pair(*own)]  # the head: every rank has all of it
    pairs = zip(layer.slice_lora_a(a), layer.slice_lora_b(b), strict=True)
    return [None if a is None else Pair(a, b) for a, b in pairs]


def _share_of_expert(experts: FusedMoEWithLoRA, pair: Pair, place: int) -> Pair:
    if place == DOWN:
        return Pair(experts._slice_w2_a(pair.a[None])[0], experts._slice_w2_b(pair.b[None])[0])
    return Pair(experts._slice_w13_a(pair.a[None])[0], experts._slice_w13_b(pair.b[None])[0])


def _of_all_experts(tensors: list[Any]) -> list[Any]:
    """A, or B, of each matrix, [experts, …]; empty for a matrix without adapters."""
    (to,) = {each.device for each in tensors if each is not None}
    nothing = torch.zeros(len(tensors) // NUM_MATRICES, 0, 0, device=to)
    by_matrix = [tensors[place::NUM_MATRICES] for place in range(NUM_MATRICES)]
    return [nothing if each[0] is None else torch.stack(each) for each in by_matrix]


def _buffers(layer: Any) -> list[Pair]:
    """Buffers of a layer's modules, [slots, 1 or experts, …]; the head has one pair by itself, experts have three."""
    if isinstance(layer, FusedMoEWithLoRA):
        return _buffers_of_experts(layer)
    if isinstance(layer.lora_a_stacked, Tensor):
        return [Pair(layer.lora_a_stacked, layer.lora_b_stacked)]
    return list(map(Pair, layer.lora_a_stacked, layer.lora_b_stacked))


def _buffers_of_experts(experts: FusedMoEWithLoRA) -> list[Pair]:
    gate, up = map(Pair, experts.w13_lora_a_stacked, experts.w13_lora_b_stacked)
    return [gate, Pair(experts.w2_lora_a_stacked[0], experts.w2_lora_b_stacked[0]), up]


# ---------------------------------------------------------------------------------------------------- base in four bits


@register_model_loader(FOUR_BITS)
class FourBitLoader(DefaultModelLoader):
    """Loads the weights that a trainer with lora.quantization computes with: matrices of attention and MLP, unpacked.

    Before vLLM joins or shards them: the scales are of 64 numbers in a row of the whole matrix.
    """

    def __init__(self, load_config: Any) -> None:
        """Reads files as vLLM does by default."""
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the checkpoint; packed on the model's device, as the trainer packs on its own."""
        device = next(model.parameters()).device
        for name, weight in super().get_all_weights(model_config, model):
            if weight.dim() == 2 and is_quantised(name.removesuffix(".weight")):
                weight = unpacked(*in_four_bits(weight.to(device, model_config.dtype)))
            yield name, weight


@register_model_loader(MXFP4)
class Mxfp4Loader(DefaultModelLoader):
    """Loads gpt-oss as the trainer reads it: experts in MXFP4 as bfloat16, to which versions are as large."""

    def __init__(self, load_config: Any) -> None:
        """Reads files as vLLM does by default."""
        super().__init__(replace(load_config, load_format="auto"))

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load as vLLM does a model that was never packed, by its configuration, now and at each reload."""
        del model.config.quantization_config  # None (vllm_start.py); the model asks whether it is there
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the checkpoint; blocks and scales of a matrix as one."""
        halves: dict[str, dict[str, Tensor]] = {}
        for name, weight in super().get_all_weights(model_config, model):
            whole, _, half = name.rpartition("_")
            if half not in ("blocks", "scales"):
                yield name, weight
                continue
            pair = halves.setdefault(whole, {})
            pair[half] = weight
            if len(pair) == 2:
                yield whole, from_mxfp4(**halves.pop(whole))
