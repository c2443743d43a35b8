"""Whether an answer may be given to a scorer that has Python evaluate it.

Scorers of reasoning-gym read expressions and lists by eval and by SymPy's parse_expr, which is eval, too: an answer of
the policy would run as a program of the reward worker, outside of the sandbox, with the rights of the run.

Input: an answer, and the right one.  Output: bool.  Harmless are literals, and expressions of numbers, letters and
mathematical functions: no text in quotes, no attribute, no other name.
"""

from __future__ import annotations

import ast
import re

# Kinds of reasoning-gym 0.1.25 whose scorers evaluate.
EVALUATING = frozenset(
    {"binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
     "simple_integration", "spiral_matrix", "string_insertion"}
)  # fmt: skip
_FUNCTIONS = frozenset(
    {"Abs", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "erf", "exp", "ln",
     "log", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)  # fmt: skip
_EXPRESSION = re.compile(r"[A-Za-z0-9_\s+\-*/^().,!=\[\]]*", re.ASCII)
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LETTERS = re.compile(r"[A-Za-z_]|[A-Z]+")
_NO_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


def is_harmless(answer: str, right: str) -> bool:
    """right: the answer that the problem came with, whose names may be used."""
    if answer == right or _is_literal(answer):
        return True
    if not _EXPRESSION.fullmatch(answer) or "__" in answer or _ATTRIBUTE.search(answer):
        return False
    known = _FUNCTIONS | {*_NAME.findall(right)}
    return all(name in known or _LETTERS.fullmatch(name) for name in _NAME.findall(answer))


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer.strip())
    except _NO_LITERAL:
        return False
    return True
