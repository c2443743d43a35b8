"""An opinion of its own on which answers of mathematics are equal, for comparison with rlhpc's math_answer.

math_spellings.tsv has groups of answers as people write them, each with what it means as a line of Python.  The oracle
reads the Python only: numbers are fractions or values of mpmath, letters have random values, intervals and sets are
compared by membership, words and units by a table written by hand.  It shares no code with the verifier.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any

import mpmath

from rlhpc.rewards.math_answer import math_answer

TABLE = Path(__file__).parent / "math_spellings.tsv"
FUNCTIONS = {
    name: getattr(mpmath, name) for name in ("sqrt", "cbrt", "log", "sin", "cos", "exp", "cosh", "pi", "e", "inf")
}
LETTERS = ("x", "y", "x_a", "x_b", "x_B", "x_E", "x_k")
NUM_POINTS = 5


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Quantity:
    """In the base unit of its kind."""

    amount: Fraction
    unit: str


@dataclass(frozen=True)
class Finite:
    members: tuple[Any, ...]


@dataclass(frozen=True)
class Ordered:
    members: tuple[Any, ...]


@dataclass(frozen=True)
class Intervals:
    pieces: tuple[tuple[str, Any, Any, str], ...]

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals(self.pieces + other.pieces)

    def holds(self, place: float) -> bool:
        return any(
            (low < place or (low == place and left == "[")) and (place < high or (place == high and right == "]"))
            for left, low, high, right in self.pieces
        )


@dataclass(frozen=True)
class Spelling:
    group: str
    text: str
    meaning: str


def spellings() -> Iterator[Spelling]:
    group = ""
    for line in TABLE.read_text("utf-8").splitlines():
        if line.startswith("# "):
            group = line[2:]
        elif line:
            text, meaning = line.split("\t")
            yield Spelling(group, text, meaning)


@lru_cache(None)
def meaning(spelling: Spelling, seed: int) -> Any:
    """The value, with letters at the seed's point; x and y are negative there every other time."""
    draw = random.Random(seed)
    letters = {name: mpmath.mpf(draw.randint(101, 2000)) / 701 * (-1) ** (seed % 2) for name in LETTERS}
    names = FUNCTIONS | letters | {
        "F": Fraction, "j": mpmath.mpc(0, 1), "abs": abs, "W": Words, "Q": lambda a, unit: Quantity(Fraction(a), unit),
        "S": lambda *members: Finite(members), "T": lambda *members: Ordered(members),
        "I": lambda left, low, high, right: Intervals(((left, low, high, right),)),
    }  # fmt: skip
    with mpmath.workdps(60):
        return eval(spelling.meaning, {"__builtins__": {}}, names)


def are_same(first: Any, second: Any) -> bool:
    """Whether two meanings are the same answer."""
    if isinstance(first, Finite) or isinstance(second, Finite):
        return _are_same_members(first, second)
    if isinstance(first, Ordered) and isinstance(second, Ordered):
        members, others = first.members, second.members
        return len(members) == len(others) and all(map(are_same, members, others))
    if isinstance(first, Intervals) and isinstance(second, Intervals):
        ends = [float(end) for piece in first.pieces + second.pieces for end in piece[1:3] if abs(end) < 1e9]
        places = [end + step for end in (*ends, 0.0) for step in (-1e6, -1.0, -0.25, 0.0, 0.25, 1.0, 1e6)]
        return all(first.holds(place) == second.holds(place) for place in places)
    if isinstance(first, Quantity) and isinstance(second, Quantity):
        return first == second
    if isinstance(first, Words | Ordered | Intervals | Quantity) or isinstance(
        second, Words | Ordered | Intervals | Quantity
    ):
        return first == second
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    with mpmath.workdps(60):
        first, second = (
            mpmath.mpc(mpmath.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v)
            for v in (first, second)
        )
        return bool(abs(first - second) <= mpmath.mpf(10) ** -50 * max(abs(first), abs(second)))


def _are_same_members(first: Any, second: Any) -> bool:
    """A set of one number is that number."""
    some, others = (value.members if isinstance(value, Finite) else (value,) for value in (first, second))
    return all(any(are_same(one, other) for other in others) for one in some) and all(
        any(are_same(one, other) for one in some) for other in others
    )


def opinion(reference: Spelling, answer: Spelling) -> bool:
    """Whether the answer equals the reference at every point."""
    if "None" in (reference.meaning, answer.meaning):
        return False
    return all(are_same(meaning(reference, seed), meaning(answer, seed)) for seed in range(NUM_POINTS))


def _verdict(reference: Spelling, answer: Spelling) -> bool | str:
    try:
        return math_answer(rf"\boxed{{{answer.text}}}", reference.text).is_correct
    except ValueError as error:
        return str(error)


def disagreements(group: str, every: int = 1) -> tuple[int, int, list[str]]:
    """How many pairs of a group were judged, how many of them are right, and those that the oracle judges otherwise.

    every: of the wrong pairs only each so-manyth is judged.
    """
    members = [spelling for spelling in spellings() if spelling.group == group]
    num_pairs, num_right, num_wrong, found = 0, 0, 0, []
    for reference, answer in permutations(members, 2):
        if reference.meaning == "None":
            continue
        expected = opinion(reference, answer)
        num_wrong += not expected
        if not expected and num_wrong % every:
            continue
        verdict = _verdict(reference, answer)
        num_pairs, num_right = num_pairs + 1, num_right + expected
        if verdict is not expected:
            found.append(f"{group}: reference {reference.text!r}, answer {answer.text!r}: {verdict}")
    return num_pairs, num_right, found


GROUPS = tuple(dict.fromkeys(spelling.group for spelling in spellings()))

if __name__ == "__main__":
    figures = [disagreements(group) for group in GROUPS]
    found = [line for *_, lines in figures for line in lines]
    num_pairs, num_right = (sum(figure[place] for figure in figures) for place in (0, 1))
    print(*found, f"{num_pairs - len(found)} of {num_pairs} verdicts agree; {num_right} pairs are right", sep="\n")
