"""Checkpoints in Megatron's own distributed format: every rank writes its share, any Megatron layout reads it.

Input: a ShardedState.  Output: the format that megatron.core.dist_checkpointing calls "torch_dist", and our
megatron.json beside it:

    __0_0.distcp  __1_0.distcp …  .metadata  common.pt  metadata.json  megatron.json

megatron.json is written last, by rank 0, when the files of all ranks are complete; it holds their checksums, the number
of steps, the random state and the model's fingerprint.
Guarantees: a failure on one rank is a CheckpointError with the same reason on all; all files are verified, each rank
reading its share of them, before any of the state is loaded.

Written in the calling process by torch's own writer.  Megatron's writer starts a server process for its results, which
hangs if the main module has no guard, and forks the training process to write, with its CUDA context and threads.
`.metadata` is a pickle: loading a checkpoint can run code, so load only your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from rlhpc.base.files import write_atomically
from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_directory import FileRecord, check_file, record_of
from rlhpc.training.checkpoint_tensors import Shard, ShardedTensorSpec, gather_stream
from rlhpc.training.megatron.hf_weights import RankModel, parameters_of_rank
from rlhpc.training.megatron.optimizer import OptimizerShard
from rlhpc.training.ranks import Exchange
from rlhpc.training.trainer_state import (
    FORMAT_VERSION,
    MEGATRON_STATE_FILE,
    STATE_FILE,
    STATE_KINDS,
    manifest_content,
    read_manifest,
)

# -------------------------------------------------------------------------------------------------------- sharded state
#
# Float32 main weights and moments of one rank as Megatron's sharded tensors, which any layout can read back.
#
# Input: this rank's OptimizerShards and the model's own sharded_state_dict.  Output: dictionaries for
# megatron.core.dist_checkpointing.  Guarantees: every number of the model is written by exactly one rank, tensors are
# distributed over the replicas; only tensors that lie on several ranks are copied between them; a rank reads only
# tensors of which it keeps a part.
#
# The optimiser's own sharded_state_dict is not used: it asserts before the first step, asks for a "step" that
# "fully_reshardable" does not store, gives all parameters one shared step tensor after a load, and collects everything
# on the first replica, which then writes alone.  An OptimizerShard knows where the numbers are; the caller sets step
# counters.


# Kind of state → Megatron's name on disk.
NAMES = {"weights": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# One key per layer, expert and half of a gated layer: shapes must not depend on the number of stages.
METADATA = {"singleton_local_shards": True}
CPU = torch.device("cpu")


class _KeptNumbers(NamedTuple):
    """Numbers [start, end) of one flattened parameter, and the rank that keeps their state."""

    start: int
    end: int
    rank: int

    @property
    def num_elements(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Place:
    """One parameter of this rank: its shard here and its place in the whole model."""

    shard: OptimizerShard
    entry: Any  # ShardedTensor of the model, or the factory of several

    def filled(self, kind: str, whole: Tensor, replica_id: Any) -> Any:
        """The sharded tensor of one kind of state; whole: float32, of the parameter's shape."""
        made = make_sharded_optimizer_tensor(self.entry, whole, prefix=f"optimizer.state.{NAMES[kind]}")
        return replace(made, replica_id=replica_id)


class ShardedState:
    """This rank's state, by name of the parameter in the whole model."""

    def __init__(self, model: RankModel, shards: Sequence[OptimizerShard]) -> None:
        """shards: of the optimiser over model.chunks."""
        entries = _entries(model.chunks)
        parameters = parameters_of_rank(model.chunks, model.config, model.layout)
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._places = {names[id(s.parameter)]: _Place(s, entries[id(s.parameter)]) for s in shards}
        self._parameters = parameters
        self._entries = {names[key]: entry for key, entry in entries.items()}

    def to_read(self, kind: str) -> dict[str, Any]:
        """Room for dist_checkpointing.load in host memory, for every tensor of which this rank keeps a part."""
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
        """Exchange the ranges that every rank keeps, and assign a writer to every tensor.  A collective."""
        kept = {name: (place.shard.start, place.shard.end) for name, place in self._places.items()}
        of_ranks: list[dict[str, tuple[int, int]]] = exchange.of_all(kept)
        writers: dict[str, int] = {}
        sharded: dict[int, list[ShardedTensorSpec]] = {}
        for index, name in enumerate(sorted(self._entries)):
            if any(self._entries[name].replica_id[:-1]):
                continue  # a copy of what another tensor rank or stage writes
            parameter = self._parameters[name]
            pieces = [_KeptNumbers(*of_ranks[r][name], r) for r in _replicas_of(parameter) if name in of_ranks[r]]
            writers[name] = writer = _writer(pieces, index)
            if max(piece.num_elements for piece in pieces) < parameter.numel():
                sharded.setdefault(writer, []).append(_sharded(name, parameter, sorted(pieces)))
        return WritePlan(self._places, writers, sharded)


