"""Task "regex": does the answer match the pattern that is the reference?

Input: a completion and a reference, which is a Python regular expression.  Output: a RewardOutcome of 1.0 or 0.0.

The whole answer must match, flags stand in the pattern ("(?i)yes").  The answer is the last marked one, or all of the
completion (marked_answer.py).  A pattern that takes exponential time is ended by rewards.timeout_s: a verifier error.
"""

from __future__ import annotations

import re
from functools import lru_cache

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.marked_answer import answer_of, outcome


def judge(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the pattern matches the whole answer, else 0.0.  Raises ValueError if the reference is none."""
    answer = answer_of(completion)
    is_correct = _compiled(reference).fullmatch(answer) is not None
    return outcome(float(is_correct), answer, is_correct=is_correct)


def check_reference(reference: str) -> None:
    """Raises ValueError if it is not a regular expression."""
    _compiled(reference)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"reference {pattern[:80]!r} is not a regular expression: {error}; legal: one of Python's re"
        ) from error
