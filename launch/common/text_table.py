"""Text tables for people, with columns as wide as their widest cells; durations in words.

Input: rows of cells, seconds.  Output: lines, words.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from unicodedata import category, east_asian_width

_CONTROL = r"\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_OBEYED = re.compile(rf"[{_CONTROL}\x1b]")
_OBEYED_BUT_COLOURS = re.compile(rf"[{_CONTROL}]|\x1b(?!\[[0-9;]*m)")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, two spaces between columns, none at the end.  All rows have as many cells as the first."""
    if not rows:
        return []
    widths = [max(columns_of(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(map(_filled, row, widths)).rstrip() for row in rows]


def columns_of(text: str) -> int:
    """Columns that a terminal gives it: two for a wide letter, none for what is set above or below another."""
    if text.isascii():
        return len(text)
    return sum(0 if category(each) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(each) in "WF") for each in text)


def cut_to(text: str, width: int) -> str:
    """As much of its beginning as has room in so many columns."""
    while columns_of(text) > width:
        text = text[:-1]
    return text


def _filled(cell: str, width: int) -> str:
    return cell + " " * (width - columns_of(cell))


def wrapped(cells: Sequence[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """One row as several, each cell broken between words to at most its width; no row where all cells are empty."""
    columns = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths)]
    return list(zip_longest(*columns, fillvalue=""))


def span(seconds: int) -> str:
    """1 min 05 s, 3 h 05 min, 2 d 04 h."""
    for unit, lower, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if seconds >= size:
            rest = seconds % size // {"h": 3600, "min": 60, "s": 1}[lower]
            return f"{seconds // size} {unit} {rest:02d} {lower}"
    return f"{seconds} s"


def printable(text: str) -> str:
    """The text on one line, without control characters and what cannot be encoded, as in names of files and logs."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def printable_line(text: str, longest: int = 160) -> str:
    """A line with its spaces, without control characters; cut if it is too long."""
    rest = len(text) - longest
    cut = text if rest <= 0 else f"{text[:longest]} … and {rest:,} characters"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def escaped(text: str, *, keeps_colours: bool = False) -> str:
    """Lines without characters that a terminal would obey, or that cannot be encoded: logs hold what models sample."""
    pattern = _OBEYED_BUT_COLOURS if keeps_colours else _OBEYED
    return pattern.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shortened(text: str, most: int = 400) -> str:
    """Return a text, such as an error, as one line of at most so many characters."""
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[: most - 2]} …"