class WritePlan:
    """The writer of each tensor of this rank's stage and tensor rank; the same on all its replicas."""

    def __init__(
        self, places: dict[str, _Place], writers: dict[str, int], sharded: dict[int, list[ShardedTensorSpec]]
    ) -> None:
        """writers: rank that writes a tensor; sharded: by writer, the tensors that it needs parts of."""
        self._places, self._writers, self._sharded = places, writers, sharded

    def to_write(self, kind: str, group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Tensors that this rank writes, for dist_checkpointing's savers; views of its shards if these are whole.

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


def _writer(pieces: Sequence[_KeptNumbers], index: int) -> int:
    """The rank with most of it; ranks with equal parts take turns."""
    most = max(piece.num_elements for piece in pieces)
    candidates = sorted(piece.rank for piece in pieces if piece.num_elements == most)
    return candidates[index % len(candidates)]


def _sharded(name: str, parameter: nn.Parameter, pieces: Sequence[_KeptNumbers]) -> ShardedTensorSpec:
    """pieces: end to end over the whole parameter."""
    assert sum(piece.num_elements for piece in pieces) == parameter.numel(), f"{name}: {pieces} do not cover it"
    return ShardedTensorSpec(
        specs=(TensorSpec(name, "float32", tuple(parameter.shape)),),
        shards=tuple(Shard(piece.rank, piece.num_elements) for piece in pieces),
        join=lambda parts: [torch.cat(list(parts))],
    )


# ----------------------------------------------------------------------------------------------- distributed checkpoint

LEAD_RANK = 0
Made = TypeVar("Made")


class DistributedSaver:
    """Saves of one model, by all ranks at once; replaces BackgroundSaver."""

    def __init__(
        self, state: ShardedState, exchange: Exchange, *, fingerprint: str, group: dist.ProcessGroup | None
    ) -> None:
        """fingerprint: of the model; group: gloo, of all ranks, None where there is one.  A collective."""
        self._plan, self._exchange, self._fingerprint, self._group = state.plan(exchange), exchange, fingerprint, group

    def add(self, kind: str, own: Callable[[int], Sequence[Tensor]]) -> None:
        """Unused: the format has no place for another kind, and a run file that needs one is refused."""
        raise AssertionError(f"checkpoint.trainer_format='megatron' has no place for {kind!r}")

    def save(self, directory: Path, *, num_steps_applied: int, rng: dict[str, str]) -> Future[dict[str, int]]:
        """Write the whole state into `directory`, which is made; every rank calls it and waits for its own disk.

        The future is done: {file name: bytes} of all ranks' files on rank 0 and {} elsewhere, or CheckpointError; then
        files may remain, but not megatron.json.
        """
        promised: Future[dict[str, int]] = Future()
        try:
            promised.set_result(self._write(directory, num_steps_applied, rng))
        except CheckpointError as error:
            promised.set_exception(error)
        return promised

    def close(self) -> None:
        """No effect: nothing runs between calls."""

    def _write(self, directory: Path, num_steps_applied: int, rng: dict[str, str]) -> dict[str, int]:
        agree, is_rank_zero = partial(_agreed, self._exchange), dist.get_rank() == LEAD_RANK
        agree(lambda: _begin(directory) if is_rank_zero else None)
        tensors: dict[str, Any] = {}
        for kind in STATE_KINDS:
            tensors |= self._plan.to_write(kind, self._group)
        _write_shards(directory, tensors, self._group)
        records = agree(lambda: _records_of_own_files(directory, is_rank_zero=is_rank_zero))
        files = {name: record for of_rank in self._exchange.of_all(records) for name, record in of_rank.items()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "num_steps_applied": num_steps_applied,
            "fingerprint": self._fingerprint,
            "files": files,
            "rng": rng,
        }
        num_bytes = agree(lambda: _write_manifest(directory, manifest) if is_rank_zero else 0)
        if not is_rank_zero:
            return {}
        return {name: record["num_bytes"] for name, record in files.items()} | {MEGATRON_STATE_FILE: num_bytes}


@dataclass(frozen=True, slots=True)
class DistributedCheckpoint:
    """A verified checkpoint, not yet read."""

    directory: Path
    num_steps_applied: int
    rng: dict[str, str]  # rng.read_rng of rank 0

    def read(self, state: ShardedState, exchange: Exchange) -> None:
        """Fill this rank's main weights and moments, one kind after the other.  A collective.

        Raises CheckpointError on all ranks if a verified file cannot be read any more; the state is mixed then.  Step
        counters and MegatronAdamW.publish are the caller's.
        """
        for kind in STATE_KINDS:
            # Has collectives within _agreed: their errors are raised on every rank.
            state.take(kind, _agreed(exchange, partial(self._load, state.to_read(kind))))

    def _load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        try:
            # Ranks ask for overlapping tensors, of which they keep different parts: no partition to validate.
            loaded: dict[str, Any] = dist_checkpointing.load(
                wanted, str(self.directory), validate_access_integrity=False
            )
        except CheckpointException as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {_reasons(error)}") from error
        except (CheckpointingException, OSError, KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {error}") from error
        return loaded


def is_distributed_checkpoint(directory: Path, exchange: Exchange) -> bool:
    """True if rank 0 finds a checkpoint of this format and none of our own.  A collective.

    Raises CheckpointError on all ranks if one of them cannot look.
    """

    def is_there() -> bool:
        try:
            return (directory / MEGATRON_STATE_FILE).exists() and not (directory / STATE_FILE).exists()
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be read: {error}") from error

    return bool(exchange.from_rank(LEAD_RANK, _agreed(exchange, is_there)))


def verify_distributed(directory: Path, exchange: Exchange, *, fingerprint: str) -> DistributedCheckpoint:
    """Read every byte, distributed over the ranks, and return the checkpoint.  A collective.

    fingerprint: of the model that wants it.  Raises CheckpointError on all ranks naming the file and the reason.
    """

    def verify() -> dict[str, Any]:
        manifest = read_manifest(directory / MEGATRON_STATE_FILE)
        if manifest["fingerprint"] != fingerprint:
            raise CheckpointError(f"{directory / MEGATRON_STATE_FILE}: belongs to another model")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for name in sorted(manifest["files"])[rank::num_ranks]:
            check_file(directory / name, FileRecord(**manifest["files"][name]), verify_content=True)
        return manifest

    manifest = _agreed(exchange, verify)
    return DistributedCheckpoint(directory, manifest["num_steps_applied"], manifest["rng"])


def _agreed(exchange: Exchange, action: Callable[[], Made]) -> Made:
    """Return action()'s result.  A collective; raises CheckpointError on all ranks if it raises on any."""
    error: CheckpointError | None = None
    try:
        made = action()
    except CheckpointError as failure:
        error = failure
    told = [problem for problem in exchange.of_all("" if error is None else str(error)) if problem]
    if told:
        raise CheckpointError(told[0]) from error
    return made


def _begin(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (STATE_FILE, MEGATRON_STATE_FILE):
            (directory / name).unlink(missing_ok=True)  # from here on an older state in this place is invalid
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


def _write_shards(directory: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Do what dist_checkpointing.save does with its default strategy, without its processes.  A collective."""
    # Also makes sure, over all ranks, that every tensor is covered once.
    sharded, _ = save_preprocess(tensors, validate_access_integrity=True)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    try:
        save_shards(
            mcore_to_pyt_state_dict(by_key),
            storage_writer=FileSystemWriter(directory, single_file_per_rank=True, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:  # not an Exception; raised on every rank
        raise CheckpointError(f"{directory}: cannot be written: {_reasons(error)}") from error


def _reasons(error: CheckpointException) -> str:
    """Reasons, without the tracebacks of all ranks in the exception's own text; these are in its chain."""
    return "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(error.failures.items()))


def _records_of_own_files(directory: Path, *, is_rank_zero: bool) -> dict[str, dict[str, int]]:
    """Read back this rank's files; on rank 0 also the files that are written once."""
    try:
        paths = list(directory.glob(f"__{dist.get_rank()}_*.distcp"))
        if is_rank_zero:
            TorchCommonSaveStrategy("torch", 1).save_common({}, str(directory))
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))
            paths += [directory / name for name in (".metadata", "common.pt", "metadata.json")]
        return {path.name: asdict(record_of(path)) for path in paths}
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's, for a file that it cannot write
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> int:
    content = manifest_content(manifest)
    try:
        write_atomically(directory / MEGATRON_STATE_FILE, content)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error
    return len(content)
