r"""Task "math_answer": does the final answer equal the reference, as mathematics?

Input: a completion and a reference.  Output: a RewardOutcome of 1.0 or 0.0.

Which text is the answer is decided strictly: the last marked answer of the completion (marked_answer.py).  Earlier ones
do not count, and a completion without a mark is wrong however right its prose is.  Plain numbers, which is what GSM8K
has, are compared at once (plain_numbers.py); everything else is read into a term (math_reading.py) and compared as one
(math_equality.py).  Every verdict is bounded: nothing here takes longer than a fraction of a second.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.marked_answer import LONGEST_ANSWER, last_marked_answer
from rlhpc.rewards.math_equality import Rules, are_equal, check_defined, is_in_lowest_terms
from rlhpc.rewards.math_reading import read
from rlhpc.rewards.math_terms import Term, has_phrase
from rlhpc.rewards.math_tokens import Unreadable
from rlhpc.rewards.math_values import TooLarge, Undefined
from rlhpc.rewards.plain_numbers import PlainNumber, parse_plain_number
from rlhpc.rewards.task_settings import task_settings
from rlhpc.types import Verdict

_HOLES = ("nan", "null")  # of a table that was written as text
# Two words in a row, outside of \text{…}: prose, where an answer was expected.
_SENTENCE = re.compile(r"[A-Za-z]{3,}\s+[A-Za-z]{3,}")
_COMMANDS = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|operatorname|begin|end)\s*\{[^}]*\}|\\[A-Za-z]+")
_SHOWN_CHARACTERS = 80
_LEGAL = r"legal: a number, one expression in LaTeX, alone, in \boxed{…} or behind ####, or a JSON list of texts"


@dataclass(frozen=True, slots=True)
class Reference:
    """One text that a reference stands for: a plain number, where it is one, and a term."""

    text: str
    number: PlainNumber | None

    def term(self) -> Term:
        """Return it as a term.  Raises Unreadable."""
        return read(self.text)


def verify(completion: str, reference: str) -> Verdict:
    """Give the verdict alone: correct, wrong, or, for a reference that cannot be read, verifier_error."""
    try:
        return Verdict.CORRECT if judge(completion, reference).is_correct else Verdict.WRONG
    except ValueError:
        return Verdict.VERIFIER_ERROR


def judge(completion: str, reference: str) -> RewardOutcome:
    r"""Return reward 1.0 or 0.0, and what was taken for the answer.

    reference: a GSM8K solution ("… #### 1,234"), a text with \boxed{…}, or the bare answer (LaTeX or a number); or a
    JSON list of such texts, of which any is right.
    Raises ValueError if the reference cannot be read: that says nothing about the completion.
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


def check_reference(reference: str) -> None:
    """Raises ValueError if a text of it cannot be read or has no value."""
    read_references(reference)


@lru_cache(4096)
def read_references(reference: str) -> tuple[Reference, ...]:
    """Return the texts that a reference stands for.  Raises ValueError as check_reference."""
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
    """Return why a text cannot be a reference; "": it can.  Raises Unreadable, Undefined, TooLarge, which say it."""
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
        return are_equal(wanted.term(), term, Rules(settings.units))
    except TooLarge:
        return False
