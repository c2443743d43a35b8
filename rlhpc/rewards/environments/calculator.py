"""A calculator: arithmetic of numbers, exactly where they are whole.

Input: an expression such as (3 + 4) * 12.  Output: its value as text.  Parsed and evaluated here, never run as Python;
numbers are bounded, so that no expression takes long.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MOST_CHARACTERS = 500
MOST_BITS = 4096  # of a whole number
_TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value.  Raises ValueError for what is no arithmetic, or too large."""
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {MOST_CHARACTERS} characters")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {expression[:80]!r}") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TWO:
            return _bounded(_TWO[type(op)](_value(left), _value(right)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)[:80]!r}; there are numbers, + - * / // % ** and parentheses")


def _power(base: float, exponent: float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise OverflowError
    value = base**exponent
    if base < 0 and isinstance(value, complex):
        raise ValueError("a root of a negative number")
    return _bounded(value)


def _bounded(value: float) -> int | float:
    if (isinstance(value, int) and value.bit_length() > MOST_BITS) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise OverflowError
    return value
