"""Time limits for waits.

Input: a limit in seconds from now; optionally a clock and a sleep function.  Output: the time left, and loops that poll
until then.  Guarantees: such a loop polls at least once, however short the limit, and once more after its last pause.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

Sleep = Callable[[float], object]  # seconds


class Deadline:
    """The end of a wait that begins now."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: math.inf never ends.  clock: seconds since an arbitrary moment."""
        self.limit_s = limit_s
        self._clock, self._began_s = clock, clock()

    @property
    def passed_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it is over."""
        return max(0.0, self.limit_s - self.passed_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.passed_s >= self.limit_s

    def polls(self, every_s: float, sleep: Sleep = time.sleep) -> Iterator[None]:
        """Yield at once, and then after every pause of `every_s` that begins before the end."""
        yield
        while not self.is_over:
            sleep(every_s)
            yield

    def wait_for(self, is_so: Callable[[], bool], every_s: float, sleep: Sleep = time.sleep) -> bool:
        """Poll until the condition is true; False: not in time."""
        return any(is_so() for _ in self.polls(every_s, sleep))
