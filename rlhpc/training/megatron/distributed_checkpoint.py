"""Checkpoints in Megatron's own distributed format: every rank writes its share, any Megatron layout reads it.

Input: a ShardedState.  Output: the format that megatron.core.dist_checkpointing calls "torch_dist", and our
megatron.json beside it:

    __0_0.distcp  __1_0.distcp …  .metadata  common.pt  metadata.json  megatron.json

megatron.json is written last, by rank 0, when the files of all ranks are complete; it holds their checksums, the number
of steps, the random state and which model it is.
Guarantees: a failure on one rank is a CheckpointError with the same reason on all; all files are verified, each rank
reading its share of them, before any of the state is loaded.

Written in the calling process by torch's own writer.  Megatron's writer starts a server process for its results, which
hangs if the main module has no guard, and forks the training process to write, with its CUDA context and threads.
`.metadata` is a pickle: loading a checkpoint can run code, so load only your own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from rlhpc.errors import CheckpointError
from rlhpc.files import write_atomically
from rlhpc.training.checkpoint.file_record import FileRecord, check_file, record_of
from rlhpc.training.checkpoint.trainer_state import (
    FORMAT_VERSION,
    MEGATRON_STATE_FILE,
    STATE_FILE,
    manifest_content,
    read_manifest,
)
from rlhpc.training.megatron.exchange import Exchange
from rlhpc.training.megatron.sharded_state import ShardedState
from rlhpc.training.optimizer import STATE_KINDS

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
        """The format has no place for another kind; a run file that asks for one is refused."""
        raise AssertionError(f"checkpoint.trainer_format='megatron' has no place for {kind!r}")

    def save(self, directory: Path, *, num_steps_applied: int, rng: dict[str, str]) -> Future[dict[str, int]]:
        """Write everything into `directory`, which is made; every rank calls it and waits for its own disk.

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
        """Nothing runs between calls."""

    def _write(self, directory: Path, num_steps_applied: int, rng: dict[str, str]) -> dict[str, int]:
        agree, is_rank_zero = _Agreement(self._exchange), dist.get_rank() == LEAD_RANK
        agree.after(lambda: _begin(directory) if is_rank_zero else None)
        tensors: dict[str, Any] = {}
        for kind in STATE_KINDS:
            tensors |= self._plan.to_write(kind, self._group)
        _write_shards(directory, tensors, self._group)
        records = agree.after(lambda: _records_of_own_files(directory, is_rank_zero=is_rank_zero))
        files = {name: record for of_rank in self._exchange.of_all(records) for name, record in of_rank.items()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "num_steps_applied": num_steps_applied,
            "fingerprint": self._fingerprint,
            "files": files,
            "rng": rng,
        }
        num_bytes = agree.after(lambda: _write_manifest(directory, manifest) if is_rank_zero else 0)
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
        agree = _Agreement(exchange)
        for kind in STATE_KINDS:
            # Has collectives within `agree`: their errors are raised on every rank.
            state.take(kind, agree.after(partial(self._load, state.to_read(kind))))

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

    return bool(exchange.from_rank(LEAD_RANK, _Agreement(exchange).after(is_there)))


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

    manifest = _Agreement(exchange).after(verify)
    return DistributedCheckpoint(directory, manifest["num_steps_applied"], manifest["rng"])


class _Agreement:
    """All ranks continue together, or all raise the error of the first."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def after(self, action: Callable[[], Made]) -> Made:
        """Return what `action` does here.  A collective; raises CheckpointError everywhere if it does anywhere."""
        made: list[Made] = []
        error: CheckpointError | None = None
        try:
            made.append(action())
        except CheckpointError as failure:
            error = failure
        told = [problem for problem in self._exchange.of_all("" if error is None else str(error)) if problem]
        if told:
            raise CheckpointError(told[0]) from error
        return made[0]


def _begin(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in (STATE_FILE, MEGATRON_STATE_FILE):
            (directory / name).unlink(missing_ok=True)  # from here on an older state in this place is invalid
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


def _write_shards(directory: Path, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """What dist_checkpointing.save does with its default strategy, without its processes.  A collective."""
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
    """Without the traceback of every rank, which the exception's own text has; they are in its chain."""
    return "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(error.failures.items()))


def _records_of_own_files(directory: Path, *, is_rank_zero: bool) -> dict[str, dict[str, int]]:
    """Read back what this rank wrote; on rank 0 also the files that are written once."""
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
