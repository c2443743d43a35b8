r"""Tasks "integer_arithmetic" and "math_answer": is the answer the right number, or the right mathematics?

"math_answer": does the final answer equal the reference?  Input: a completion and a reference.  Output: a RewardOutcome
of 1.0 or 0.0.

The answer is strictly the last marked one of the completion (text_answer.py).  Earlier ones do not count, and a
completion without a mark is wrong however right its prose is.  Plain numbers, which is what GSM8K
has, are compared at once (math_values.py); everything else is read into a term (math_reading.py) and compared as one
(math_equality.py).  Every verdict is bounded: nothing here takes longer than a fraction of a second.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.math_equality import are_equal, check_defined, is_in_lowest_terms
from rlhpc.rewards.math_reading import read
from rlhpc.rewards.math_tokens import Unreadable
from rlhpc.rewards.math_values import PlainNumber, TooLarge, Undefined, has_phrase, parse_plain_number
from rlhpc.rewards.task_settings import task_settings
from rlhpc.rewards.text_answer import LONGEST_ANSWER, last_marked_answer

# --------------------------------------------------------------------------------------------------- integer arithmetic
#
# Task "integer_arithmetic": does the completion end with the right integer?
#
# Input: a completion such as "12+34;2+4=6;10+30=40;46" and a reference such as "46".  Output: a RewardOutcome of 1.0 or
# 0.0.
#
# The answer is the text after the last of the marks "####", ";" and "=", or the whole completion without a mark.  It
# must be one integer in canonical spelling: ASCII digits, a minus sign if negative, no leading zero, no plus, no comma,
# at most blanks around it.  So two answers after the last mark, trailing digits or words are wrong.

_MARK = re.compile(r"####|;|=")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_SHOWN_CHARACTERS = 80


def integer_arithmetic(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the answer equals the reference, else 0.0.  Raises ValueError if the reference is no integer."""
    wanted = _integer(reference)
    answer = final_answer(completion)
    if answer is None:
        tail = completion[-_SHOWN_CHARACTERS:]
        return RewardOutcome(0.0, is_correct=False, detail=f"no integer at the end of {tail!r}")
    # Both spellings are canonical, so text equality is integer equality, for any number of digits.
    is_correct = answer == wanted
    return RewardOutcome(float(is_correct), is_correct, detail=f"answer {answer[:_SHOWN_CHARACTERS]}", answer=answer)


def check_integer_arithmetic(reference: str) -> None:
    """Raise ValueError for a reference that is no integer."""
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
    """Return the answer in canonical spelling; None if the text after the last mark is not one integer."""
    answer = _MARK.split(completion)[-1].strip()
    return answer if _INTEGER.fullmatch(answer) else None


# ---------------------------------------------------------------------------------------------------------- math answer

_HOLES = ("nan", "null")  # missing values of a table that was written as text
# Two words in a row, outside of \text{…}: prose instead of an answer.
_SENTENCE = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{3,}")
_WORD, _DIGIT = re.compile(r"[A-Za-z]{3,}"), re.compile(r"\d")
_NAMES = ("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "max", "min", "abs", "inf", "infinity")
_TRUTHS = ("true", "false", "yes")
_COMMANDS = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|operatorname|begin|end)\s*\{[^}]*\}|\\[A-Za-z]+")
_LEGAL = r"legal: a number, one expression in LaTeX, alone, in \boxed{…} or behind ####, or a JSON list of texts"


@dataclass(frozen=True, slots=True)
class Reference:
    """One alternative of a reference: its text, and its number if it is a plain one."""

    text: str
    number: PlainNumber | None


def verify(completion: str, reference: str) -> Verdict:
    """Give the verdict alone: correct, wrong, or, for a reference that cannot be read, verifier_error."""
    try:
        return Verdict.CORRECT if math_answer(completion, reference).is_correct else Verdict.WRONG
    except ValueError:
        return Verdict.VERIFIER_ERROR


