"""The last fenced block of a completion, which holds its program or its document.

A fence is a line of three backticks, indented by at most three blanks; the first word behind an opening one is the
block's mark.  A block ends with the first line after it that is a fence and nothing else.  Lines may end as on
Windows; in what is returned they end in a line feed.  Each line is looked at once: a completion may be nothing but
opening fences.
"""

from __future__ import annotations

import re

_OPENING = re.compile(r" {0,3}```[ \t]*([\w+-]*)")
_CLOSING = re.compile(r" {0,3}```[ \t]*")


def last_block(text: str) -> tuple[str, str] | None:
    """Return the last block's mark and lines; None if no block is closed."""
    lines = text.replace("\r\n", "\n").split("\n")
    found: tuple[str, int, int] | None = None
    opening: re.Match[str] | None = None
    begin = 0
    for number, line in enumerate(lines):
        if opening is None:
            opening, begin = _OPENING.match(line), number + 1
        elif _CLOSING.fullmatch(line):
            found, opening = (opening[1], begin, number), None
    if found is None:
        return None
    mark, begin, end = found
    return mark, "".join(f"{line}\n" for line in lines[begin:end])
