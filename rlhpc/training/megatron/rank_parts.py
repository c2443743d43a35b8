"""One rank's part of the model and of the optimiser state, under the names of the HF checkpoint.

Input: a run file, or shards of the optimiser and checkpoints.  Output: loaded chunks, and the items by which weights
and state leave the ranks.  Items are the same on all ranks, in the order of the HF specs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.config import Config
from rlhpc.parallel_layout import ParallelLayout
from rlhpc.training.megatron.exchange import Exchange
from rlhpc.training.megatron.hf_layout import ParameterMap, critic_of, exported, parameter_maps
from rlhpc.training.megatron.hf_weights import (
    OwnedRange,
    load_weights,
    local_shard,
    own_shards,
    parameters_of_rank,
    sharded_float32_state,
    sharded_weights,
    tensor_rank,
)
from rlhpc.training.megatron.model import build_chunks
from rlhpc.training.megatron.model_config import transformer_config
from rlhpc.training.megatron.model_file import ModelConfig, read_model
from rlhpc.training.megatron.optimizer_state import OptimizerShard
from rlhpc.training.sharded_tensors import ShardedTensorSpec
from rlhpc.training.tensor_source import TensorSource
from rlhpc.training.value_head import VALUE_HEAD
from rlhpc.types import TensorSpec


@dataclass(frozen=True, slots=True)
class RankModel:
    """This rank's chunks of layers, in the dtype of the forward pass."""

    chunks: tuple[Any, ...]  # not wrapped
    config: ModelConfig
    layout: ParallelLayout
    dtype: torch.dtype
    device: torch.device
    items: tuple[ShardedTensorSpec, ...]  # all weights of the model
    own: Callable[[int], Sequence[Tensor]]  # see gather_stream

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
        items = sharded_weights(model, layout, dtype)
        return cls(tuple(chunks), model, layout, dtype, device, items, own_shards(chunks, model, layout))

    def parameters(self) -> list[Tensor]:
        """This rank's parameters, live, each once."""
        return [p.detach() for p in dict.fromkeys(p for chunk in self.chunks for p in chunk.parameters())]

    def forget_last_tokens(self) -> None:
        """Take the last micro-batch's tensors from the dispatchers of mixture layers, when the model is given up.

        Each keeps routing probabilities, and through their graph, where no garbage collector looks, every module,
        every buffer and the threads of every process group.
        """
        dispatchers = (getattr(module, "token_dispatcher", None) for chunk in self.chunks for module in chunk.modules())
        for dispatcher in filter(None, dispatchers):
            for name, value in list(vars(dispatcher).items()):
                if isinstance(value, torch.Tensor):
                    setattr(dispatcher, name, None)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of all weights, in the order of items."""
        return tuple(spec for item in self.items for spec in item.specs)

    @property
    def places(self) -> tuple[ParameterMap, ...]:
        """All parameters of the whole model, copies of a tied head included."""
        return parameter_maps(self.config, self.layout)


class ModelSource(TensorSource):
    """An HF checkpoint, and a head of zeros for a critic, which it does not have."""

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """See TensorSource."""
        if name in self.names or name != VALUE_HEAD:
            super().require(name, shape)

    def read(self, name: str, dtype: torch.dtype | None = None, index: tuple[slice, ...] | None = None) -> Tensor:
        """See TensorSource; zeros of one row, which broadcast to as many columns as there are."""
        if name in self.names or name != VALUE_HEAD:
            return super().read(name, dtype, index)
        return torch.zeros(1, 1, dtype=dtype or torch.float32)


class RankState:
    """Float32 main weights and moments: which numbers are this rank's to send, and how it reads its own."""

    def __init__(self, model: RankModel, shards: Sequence[OptimizerShard], exchange: Exchange) -> None:
        """Exchange what every rank keeps.  A collective."""
        parameters = parameters_of_rank(model.chunks, model.config, model.layout)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._layout = model.layout
        self._shards = {names[id(shard.parameter)]: shard for shard in shards}
        self._places = {place.name: place for place in model.places if place.name in self._shards}
        self._exported = [place.name for place in exported(model.places)]
        kept = [
            (name, self._places[name].shard_of(tensor_rank(model.layout)), dist.get_rank(), shard.start, shard.end)
            for name, shard in self._shards.items()
        ]
        ranges = [OwnedRange(*each) for of_rank in exchange.of_all(kept) for each in of_rank]
        self.items: tuple[ShardedTensorSpec, ...] = sharded_float32_state(model.config, model.layout, ranges)

    def own(self, kind: str, index: int) -> Sequence[Tensor]:
        """This rank's live part of items[index], float32; see BackgroundSaver."""
        return (self._shards[self._exported[index]].tensor(kind),)

    @torch.no_grad()
    def read(self, kind: str, source: TensorSource) -> None:
        """Fill this rank's state of one kind, parameter by parameter; MegatronAdamW.publish is the caller's.

        Raises the source's error; then some of it is filled.
        """
        for name, shard in self._shards.items():
            whole = local_shard(self._places[name], source, self._layout)
            shard.tensor(kind).copy_(whole.view(-1)[shard.start : shard.end])
