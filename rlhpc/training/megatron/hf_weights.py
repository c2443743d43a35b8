"""Load HF weights into the parameters of a Megatron model, and export them.

Input: model chunks from build_chunks and a TensorSource.  Output: this rank's parameters, filled; and the
ShardedTensorSpecs by which gather_stream gathers weights and optimiser state under their HF names.
Guarantees: a rank reads only what it holds, with one slab of one tensor in memory; the items are the same on all ranks,
in the order of the HF specs; the copy of a tied head is loaded and never exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.config.rules import Config
from rlhpc.models.shape import ParallelLayout, num_experts
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec, TensorSource
from rlhpc.training.logprob import VALUE_HEAD
from rlhpc.training.megatron.hf_layout import (
    Kind,
    ParameterMap,
    critic_of,
    exported,
    fill_local,
    parameter_maps,
    specs_of,
    to_hf,
    to_local,
)
from rlhpc.training.megatron.model import build_chunks
from rlhpc.training.megatron.model_config import ModelConfig, read_model, transformer_config
from rlhpc.training.megatron.optimizer import OptimizerShard
from rlhpc.training.ranks import DTYPES, Exchange
from rlhpc.weights.four_bits import from_mxfp4

if TYPE_CHECKING:
    from rlhpc.training.megatron.lora import RankAdapters

# ----------------------------------------------------------------------------------------------------------- hf weights

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Numbers [start, end) of one flattened shard, of which a rank keeps the optimiser's state.

    Several ranks may keep the same numbers: replicas of the model, and of parameters that are not cut.
    """

    name: str  # ParameterMap.name
    shard: int
    rank: int
    start: int
    end: int


def parameters_of_rank(chunks: Sequence[Any], model: Any, layout: ParallelLayout) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by ParameterMap.name.

    chunks: of build_chunks, not wrapped.  The default process group must be up.
    """
    return {
        rename(name): parameter
        for chunk, rename in _renamed(chunks, model, layout)
        for name, parameter in chunk.named_parameters()
    }


def modules_of_rank(chunks: Sequence[Any], model: Any, layout: ParallelLayout) -> dict[str, nn.Module]:
    """Return this rank's modules by the name that their parameters have before the last dot."""
    return {
        rename(name): module
        for chunk, rename in _renamed(chunks, model, layout)
        for name, module in chunk.named_modules()
    }


def _renamed(chunks: Sequence[Any], model: Any, layout: ParallelLayout) -> Iterator[tuple[Any, Callable[[str], str]]]:
    """Each chunk, with a function that renumbers layers and experts in its names over the whole model."""
    experts_here = num_experts(model.to_dict()) // layout.expert
    first_expert = _expert_rank(layout) * experts_here
    experts = range(first_expert, first_expert + experts_here)
    for chunk in chunks:
        layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # Megatron counts from 1

        def rename(name: str, layers: Sequence[int] = layers) -> str:
            return _renumber(_renumber(name, _LAYER, layers), _EXPERT, experts)

        yield chunk, rename


@torch.no_grad()
def load_weights(chunks: Sequence[Any], source: TensorSource, model: Any, layout: ParallelLayout) -> None:
    """Fill every parameter of this rank's chunks, in whatever dtype and on whatever device it is.

    Raises the source's error (ConfigError naming model.path) for a tensor that is missing or has another shape than
    config.json says; parameters are then partly filled.
    """
    maps = {each.name: each for each in parameter_maps(model, layout)}
    for name, parameter in parameters_of_rank(chunks, model, layout).items():
        place = maps[name]
        _refuse_unmarked(place, parameter)
        _require(place, source)
        fill_local(place, partial(_read, source), place.shard_of(dist.get_rank()), parameter)


