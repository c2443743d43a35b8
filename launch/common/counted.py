"""Numbers with their nouns, in messages.  Python 3.9 and the standard library."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"; noun: in the singular, with a plural that adds s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def three_digits(number: float) -> str:
    """Three significant digits, but all of a number from a thousand on: 0.075, 12.3, 1,234, 12,288."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"


def numbered(noun: str, first: int, last: int) -> str:
    """ "step 5", "steps 5 to 7"."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
