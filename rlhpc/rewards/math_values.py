"""Compute the value of a term, within bounds.

Input: a term and a point, which gives letters their values.  Output: a Fraction if it is rational, else a number of
mpmath to 160 digits.  Raises TooLarge for numbers of more than _MOST_BITS and sums of more than _MOST_STEPS steps,
Undefined for terms without a value, such as 1/0.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial, reduce
from itertools import pairwise
from operator import add, mul, truediv
from typing import Any

import mpmath

from rlhpc.rewards.math_tokens import Unreadable
from rlhpc.rewards.math_words import COUNT, Unit, unit_of

# ----------------------------------------------------------------------------------------------------------- math terms
#
# An answer of mathematics as a tree, and functions that join small trees.
#
# A Term is made by math_reading.py, evaluated by math_values.py and compared by math_equality.py.


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
    """True if several words in a row are part of a term, as a name or as the whole term."""
    return (term.kind in ("words", "symbol") and " " in term.name.removeprefix("set ")) or any(
        map(has_phrase, term.parts)
    )


def depth_of(term: Term) -> int:
    """Return the number of levels of a term."""
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
    """Return "36 − 9π cm²" as a quantity: the unit behind a sum applies to the whole sum."""
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
    """Return a fraction of whole numbers below 1; None for any other."""
    is_proper = above.denominator == below.denominator == 1 and 0 < above < below
    return above / below if is_proper else None


# -------------------------------------------------------------------------------------------------------- plain numbers
#
# Read a number as people write it in an answer: "1,234", "$18", "-0.50", "3/4", "40%", "12 eggs".
#
# The fast path of most answers: exact (fractions, not floats) and strict.  A text with anything besides one number, its
# currency or percent sign and one unit is not a plain number, and is read by math_reading.py.  Pure.

_NUMBER = re.compile(
    r"""
    (?P<minus>-)? \s* (?P<currency>[$€£¥])? (?P<minus_after>-)?
    (?: (?P<grouped>[0-9]{1,3}(?:,[0-9]{3})+) | (?P<digits>[0-9]+) )?
    (?P<decimals>\.[0-9]+)?
    (?: / (?P<denominator>[0-9]+) )?
    \s* (?P<percent>%)?
    (?: \s+ (?P<unit>[A-Za-z]{2,}) )?
    \.?
    """,
    re.VERBOSE,
)
_LATEX_SPELLINGS = (
    (re.compile(r"\\[$]"), "$"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile("[−–]"), "-"),
)
LONGEST_TEXT = 1_000  # characters
_TO_RESPELL = re.compile(r"[\\{~−–]")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """One number; `value` is the number as written, not divided by 100 if a percent sign follows."""

    value: Fraction
    is_percent: bool = False
    unit: Unit = COUNT

    def equals(self, answer: PlainNumber) -> bool:
        """Compare a reference (self) with an answer.

        "40%" answers "40" (the question asked for a percentage), "40%" and "0.4"; "40" answers "40%" too, while "0.4"
        does not answer "40".  Two units must be of the same kind: "5 km" is "5000 metres", and not "$5".
        """
        if self.unit.dimensions and answer.unit.dimensions:
            is_same = self.unit.dimensions == answer.unit.dimensions
            return is_same and self.value * self.unit.factor == answer.value * answer.unit.factor
        if self.value == answer.value:
            return True
        if self.is_percent == answer.is_percent:
            return False
        return self._amount == answer._amount

    @property
    def _amount(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value


def parse_plain_number(text: str) -> PlainNumber | None:
    """Return the number; None if the text is not exactly one plain number."""
    if len(text) > LONGEST_TEXT:
        return None
    if _TO_RESPELL.search(text):
        for spelling, plain in _LATEX_SPELLINGS:
            text = spelling.sub(plain, text)
    text = text.strip()
    if text.count("$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or not (match["grouped"] or match["digits"] or match["decimals"]):
        return None
    if match["minus"] and match["minus_after"]:
        return None
    whole = (match["grouped"] or match["digits"] or "0").replace(",", "")
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction(whole + (match["decimals"] or "")) / denominator
    has_minus = match["minus"] or match["minus_after"]
    unit = unit_of(match["unit"] or match["currency"]) if match["unit"] or match["currency"] else COUNT
    if unit is None or (match["unit"] and (match["currency"] or match["percent"])):
        return None
    return PlainNumber(-value if has_minus else value, match["percent"] is not None, unit)


# ---------------------------------------------------------------------------------------------------------- math values

_MOST_BITS = 1 << 17
_MOST_STEPS = 4_000
_LARGEST_ARGUMENT = 10**15
_LARGEST_MAGNITUDE = 10**9  # of a power, in bits, if it is not computed exactly
_LARGEST_FACTORIAL = 10_000
_DIGITS = (40, 160)
_NEAR, _TINY = mpmath.mpf(10) ** -100, mpmath.mpf(10) ** -60

HAS_NO_VALUE = frozenset(
    {"set", "list", "bracketed", "union", "intersection", "difference", "relation", "either", "both", "ratio", "time",
     "based", "modulo", "matrix", "words", "plus-minus",
     "choice", "rounded"}
)  # fmt: skip


class Undefined(ValueError):
    """A term has no value, as 1/0 or the logarithm of 0."""


class TooLarge(ValueError):
    """A number is too large, or a sum too long, to be computed."""


class Point:
    """Values of letters: given ones; for others numbers between −3 and 3 that depend on name and seed."""

    def __init__(self, seed: int, given: Mapping[str, Any] | None = None, *, log_base: int | None = None) -> None:
        self.seed = seed
        self.given = dict(given or {})
        self.log_base = log_base
        self.steps = 0

    def value(self, name: str) -> Any:
        """Return the value of a letter; positive at every second point."""
        if name in self.given:
            return self.given[name]
        draw = zlib.crc32(f"{self.seed} {name} {self.seed}".encode())
        value = mpmath.mpf(draw % 29_989 + 7) / 10_007
        return -value if self.seed % 2 and draw >> 16 & 1 else value


def value_of(term: Term, point: Point) -> Any:
    """Return the value: a Fraction, or mpf or mpc of 160 digits.  Raises Undefined and TooLarge.

    Also computed with 40 digits: a value that shrinks with more digits is zero, one that grows was divided by zero.
    """
    rough = _checked(term, point, _DIGITS[0])
    if isinstance(rough, Fraction):
        return rough
    exact = _checked(term, point, _DIGITS[1])
    if isinstance(exact, Fraction):
        return exact
    with with_digits():
        sizes = [max(abs(mpmath.re(value)), abs(mpmath.im(value))) for value in (rough, exact)]
        if sizes[1] < sizes[0] * _TINY:
            return Fraction(0)
        if sizes[0] < sizes[1] * _TINY and sizes[0] != 0:
            raise Undefined("it divides by zero")
        if isinstance(exact, mpmath.mpc) and abs(exact.imag) <= abs(exact.real) * _NEAR:
            return exact.real
        return exact


def are_near(first: Any, second: Any) -> bool:
    """True if two values are equal: exactly, or to a hundred digits."""
    if isinstance(first, Fraction | int) and isinstance(second, Fraction | int):
        return first == second
    if any(isinstance(value, mpmath.mpf) and mpmath.isinf(value) for value in (first, second)):
        return bool(as_float(first) == as_float(second))
    with with_digits():
        first, second = as_float(first), as_float(second)
        return bool(abs(first - second) <= _NEAR * max(abs(first), abs(second)))


def is_real(value: Any) -> bool:
    """True for a value without an imaginary part."""
    return not isinstance(value, mpmath.mpc)


def as_float(value: Any) -> Any:
    """Return a value as a number of mpmath."""
    if isinstance(value, Fraction):
        with with_digits():
            return mpmath.mpf(value.numerator) / value.denominator
    return mpmath.mpmathify(value)


@lru_cache(256)
def symbols(term: Term) -> frozenset[str]:
    """Return the letters and words of a term that denote numbers."""
    if term.kind == "symbol":
        return frozenset({term.name})
    if term.kind == "opaque":
        return frozenset({_opaque_name(term)})
    found: frozenset[str] = frozenset()
    return found.union(*map(symbols, term.parts))


def _opaque_name(term: Term) -> str:
    return f"{term.name} {term.parts!r}"


@contextmanager
def with_digits(number: int = _DIGITS[1]) -> Iterator[None]:
    """Compute with this many digits in the block."""
    with mpmath.workdps(number):
        yield


def _checked(term: Term, point: Point, digits: int) -> Any:
    point.steps = 0
    with with_digits(digits):
        try:
            value = _value(term, point)
        except (Undefined, TooLarge):
            raise
        except (ArithmeticError, ValueError, mpmath.libmp.NoConvergence) as error:  # ValueError: at a pole
            raise Undefined(str(error)) from error
        if not isinstance(value, Fraction) and mpmath.isnan(value):
            raise Undefined("it has no value")
        return value


def _value(term: Term, point: Point) -> Any:
    point.steps += 1
    if point.steps > _MOST_STEPS:
        raise TooLarge("it takes too many steps")
    compute = _KINDS.get(term.kind)
    if compute is None:
        raise Undefined(f"a {term.kind} is no number")
    return compute(term, point)


def _float(value: Any) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > _MOST_BITS:
        raise TooLarge("a number has too many digits")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, Fraction) and value.denominator == 1


def _constant(term: Term, point: Point) -> Any:
    if term.name in point.given:  # the i of a sum
        return point.given[term.name]
    return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1), "infinity": mpmath.inf}[term.name] * mpmath.mpf(1)


def _combined(combine: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Combine two values, exactly if both are fractions."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return _bounded(combine(first, second))
    return combine(_float(first), _float(second))


def _folded(combine: Callable[[Any, Any], Any], first: int, term: Term, point: Point) -> Any:
    """Combine the values of all parts, one after the other."""
    found: Any = Fraction(first)
    for part in term.parts:
        found = _combined(combine, found, _value(part, point))
    return found


def _quotient(term: Term, point: Point) -> Any:
    above, below = (_value(part, point) for part in term.parts)
    if below == 0:
        raise Undefined("it divides by zero")
    return _combined(truediv, above, below)


def _raised(base: Any, exponent: Any) -> Any:
    if base == 0:
        if isinstance(exponent, mpmath.mpc) or not exponent > 0:
            raise Undefined("0 has positive powers only")
        return Fraction(0)
    if isinstance(base, Fraction) and _is_whole(exponent):
        num_bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if base not in (1, -1) and abs(exponent) * max(num_bits, 1) > _MOST_BITS:
            raise TooLarge("a power has too many digits")
        return base ** (int(exponent) if base not in (1, -1) else int(exponent) % 2)
    base, exponent = _float(base), _float(exponent)
    if mpmath.isinf(exponent) or mpmath.isinf(base):
        return base**exponent
    if abs(exponent) > _LARGEST_ARGUMENT or abs(exponent) * (abs(mpmath.mag(base)) + 1) > _LARGEST_MAGNITUDE:
        raise TooLarge("a power is too large")
    return base**exponent


def _root(term: Term, point: Point) -> Any:
    """Return the real root if there is one."""
    base, degree = (_value(part, point) for part in term.parts)
    if degree == 0:
        raise Undefined("there is no root of degree 0")
    if not (_is_whole(degree) and 1 < degree <= 1000):
        return _raised(base, 1 / degree)
    if isinstance(base, Fraction) and degree == 2 and base >= 0:
        roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if roots[0] ** 2 == base.numerator and roots[1] ** 2 == base.denominator:
            return Fraction(*roots)
    base = _float(base)
    if is_real(base) and base < 0 and degree % 2:
        return -mpmath.root(-base, int(degree))
    return mpmath.root(base, int(degree)) if degree > 2 else mpmath.sqrt(base)


def _opaque(term: Term, point: Point) -> Any:
    """Return the conjugate of a complex number; a value of its own for everything else."""
    if term.name == "overline" and not symbols(term.parts[0]) and term.parts[0].kind not in HAS_NO_VALUE:
        value = _value(term.parts[0], point)
        if not is_real(value):
            return mpmath.conj(value)
    return point.value(_opaque_name(term))


def _quantity(term: Term, point: Point) -> Any:
    found = _combined(mul, _value(term.parts[0], point), term.unit.factor)
    for name, power in term.unit.dimensions:
        found = _float(found) * point.value(f"[{name}]") ** power
    return found


def _repeated(term: Term, point: Point) -> Any:
    """Return a sum or a product over a whole number."""
    first, last = (_value(part, point) for part in term.parts[:2])
    if not (_is_whole(first) and _is_whole(last)):
        raise TooLarge("it has no whole bounds")
    total: Any = Fraction(term.kind == "product-over")
    if last - first > _MOST_STEPS:
        raise TooLarge("it takes too many steps")
    inner = Point(point.seed, point.given, log_base=point.log_base)
    for index in range(int(first), int(last) + 1):
        inner.given[term.name] = Fraction(index)
        inner.steps = point.steps
        value = _value(term.parts[2], inner)
        point.steps = inner.steps
        total = _combined(mul if term.kind == "product-over" else add, total, value)
    return total


def _call(term: Term, point: Point) -> Any:
    if term.name == "det":
        return _determinant(term.parts[0], point)
    values = [_value(part, point) for part in term.parts]
    if term.name in ("log", "log_", "ln", "log10"):
        return _logarithm(term.name, values, point)
    if term.name in _EXACT:
        return _EXACT[term.name](*values)
    function = _REAL_FUNCTIONS.get(term.name)
    if function is None or len(values) != 1:
        return point.value(_opaque_name(term))
    if abs(values[0]) > _LARGEST_ARGUMENT and not mpmath.isinf(_float(values[0])):
        raise TooLarge("an argument is too large")
    return function(_float(values[0]))


def _logarithm(name: str, values: list[Any], point: Point) -> Any:
    if values[0] == 0:
        raise Undefined("0 has no logarithm")
    bases = {"ln": None, "log": point.log_base, "log10": 10}
    base = values[1] if name == "log_" else bases[name]
    if base in (0, 1):
        raise Undefined("there is no logarithm to that base")
    found = mpmath.log(_float(values[0]))
    return found if base is None else found / mpmath.log(_float(base))


def _factorial(value: Any) -> Any:
    if _is_whole(value):
        if value < 0:
            raise Undefined("a negative number has no factorial")
        if value > _LARGEST_FACTORIAL:
            raise TooLarge("a factorial has too many digits")
        return Fraction(math.factorial(int(value)))
    if abs(value) > _LARGEST_FACTORIAL:
        raise TooLarge("a factorial is too large")
    return mpmath.gamma(_float(value) + 1)


def _binomial(above: Any, below: Any) -> Any:
    if _is_whole(above) and _is_whole(below) and above >= 0:
        if below < 0 or below > above:
            return Fraction(0)
        if min(below, above - below) * int(above).bit_length() > _MOST_BITS:
            raise TooLarge("a binomial has too many digits")
        return Fraction(math.comb(int(above), int(below)))
    if any(abs(value) > _LARGEST_FACTORIAL for value in (above, below)):
        raise TooLarge("a binomial is too large")
    return mpmath.binomial(_float(above), _float(below))


def _floor(value: Any) -> Any:
    if isinstance(value, Fraction):
        return Fraction(math.floor(value))
    if not is_real(value) or mpmath.isinf(value) or abs(value) > _LARGEST_ARGUMENT:
        raise TooLarge("it is no number to round")
    nearest = mpmath.nint(value)
    is_whole = abs(value - nearest) < mpmath.mpf(10) ** (-mpmath.mp.dps + 8)
    return Fraction(int(nearest if is_whole else mpmath.floor(value)))


def _whole_numbers(values: tuple[Any, ...]) -> list[int]:
    if not all(map(_is_whole, values)):
        raise Undefined("it is of whole numbers")
    return [int(value) for value in values]


def _largest(values: tuple[Any, ...], choose: Callable[..., Any]) -> Any:
    if not all(map(is_real, values)):
        raise Undefined("complex numbers have no order")
    return choose(values, key=_float)


def _determinant(matrix: Term, point: Point) -> Any:
    rows = [[_float(_value(cell, point)) for cell in row.parts] for row in matrix.parts]
    if not rows or any(len(row) != len(rows) for row in rows):
        raise Undefined("it is no square matrix")
    return mpmath.det(mpmath.matrix(rows))


def _sign(value: Any) -> Any:
    if not is_real(value):
        return value / abs(value)
    return Fraction((value > 0) - (value < 0))


_KINDS: dict[str, Callable[[Term, Point], Any]] = {
    "number": lambda term, _point: term.value,
    "symbol": lambda term, point: point.value(term.name),
    "opaque": _opaque,
    "constant": _constant,
    "sum": partial(_folded, add, 0),
    "product": partial(_folded, mul, 1),
    "quotient": _quotient,
    "power": lambda term, point: _raised(*(_value(part, point) for part in term.parts)),
    "root": _root,
    "negative": lambda term, point: -_value(term.parts[0], point),
    "percent": lambda term, point: _combined(mul, _value(term.parts[0], point), Fraction(1, 100)),
    "degree": lambda term, point: _float(_value(term.parts[0], point)) * mpmath.pi / 180,
    "quantity": _quantity,
    "sum-over": _repeated,
    "product-over": _repeated,
    "call": _call,
}
_EXACT: dict[str, Callable[..., Any]] = {
    "factorial": _factorial,
    "binom": _binomial,
    "abs": abs,
    "floor": _floor,
    "ceil": lambda value: -_floor(-value),
    "gcd": lambda *values: Fraction(math.gcd(*_whole_numbers(values))),
    "lcm": lambda *values: Fraction(math.lcm(*_whole_numbers(values))),
    "max": lambda *values: _largest(values, max),
    "min": lambda *values: _largest(values, min),
    "re": lambda value: value.real if isinstance(value, mpmath.mpc) else value,
    "im": lambda value: value.imag if isinstance(value, mpmath.mpc) else Fraction(0),
    "sgn": _sign,
}
_REAL_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot, "arcsec": mpmath.asec,
    "arccsc": mpmath.acsc, "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth,
    "arcsinh": mpmath.asinh, "arccosh": mpmath.acosh, "arctanh": mpmath.atanh, "exp": mpmath.exp, "arg": mpmath.arg,
    "cis": lambda angle: mpmath.exp(mpmath.mpc(0, 1) * angle), "Gamma": mpmath.gamma,
}  # fmt: skip
