"""The controller's requests to the trainer and its replies, one at a time.

Only the train loop asks.  The trainer answers in order, so that an answer of another kind than expected is a bug.
The one message out of order, the completion of a checkpoint, comes over the control channel.  The rows of a batch go
straight to the ranks that train them, each its own, and may be sent while another request is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelTimeout, ProtocolError
from rlhpc.messages import BatchRows, TrainerReady
from rlhpc.types import PackedMinibatch

Answer = TypeVar("Answer")
RANK_0 = "trainer-0"
SEND_S = 60.0  # for a rank to take a message


class TrainerLink:
    """Sends requests to rank 0 and waits for its replies."""

    def __init__(self, batches: ServerChannel) -> None:
        self._batches = batches
        self._replicas: tuple[int, ...] = (0,)  # of every rank
        self.obeys = False  # whether the ranks have loaded everything, and wait for commands

    async def ready(self, meet_timeout_s: float, missing: Callable[[], Collection[str]]) -> TrainerReady:
        """Wait, without a limit, until the trainer has loaded its model.

        Raises ChannelTimeout if some ranks are still `missing` after meet_timeout_s, and names them.
        """
        ready = await self._ready(meet_timeout_s, missing)
        self._replicas, self.obeys = ready.replicas, True
        return ready

    async def _ready(self, meet_timeout_s: float, missing: Callable[[], Collection[str]]) -> TrainerReady:
        try:
            return await self.answer(TrainerReady, meet_timeout_s)
        except ChannelTimeout:
            if names := missing():
                raise ChannelTimeout(
                    f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} not connected after "
                    f"{meet_timeout_s:g} s; see logs/trainer-*/, or whether the job that starts it is still queued"
                ) from None
        return await self.answer(TrainerReady)

    async def tell(self, command: object) -> None:
        """Queue a command that has no answer, or whose answer is awaited later."""
        await self._batches.send(RANK_0, command, timeout_s=SEND_S)

    async def send_rows(self, number: int, minibatches: Sequence[PackedMinibatch]) -> None:
        """Queue the rows of a batch to all ranks, to each those of its replica."""
        for rank, replica in enumerate(self._replicas):
            mine = tuple(_of_replica(minibatch, replica) for minibatch in minibatches)
            await self._batches.send(f"trainer-{rank}", BatchRows(number, mine), timeout_s=SEND_S)
            await asyncio.sleep(0)  # encoding takes milliseconds

    async def ask(self, command: object, kind: type[Answer]) -> Answer:
        """Queue a command and wait for its answer.  Raises ProtocolError for an answer of another kind."""
        await self.tell(command)
        return await self.answer(kind)

    async def answer(self, kind: type[Answer], timeout_s: float | None = None) -> Answer:
        """Wait for the next answer.  As a rule without a limit: the registry of processes notices a dead trainer.

        Raises ChannelTimeout where there is one, ProtocolError for an answer of another kind.
        """
        peer, message = await self._batches.receive(timeout_s)
        if not isinstance(message, kind):
            raise ProtocolError(peer, type(message).__name__, f"expected {kind.__name__}")
        return message


def _of_replica(minibatch: PackedMinibatch, replica: int) -> PackedMinibatch:
    """The minibatch, without the rows of the others."""
    ranks = tuple(rows if place == replica else () for place, rows in enumerate(minibatch.ranks))
    return replace(minibatch, ranks=ranks)
