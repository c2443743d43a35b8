"""Small instruments: how fast, how idle, how late, how long still.

Pure but for LoopLag; time comes in as an argument or as a clock, always monotonic seconds.  A clock that stands still
gives zero, never a division by it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rlhpc.contracts import Clock


class Rate:
    """Amount per second over a sliding window."""

    def __init__(self, window_s: float, now: float) -> None:
        """now: when counting begins; until a window has passed, the rate is over the time since then."""
        self._window_s, self._began = window_s, now
        self._events: deque[tuple[float, float]] = deque()  # (when, how much)
        self._sum = 0.0

    def add(self, now: float, amount: float) -> None:
        """Note that `amount` was done; `now` never goes back."""
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
            self._sum = 0.0  # rounding does not add up over weeks


class IdleMeter:
    """Share of time spent in named waits.  Waits of one meter do not overlap: it belongs to one loop."""

    def __init__(self, clock: Clock) -> None:
        """Begin to count now."""
        self._clock = clock
        self._began = clock()
        self._waited_s: dict[str, float] = {}
        self._current: tuple[str, float] | None = None  # (name, since)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Count the time in the block as waiting for `name`, also when it raises."""
        assert self._current is None, f"waiting for {name!r} inside waiting for {self._current}"
        self._current = (name, self._clock())
        try:
            yield
        finally:
            self._account(self._clock())
            self._current = None

    @property
    def waits_for(self) -> str:
        """Name of the wait going on now, "" where there is none."""
        return self._current[0] if self._current else ""

    def take(self) -> tuple[float, dict[str, float]]:
        """Return (idle ratio, seconds by name) since the last take, and begin anew; a wait going on is cut in two."""
        now = self._clock()
        self._account(now)
        waited_s, span_s = self._waited_s, now - self._began
        self._waited_s, self._began = {}, now
        return (min(1.0, sum(waited_s.values()) / span_s) if span_s > 0 else 0.0), waited_s

    def _account(self, now: float) -> None:
        if self._current is not None:
            name, since = self._current
            self._waited_s[name] = self._waited_s.get(name, 0.0) + now - since
            self._current = (name, now)


class LoopLag:
    """How late an event loop comes back to a task that slept: what every message waits besides."""

    def __init__(
        self, clock: Clock, interval_s: float = 0.1, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        """interval_s: between two looks."""
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

        Sees a lag that still lasts: whoever takes is on the loop too, and may come before the task that slept.
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
        """Note that `num_done` steps of the run are done."""
        self._ends.append((num_done, now))

    def remaining_s(self) -> float | None:
        """Seconds from the last step to the end of the run; None before two steps were seen."""
        if len(self._ends) < 2:
            return None
        (first_done, first_s), (last_done, last_s) = self._ends[0], self._ends[-1]
        if last_done <= first_done:
            return None
        return (last_s - first_s) / (last_done - first_done) * max(0, self._num_steps - last_done)
