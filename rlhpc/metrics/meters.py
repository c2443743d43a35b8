"""Small meters: rates, event-loop lag, remaining time.

Pure except LoopLag; time is passed in, as an argument or as a clock, always monotonic seconds.  If the clock does not
advance, the result is zero, not a division by zero.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from rlhpc.contracts import Clock


class Rate:
    """Amount per second over a sliding window."""

    def __init__(self, window_s: float, now: float) -> None:
        """now: start of counting; until a window has passed, the rate is over the time since then."""
        self._window_s, self._began = window_s, now
        self._events: deque[tuple[float, float]] = deque()  # (when, how much)
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """Add `amount`; `now` never decreases."""
        self._events.append((now, amount))
        self._sum += amount
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Amount of the last window over its length; 0 where no time has passed."""
        self._forget(now)
        span_s = min(self._window_s, now - self._began)
        return self._sum / span_s if span_s > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._events and self._events[0][0] <= now - self._window_s:
            self._sum -= self._events.popleft()[1]
        if not self._events:
            self._sum = 0.0  # so that rounding errors do not accumulate over weeks


class LoopLag:
    """How late an event loop resumes a task that slept: an extra delay of every message."""

    def __init__(
        self, clock: Clock, interval_s: float = 0.1, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """interval_s: between two measurements."""
        self._clock, self._interval_s, self._sleep = clock, interval_s, sleep
        self._max_s = 0.0
        self._sleeps_until: float | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            self._sleeps_until = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self._look()

    def take(self) -> float:
        """Return the worst lag in seconds since the last take.

        Includes a lag that still lasts: the caller runs on the loop too, perhaps before the task that slept.
        """
        self._look()
        worst_s, self._max_s = self._max_s, 0.0
        return worst_s

    def _look(self) -> None:
        if self._sleeps_until is not None:
            self._max_s = max(self._max_s, self._clock() - self._sleeps_until)


class Eta:
    """When the run will end, from the pace of its last steps."""

    def __init__(self, num_steps: int, window_steps: int = 20) -> None:
        """num_steps: of the whole run.

        The first step of an attempt waits for engines to start; it only sets the clock and counts for nothing.
        """
        self._num_steps = num_steps
        self._ends: deque[tuple[int, float]] = deque(maxlen=window_steps + 1)  # (steps done, when)

    def step_done(self, num_done: int, now: float) -> None:
        """Record that `num_done` steps of the run are done."""
        self._ends.append((num_done, now))

    def remaining_s(self) -> float | None:
        """Seconds from the last step to the end of the run; None before two steps were seen."""
        if len(self._ends) < 2:
            return None
        (first_done, first_s), (last_done, last_s) = self._ends[0], self._ends[-1]
        if last_done <= first_done:
            return None
        return (last_s - first_s) / (last_done - first_done) * max(0, self._num_steps - last_done)
