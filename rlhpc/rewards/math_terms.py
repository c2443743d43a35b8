"""What an answer of mathematics says, as a tree, and how small trees are joined.

A Term is made by math_reading.py, evaluated by math_values.py and compared by math_equality.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import pairwise

from rlhpc.rewards.math_tokens import Unreadable
from rlhpc.rewards.math_words import COUNT, Unit


@dataclass(frozen=True, slots=True)
class Term:
    """One node of an answer; equal terms are written alike.

    kind: "number", "symbol", "constant", "sum", "product", "quotient", "power", "negative", "root", "call" (of a
    function NAME), "percent", "degree", "quantity" (a value with a unit), "plus-minus", "opaque" (a command NAME that
    is not understood), "set", "list", "bracketed" (NAME: both brackets), "union", "intersection", "difference",
    "relation" (NAME: its signs), "either" and "both" (relations), "ratio", "time", "based" (digits NAME in a base),
    "modulo", "choice" (a letter, and what it stands for), "rounded" (a value, and one near it), "matrix", "words",
    "sum-over" and "product-over".
    """

    kind: str
    parts: tuple[Term, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)
    unit: Unit = COUNT


def has_phrase(term: Term) -> bool:
    """Whether several words in a row are part of a term, as a name or as all of it."""
    return (term.kind in ("words", "symbol") and " " in term.name.removeprefix("set ")) or any(
        map(has_phrase, term.parts)
    )


def depth_of(term: Term) -> int:
    """Return how many levels a term has."""
    depth, level = 0, [term]
    while level:
        depth, level = depth + 1, [part for each in level for part in each.parts]
    return depth


def letter(text: str) -> Term:
    """Return e and i as constants, other letters as symbols."""
    return Term("constant", name=text) if text in ("e", "i") else Term("symbol", name=text)


def negative(term: Term) -> Term:
    """Return −term; −(−x) is x."""
    if term.kind == "number":
        return Term("number", value=-term.value)
    return term.parts[0] if term.kind == "negative" else Term("negative", (term,))


def times(left: Term, right: Term) -> Term:
    """Return a product, which has no product as its first factor."""
    parts = left.parts if left.kind == "product" else (left,)
    return Term("product", (*parts, right))


def added(first: Term, second: Term) -> Term:
    """Return 5 feet 6 inches as one quantity."""
    is_same = second.kind == "quantity" and first.unit.dimensions == second.unit.dimensions != ()
    if not is_same or {first.parts[0].kind, second.parts[0].kind} != {"number"}:
        raise Unreadable("a number follows a unit")
    value = first.parts[0].value + second.parts[0].value * second.unit.factor / first.unit.factor
    return Term("quantity", (Term("number", value=value),), unit=first.unit)


def with_unit_of_last(found: Term) -> Term:
    """Return "36 − 9π cm²" as a quantity: the unit behind a sum is that of all of it."""
    if found.kind != "sum":
        return found
    last = found.parts[-1]
    quantity = last.parts[0] if last.kind == "negative" else last
    has_others = any(part.kind in ("quantity", "negative") and "quantity" in _kinds(part) for part in found.parts[:-1])
    if quantity.kind != "quantity" or has_others:
        return found
    sums = [
        Term("sum", (*found.parts[:-1], value if last is quantity else negative(value))) for value in quantity.parts
    ]
    return Term("quantity", tuple(sums), unit=quantity.unit)


def _kinds(term: Term) -> set[str]:
    return {term.kind}.union(part.kind for part in term.parts)


def joined_quantity(items: list[Term], joints: list[str]) -> Term | None:
    """Return "2 hours and 30 minutes" as one quantity: each unit is smaller than the one before."""
    are_plain = all(
        item.kind == "quantity" and item.unit.dimensions and item.parts[0].kind == "number" for item in items
    )
    if not are_plain or not {*joints} <= {"and", ","}:
        return None
    units = [item.unit for item in items]
    if len({unit.dimensions for unit in units}) > 1 or any(a.factor <= b.factor for a, b in pairwise(units)):
        return None
    return reduce(added, items)


def proper_fraction(above: Fraction, below: Fraction) -> Fraction | None:
    """Return a fraction of whole numbers below 1; None where it is none."""
    is_proper = above.denominator == below.denominator == 1 and 0 < above < below
    return above / below if is_proper else None
