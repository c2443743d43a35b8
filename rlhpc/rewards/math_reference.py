"""Whether math_answer can read a reference; without loading math-verify where it is a plain number."""

from __future__ import annotations

from rlhpc.rewards.marked_answer import last_marked_answer
from rlhpc.rewards.plain_numbers import parse_plain_number


def check_reference(reference: str) -> None:
    """Raises ValueError if it is neither a number nor LaTeX of one expression."""
    if parse_plain_number(answer_in(reference)) is None:
        # Imported here because it brings SymPy along, which takes a second.
        from rlhpc.rewards.math_answer import read_reference

        read_reference(reference)


def answer_in(reference: str) -> str:
    r"""What stands behind the last #### or in the last \boxed{…}, or all of it."""
    marked = last_marked_answer(reference)
    return reference.strip() if marked is None else marked