def local_shard(
    parameter: ParameterMap, source: TensorSource, layout: ParallelLayout, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return this rank's shard of one parameter, of parameter.shard_shape, on the CPU; only its parts are read.

    Raises as load_weights does.
    """
    _require(parameter, source)
    return to_local(parameter, partial(_read, source), parameter.shard_of(dist.get_rank()), dtype)


def sharded_weights(maps: Sequence[ParameterMap], dtype: torch.dtype) -> tuple[ShardedTensorSpec, ...]:
    """Return the places of the weights, in the order of export: on the ranks of the first replica.  Pure."""
    return tuple(
        ShardedTensorSpec(
            specs=specs_of(place, _word(dtype)),
            shards=tuple(Shard(rank, place.shard_elements) for rank in place.ranks),
            join=partial(to_hf, place),
        )
        for place in exported(maps)
    )


def own_shards(
    parameters: Mapping[str, nn.Parameter], maps: Sequence[ParameterMap]
) -> Callable[[int], Sequence[Tensor]]:
    """Return gather_stream's `own` for items of sharded_weights: live views of this rank's parameters.

    parameters: of parameters_of_rank.
    """
    names = [place.name for place in exported(maps)]
    return lambda index: (parameters[names[index]].detach().view(-1),)


def sharded_float32_state(maps: Sequence[ParameterMap], ranges: Iterable[OwnedRange]) -> tuple[ShardedTensorSpec, ...]:
    """Return the places of float32 state, in the order of exported(maps).  Pure.

    ranges: of all ranks, in any order, the same on every rank; between them they cover every shard.  Of replicas the
    lowest ranks are used.  No rank has more than one piece of an item.
    """
    by_name: dict[str, list[OwnedRange]] = {}
    for each in ranges:
        by_name.setdefault(each.name, []).append(each)
    return tuple(_state_item(place, by_name.get(place.name, [])) for place in exported(maps))


def _expert_rank(layout: ParallelLayout) -> int:
    """Expert rank of this process: experts lie on consecutive ranks, and a stage has a multiple of these."""
    return dist.get_rank() % layout.expert


def _renumber(name: str, place: re.Pattern[str], numbers: Sequence[int]) -> str:
    return place.sub(lambda match: str(numbers[int(match[0])]), name)


def _state_item(place: ParameterMap, ranges: Sequence[OwnedRange]) -> ShardedTensorSpec:
    pieces: list[Shard] = []
    counts = []
    for shard in range(place.num_shards):
        cover = _cover(place, shard, [each for each in ranges if each.shard == shard])
        pieces += [Shard(each.rank, each.end - each.start) for each in cover]
        counts.append(len(cover))
    assert len({piece.rank for piece in pieces}) == len(pieces), f"{place.name}: two pieces of one rank"
    return ShardedTensorSpec(specs_of(place, "float32"), tuple(pieces), partial(_join_ranges, place, tuple(counts)))


def _cover(place: ParameterMap, shard: int, ranges: Sequence[OwnedRange]) -> list[OwnedRange]:
    """Choose ranges that lie end to end over the whole shard.

    Every replica's own ranges do, so that wherever one of them ends another begins.
    """
    by_start: dict[int, OwnedRange] = {}
    for each in sorted(ranges, key=lambda each: -each.rank):
        if each.end > each.start:
            by_start[each.start] = each  # the lowest rank comes last and stays
    cover: list[OwnedRange] = []
    position = 0
    while position < place.shard_elements:
        assert position in by_start, f"{place.name}: no rank keeps shard {shard} from {position} on"
        cover.append(by_start[position])
        position = cover[-1].end
    return cover


def _join_ranges(place: ParameterMap, counts: Sequence[int], pieces: Sequence[Tensor]) -> list[Tensor]:
    """counts: of pieces per shard."""
    remaining = iter(pieces)
    shards = [[next(remaining) for _ in range(count)] for count in counts]
    return to_hf(place, [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in shards])


def _read(source: TensorSource, name: str, index: tuple[slice, ...]) -> Tensor:
    return source.read(name, index=index)


def _require(place: ParameterMap, source: TensorSource) -> None:
    for tensor in place.tensors:
        source.require(tensor.name, tensor.shape)


def _refuse_unmarked(place: ParameterMap, parameter: nn.Parameter) -> None:
    """Check marks: Megatron's gradient norm counts unmarked sharded parameters on the first tensor rank only."""
    is_marked = getattr(parameter, "tensor_model_parallel", False)
    assert is_marked == (place.kind is not Kind.REPLICATED), f"{place.name} is marked wrongly for the gradient norm"
    assert parameter.shape == place.shard_shape, (place.name, parameter.shape, place.shard_shape)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------------- rank parts
#
# One rank's part of the model and of the optimiser state, under the names of the HF checkpoint.
#
# Input: a run file, or shards of the optimiser and checkpoints.  Output: loaded chunks, and the items by which weights
# and state leave the ranks.  Items are the same on all ranks, in the order of the HF specs.


@dataclass(frozen=True, slots=True)
class RankModel:
    """This rank's chunks of layers, in the dtype of the forward pass."""

    chunks: tuple[Any, ...]  # not wrapped
    config: ModelConfig
    layout: ParallelLayout
    dtype: torch.dtype
    device: torch.device
    items: tuple[ShardedTensorSpec, ...]  # of a version
    own: Callable[[int], Sequence[Tensor]]  # see gather_stream
    adapters: RankAdapters | None = None  # the trained part, if not the whole model

    @classmethod
    def load(
        cls, config: Config, dtype: torch.dtype, device: torch.device, *, has_value_head: bool = False
    ) -> RankModel:
        """Build and load the chunks.  Process groups must be open.  Raises ConfigError naming model.path or a key."""
        layout = ParallelLayout.of(config.trainer)
        model = read_model(config.model.path)
        model = critic_of(model) if has_value_head else model
        chunks = build_chunks(model, transformer_config(model, config.trainer, dtype), config.trainer, device)
        load_weights(chunks, ModelSource.of_model(config.model.path), model, layout)
        maps = parameter_maps(model, layout)
        own = own_shards(parameters_of_rank(chunks, model, layout), maps)
        whole = cls(tuple(chunks), model, layout, dtype, device, sharded_weights(maps, dtype), own)
        return whole._with_adapters(config) if config.lora.rank else whole

    def _with_adapters(self, config: Config) -> RankModel:
        """Put adapters beside the layers, in place, and train nothing else."""
        from rlhpc.training.megatron.lora import attach_adapters  # loads transformers: see model_config.py

        modules = modules_of_rank(self.chunks, self.config, self.layout)
        adapters = attach_adapters(modules, config, self.config, self.layout, self.device)
        parameters = parameters_of_rank(self.chunks, self.config, self.layout)
        places, part = (
            (exported(parameter_maps(self.config, self.layout)), adapters.weight)
            if adapters.lora.is_merged
            else (adapters.maps, adapters.part)
        )

        def own(index: int) -> Sequence[Tensor]:
            name = places[index].name
            return (part(name, parameters[name].detach()).view(-1),)

        items = self.items if adapters.lora.is_merged else sharded_weights(places, torch.float32)
        return replace(self, items=items, own=own, adapters=adapters)

    def parameters(self) -> list[Tensor]:
        """This rank's parameters, live, each once."""
        return [p.detach() for p in dict.fromkeys(p for chunk in self.chunks for p in chunk.parameters())]

    def forget_last_tokens(self) -> None:
        """Drop the last micro-batch's tensors from the dispatchers of mixture layers, when the model is released.

        Each keeps routing probabilities, and through their graph, where no garbage collector looks, every module,
        every buffer and the threads of every process group.
        """
        dispatchers = (getattr(module, "token_dispatcher", None) for chunk in self.chunks for module in chunk.modules())
        for dispatcher in filter(None, dispatchers):
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, torch.Tensor):
                    setattr(dispatcher, name, None)

    @property
    def sent_dtype(self) -> torch.dtype:
        """Return the dtype of the tensors of a version."""
        return DTYPES[self.items[0].specs[0].dtype]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of all weights, in the order of items."""
        return tuple(spec for item in self.items for spec in item.specs)

    @property
    def places(self) -> tuple[ParameterMap, ...]:
        """All trained parameters: of the whole model, copies of a tied head included, or its adapters."""
        return parameter_maps(self.config, self.layout) if self.adapters is None else self.adapters.maps


_PACKED = ("_blocks", "_scales")  # suffixes of tensors in MXFP4


class ModelSource(TensorSource):
    """An HF checkpoint, with a head of zeros for a critic, and experts in MXFP4 unpacked to bfloat16."""

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """See TensorSource."""
        if self._is_packed(name):
            self._require_packed(name, shape)
        elif name in self.names or name != VALUE_HEAD:
            super().require(name, shape)

    def read(self, name: str, dtype: torch.dtype | None = None, index: tuple[slice, ...] | None = None) -> Tensor:
        """See TensorSource; of a critic's head zeros of one row, which broadcast to as many columns as there are."""
        if self._is_packed(name):
            experts, *others = index or (slice(None),)
            blocks, scales = (super(ModelSource, self).read(name + part, index=(experts,)) for part in _PACKED)
            part = from_mxfp4(blocks, scales)[:, *others]
            return part if dtype is None else part.to(dtype)
        if name in self.names or name != VALUE_HEAD:
            return super().read(name, dtype, index)
        return torch.zeros(1, 1, dtype=dtype or torch.float32)

    def _is_packed(self, name: str) -> bool:
        return name not in self.names and name + _PACKED[0] in self.names

    def _require_packed(self, name: str, shape: tuple[int, ...]) -> None:
        experts, rows, groups, half = self.shape(name + _PACKED[0])
        found = experts, groups * half * 2, rows
        if found != shape or self.shape(name + _PACKED[1]) != (experts, rows, groups):
            raise ConfigError(f"model.path: {name} is {found} in MXFP4, not {shape} as config.json has it")


