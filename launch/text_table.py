"""Columns of text for people: every cell as wide as the widest of its column.

Input: rows of cells.  Output: lines.
"""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row, two blanks between columns, none at the end.  All rows have as many cells as the first."""
    if not rows:
        return []
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
