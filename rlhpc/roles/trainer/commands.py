"""One ordered stream of commands for all ranks of the trainer, and the rows of batches, of which each rank has its own.

    controller ──commands──▶ rank 0 ──▶ all ranks        over the trainer's own process group
               ──rows──────▶ every rank                  ahead, while the step before is trained

So every rank sees the same commands in the same order, which is what collectives need, and no rank is sent what it does
not train.  Rows wait in this process until their command comes: ZeroMQ's thread receives them.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.base.patience import Deadline
from rlhpc.protocol.contracts import BlockingClientChannel
from rlhpc.protocol.errors import ChannelError, ChannelTimeout, ProtocolError, RlhpcError, RoleFailed
from rlhpc.protocol.messages import BATCHES, CONTROL, BatchRows, Heartbeat, SaveReport, StopRole, TrainBatch
from rlhpc.protocol.types import PackedBatch
from rlhpc.roles.lifecycle import RoleContext, hello, leave_at_once
from rlhpc.training.ranks import open_gloo_group
from rlhpc.transport.codec import Codec, Frame
from rlhpc.transport.open import connect_blocking

# ---------------------------------------------------------------------------------------------------------- end request
#
# Which signals end a trainer, and which do not.
#
# It ignores Slurm's signals, which reach every process of a job step, because only the controller knows which step to
# finish and what to save.  A trainer whose parent has died exits.


FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_STDERR = 2


class EndRequest:
    """Listens for signals; created in the main thread, where KeyboardInterrupt is raised."""

    def __init__(self) -> None:
        """Listen from now on."""
        self._is_requested = False
        self._was_told = False
        self._parent_pid = os.getppid()
        for number in FROM_SLURM:
            signal.signal(number, self._stay)
            signal.siginterrupt(number, False)  # a signal must not interrupt system calls of libraries
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C

    def is_made(self) -> bool:
        """Whether a signal has asked this process to leave."""
        return self._is_requested

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
        raise KeyboardInterrupt  # an interrupted blocking call keeps its state

    def _stay(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent_pid:  # so the kernel sends it because the parent is dead (lifecycle.py)
            self._leave(number, frame)
        if not self._was_told:
            self._was_told = True
            # Not through logging: the line that the signal has interrupted may hold its stream.
            name = signal.Signals(number).name
            line = f"{time.strftime('%F %T')} trainer {name}: signal from Slurm: the controller decides when to stop\n"
            os.write(_STDERR, line.encode())


# ------------------------------------------------------------------------------------------------------------ heartbeat
#
# The trainer's heartbeat, from its own thread: the main thread is busy for whole steps.
#
# The same connection carries the messages of other threads of the trainer, since a socket belongs to one thread.  The
# controller stops by it a rank that is not ready for commands yet: one that loads its model, waits for other ranks or
# for the channel of commands has nothing to finish, and leaves at once.


log = logging.getLogger("rlhpc.trainer")
LOOK_S = 0.2  # between two looks whether the controller has said anything


class TrainerHeartbeat:
    """Sends Hello, then heartbeats until closed.

    Any thread may call `tell`, the main thread `now`; a separate thread does the rest.
    """

    def __init__(self, context: RoleContext, interval_s: float, leave: Callable[[int], object] = leave_at_once) -> None:
        """leave: ends the process with an exit status; called when the controller stops it before its first command."""
        self._context, self._interval_s, self._leave = context, interval_s, leave
        self._current = Heartbeat("starting", "", -1)
        self._told: queue.SimpleQueue[SaveReport | None] = queue.SimpleQueue()  # None: stop
        self._failure: RlhpcError | OSError | None = None  # of that thread: nobody else can say that it is silent
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        """Start beating."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the messages that are queued, and stop."""
        self._told.put(None)
        self._thread.join(timeout=5.0)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        """Replace the content of the next heartbeats.  Raises RoleFailed if none will ever come."""
        if self._failure is not None:
            raise RoleFailed(f"heartbeats have ended: {self._failure}") from self._failure
        self._current = Heartbeat(state, waits_for, policy_version)

    def tell(self, message: SaveReport) -> None:
        """Send a message to the controller at once, between heartbeats."""
        self._told.put(message)

    def _beat(self) -> None:
        try:
            control = connect_blocking(
                CONTROL,
                **self._context.caller,
                timeout_s=self._context.meet_timeout_s,
            )
        except (RlhpcError, OSError) as error:  # of keys, or an address that cannot be read for as long
            self._failure = error
            return
        try:
            control.send(hello(self._context))
            control.send(self._current)
            while self._speak_until_next_beat(control):
                control.send(self._current)
            control.close()
        except ChannelError:
            return  # the controller is gone; the main thread finds out at its next message
        except (RlhpcError, OSError) as error:
            self._failure = error

    def _speak_until_next_beat(self, control: BlockingClientChannel) -> bool:
        """Send queued messages until the next heartbeat is due.  False when asked to stop."""
        next_beat = Deadline(self._interval_s)
        while not next_beat.is_over:
            self._obey(control)
            try:
                message = self._told.get(timeout=min(LOOK_S, next_beat.left_s))
            except queue.Empty:
                continue
            if message is None:
                return False
            control.send(message)
        return True

    def _obey(self, control: BlockingClientChannel) -> None:
        """Leave if the controller has said so; it says so here only to ranks that obey no commands yet."""
        with suppress(ChannelTimeout):
            message = control.receive(0.0)
            if isinstance(message, StopRole):
                log.info("asked to stop: %s", message.reason)
                self._leave(0)


# ------------------------------------------------------------------------------------------------------- command stream


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
