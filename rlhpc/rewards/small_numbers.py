"""Whether two expressions that math-verify takes for equal hold numbers of another size.

math-verify compares numbers by their difference alone: below 10⁻¹⁵ they are equal, decimal ones where six decimals
agree.  So 10⁻²⁰ would answer for the charge of an electron, for 1/2⁶⁰, and for every other number that is as small.

Input: expressions of SymPy.  Output: bool.  Numbers are compared relative to their size here, and far less strictly
than math-verify does where they are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sympy import And, Basic, Eq, Expr, FiniteSet, Interval, Or, Tuple, Union, simplify
from sympy.core.relational import Relational

_RELATIVE = 1e-4


def have_other_numbers(wanted: Any, answer: Any) -> bool:
    """Whether as many numbers of one and of the other, by size, differ; False where there are more of one.

    Also where both are relations that are arranged in other ways: 2x + 3y = 6 and 4x + 6y = 12, x ≥ 3 and x − 3 ≥ 0.
    """
    if _are_rearranged(wanted, answer):
        return False
    ours, theirs = (sorted(_valued(expression), key=lambda pair: pair[0]) for expression in (wanted, answer))
    return len(ours) == len(theirs) and not all(map(_is_near, ours, theirs))


def _are_rearranged(wanted: Any, answer: Any) -> bool:
    """Whether they relate other things than numbers, and not only one letter each."""
    relations = [part.atoms(Relational) if isinstance(part, Basic) else set() for part in (wanted, answer)]
    sides = [{side for relation in each for side in relation.args if not side.is_number} for each in relations]
    return all(relations) and not all(side.is_Symbol for side in sides[0] ^ sides[1])


def _is_near(ours: tuple[Any, Expr], theirs: tuple[Any, Expr]) -> bool:
    (a, expression), (b, other) = ours, theirs
    return bool(abs(a - b) <= _RELATIVE * max(abs(a), abs(b))) or simplify(expression - other) == 0


def _valued(expression: Any) -> list[tuple[Any, Expr]]:
    """The real and finite numbers of an expression, with their values."""
    pairs = ((number.evalf(), number) for number in _numbers(expression))
    return [(value, number) for value, number in pairs if value.is_Float or value.is_zero]


def _numbers(expression: Any) -> Iterator[Expr]:
    """The numbers that it consists of; of an equation what it ends with, as math-verify reads "9 · 2 = 18"."""
    match expression:
        case Eq():
            yield from _numbers(expression.rhs)
        case And() if isinstance(expression.args[-1], Eq):
            yield from _numbers(expression.args[-1])
        case Interval():
            yield from (expression.start, expression.end)
        case Relational() | And() | Or() | Tuple() | FiniteSet() | Union():
            for part in expression.args:
                yield from _numbers(part)
        case Expr() if expression.is_number:
            yield expression
