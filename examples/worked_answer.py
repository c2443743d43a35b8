"""A reward function of one's own: the right answer, and a little for working that adds up.

In the run file: `task = "worked_answer:reward"`, with this directory on PYTHONPATH.  docs/rewards.md says what a reward
function has to keep to, docs/tutorial.md trains with this one.
"""

from __future__ import annotations

import re

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.math_answer import judge

WORKING_REWARD = 0.2  # small beside 1.0: an answer that is only well argued must not pay
_EQUATION = re.compile(r"([0-9.,$ +*/x()-]+)=\s*\$?(-?[0-9][0-9.,]*)")
_TWO_NUMBERS = re.compile(r"(-?[0-9.]+)\s*([-+*/x])\s*([0-9.]+)")
_ANNOTATION = re.compile(r"<<[^>]*>>")  # GSM8K repeats every sum for a calculator: 48/2 = <<48/2=24>>24


def reward(completion: str, reference: str) -> RewardOutcome:
    """Return 1.0 for the right answer, plus WORKING_REWARD times the share of equations that hold.

    completion: working and `#### answer`; reference: a GSM8K solution.  Raises ValueError for a reference without an
    answer: that is a fault of the data, and must not look like a wrong answer.
    """
    outcome = judge(completion, reference)
    working = WORKING_REWARD * share_of_true_equations(completion)
    return RewardOutcome(
        reward=outcome.reward + working,
        is_correct=outcome.is_correct,
        parts={"answer": outcome.reward, "working": working},  # charts reward_part/answer, reward_part/working
        detail=outcome.detail,
    )


def share_of_true_equations(text: str) -> float:
    """Return which share of the equations of two numbers, such as `3 + 4 = 7`, hold; 0.0 where there is none."""
    results = []
    for left, right in _EQUATION.findall(_ANNOTATION.sub("", text)):
        sides = _TWO_NUMBERS.fullmatch(_plain(left)), _plain(right).rstrip(".")
        if sides[0] is not None:
            results.append(_holds(*sides[0].groups(), sides[1]))
    return sum(results) / len(results) if results else 0.0


def _plain(text: str) -> str:
    return text.replace(",", "").replace("$", "").strip()


def _holds(left: str, sign: str, right: str, result: str) -> bool:
    """Whether the equation holds to a hundredth; one that is no arithmetic (1.2.3, a division by zero) does not."""
    try:
        a, b, wanted = float(left), float(right), float(result)
        value = {"+": a + b, "-": a - b, "*": a * b, "x": a * b}[sign] if sign != "/" else a / b
    except (ValueError, ZeroDivisionError):
        return False
    return abs(value - wanted) < 0.01
