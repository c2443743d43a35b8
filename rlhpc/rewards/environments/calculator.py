"""A calculator: arithmetic of numbers, exactly where they are whole.

    sum      product { (+ | -) product }
    product  factor { (* | / | // | %) factor }
    factor   (+ | -) factor | atom [ ** factor ]
    atom     number | ( sum )

Input: an expression such as (3 + 4) * 12.  Output: its value as text.  Read here, and never by
Python's own parser, which deep nesting can crash; numbers and depth are bounded, so that no expression takes long.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

MOST_CHARACTERS = 500
MOST_DEPTH = 60
MOST_BITS = 4096  # of a whole number
Number = int | float
_TOKEN = re.compile(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\*\*|//|[-+*/%()])")
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-"})
_SUMS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({"+": operator.add, "-": operator.sub})
_PRODUCTS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod}
)


def calculate(expression: str) -> str:
    """The value.  Raises ValueError for what is no arithmetic, or too large."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    try:
        value = _Reader(expression).value()
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


class _Reader:
    """Reads and calculates, from left to right."""

    def __init__(self, expression: str) -> None:
        self._expression, self._depth = expression, 0
        text, at = expression.translate(_SPELLINGS).rstrip(), 0
        self._tokens: list[str] = []  # the next one last
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._odd(text[at:].strip())
            self._tokens.append(found[1])
            at = found.end()
        self._tokens.reverse()

    def value(self) -> Number:
        """The value of the whole expression."""
        value = self._sum()
        if self._tokens:
            raise self._odd(self._tokens[-1])
        return value

    def _sum(self) -> Number:
        value = self._product()
        while self._tokens and self._tokens[-1] in _SUMS:
            value = _bounded(_SUMS[self._tokens.pop()](value, self._product()))
        return value

    def _product(self) -> Number:
        value = self._factor()
        while self._tokens and self._tokens[-1] in _PRODUCTS:
            value = _bounded(_PRODUCTS[self._tokens.pop()](value, self._factor()))
        return value

    def _factor(self) -> Number:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ValueError("not so deeply nested, please")
        if not self._tokens:
            raise self._odd("its end")
        if self._tokens[-1] in _SUMS:
            value = -self._factor() if self._tokens.pop() == "-" else self._factor()
        else:
            value = self._atom()
            if self._tokens and self._tokens[-1] == "**":
                self._tokens.pop()
                value = _power(value, self._factor())
        self._depth -= 1
        return value

    def _atom(self) -> Number:
        token = self._tokens.pop()
        if token == "(":
            value = self._sum()
            if not self._tokens or self._tokens.pop() != ")":
                raise self._odd("a parenthesis that is not closed")
            return value
        if not token[0].isdigit() and token[0] != ".":
            raise self._odd(token)
        return _bounded(int(token) if token.isdigit() else float(token))

    def _odd(self, what: str) -> ValueError:
        return ValueError(
            f"{self._expression[:80]!r} is not arithmetic, because of {what[:20]!r}; there are numbers, "
            "+ - * / // % ** and parentheses"
        )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise OverflowError
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number is not real")
    power: Number = base**exponent
    return _bounded(power)


def _bounded(value: Number) -> Number:
    is_finite = value.bit_length() <= MOST_BITS if isinstance(value, int) else math.isfinite(value)
    if not is_finite:
        raise OverflowError
    return value
