"""Names that somebody may have meant.  Input: a name that is not known, and those that are.  Output: the nearest."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, names: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the nearest names, none if none is near; one with the same letters turned is nearest: "task" of "taks"."""
    known = [*names]
    turned = [each for each in known if sorted(each) == sorted(name)]
    return turned[:most] or get_close_matches(name, known, most, cutoff)


def near_hint(name: str, names: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return " (did you mean x?)", to be put behind a message; "" if no name is near."""
    meant = nearest(name, names, most, cutoff)
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""
