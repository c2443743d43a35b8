"""Make the list of faults of a failing seed as short as it can be: what is left explains the failure.

Input: a list, and whether a list fails.  Output: a list that fails, of which no single fault can be left out.
Delta debugging (Zeller and Hildebrandt 2002): leave out halves, then quarters, then single ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shortest(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """`items` fails; `fails` is asked for lists in the same order."""
    kept, parts = list(items), 1
    while kept:
        size = max(1, len(kept) // parts)
        for first in range(0, len(kept), size):
            rest = kept[:first] + kept[first + size :]
            if fails(rest):
                kept, parts = rest, max(1, parts - 1)
                break
        else:
            if size == 1:
                return kept
            parts *= 2
    return kept
