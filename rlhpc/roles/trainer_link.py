"""The controller's conversation with the trainer: a question, then its answer, one at a time.

Only the train loop asks.  The trainer answers in order, so that an answer of another kind than expected is a bug.
What comes out of turn, the end of a checkpoint's writing, comes over the control channel.
"""

from __future__ import annotations

from typing import TypeVar

from rlhpc.contracts import ServerChannel
from rlhpc.errors import ProtocolError
from rlhpc.messages import TrainerReady

Answer = TypeVar("Answer")
LEAD = "trainer-0"


class TrainerLink:
    """Asks the lead rank and waits for its answers."""

    def __init__(self, batches: ServerChannel) -> None:
        self._batches = batches

    async def ready(self) -> TrainerReady:
        """Wait until the trainer has loaded its model."""
        return await self.answer(TrainerReady)

    async def tell(self, command: object) -> None:
        """Queue a command that has no answer, or whose answer is awaited later."""
        await self._batches.send(LEAD, command, timeout_s=60.0)

    async def ask(self, command: object, kind: type[Answer]) -> Answer:
        """Queue a command and wait for its answer.  Raises ProtocolError for an answer of another kind."""
        await self.tell(command)
        return await self.answer(kind)

    async def answer(self, kind: type[Answer]) -> Answer:
        """Wait for the next answer.  Nothing here times out: a dead trainer is the fleet's to notice."""
        peer, message = await self._batches.receive()
        if not isinstance(message, kind):
            raise ProtocolError(peer, type(message).__name__, f"expected {kind.__name__}")
        return message
