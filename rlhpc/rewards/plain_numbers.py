"""Read a number as people write it in an answer: "1,234", "$18", "-0.50", "3/4", "40%", "12 eggs".

The quick way, which most answers take: exact (fractions, not floats) and strict.  A text that holds anything besides
one number, its currency or percent sign and one unit is not a plain number; math_reading.py reads all others.  Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rlhpc.rewards.math_words import COUNT, Unit, unit_of

_NUMBER = re.compile(
    r"""
    (?P<minus>-)? \s* (?P<currency>[$€£¥])? (?P<minus_after>-)?
    (?: (?P<grouped>[0-9]{1,3}(?:,[0-9]{3})+) | (?P<digits>[0-9]+) )?
    (?P<decimals>\.[0-9]+)?
    (?: / (?P<denominator>[0-9]+) )?
    \s* (?P<percent>%)?
    (?: \s+ (?P<unit>[A-Za-z]{2,}) )?
    \.?
    """,
    re.VERBOSE,
)
_LATEX_SPELLINGS = (
    (re.compile(r"\\[$]"), "$"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile("[−–]"), "-"),
)
LONGEST_TEXT = 1_000  # characters
_TO_RESPELL = re.compile(r"[\\{~−–]")


@dataclass(frozen=True, slots=True)
class PlainNumber:
    """One number; `value` is the number as written, not divided by 100 if a percent sign follows."""

    value: Fraction
    is_percent: bool = False
    unit: Unit = COUNT

    def equals(self, answer: PlainNumber) -> bool:
        """Compare a reference (self) with an answer.

        "40%" answers "40" (the question asked for a percentage), "40%" and "0.4"; "40" answers "40%" too, while "0.4"
        does not answer "40".  Two units must be of the same kind: "5 km" is "5000 metres", and not "$5".
        """
        if self.unit.dimensions and answer.unit.dimensions:
            is_same = self.unit.dimensions == answer.unit.dimensions
            return is_same and self.value * self.unit.factor == answer.value * answer.unit.factor
        if self.value == answer.value:
            return True
        if self.is_percent == answer.is_percent:
            return False
        return self._amount == answer._amount

    @property
    def _amount(self) -> Fraction:
        return self.value / 100 if self.is_percent else self.value


def parse_plain_number(text: str) -> PlainNumber | None:
    """Return the number, or None where the text is not exactly one plain number."""
    if len(text) > LONGEST_TEXT:
        return None
    if _TO_RESPELL.search(text):
        for spelling, plain in _LATEX_SPELLINGS:
            text = spelling.sub(plain, text)
    text = text.strip()
    if text.count("$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or not (match["grouped"] or match["digits"] or match["decimals"]):
        return None
    if match["minus"] and match["minus_after"]:
        return None
    whole = (match["grouped"] or match["digits"] or "0").replace(",", "")
    denominator = int(match["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction(whole + (match["decimals"] or "")) / denominator
    has_minus = match["minus"] or match["minus_after"]
    unit = unit_of(match["unit"] or match["currency"]) if match["unit"] or match["currency"] else COUNT
    if unit is None or (match["unit"] and (match["currency"] or match["percent"])):
        return None
    return PlainNumber(-value if has_minus else value, match["percent"] is not None, unit)
