"""Measure for how long an engine had work, and how much of it at once.

Pure: the clock is passed in.
"""

from __future__ import annotations

from rlhpc.contracts import Clock


class BusyClock:
    """Seconds with at least one request in flight, pauses excluded."""

    def __init__(self, clock: Clock, max_num_seqs: int) -> None:
        """Starts without requests, not paused.  max_num_seqs: requests that are decoded together at most."""
        self._clock, self._max_num_seqs = clock, max_num_seqs
        self._num_in_hand = 0
        self._is_paused = False
        self._past_s = self._past_decoding_s = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Busy seconds up to now."""
        return self._past_s + self._present_s

    @property
    def decoding_s(self) -> float:
        """Request-seconds up to now: the number of requests that are decoded, integrated over the same seconds."""
        return self._past_decoding_s + self._present_s * self._num_decoded

    def enter(self) -> None:
        """A request begins."""
        self._settle()
        self._num_in_hand += 1
        self._go_on()

    def leave(self) -> None:
        """A request ends."""
        self._settle()
        self._num_in_hand -= 1
        self._go_on()

    def pause(self) -> None:
        """Stop counting."""
        self._settle()
        self._is_paused = True
        self._go_on()

    def resume(self) -> None:
        """Go on counting."""
        self._settle()
        self._is_paused = False
        self._go_on()

    @property
    def _present_s(self) -> float:
        """Busy seconds since the last change."""
        return self._clock() - self._since if self._since is not None else 0.0

    @property
    def _num_decoded(self) -> int:
        return min(self._num_in_hand, self._max_num_seqs)

    def _settle(self) -> None:
        present_s = self._present_s
        self._past_s += present_s
        self._past_decoding_s += present_s * self._num_decoded

    def _go_on(self) -> None:
        self._since = self._clock() if self._num_in_hand > 0 and not self._is_paused else None
