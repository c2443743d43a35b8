"""Seconds in which this process was awake: the clock by which deadlines of others are measured.

A process that was stopped, suspended with its machine or blocked by a filesystem has received nothing meanwhile, though
everybody may have sent: the messages wait in its queues.  Such time counts neither as silence of others nor towards the
deadline of a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlhpc.contracts import Clock

log = logging.getLogger("rlhpc.clock")
LOOKS_PER_STRETCH = 5  # so that an event loop that is only busy loses none of its time


class AwakeClock:
    """A monotonic clock that stops while the event loop is blocked, except for `longest_s`."""

    def __init__(
        self, clock: Clock, longest_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """longest_s: the most that the time between two looks counts for; small compared with every time-out."""
        self._clock, self._longest_s, self._sleep = clock, longest_s, sleep
        self._counted_s = self._looked_at_s = clock()

    def __call__(self) -> float:
        """Seconds since an arbitrary moment, without pauses."""
        return self._counted_s + min(self._clock() - self._looked_at_s, self._longest_s)

    async def run(self) -> None:
        """Look periodically until cancelled: without looks the clock stops."""
        while True:
            self.look()
            await self._sleep(self._longest_s / LOOKS_PER_STRETCH)

    def look(self) -> None:
        """The event loop runs: count the time since the last look."""
        now_s = self._clock()
        elapsed_s = now_s - self._looked_at_s
        if elapsed_s > 2 * self._longest_s:
            log.warning("this process was paused for %.1f s: this does not count as silence of others", elapsed_s)
        self._counted_s, self._looked_at_s = self(), now_s
