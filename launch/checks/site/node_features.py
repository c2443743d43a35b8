"""Which nodes satisfy a feature expression such as "ib&(h100|h200)".

Input: Slurm's --constraint and the features of a node.  Pure.  AND and OR have equal precedence and bind from left to
right, as in Slurm; brackets and parentheses group.  An expression of another form (counts, "prefer") matches every
node; sbatch has the last word.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_TOKEN = re.compile(r"[&|()\[\]]|[^&|()\[\]*]+|\*\d+")


def words_of(constraint: str) -> list[str]:
    """Features that it names."""
    return [token for token in _TOKEN.findall(constraint) if token not in "&|()[]" and not token.startswith("*")]


def fulfils(constraint: str, features: Collection[str]) -> bool:
    """True if a node of these features may be given."""
    tokens = _TOKEN.findall(constraint)
    if any(token.startswith(("*", "!")) for token in tokens):
        return True
    try:
        result, rest = _expression(tokens, features)
    except IndexError:
        return True
    return result or bool(rest)


def _expression(tokens: list[str], features: Collection[str]) -> tuple[bool, list[str]]:
    result, rest = _operand(tokens, features)
    while rest and rest[0] in "&|":
        right, after = _operand(rest[1:], features)
        result = (result and right) if rest[0] == "&" else (result or right)
        rest = after
    return result, rest


def _operand(tokens: list[str], features: Collection[str]) -> tuple[bool, list[str]]:
    """Raises IndexError: the expression ends too soon."""
    first, rest = tokens[0], tokens[1:]
    if first in "([":
        result, rest = _expression(rest, features)
        return result, rest[1:]
    return first in features, rest
