"""A calculator: arithmetic of numbers, exact where they are whole.

Input: an expression such as (3 + 4) * 12.  Output: its value as text.  Python parses the expression; of its syntax
tree only numbers and the operators below have a value.  Length and numbers are bounded, so that no expression takes
long.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

MOST_CHARACTERS = 500
MOST_BITS = 4096  # of a whole number
Number = int | float
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")  # Python refuses 007
_SPELLINGS = str.maketrans({"^": "**", "×": "*", "÷": "/", "−": "-"})


def calculate(expression: str) -> str:
    """Return the value.  Raises ValueError for what is no arithmetic, or too large."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    text = _LEADING_ZEROS.sub("", " ".join(expression.translate(_SPELLINGS).split()))
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error
    except (SyntaxError, UnicodeError) as error:
        raise _no_arithmetic(expression) from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("not so deeply nested, please") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _bounded(_OPERATORS[type(kind)](_value(left), _value(right)))
    raise _no_arithmetic(ast.unparse(node))


def _no_arithmetic(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not arithmetic; there are numbers, + - * / // % ** and parentheses")


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise OverflowError
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number is not real")
    return base**exponent


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: _power,
    }
)


def _bounded(value: Number) -> Number:
    is_finite = value.bit_length() <= MOST_BITS if isinstance(value, int) else math.isfinite(value)
    if not is_finite:
        raise OverflowError
    return value
