"""Which groups of the simulated ring a batch may be chosen from, counted as they come and go."""

from __future__ import annotations


class Takeable:
    """Counts the finished groups that a batch may be chosen from, to save thousands of fruitless calls of the ledger.

    These are the groups less than `window` ids past the oldest group in flight; ids are given in order.
    """

    def __init__(self, window: int) -> None:
        self.number = 0
        self.oldest = 0  # in flight; if none is, the id of the next
        self._window = window
        self._in_flight: set[int] = set()
        self._beyond: set[int] = set()  # ready, and past the window
        self._next = 0

    def admitted(self, group_id: int) -> None:
        """A group is in flight."""
        self._in_flight.add(group_id)
        self._next = group_id + 1

    def ended(self, group_id: int, *, is_ready: bool) -> None:
        """A group is no longer in flight: it is finished, or dropped."""
        self._in_flight.remove(group_id)
        if is_ready and group_id < self.oldest + self._window:
            self.number += 1
        elif is_ready:
            self._beyond.add(group_id)
        while self.oldest < self._next and self.oldest not in self._in_flight:
            edge = self.oldest + self._window  # which is inside from now on
            self.oldest += 1
            if edge in self._beyond:
                self._beyond.remove(edge)
                self.number += 1
