"""A reward function of one's own: the right answer, and a little for working that adds up.

In the run file: `task = "worked_answer:reward"`, with this directory on PYTHONPATH.  docs/rewards.md says what a reward
function has to keep to; docs/tutorial.md trains with `first_try`, finds its hole, and then trains with `reward`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.math_answer import math_answer

WORKING_REWARD = 0.2  # small beside 1.0: an answer that is only well argued must not pay
_EQUATION = re.compile(r"([0-9.,$ +*/x()-]+)=\s*\$?(-?[0-9][0-9.,]*)")
_ANNOTATION = re.compile(r"<<[^>]*>>")  # GSM8K repeats every sum for a calculator: 48/2 = <<48/2=24>>24
_LONGEST = 100  # characters of a sum: a policy may write what would take a parser's whole stack
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def reward(completion: str, reference: str) -> RewardOutcome:
    """Return 1.0 for the right answer, plus WORKING_REWARD times the share of equations that hold.

    completion: working and `#### answer`; reference: the answer, or a solution of GSM8K's that ends so.

    Raises ValueError for a reference without an answer: that is a fault of the data, and must not look like a wrong
    answer.
    """
    found = [holds is True for holds in equations(completion)]
    return _with_working(completion, reference, found)


def first_try(completion: str, reference: str) -> RewardOutcome:
    """As `reward`, but what cannot be read as a sum is passed over, as remarks between equations are."""
    found = [holds for holds in equations(completion) if holds is not None]
    return _with_working(completion, reference, found)


def _with_working(completion: str, reference: str, holds: list[bool]) -> RewardOutcome:
    outcome = math_answer(completion, reference)
    working = WORKING_REWARD * sum(holds) / len(holds) if holds else 0.0
    return RewardOutcome(
        reward=outcome.reward + working,
        is_correct=outcome.is_correct,
        parts={"answer": outcome.reward, "working": working},  # charts reward_part/answer, reward_part/working
        detail=outcome.detail,
    )


def equations(text: str) -> Iterator[bool | None]:
    """Whether each equation of numbers, such as `3 + 4 = 7`, holds to a hundredth; None: its left side is no sum."""
    for left, right in _EQUATION.findall(_ANNOTATION.sub("", text)):
        if any(character.isdigit() for character in left):
            yield _holds(_plain(left).replace("x", "*"), _plain(right).rstrip("."))


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip()


def _holds(left: str, right: str) -> bool | None:
    if len(left) > _LONGEST:
        return None
    try:
        tree = ast.parse(left, mode="eval").body
        if not isinstance(tree, ast.BinOp):
            return None  # a number alone is no working
        return abs(_value_of(tree) - float(right)) < 0.01
    except ZeroDivisionError:
        return False
    except (SyntaxError, ValueError):
        return None


def _value_of(tree: ast.expr) -> float:
    """Of sums, differences, products and quotients of numbers.  Raises ValueError for anything else."""
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return float(_OPERATORS[type(tree.op)](_value_of(tree.left), _value_of(tree.right)))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value_of(tree.operand)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float):
        return float(tree.value)
    raise ValueError(f"no arithmetic: {ast.dump(tree)}")
