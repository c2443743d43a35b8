"""Write a checkpoint while training continues: copy the state to the host, then stream it to disk from a thread.

Input: the live shards of masters and moments of every rank.  Output: the files of trainer_state.py, written by rank 0.
Guarantees: the checkpoint is the state at the call of save(), bit for bit; training waits only for one copy to the
host; a failed write is reported on every rank and leaves none of them waiting.
Costs 12 bytes of host memory for every parameter that a rank owns.

The thread is not a daemon: torch must not be torn down under it.  A process that wants to leave sooner than the disk
allows cancels the future; one that is killed leaves a directory without manifest, which is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhpc.protocol.errors import CheckpointError
from rlhpc.training.backends import pin, unpin
from rlhpc.training.checkpoint_tensors import ShardedTensorSpec, gather_stream
from rlhpc.training.ranks import open_gloo_group
from rlhpc.training.trainer_state import STATE_KINDS, write_checkpoint

# Ranks that have sent their shards wait for the disk of rank 0.  A dead rank is noticed by its closed connection.
WRITE_TIMEOUT = timedelta(days=1)


def open_save_group() -> dist.ProcessGroup | None:
    """Return a gloo group of all ranks for one BackgroundSaver; None where this process is the only one.  A collective.

    The saver's thread needs a group to itself: two threads that use one would mix up their messages.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return open_gloo_group(WRITE_TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Write:
    """One save, as input of the thread."""

    directory: Path
    num_steps_applied: int
    rng: dict[str, str]
    is_given_up: Callable[[], bool]


