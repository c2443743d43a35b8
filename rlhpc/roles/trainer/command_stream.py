"""One ordered stream of commands for all ranks of the trainer.

Rank 0 receives from the controller; the others receive from rank 0, over the trainer's own process group.  So
every rank sees the same commands in the same order, which is what collectives need.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhpc.contracts import BlockingClientChannel
from rlhpc.errors import RoleFailed
from rlhpc.topology import BATCHES
from rlhpc.training.process_group import open_gloo_group
from rlhpc.transport.codec import Codec

_PATIENCE = timedelta(days=30)  # ranks wait for commands as long as the controller takes


class CommandStream:
    """Yields each command on every rank."""

    def __init__(self, channel: BlockingClientChannel | None, num_ranks: int) -> None:
        """`channel` is given on rank 0 only.  Collective over all ranks."""
        self._channel = channel
        self._codec = Codec(BATCHES.to_client)
        self._group = open_gloo_group(_PATIENCE) if num_ranks > 1 else None
        self._sequence = 0

    def next(self, interrupted: Callable[[], bool]) -> Any:
        """Return the next command.  Raises ProtocolError; RoleFailed when rank 0 is gone."""
        command = self._channel.receive() if self._channel is not None else None
        if self._group is None:
            return command
        try:
            return self._share(command)
        except RuntimeError as error:
            if interrupted():
                raise KeyboardInterrupt from None
            raise RoleFailed(f"the trainer's ranks lost each other while waiting for a command: {error}") from error

    def _share(self, command: object) -> Any:
        """Send rank 0's command to all ranks; as fast as gloo when measured, little compared with a step."""
        self._sequence += 1
        frames = [] if self._channel is None else self._codec.encode(command, self._sequence)
        lengths = torch.tensor([len(memoryview(f).cast("B")) for f in frames], dtype=torch.int64)
        count = torch.tensor([len(frames)], dtype=torch.int64)
        dist.broadcast(count, src=0, group=self._group)
        if self._channel is None:
            lengths = torch.empty(int(count), dtype=torch.int64)
        dist.broadcast(lengths, src=0, group=self._group)
        payload = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        if self._channel is not None:
            payload.numpy()[:] = np.concatenate([np.frombuffer(f, dtype=np.uint8) for f in frames])
        dist.broadcast(payload, src=0, group=self._group)
        if self._channel is not None:
            return command
        borders = np.concatenate([[0], np.cumsum(lengths.numpy())])
        whole = memoryview(payload.numpy().data)
        parts = [whole[a:b] for a, b in pairwise(borders.tolist())]
        _, received = self._codec.decode(parts, "trainer-0")
        return received
