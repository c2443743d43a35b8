r"""Read units from tokens: "km/h", "m^2", "red balls in total", "dollars per day", "\frac{\text{m}}{\text{s}}".

Input: tokens (math_tokens.py) and a place among them.  Output: a Unit, or None, where no unit stands there.
"""

from __future__ import annotations

from rlhpc.rewards.math_tokens import Token, Unreadable, tokens_of
from rlhpc.rewards.math_words import (
    COUNT,
    Unit,
    abbreviation,
    is_beside_unit,
    is_needless,
    may_be_scale,
    may_be_variable,
    unit_of,
)

_PER = ("/", "per", "a", "an", "every")
_MOST_WORDS = 8  # beside something that is counted
TIMES = frozenset({"*", r"\cdot", r"\times", r"\ast"})


class UnitReader:
    """Reads tokens from left to right; `_place` is the next one.  All methods raise Unreadable."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def _next(self) -> Token:
        return self._tokens[self._place] if self._place < len(self._tokens) else Token("end", "")

    def _ahead(self, steps: int) -> Token:
        place = self._place + steps
        return self._tokens[place] if place < len(self._tokens) else Token("end", "")

    def _take(self) -> Token:
        token = self._next
        if token.kind == "end":
            raise Unreadable("something is missing at the end")
        self._place += 1
        return token

    def _accept(self, *texts: str) -> Token | None:
        if self._next.text in texts and self._next.kind != "number":
            return self._take()
        return None

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise Unreadable(f"{self._next.text or 'the end'!r} stands where {text!r} is due")

    def _unit(self) -> Unit | None:
        """Read things that are counted, words beside them, and measures: "red balls in total", "km/h", "m^2"."""
        found = None
        while True:
            start = self._place
            if found is not None and self._next.kind == "sign":
                break
            step = self._one_unit(is_first=found is None)
            if step is None:
                self._place = start
                break
            found = step if found is None else found.times(step)
            while self._next.text in _PER:
                quotient = self._per(found)
                if quotient is None:
                    return found if self._next.text == "/" else None
                found = quotient
        return found

    def _per(self, above: Unit) -> Unit | None:
        """Read the "per hour" of "dollars per hour"; None, and nothing read, where there is none."""
        place = self._place
        if not self._accept(*_PER):
            return None
        below = self._grouped() if self._next.text == "(" else self._one_unit(is_first=False)
        if below is None:
            self._place = place
            return None
        return above.times(below, -1)

    def _grouped(self) -> Unit | None:
        """Read the "(kg K)" of "J/(kg K)"."""
        self._take()
        unit = self._unit()
        return unit if self._accept(")") else None

    def _one_unit(self, *, is_first: bool) -> Unit | None:
        token = self._next
        word = token.text.lower()
        if token.kind == "word" and word in ("square", "sq", "cubic", "cu") and unit_of(self._ahead(1).text):
            self._take()
            unit = unit_of(self._take().text)
            return None if unit is None else COUNT.times(unit, 3 if word in ("cubic", "cu") else 2)
        if token.kind == "word" and word == "in" and self._ahead(1).text in ("total", "all"):
            self._place += 2
            return COUNT
        if token.kind in ("word", "letter", "sign", "command") and (unit := unit_of(token.text)) is not None:
            return self._powered(unit) if self._is_unit_here(is_first=is_first) else None
        if token.kind == "word" and (spelt := abbreviation(word)):
            self._take()
            return UnitReader(tokens_of(spelt))._unit()
        if token.kind == "word" and (is_needless(word) or (is_beside_unit(word) and self._a_unit_follows())):
            self._take()
            return COUNT
        if token.text == "of" and self._ahead(1).text in ("a", "an") and unit_of(self._ahead(2).text) is not None:
            self._place += 2  # "3/4 of an hour"
            return self._one_unit(is_first=is_first)
        if token.text == "of" and not is_first and self._a_unit_follows():
            self._take()
            return COUNT
        return self._fraction_of_units() if token.text == r"\frac" else None

    def _a_unit_follows(self) -> bool:
        step = 1
        while step < _MOST_WORDS and (is_beside_unit(self._ahead(step).text) or self._ahead(step).text == "of"):
            step += 1
        return unit_of(self._ahead(step).text) is not None

    def _is_unit_here(self, *, is_first: bool) -> bool:
        """Whether a letter that is a unit or a variable is the unit: upright, or alone behind a number and a gap."""
        token, before = self._next, self._tokens[self._place - 1]
        if token.kind != "letter" or token.is_upright or not is_first or not may_be_variable(token.text):
            return True
        behind = self._ahead(1)
        is_product = (behind.text in TIMES and may_be_variable(self._ahead(2).text)) or (
            may_be_variable(behind.text) and self._ahead(2).text == "^"
        )
        is_last = behind.kind == "end" or behind.text in ("/", "^", ",") or is_product
        return before.kind == "number" and token.has_gap and is_last and not may_be_scale(token.text)

    def _powered(self, unit: Unit) -> Unit | None:
        self._take()
        exponent = 1
        if self._next.text == "^":
            self._take()
            has_brace, sign = self._accept("{"), -1 if self._accept("-") else 1
            power = self._take()
            if power.kind != "number" or power.value not in range(1, 10) or (has_brace and not self._accept("}")):
                return None
            exponent = sign * int(power.value)
        elif self._next.kind == "number" and self._next.text in ("2", "3") and not self._next.has_gap:
            exponent = int(self._take().text)
        if self._next.text in TIMES and unit_of(self._ahead(1).text):
            self._take()
        return COUNT.times(unit, exponent)

    def _fraction_of_units(self) -> Unit | None:
        r"""Read \frac{\text{km}}{\text{h}}."""
        self._take()
        units = []
        for _ in range(2):
            if not self._accept("{") or (unit := self._unit()) is None or not self._accept("}"):
                return None
            units.append(unit)
        return units[0].times(units[1], -1)
