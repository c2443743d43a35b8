"""Suggestions for a mistyped name.  Input: an unknown name, and the known ones.  Output: the nearest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

ALIKE = 0.6  # of two names, from here on, as difflib measures it
SHORTEST_BEGINNING = 3  # letters


def nearest(name: str, names: Iterable[str], most: int = 1, cutoff: float = ALIKE) -> list[str]:
    """Return the nearest names, perhaps none; one with the same letters, in another order or case, is first.

    If none is similar, a name that begins with `name` is taken: "integer_arithmetic" for "integer".
    """
    known = [*names]
    turned = [each for each in known if sorted(each.casefold()) == sorted(name.casefold())]  # "task" for "taks"
    turned.sort(key=lambda each: each.casefold() != name.casefold())
    longer = [each for each in known if len(name) >= SHORTEST_BEGINNING and each.startswith(name)]
    return turned[:most] or get_close_matches(name, known, most, cutoff) or (longer[:most] if cutoff <= ALIKE else [])


def near_hint(name: str, names: Iterable[str], most: int = 1, cutoff: float = ALIKE) -> str:
    """Return " (did you mean x?)", to be put behind a message; "" if no name is near."""
    meant = nearest(name, names, most, cutoff)
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""
