r"""Task "multiple_choice": is the letter that was chosen the right one?

Input: a completion and a reference, one letter.  Output: a RewardOutcome of 1.0 or 0.0.

Only a marked choice counts, and only the mark that begins last: \boxed{…}, "#### …", or a line that begins with
"Answer:"; a completion that is nothing but a choice needs no mark.  A choice is one letter, as "B", "(B)", "B." or
"B)", which a text may follow ("B. Paris"); two letters ("A or B") are none, so that listing many gains nothing.
"""

from __future__ import annotations

import re

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.marked_answer import last_mark, outcome

_ANSWER_LINE = re.compile(r"^[ \t*]*answer[ \t*]*:[ \t*]*([^\n]*)", re.IGNORECASE | re.MULTILINE)
_IN_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_BLANK = re.compile(r"\\[ ,;:!]|~")
_CHOICE = re.compile(r"[(\[]?([A-Za-z])(?:[)\].:]+(?:\s.*)?|\**)", re.DOTALL)
_SECOND = re.compile(r"[(\[][A-Za-z][)\]]|\b[A-Z]\)|\b(?:or|and)\s+[A-Z]\b")


def judge(completion: str, reference: str) -> RewardOutcome:
    """Reward 1.0 if the letters are equal, in either case.  Raises ValueError if the reference is not one letter."""
    wanted = _wanted(reference)
    marked = [(match.start(), match[1]) for match in _ANSWER_LINE.finditer(completion)]
    if (mark := last_mark(completion)) is not None:
        marked.append(mark)
    chosen = _letter(max(marked)[1] if marked else completion)
    is_correct = chosen == wanted
    return outcome(float(is_correct), chosen or "", is_correct=is_correct)


def check_reference(reference: str) -> None:
    """Raises ValueError if it is not one letter."""
    _wanted(reference)


def _wanted(reference: str) -> str:
    letter = _letter(reference)
    if letter is None:
        raise ValueError(f"reference {reference[:80]!r} is not one letter; legal: B, (B) or B.")
    return letter


def _letter(text: str) -> str | None:
    """The one letter that a text chooses, in upper case; None: none, or more than one."""
    text = _BLANK.sub(" ", _IN_TEXT.sub(r"\1", text)).strip().strip("$*").strip()
    match = _CHOICE.fullmatch(text)
    if match is None or _SECOND.search(text[match.end(1) :].lstrip(").]:")):
        return None
    return match[1].upper()
