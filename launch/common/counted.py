"""Numbers with their nouns, in messages.  Python 3.9 and the standard library."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"; noun: in the singular, with a plural that adds s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def numbered(noun: str, first: int, last: int) -> str:
    """ "step 5", "steps 5 to 7"."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"
