"""References and answers of the task reasoning_gym, parsed without the library, which a login node may lack."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from rlhpc.sandbox.values import decode

# ------------------------------------------------------------------------------------------------------ harmless answer
#
# Check whether an answer may be passed to a scorer that evaluates it as Python.
#
# Scorers of reasoning-gym read expressions and lists by eval and by SymPy's parse_expr, which also uses eval: an answer
# of the policy would run as code in the reward worker, outside of the sandbox, with the rights of the run.
#
# Input: an answer, and the right one.  Output: bool.  Harmless are expressions of numbers, letters (perhaps with a
# number) and mathematical functions, without attributes and other names; and literals whose texts are such expressions:
# SymPy's diff evaluates a text that parse_expr has returned, so that code may be hidden in quotes.


# Kinds of reasoning-gym 0.1.25 whose scorers evaluate.
EVALUATING = frozenset(
    {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
     "simple_integration", "spiral_matrix", "string_insertion"}
)  # fmt: skip
_FUNCTIONS = frozenset(
    {"Abs", "Rational", "abs", "acos", "acosh", "acot", "acoth", "acsc", "asec", "asin", "asinh", "atan", "atanh",
     "cbrt", "const", "constant", "cos", "cosh", "cot", "coth", "csc", "csch", "erf", "exp", "ln", "log", "pi", "root",
     "sec", "sech", "sin", "sinh", "sqrt", "tan", "tanh"}
)  # fmt: skip
_EXPRESSION = re.compile(r"[A-Za-z0-9_\s+\-*/^().,!=\[\]]*", re.ASCII)
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z_]|[A-Za-z]_?[0-9]+|[A-Z]+")  # C1 and C_1 are constants of integration
_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


def is_harmless(answer: str, right: str) -> bool:
    """True if an answer may be evaluated; right: the problem's own answer, whose names may be used."""
    if answer == right:
        return True
    try:
        literal = ast.literal_eval(answer.strip())
    except _NO_LITERAL:
        return _is_expression(answer, right)
    return all(isinstance(text, str) and _is_expression(text, right) for text in _texts(literal))


def _is_expression(text: str, right: str) -> bool:
    if not _EXPRESSION.fullmatch(text) or "__" in text or _ATTRIBUTE.search(text):
        return False
    known = _FUNCTIONS | {*_NAME.findall(right)}
    return all(name in known or _LETTERS.fullmatch(name) for name in _NAME.findall(text))


def _texts(literal: Any) -> Iterator[str | bytes]:
    """Texts and bytes in a literal, at any depth."""
    match literal:
        case str() | bytes():
            yield literal
        case dict():
            for pair in literal.items():
                yield from _texts(pair)
        case list() | tuple() | set():
            for part in literal:
                yield from _texts(part)


# ---------------------------------------------------------------------------------------------- reasoning gym reference

_SHOWN_CHARACTERS = 80


def read_reference(reference: str) -> tuple[str, Any, Any]:
    """Parse a reference of data.source: (name of the dataset, entry, settings).  Raises ValueError for any other."""
    try:
        read = json.loads(reference)
        return str(read["dataset"]), decode(read["entry"]), decode(read["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"the reference is {reference[:_SHOWN_CHARACTERS]!r}; the task reasoning_gym judges those of data.source, "
            'with data.reference_field = "entry"'
        ) from error


def check_reasoning_gym(reference: str) -> None:
    """Raise ValueError for a reference that is no entry of data.source."""
    read_reference(reference)
