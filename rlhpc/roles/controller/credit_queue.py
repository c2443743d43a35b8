"""Generators ordered by credit: how many more samples each is willing to hold.

Input: names whose credit may have changed.  Output: the generator with most credit, of equals the first by name, so
that who is granted what is the same in every run.  Pure.  A change and a question cost O(log n) of n generators.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

SPARE = 16  # entries that are out of date, before they are counted as too many


class CreditQueue:
    """A heap of credits as they were when they were last looked at; what comes out is looked at again."""

    def __init__(self, credit_of: Callable[[str], int]) -> None:
        """credit_of: a generator's credit now; 0 or less for one that may have nothing."""
        self._credit_of = credit_of
        self._known: dict[str, int] = {}  # all that had credit
        self._heap: list[tuple[int, str]] = []  # (−credit, name); out of date where it is not what is known

    def look_at_all(self, names: Iterable[str]) -> None:
        """Forget what is known: these are all generators that there are."""
        self._known = {name: credit for name in names if (credit := self._credit_of(name)) > 0}
        self._heap = [(-credit, name) for name, credit in self._known.items()]
        heapq.heapify(self._heap)

    def look_at(self, name: str) -> None:
        """Its credit may have changed."""
        credit = self._credit_of(name)
        if credit <= 0:
            self._known.pop(name, None)
        elif self._known.get(name) != credit:
            self._known[name] = credit
            heapq.heappush(self._heap, (-credit, name))
            if len(self._heap) > 2 * len(self._known) + SPARE:
                self._heap = [(-credit, name) for name, credit in self._known.items()]
                heapq.heapify(self._heap)

    def set_aside(self, name: str) -> None:
        """Leave it out until it is looked at again."""
        self._known.pop(name, None)

    def most(self) -> tuple[str, int] | None:
        """The generator with most credit, and that; None if none has any."""
        while self._heap:
            credit, name = -self._heap[0][0], self._heap[0][1]
            if self._known.get(name) != credit:
                heapq.heappop(self._heap)
            elif self._credit_of(name) != credit:
                self.look_at(name)
            else:
                return name, credit
        return None
