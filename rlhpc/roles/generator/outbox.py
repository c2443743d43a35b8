"""Keep delivered rollouts until the controller has them on disk; a controller that died before gets them again.

Input: ScoredRollout.  Output: Delivery, in order, again after a silence and to the next controller.
Guarantee: a rollout is deleted only when a controller has acknowledged it, or lost when this process dies.
"""

from __future__ import annotations

import asyncio
import uuid

from rlhpc.contracts import ClientChannel
from rlhpc.messages import Delivered, Delivery
from rlhpc.types import ScoredRollout

SILENCE_S = 20.0  # without an acknowledgement, though something waits for one: it is sent again
LONGEST_SILENCE_S = 300.0  # each silence after the first is twice as long: a disk may refuse for minutes


class Outbox:
    """What one generator has delivered and must not forget yet.  It outlives the sessions with controllers."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex[:12]
        self._num_delivered = 0
        self._kept: dict[int, tuple[ScoredRollout, int]] = {}  # in the order of delivery, each with its timeline

    @property
    def num_kept(self) -> int:
        """Rollouts that wait for an acknowledgement."""
        return len(self._kept)

    async def deliver(self, channel: ClientChannel, scored: ScoredRollout, timeline: int) -> None:
        """Send a rollout, and keep it.  timeline: of the weights that sampled it.

        Raises ChannelError; then it is kept, too.
        """
        self._num_delivered += 1
        self._kept[self._num_delivered] = scored, timeline
        await self._send(channel, self._num_delivered)

    def acknowledged(self, message: Delivered) -> None:
        """The controller has all up to this one on disk."""
        if message.outbox == self._name:
            for number in [number for number in self._kept if number <= message.number]:
                del self._kept[number]

    async def repeat(self, channel: ClientChannel) -> None:
        """Send all that is kept to a controller that may not know it, and again after each silence; endlessly."""
        silence_s = SILENCE_S
        while True:
            oldest = min(self._kept, default=0)
            for number in list(self._kept):
                if number in self._kept:
                    await self._send(channel, number)
            while True:  # until nothing was acknowledged for long
                await asyncio.sleep(silence_s)
                before, oldest = oldest, min(self._kept, default=0)
                if oldest and oldest == before:
                    silence_s = min(2 * silence_s, LONGEST_SILENCE_S)
                    break
                silence_s = SILENCE_S

    async def _send(self, channel: ClientChannel, number: int) -> None:
        scored, timeline = self._kept[number]
        await channel.send(Delivery(number, min(self._kept), self._name, timeline, scored))