class BackgroundSaver:
    """Saves of one model on one rank, one at a time.  Every rank has one, over the same items in the same order."""

    def __init__(
        self,
        items: Sequence[ShardedTensorSpec],
        own: Callable[[str, int], Sequence[Tensor]],
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        lead_rank: int = 0,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Allocate the host buffers and touch every page of them, so that the first save is as fast as the others.

        own(kind, index): this rank's live float32 shards of items[index], for a kind of STATE_KINDS, in the order of
        its shards; flat or not; called at each save, only for items of which this rank has shards.  items: with float32
        specs.  device: where the shards live; on CUDA the buffers are pinned.  group: of open_save_group.  adapter:
        record for the manifest if the items are adapters.
        """
        # A tensor that cannot be made is a failed write like any other, reported to every rank.
        self._items = [replace(item, join=partial(_joined, item)) for item in items]
        self._group, self._lead_rank, self._adapter = group, lead_rank, adapter
        self._own: dict[str, Callable[[int], Sequence[Tensor]]] = {kind: partial(own, kind) for kind in STATE_KINDS}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._mine = [
            (index, [shard.num_elements for shard in item.shards if shard.rank == self._rank])
            for index, item in enumerate(items)
            if any(shard.rank == self._rank for shard in item.shards)
        ]
        self._num_elements = sum(sum(sizes) for _, sizes in self._mine)
        self._is_pinned = device.type == "cuda" and self._num_elements > 0
        self._pinned: list[int] = []  # addresses
        self._copies = {kind: self._buffer() for kind in STATE_KINDS}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[dict[str, int]] | None = None
        self._out_of_step = ""  # reason why nothing can be gathered any more

    def add(self, kind: str, own: Callable[[int], Sequence[Tensor]]) -> None:
        """Save tensors of another kind with each state from now on.  own(index): live, as in __init__."""
        self.wait()
        self._own[kind], self._copies[kind] = own, self._buffer()

    def save(self, directory: Path, *, num_steps_applied: int, rng: dict[str, str]) -> Future[dict[str, int]]:
        """Copy this rank's shards, start writing into `directory`, and return.  Every rank calls it.

        Waits for the previous save.  The future gives {file name: bytes} on rank 0 and {} elsewhere, or
        CheckpointError; then files may remain, but not the manifest.  Cancelling rank 0's future ends the write at the
        next tensor: a CheckpointError elsewhere.
        """
        self.wait()
        self._copy()
        promised: Future[dict[str, int]] = Future()
        write = _Write(directory, num_steps_applied, rng, promised.cancelled)
        self._running = self._thread.submit(self._write, write)
        self._running.add_done_callback(partial(_hand_on, promised))
        return promised

    def wait(self) -> None:
        """Wait until nothing is being written; its outcome is ignored."""
        if self._running is not None:
            wait((self._running,))

    def close(self) -> None:
        """Wait for a running save; then free the buffers.  Idempotent.  Call it before leaving the process groups."""
        self._thread.shutdown(wait=True)
        while self._pinned:
            unpin(self._pinned.pop())
        self._copies = {}

    # ------------------------------------------------------------------------------------------------ in the caller

    def _buffer(self) -> dict[int, list[Tensor]]:
        """Views of one new buffer: this rank's shards of each item."""
        buffer = torch.empty(self._num_elements, dtype=torch.float32).fill_(0.0)  # touches every page
        if self._is_pinned:
            self._pinned.append(pin(buffer))
        shards = iter(buffer.split_with_sizes([size for _, sizes in self._mine for size in sizes]))
        return {index: [next(shards) for _ in sizes] for index, sizes in self._mine}

    @torch.no_grad()
    def _copy(self) -> None:
        for kind, copies in self._copies.items():
            for index, targets in copies.items():
                for target, shard in zip(targets, self._own[kind](index), strict=True):
                    assert (shard.dtype, shard.numel()) == (torch.float32, target.numel()), self._items[index].specs
                    target.copy_(shard.reshape(-1), non_blocking=self._is_pinned)
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()

    # ------------------------------------------------------------------------------------------------ in the thread

    def _write(self, write: _Write) -> dict[str, int]:
        """Stream the copies to rank 0, which writes them.  Raises CheckpointError.

        Ranks that are out of step stay so: the next stream of one rank would be taken for this one.
        """
        if not self._out_of_step:
            try:
                return self._write_together(write)
            except (RuntimeError, MemoryError) as failure:  # a rank is gone; or no room for another one's shards
                self._out_of_step = f"the state could not be gathered: {failure}"
            self._cut_off()  # not above: the failure's traceback refers to the group
        raise CheckpointError(f"{write.directory}: {self._out_of_step}")

    def _write_together(self, write: _Write) -> dict[str, int]:
        files: dict[str, int] = {}
        error: CheckpointError | None = None
        if self._rank == self._lead_rank:
            try:
                files = self._write_files(write)
            except CheckpointError as failure:
                error = failure
        else:
            for _ in self._stream():
                pass
        has_succeeded = self._hear_lead(error is None)
        if error is not None:
            raise error
        if not has_succeeded:
            raise CheckpointError(f"{write.directory}: rank 0 could not write it; see its log")
        return files

    def _cut_off(self) -> None:
        """Close the connections, so that ranks that still send to this one fail."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _write_files(self, write: _Write) -> dict[str, int]:
        tensors = self._stream()
        specs = [spec for item in self._items for spec in item.specs]
        try:
            return write_checkpoint(
                write.directory,
                specs,
                lambda kind: _unless_given_up(tensors, write),
                num_steps_applied=write.num_steps_applied,
                rng=write.rng,
                kinds=tuple(self._copies),
                adapter=self._adapter,
            )
        finally:
            for _ in tensors:  # after an error: the others go on sending, and rank 0 must receive it
                pass

    def _stream(self) -> Iterator[Tensor]:
        """Yield every tensor of every kind on rank 0, in the order of kinds and items; nothing elsewhere.

        Raises CheckpointError for a tensor that cannot be made, after receiving everything that the others send.
        """
        kinds = iter(self._copies.values())
        for copies in kinds:
            try:
                yield from self._gathered(copies)
            except CheckpointError:
                for others in kinds:
                    with suppress(CheckpointError):  # perhaps of the same tensor: no longer needed
                        for _ in self._gathered(others):
                            pass
                raise

    def _gathered(self, copies: dict[int, list[Tensor]]) -> Iterator[Tensor]:
        tensors = gather_stream(
            self._items,
            copies.__getitem__,
            to_rank=self._lead_rank,
            dtype=torch.float32,
            device=torch.device("cpu"),
            group=self._group,
        )
        return (tensor for _, tensor in tensors)

    def _hear_lead(self, has_succeeded: bool) -> bool:
        """Return rank 0's answer on every rank."""
        if self._group is None:
            return has_succeeded
        answer = torch.tensor(int(has_succeeded), dtype=torch.int32)
        dist.broadcast(answer, src=self._lead_rank, group=self._group)
        return bool(answer.item())


def _joined(item: ShardedTensorSpec, pieces: Sequence[Tensor]) -> list[Tensor]:
    try:
        return list(item.join(pieces))
    except (RuntimeError, MemoryError) as error:  # torch's, if there is no memory
        raise CheckpointError(f"{item.specs[0].name} cannot be put together: {error}") from error


def _unless_given_up(tensors: Iterator[Tensor], write: _Write) -> Iterator[Tensor]:
    for tensor in tensors:
        if write.is_given_up():
            raise CheckpointError(f"{write.directory}: cancelled while it was written")
        yield tensor


def _hand_on(promised: Future[dict[str, int]], ended: Future[dict[str, int]]) -> None:
    """Set the outcome, unless the future was cancelled."""
    if not promised.set_running_or_notify_cancel():
        return
    error = ended.exception()
    if error is not None:
        promised.set_exception(error)
    else:
        promised.set_result(ended.result())
