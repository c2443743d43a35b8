"""Task "integer_arithmetic": is the last thing written the right integer?

Input: a completion such as "12+34;2+4=6;10+30=40;46" and a reference such as "46".  Output: a RewardOutcome of 1.0 or
0.0.

The answer is what stands after the last of the marks "####", ";" and "=", or the whole completion where there is
none.  It must be one integer in its only spelling: ASCII digits, a minus sign where it is negative, no leading zero,
no plus, no comma, blanks around it at most.  So two answers after the last mark, trailing digits or words are wrong.
"""

from __future__ import annotations

import re

from rlhpc.contracts import RewardOutcome

_MARK = re.compile(r"####|;|=")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_SHOWN_CHARACTERS = 80


def judge(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the answer equals the reference, else 0.0.  Raises ValueError if the reference is no integer."""
    wanted = _integer(reference)
    answer = final_answer(completion)
    if answer is None:
        tail = completion[-_SHOWN_CHARACTERS:]
        return RewardOutcome(0.0, is_correct=False, detail=f"no integer at the end of {tail!r}")
    # Both spellings are canonical, so text equality is integer equality, for any number of digits.
    is_correct = answer == wanted
    return RewardOutcome(float(is_correct), is_correct, detail=f"answer {answer[:_SHOWN_CHARACTERS]}", answer=answer)


def check_reference(reference: str) -> None:
    """Raises ValueError if it is no integer."""
    _integer(reference)


def _integer(reference: str) -> str:
    wanted = reference.strip()
    if _INTEGER.fullmatch(wanted) is None:
        raise ValueError(
            f"reference {reference[:_SHOWN_CHARACTERS]!r} is not an integer in canonical spelling; legal: digits, a "
            "minus sign where it is negative, no leading zero, no comma"
        )
    return wanted


def final_answer(completion: str) -> str | None:
    """Return the answer in canonical spelling, or None where what follows the last mark is not one integer."""
    answer = _MARK.split(completion)[-1].strip()
    return answer if _INTEGER.fullmatch(answer) else None
