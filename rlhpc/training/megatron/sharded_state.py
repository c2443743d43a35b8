"""Float32 main weights and moments of one rank as Megatron's sharded tensors, which any layout can read back.

Input: this rank's OptimizerShards and the model's own sharded_state_dict.  Output: dictionaries for
megatron.core.dist_checkpointing.  Guarantees: every number of the model is written by exactly one rank, tensors are
distributed over the replicas; only tensors that lie on several ranks are copied between them; a rank reads only tensors
of which it keeps a part.

The optimiser's own sharded_state_dict is not used: it asserts before the first step, asks for a "step" that
"fully_reshardable" does not store, gives all parameters one shared step tensor after a load, and collects everything
on the first replica, which then writes alone.  An OptimizerShard knows where the numbers are; the caller sets step
counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor, nn

from rlhpc.training.megatron.exchange import Exchange
from rlhpc.training.megatron.hf_weights import parameters_of_rank
from rlhpc.training.megatron.optimizer_state import OptimizerShard
from rlhpc.training.megatron.rank_parts import RankModel
from rlhpc.training.sharded_tensors import Shard, ShardedTensorSpec, gather_stream
from rlhpc.types import TensorSpec

# Kind of state → what Megatron calls it on disk.
NAMES = {"weights": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# One key per layer, expert and half of a gated layer: shapes must not depend on the number of stages.
METADATA = {"singleton_local_shards": True}
CPU = torch.device("cpu")


class _Kept(NamedTuple):
    """Numbers [start, end) of one flattened parameter, and the rank that keeps their state."""

    start: int
    end: int
    rank: int

    @property
    def num_elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Place:
    """One parameter of this rank: its shard here and where it belongs in the whole model."""

    shard: OptimizerShard
    entry: Any  # ShardedTensor of the model, or the factory of several

    def filled(self, kind: str, whole: Tensor, replica_id: Any) -> Any:
        """The sharded tensor of one kind of state; whole: float32, of the parameter's shape."""
        made = make_sharded_optimizer_tensor(self.entry, whole, prefix=f"optimizer.state.{NAMES[kind]}")
        return replace(made, replica_id=replica_id)


class ShardedState:
    """What this rank keeps, by name of the parameter in the whole model."""

    def __init__(self, model: RankModel, shards: Sequence[OptimizerShard]) -> None:
        """shards: of the optimiser over model.chunks."""
        entries = _entries(model.chunks)
        parameters = parameters_of_rank(model.chunks, model.config, model.layout)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places = {names[id(s.parameter)]: _Place(s, entries[id(s.parameter)]) for s in shards}
        self._parameters = parameters
        self._entries = {names[key]: entry for key, entry in entries.items()}

    def to_read(self, kind: str) -> dict[str, Any]:
        """For dist_checkpointing.load: room in host memory for every tensor of which this rank keeps a part."""
        return {
            name: place.filled(kind, torch.empty(place.shard.parameter.shape), place.entry.replica_id)
            for name, place in self._places.items()
        }

    @torch.no_grad()
    def take(self, kind: str, loaded: dict[str, Tensor]) -> None:
        """Copy this rank's part from the loaded tensors of to_read(); the caller calls MegatronAdamW.publish."""
        for name, place in self._places.items():
            shard = place.shard
            shard.tensor(kind).copy_(loaded[name].reshape(-1)[shard.start : shard.end])

    def plan(self, exchange: Exchange) -> WritePlan:
        """Exchange what every rank keeps, and assign a writer to every tensor.  A collective."""
        kept = {name: (place.shard.start, place.shard.end) for name, place in self._places.items()}
        of_ranks: list[dict[str, tuple[int, int]]] = exchange.of_all(kept)
        writers: dict[str, int] = {}
        sharded: dict[int, list[ShardedTensorSpec]] = {}
        for index, name in enumerate(sorted(self._entries)):
            if any(self._entries[name].replica_id[:-1]):
                continue  # a copy of what another tensor rank or stage writes
            parameter = self._parameters[name]
            pieces = [_Kept(*of_ranks[r][name], r) for r in _replicas_of(parameter) if name in of_ranks[r]]
            writers[name] = writer = _writer(pieces, index)
            if max(piece.num_elements for piece in pieces) < parameter.numel():
                sharded.setdefault(writer, []).append(_sharded(name, parameter, sorted(pieces)))
        return WritePlan(self._places, writers, sharded)


class WritePlan:
    """Who writes which tensor of this rank's stage and tensor rank; the same on all its replicas."""

    def __init__(
        self, places: dict[str, _Place], writers: dict[str, int], sharded: dict[int, list[ShardedTensorSpec]]
    ) -> None:
        """writers: rank that writes a tensor; sharded: by writer, those that it has to be sent parts of."""
        self._places, self._writers, self._sharded = places, writers, sharded

    def to_write(self, kind: str, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """For dist_checkpointing's savers: what this rank writes, views of its shards where they are whole.

        group: gloo, of all ranks.  A collective.  Needs host memory for gathered tensors.
        """
        rank = dist.get_rank()
        together: dict[str, Tensor] = {}
        for writer in sorted(self._sharded):
            items = self._sharded[writer]
            names = [item.specs[0].name for item in items]

            def own(index: int, names: Sequence[str] = names) -> Sequence[Tensor]:
                return (self._places[names[index]].shard.tensor(kind).to(CPU),)

            # dict() may keep them, though a tensor is valid only until the next one: torch.cat makes each a new one.
            together |= dict(gather_stream(items, own, to_rank=writer, dtype=torch.float32, device=CPU, group=group))
        mine = {}
        for name, writer in self._writers.items():
            if writer == rank:
                place = self._places[name]
                whole = together[name] if name in together else place.shard.tensor(kind)
                replica_id = (*place.entry.replica_id[:-1], 0)
                mine[f"{kind}.{name}"] = place.filled(kind, whole.view(place.shard.parameter.shape), replica_id)
        return mine


def _entries(chunks: Iterable[Any]) -> dict[int, Any]:
    """id of a parameter → its ShardedTensor or factory; the head's copy of a tied embedding is an embedding there."""
    return {
        id(entry.data): entry
        for chunk in chunks
        for entry in chunk.sharded_state_dict(metadata=dict(METADATA)).values()
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and isinstance(entry.data, nn.Parameter)
    }


def _replicas_of(parameter: nn.Parameter) -> list[int]:
    """Ranks over which the optimiser's state of a parameter of this rank is sharded."""
    if getattr(parameter, "allreduce", True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        group = parallel_state.get_expert_data_parallel_group()
    return dist.get_process_group_ranks(group)


def _writer(pieces: Sequence[_Kept], index: int) -> int:
    """The rank with most of it; ranks with equal parts take turns."""
    most = max(piece.num_elements for piece in pieces)
    candidates = sorted(piece.rank for piece in pieces if piece.num_elements == most)
    return candidates[index % len(candidates)]


def _sharded(name: str, parameter: nn.Parameter, pieces: Sequence[_Kept]) -> ShardedTensorSpec:
    """pieces: end to end over the whole parameter."""
    assert sum(piece.num_elements for piece in pieces) == parameter.numel(), f"{name}: {pieces} do not cover it"
    return ShardedTensorSpec(
        specs=(TensorSpec(name, "float32", tuple(parameter.shape)),),
        shards=tuple(Shard(piece.rank, piece.num_elements) for piece in pieces),
        join=lambda parts: [torch.cat(list(parts))],
    )