class RankState:
    """Float32 main weights and moments: the parts that this rank sends, and loading of its own."""

    def __init__(self, model: RankModel, shards: Sequence[OptimizerShard], exchange: Exchange) -> None:
        """Exchange the ranges that every rank keeps.  A collective."""
        parameters = parameters_of_rank(model.chunks, model.config, model.layout)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layout = model.layout
        self._shards = {names[id(shard.parameter)]: shard for shard in shards}
        self._places = {place.name: place for place in model.places if place.name in self._shards}
        self._exported = [place.name for place in exported(model.places)]
        kept = [
            (name, self._places[name].shard_of(dist.get_rank()), dist.get_rank(), shard.start, shard.end)
            for name, shard in self._shards.items()
        ]
        ranges = [OwnedRange(*each) for of_rank in exchange.of_all(kept) for each in of_rank]
        self.items: tuple[ShardedTensorSpec, ...] = sharded_float32_state(model.places, ranges)

    def own(self, kind: str, index: int) -> Sequence[Tensor]:
        """This rank's live part of items[index], float32; see BackgroundSaver."""
        return (self._shards[self._exported[index]].tensor(kind),)

    @torch.no_grad()
    def read(self, kind: str, source: TensorSource) -> None:
        """Fill this rank's state of one kind, parameter by parameter; MegatronAdamW.publish is the caller's.

        Raises the source's error; the state is then partly filled.
        """
        for name, shard in self._shards.items():
            whole = local_shard(self._places[name], source, self._layout)
            shard.tensor(kind).copy_(whole.view(-1)[shard.start : shard.end])
