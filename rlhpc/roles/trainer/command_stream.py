"""One ordered stream of commands for all ranks of the trainer, and the rows of batches, of which each rank has its own.

    controller ──commands──▶ rank 0 ──▶ all ranks        over the trainer's own process group
               ──rows──────▶ every rank                  ahead, while the step before is trained

So every rank sees the same commands in the same order, which is what collectives need, and no rank is sent what it does
not train.  Rows wait in this process until their command comes: ZeroMQ's thread receives them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.contracts import BlockingClientChannel
from rlhpc.errors import ChannelTimeout, ProtocolError, RoleFailed
from rlhpc.messages import BatchRows, TrainBatch
from rlhpc.topology import BATCHES
from rlhpc.training.process_group import open_gloo_group
from rlhpc.transport.codec import Codec, Frame
from rlhpc.types import PackedBatch

ROWS_S = 60.0  # for rows that were sent before their command, and to another rank's command
# The exception of a signal's handler is lost where Python runs a destructor: it is looked for as often as this.
_LOOK_S = 0.5
_PATIENCE = timedelta(days=30)  # ranks wait for commands as long as the controller takes
_FIRST_BYTES = 1 << 16  # of a command, in the first broadcast: almost all fit
_LENGTH = struct.Struct("<Q")


class CommandStream:
    """Yields each command on every rank."""

    def __init__(self, channel: BlockingClientChannel, rank: int, num_ranks: int) -> None:
        """`channel`: of this rank.  Collective over all ranks."""
        self._channel, self._rank, self._num_ranks = channel, rank, num_ranks
        self._codec = Codec(*BATCHES.from_server)
        self._group = open_gloo_group(_PATIENCE) if num_ranks > 1 else None
        self._rows: BatchRows | None = None  # the newest
        self._sequence = 0

    def replicas(self, mine: int) -> tuple[int, ...]:
        """Which data-parallel replica each rank is part of.  Collective over all ranks."""
        if self._group is None:
            return (mine,)
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self._num_ranks)]
        dist.all_gather(found, torch.tensor([mine]), group=self._group)
        return tuple(int(replica) for replica in found)

    def next(self, interrupted: Callable[[], bool]) -> Any:
        """Return the next command, a batch with the rows of this rank's replica alone.

        interrupted: whether this process has been asked to leave.
        Raises KeyboardInterrupt if so; ProtocolError; RoleFailed when rank 0 is gone, or rows are lost.
        """
        command = self._next_command(interrupted) if self._rank == 0 else None
        if self._group is not None:
            try:
                command = self._share(command)
            except RuntimeError as error:
                if interrupted():
                    raise KeyboardInterrupt from None
                raise RoleFailed(f"the trainer's ranks lost each other while waiting for a command: {error}") from error
        return self._with_rows(command) if isinstance(command, TrainBatch) else command

    def _next_command(self, interrupted: Callable[[], bool]) -> Any:
        while not interrupted():
            with suppress(ChannelTimeout):
                message = self._channel.receive(_LOOK_S)
                if not isinstance(message, BatchRows):
                    return message
                self._rows = message
        raise KeyboardInterrupt

    def _with_rows(self, command: TrainBatch) -> PackedBatch:
        while self._rows is None or self._rows.number < command.rows:
            try:
                message = self._channel.receive(ROWS_S)
            except ChannelTimeout as error:
                raise RoleFailed(
                    f"rank {self._rank} has not received rows {command.rows}, of step {command.batch.step}, within "
                    f"{ROWS_S:g} s; {self._channel.statistics.messages_lost} messages of its channel were lost"
                ) from error
            if not isinstance(message, BatchRows):
                raise ProtocolError("controller", type(message).__name__, f"rows {command.rows} are due")
            self._rows = message
        rows, self._rows = self._rows, None
        if rows.number != command.rows:
            raise RoleFailed(f"rank {self._rank} has rows {rows.number}, and is to train rows {command.rows}")
        return replace(command.batch, minibatches=rows.minibatches)

    def _share(self, command: object) -> Any:
        """Send rank 0's command to all ranks: one broadcast, two for a long one."""
        self._sequence += 1
        whole = _joined(self._codec.encode(command, self._sequence)) if self._rank == 0 else b""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        _fill(first, whole[:_FIRST_BYTES])
        dist.broadcast(first, src=0, group=self._group)
        num_left = max(0, _LENGTH.unpack_from(first.numpy().data)[0] - _FIRST_BYTES)
        rest = torch.zeros(num_left, dtype=torch.uint8)
        if num_left:
            _fill(rest, whole[_FIRST_BYTES:])
            dist.broadcast(rest, src=0, group=self._group)
        if self._rank == 0:
            return command
        _, received = self._codec.decode(_parted(first.numpy().tobytes() + rest.numpy().tobytes()), "trainer-0")
        return received


def _joined(frames: Sequence[Frame]) -> bytes:
    """Their whole length with this head, their number, the length of each, then all."""
    lengths = [len(frame) for frame in frames]
    head = b"".join([_LENGTH.pack(length) for length in (len(lengths), *lengths)])
    return b"".join([_LENGTH.pack(_LENGTH.size + len(head) + sum(lengths)), head, *frames])


def _parted(whole: bytes) -> list[Frame]:
    """Undo _joined; zeros may follow."""
    count = _LENGTH.unpack_from(whole, _LENGTH.size)[0]
    start, parts = (2 + count) * _LENGTH.size, list[Frame]()
    for place in range(count):
        end = start + _LENGTH.unpack_from(whole, (2 + place) * _LENGTH.size)[0]
        parts.append(memoryview(whole)[start:end])
        start = end
    return parts


def _fill(tensor: torch.Tensor, data: bytes) -> None:
    tensor.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