def math_answer(completion: str, reference: str) -> RewardOutcome:
    r"""Return reward 1.0 or 0.0, and the extracted answer.

    reference: a GSM8K solution ("… #### 1,234"), a text with \boxed{…}, or the bare answer (LaTeX or a number); or a
    JSON list of such texts, of which any is right.
    Raises ValueError if the reference cannot be read, which is no verdict on the completion.
    """
    wanted = read_references(reference)
    answer_text = last_marked_answer(completion)
    if answer_text is None:
        return RewardOutcome(0.0, is_correct=False, detail=r"no \boxed{…} and no ####")
    if not answer_text or len(answer_text) > LONGEST_ANSWER:
        return RewardOutcome(0.0, is_correct=False, detail=f"answer of {len(answer_text)} characters")
    is_correct = any(_is_answered(each, answer_text) for each in wanted)
    shown = f"answer {answer_text[:_SHOWN_CHARACTERS]}"
    return RewardOutcome(float(is_correct), is_correct, detail=shown, answer=answer_text)


def check_math_answer(reference: str) -> str:
    """Raise ValueError for a reference with a text that cannot be read or has no value.

    Returns a doubt about one that is words, such as "no idea" for an answer that nobody knew; "": there is none.
    """
    for each in read_references(reference):
        words = _WORD.findall("" if _DIGIT.search(each.text) else _COMMANDS.sub("", each.text))
        if any(word.lower() not in (*_NAMES, *_TRUTHS) for word in words):
            return f"{each.text[:_SHOWN_CHARACTERS]!r} is words without a number"
    return ""


@lru_cache(4096)
def read_references(reference: str) -> tuple[Reference, ...]:
    """Return the alternatives of a reference.  Raises ValueError as check_math_answer."""
    texts = _alternatives(reference)
    if not texts:
        raise ValueError(f"reference {reference[:_SHOWN_CHARACTERS]!r} is an empty list; {_LEGAL}")
    return tuple(map(_read_reference, texts))


def _alternatives(reference: str) -> list[str]:
    """Return the texts of a JSON list of texts; [1, 2] is an interval."""
    if reference.lstrip().startswith("["):
        try:
            texts = json.loads(reference)
        except (ValueError, RecursionError):
            return [reference]
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return [str(text) for text in texts]
    return [reference]


def _read_reference(text: str) -> Reference:
    marked = last_marked_answer(text)
    answer = text.strip() if marked is None else marked
    number = parse_plain_number(answer)
    if number is not None:
        return Reference(answer, number)
    may_be_prose = marked is None and _SENTENCE.search(_COMMANDS.sub("", answer)) is not None
    try:
        fault = "it is no mathematics" if answer.lower() in _HOLES else _fault_of(answer, may_be_prose=may_be_prose)
    except (Unreadable, Undefined, TooLarge) as error:
        fault = str(error)
    if fault:
        raise ValueError(
            f"reference {answer[:_SHOWN_CHARACTERS]!r} cannot be read as mathematics; {_LEGAL}; here {fault}"
        )
    return Reference(answer, None)


def _fault_of(answer: str, *, may_be_prose: bool) -> str:
    """Return why a text cannot be a reference; "": it can.  Raises Unreadable, Undefined, TooLarge."""
    term = read(answer)
    if may_be_prose and has_phrase(term):
        return "it is prose"
    check_defined(term)
    return ""


def _is_answered(wanted: Reference, answer_text: str) -> bool:
    settings = task_settings().math
    answer = parse_plain_number(answer_text)
    is_plain = settings.fractions == "any" and settings.units == "optional"
    if is_plain and wanted.number is not None and answer is not None:
        return wanted.number.equals(answer)
    try:
        term = read(answer_text)
    except Unreadable:
        return False
    if settings.fractions == "lowest" and not is_in_lowest_terms(term):
        return False
    try:
        return are_equal(read(wanted.text), term, settings.units)
    except TooLarge:
        return False
