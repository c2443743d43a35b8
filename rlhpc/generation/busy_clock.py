"""Measure for how long an engine had work.

Pure: time is asked from the clock that is passed in.
"""

from __future__ import annotations

from rlhpc.contracts import Clock


class BusyClock:
    """Seconds with at least one request in flight, pauses excluded."""

    def __init__(self, clock: Clock) -> None:
        """Starts without requests, not paused."""
        self._clock = clock
        self._num_in_hand = 0
        self._is_paused = False
        self._past_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self._past_s + (self._clock() - self._since if self._since is not None else 0.0)

    def enter(self) -> None:
        """A request begins."""
        self._num_in_hand += 1
        self._settle()

    def leave(self) -> None:
        """A request ends."""
        self._num_in_hand -= 1
        self._settle()

    def pause(self) -> None:
        """Stop counting."""
        self._is_paused = True
        self._settle()

    def resume(self) -> None:
        """Go on counting."""
        self._is_paused = False
        self._settle()

    def _settle(self) -> None:
        now = self._clock()
        if self._since is not None:
            self._past_s += now - self._since
        self._since = now if self._num_in_hand > 0 and not self._is_paused else None
