r"""Task "math_answer": does the final answer equal the reference, as mathematics?

Input: a completion and a reference.  Output: a RewardOutcome of 1.0 or 0.0.

Which text is the answer is decided strictly: the last marked answer of the completion (marked_answer.py).  Earlier ones
do not count, and a completion without a mark is wrong however right its prose is.  What the text means is decided by
plain_numbers.py for plain numbers (which is what GSM8K has) and by math-verify for everything else; small_numbers.py
corrects its comparison.

math-verify's own time limits are off: they are alarms, which work in a main thread only and do not interrupt C code.
A comparison may therefore never end; the pool kills it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import math_verify

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.marked_answer import LONGEST_ANSWER, braced, last_marked_answer
from rlhpc.rewards.math_reference import answer_in
from rlhpc.rewards.plain_numbers import PlainNumber, parse_plain_number
from rlhpc.rewards.small_numbers import have_other_numbers
from rlhpc.types import Verdict

# math-verify adds juxtaposed numbers: it reads "18 19" as 37 and "1 234" as 235.
_TWO_NUMBERS = re.compile(r"[0-9](?:\s|\\[,;:! ]|~)+[0-9]")
_IN_DOLLARS = re.compile(r"^\$([^$]*)(?<!\\)\$$")
_BARE_DOLLAR = re.compile(r"(?<!\\)\$")
# Two words in a row, which math-verify would read as products of letters.
_SENTENCE = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{3,}")
_COMMANDS = re.compile(r"\\(?:text|textbf|mathrm|operatorname|begin|end)\s*\{[^}]*\}|\\[A-Za-z]+")
_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?\$?$")  # math-verify passes over it
_SPELLINGS = (("°", r"^\circ "), ("∞", r"\infty "), (r"\varnothing", r"\emptyset"))
_HOLES = ("nan", "null")  # of a table that was written as text; math-verify reads products of letters
_SHOWN_CHARACTERS = 80

_LATEX = (math_verify.LatexExtractionConfig(boxed_match_priority=0),)

# It warns that its time limits are off, once per process, which is on purpose here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(completion: str, reference: str) -> Verdict:
    """Give the verdict alone: correct, wrong, or, for a reference that cannot be read, verifier_error."""
    try:
        return Verdict.CORRECT if judge(completion, reference).is_correct else Verdict.WRONG
    except ValueError:
        return Verdict.VERIFIER_ERROR


def judge(completion: str, reference: str) -> RewardOutcome:
    r"""Return reward 1.0 or 0.0, and what was taken for the answer.

    reference: a GSM8K solution ("… #### 1,234"), a text with \boxed{…}, or the bare answer (LaTeX or a number).
    Raises ValueError if the reference cannot be read: that says nothing about the completion.
    """
    wanted = read_reference(reference)
    answer_text = last_marked_answer(completion)
    if answer_text is None:
        return RewardOutcome(0.0, is_correct=False, detail=r"no \boxed{…} and no ####")
    if not answer_text or len(answer_text) > LONGEST_ANSWER:
        return RewardOutcome(0.0, is_correct=False, detail=f"answer of {len(answer_text)} characters")
    is_correct = not _have_other_bases(answer_in(reference), answer_text) and _is_equal(wanted, answer_text)
    shown = f"answer {answer_text[:_SHOWN_CHARACTERS]}"
    return RewardOutcome(float(is_correct), is_correct, detail=shown, answer=answer_text)


def read_reference(reference: str) -> PlainNumber | list[Any]:
    """Return the number, or the expression as math-verify reads it.  Raises ValueError if it is neither."""
    text = answer_in(reference)
    number = parse_plain_number(text)
    if number is not None:
        return number
    is_none = text.lower() in _HOLES or _SENTENCE.search(_COMMANDS.sub("", text))
    parsed = [] if is_none else _parse_latex(text)
    if not parsed:
        raise ValueError(
            f"reference {text[:_SHOWN_CHARACTERS]!r} cannot be read as mathematics; legal: a number, or one expression "
            r"in LaTeX, alone, in \boxed{…} or behind ####"
        )
    return parsed


def _parse_latex(text: str) -> list[Any]:
    """Return math-verify's reading, a list of one SymPy expression; an empty list where it has none.

    Refused unread: what math-verify would misread, and what could break out of the braces it is put in.
    """
    text = _IN_DOLLARS.sub(r"\1", text)
    for spelling, known in _SPELLINGS:
        text = text.replace(spelling, known)
    if not text or _TWO_NUMBERS.search(text) or _BARE_DOLLAR.search(text) or braced(text + "}", 0) != text:
        return []
    parsed: list[Any] = math_verify.parse(
        rf"\boxed{{{text}}}", _LATEX, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return parsed


def _is_equal(wanted: PlainNumber | list[Any], answer_text: str) -> bool:
    answer = parse_plain_number(answer_text)
    if isinstance(wanted, PlainNumber):
        if answer is not None:
            return wanted.equals(answer)
        wanted = _parse_latex(wanted.as_latex())
    parsed = _parse_latex(answer_text if answer is None else answer.as_latex())
    if not parsed or not _are_equal(wanted, parsed):
        return False
    return not have_other_numbers(wanted[0], parsed[0])


def _are_equal(wanted: list[Any], parsed: list[Any]) -> bool:
    """An inequality may answer an interval, as an interval answers an inequality."""
    equal: bool = math_verify.verify(
        wanted, parsed, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
    )
    return equal


def _have_other_bases(wanted: str, answer: str) -> bool:
    """Whether both say in which base they are, and it is not the same one."""
    ours, theirs = _BASE.search(wanted), _BASE.search(answer)
    return ours is not None and theirs is not None and ours[1] != theirs[1]
