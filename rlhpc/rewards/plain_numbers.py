r"""Read a number as people write it in an answer: "1,234", "$18", "-0.50", "3/4", "40%", "12 eggs", "7\text{ m}".

Exact (fractions, not floats) and strict: a text that holds anything besides one number, its currency sign, its
percent sign and its unit is not a plain number.  Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_NUMBER = re.compile(
    r"""
    (?P<minus>-)? \s* (?:[$€£¥])? (?P<minus_after>-)?
    (?: (?P<grouped>[0-9]{1,3}(?:,[0-9]{3})+) | (?P<digits>[0-9]+) )?
    (?P<decimals>\.[0-9]+)?
    (?: / (?P<denominator>[0-9]+) )?
    \s* (?P<percent>%)?
    (?P<unit>(?:\s+[A-Za-z]+)*)
    \.?
    """,
    re.VERBOSE,
)
_UNIT_SYMBOLS = frozenset({"cm", "mm", "km", "kg", "lb", "oz", "ft", "mi", "hr"})
# Words that change the number before them, so that they are no units.
_SCALES = frozenset(
    {"hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "percentage", "and", "plus", "minus",
     "times", "over"}
)  # fmt: skip
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{([^{}\\]*)\}")
_LATEX_SPELLINGS = (
    (re.compile(r"\\[$]"), "$"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile("[−–]"), "-"),
)


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """One number; `value` is the number as written, not divided by 100 if a percent sign follows."""

    value: Fraction
    is_percent: bool = False

    def equals(self, answer: PlainNumber) -> bool:
        """Compare a reference (self) with an answer.

        "40%" answers "40" (the question asked for a percentage), "40%" and "0.4"; "40" answers "40%" too, while "0.4"
        does not answer "40".
        """
        if self.value == answer.value:
            return True
        if self.is_percent == answer.is_percent:
            return False
        return self._amount == answer._amount

    @property
    def _amount(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value

    def as_latex(self) -> str:
        """Spell it so that math-verify reads it exactly."""
        sign = "-" if self.value < 0 else ""
        numerator, denominator = abs(self.value.numerator), self.value.denominator
        bare = str(numerator) if denominator == 1 else rf"\frac{{{numerator}}}{{{denominator}}}"
        return sign + bare + (r"\%" if self.is_percent else "")


def parse_plain_number(text: str) -> PlainNumber | None:
    """Return the number, or None where the text is not exactly one plain number."""
    for spelling, plain in _LATEX_SPELLINGS:
        text = spelling.sub(plain, text)
    text = _TEXT.sub(_without_unit, text).strip()
    if text.count("$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or not (match["grouped"] or match["digits"] or match["decimals"]):
        return None
    if not all(_is_unit(word) for word in match["unit"].lower().split()):
        return None
    if match["minus"] and match["minus_after"]:
        return None
    whole = (match["grouped"] or match["digits"] or "0").replace(",", "")
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction(whole + (match["decimals"] or "")) / denominator
    has_minus = match["minus"] or match["minus_after"]
    return PlainNumber(-value if has_minus else value, is_percent=match["percent"] is not None)


def _is_unit(word: str) -> bool:
    """Two letters or fewer are more likely variables: "2 x" is not 2."""
    return word in _UNIT_SYMBOLS or (len(word) > 2 and word not in _SCALES)


def _without_unit(text_command: re.Match[str]) -> str:
    r"""Drop a unit such as \text{ m}, of any length, since it cannot be a variable; keep any other text."""
    words = text_command[1].split()
    is_unit = all(word.isalpha() and word.lower() not in _SCALES for word in words)
    return " " if is_unit else f" {text_command[1]}"
