r"""Split an answer, in TeX or as people type, into tokens.

Input: a text of LaTeX, Unicode and words.  Output: a list of tokens in one spelling: "½" and \tfrac12 are \frac,
"twenty-five" is 25, "5 million" 5000000, "squared" is ^2, \text{…} and fonts are replaced by their content.
Pure; the work grows with the length of the text, which is bounded.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction

from rlhpc.rewards.math_words import (
    COUNT,
    NUMBERS,
    OPERATIONS,
    PARTS,
    SCALES,
    Unit,
    abbreviation,
    is_beside_unit,
    is_needless,
    may_be_scale,
    may_be_variable,
    unit_of,
)

# ---------------------------------------------------------------------------------------------------------- math tokens

MOST_DIGITS = 5_000  # of a number with an exponent, such as 1e400


class Unreadable(ValueError):
    """A text that cannot be read as mathematics here."""


@dataclass(frozen=True, slots=True)
class Token:
    r"""One sign, number, word, letter or command.

    kind: "number" and "scale" (with their values), "letter", "word" (two letters or more), "command", "sign".
    has_gap: blanks before it.  is_upright: inside \text{…} or \mathrm{…}.
    """

    kind: str
    text: str
    has_gap: bool = False
    is_upright: bool = False
    value: Fraction = Fraction(0)


_CHARACTERS = str.maketrans(
    {
        "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "•": r"\cdot ",
        "∗": "*", "÷": r"\div ", "∕": "/", "⁄": "/", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "∀": r"\forall ", "≡": r"\equiv ", "∈": r"\in ", "∉": r"\notin ", "∪": r"\cup ", "∩": r"\cap ",
        "∅": r"\emptyset ",
        "∖": r"\setminus ", "±": r"\pm ", "∓": r"\mp ", "′": "'", "’": "'", "″": "''", "…": r"\ldots ",
        "⋯": r"\ldots ", "ℝ": r"\mathbb{R}", "ℕ": r"\mathbb{N}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}",
        "ℂ": r"\mathbb{C}", "→": r"\to ", "⟨": r"\langle ", "⟩": r"\rangle ", "∣": r"\mid ", "⌊": r"\lfloor ",
        "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ",
        "∧": r"\land ", "∨": r"\lor ", "¬": r"\neg ", "\u00a0": " ", "\u2009": r"\,", "\u202f": r"\,", "º": "°",
        "˚": "°", "ⅈ": "i", "ⅉ": "j", "ⅇ": "e", "“": '"', "”": '"', "\u200b": "", "\ufeff": "", "\t": " ", "\n": " ",
        "\r": " ",
    }
)  # fmt: skip
_GREEK = {
    unicodedata.lookup(f"GREEK {case} LETTER {name}"): f"\\{tex} "
    for name in (
        "alpha beta gamma delta epsilon zeta eta theta iota kappa mu nu xi pi rho sigma tau upsilon phi chi psi omega"
    )
    .upper()
    .split()
    for case, tex in (("SMALL", name.lower()), ("CAPITAL", name.title()))
} | {"λ": r"\lambda ", "Λ": r"\Lambda "}
_GREEK["ϕ"] = _GREEK["φ"]
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣ", "0123456789+-=()nix", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙₓ", "0123456789+-=()nx", strict=True))
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_STYLED = re.compile("[\u2102-\u2149\U0001d400-\U0001d7ff\uff01-\uff5e]")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"([√∛∜])\s*([0-9]+(?:\.[0-9]+)?|)")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_BARRED = re.compile("((?:[0-9]\u0305)+)")
_DOTTED = re.compile("([0-9])\u0307")

_REWRITTEN = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", " "),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|boldmath|rm|bf|it)(?![A-Za-z])", " "),
        (r"\{,\}|,\\!\s*|(?<=[0-9])\\[,;: ](?=[0-9]{3}(?![0-9]))", ","),
        (r"\\\\\s*\[\s*[0-9.]+\s*(?:mm|cm|pt|ex|em|in)\s*\]", r"\\\\ "),
        (r"(?:\{\s*\})?[_^]\s*\{?\s*([0-9]+|[a-z])\s*\}?\s*(?:\\(?:mathrm|mathbf|text)\s*\{\s*C\s*\}|C)\s*_\s*"
         r"(?:\{\s*([0-9]+|[a-z])\s*\}|([0-9a-z]))", r"\\binom{\1}{\2\3}"),
        (r"(?<![A-Za-z0-9_^.{\\])([0-9]+)\s*C\s*([0-9]+)(?![A-Za-z0-9.])", r"\\binom{\1}{\2}"),
        (r"(?<![0-9A-Za-z)}])C\s*_\s*\{?\s*([0-9]+)\s*\}?\s*\^\s*\{?\s*([0-9]+)\s*\}?", r"\\binom{\1}{\2}"),
        (r"(?<![0-9A-Za-z)}])C\s*\^\s*\{?\s*([0-9]+)\s*\}?\s*_\s*\{?\s*([0-9]+)\s*\}?", r"\\binom{\2}{\1}"),
        (r"(?<![0-9A-Za-z)}\\])C\s*\(\s*([0-9]+|[a-z])\s*,\s*([0-9]+|[a-z])\s*\)", r"\\binom{\1}{\2}"),
        (r"((?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s+[0-9]{1,2})(?:st|nd|rd|th)\b", r"\1"),
        (r"(?<=[0-9])!=", "! ="),
        (r"\\(?:q?quad|enspace|thinspace|medspace|space|nobreakspace)(?![A-Za-z])|(?<!\\)\\[,;:!> ]|~", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\\d?t?c?frac(?![A-Za-z])", r"\\frac"),
        (r"\\d?t?binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:var|p)nothing(?![A-Za-z])|\\O(?![A-Za-z])", r"\\emptyset"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])|\\textdegree(?![A-Za-z])", "°"),
        (r"\\(?:text|mathrm)\s*\{\s*°\s*([CF])\s*\}", r"°\1"),
        (r"°\s*(?:C(?![A-Za-z])|\\(?:text|mathrm)\s*\{\s*C\s*\})", " ℃ "),
        (r"°\s*(?:F(?![A-Za-z])|\\(?:text|mathrm)\s*\{\s*F\s*\})", " ℉ "),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"(?<![A-Za-z])m\s*s(?=\s*\^\s*\{?\s*-)", "m s"),  # m/s², no milliseconds
        (r"\blight[\s-]+years?\b", "lightyears"),
        (r"\*\*", "^"),
        (r"\b(sq|cu)\.", r"\1 "),
        (r"\\(?:text)?euro(?:sym)?(?![A-Za-z])", "€"),
        (r"\\(?:pounds|textsterling)(?![A-Za-z])", "£"),
        (r"\\(?:text)?yen(?![A-Za-z])", "¥"),
        (r"\\mu\s*(?=(?:m|s|g|L|A|C|F|W)(?![A-Za-z]))", "µ"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    )
)  # fmt: skip
_WRAPPED = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]*)\$\$", r"\$([^$]*[^$\\])\$", r"\\\(((?:(?!\\\)).)*)\\\)", r"\\\[((?:(?!\\\]).)*)\\\]",
        r"\"([^\"]*)\"",
    )
)  # fmt: skip

_FONTS = frozenset(
    {"text", "textbf", "textit", "textrm", "textsf", "texttt", "textnormal", "mbox", "hbox", "emph", "mathrm", "mathbf",
     "mathit", "mathsf", "mathtt", "mathnormal", "boldsymbol", "bm", "operatorname", "operatorname*", "mathop",
     "ensuremath", "bold", "pmb", "underline", "boxed", "fbox", "mathbin", "mathrel", "mathord"}
)  # fmt: skip
_SLANTED = frozenset({"mathit", "boldsymbol", "bm", "ensuremath", "boxed", "fbox", "underline", "mathnormal"})
_DIGITS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_SIMPLE_DIGITS = r"[0-9]+"
_NUMBER = r"""
    (?P<repeating> (?P<start>[0-9]*) \. (?P<fixed>[0-9]*)
        (?: \\(?:overline|bar)\s*(?: \{\s*(?P<bar>[0-9]+)\s*\} | (?P<digit>[0-9]) )
          | (?P<dots> \\dot\s*\{?\s*[0-9]\s*\}? (?: [0-9]* \\dot\s*\{?\s*[0-9]\s*\}? )? )
          | \( (?P<paren>[0-9]+) \) (?![A-Za-z0-9(^])
          | (?P<ellipsis> (?: \.\.\. | \s*\\l?dots | \s*\\cdots ) (?![A-Za-z.]) ) ) )
  | (?P<scientific> (?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+) [eE] [+-]?[0-9]+ (?![A-Za-z0-9.^]) )
  | (?P<plain> (?:DIGITS) (?:\.[0-9]+)? (?:\.(?![0-9.]))? | \.[0-9]+ )
"""
_TOKEN = {
    is_inside: re.compile(
        rf"""(?P<gap>\s*)(?:(?P<number>{_NUMBER.replace("DIGITS", _SIMPLE_DIGITS if is_inside else _DIGITS)})
          | (?P<command>\\[A-Za-z]+\*? | \\[^A-Za-z])
          | (?P<letters>[^\W\d_]+)
          | (?P<sign> <= | >= | != | == | <> | \.\.\. | [^\s]))""",
        re.VERBOSE,
    )
    for is_inside in (False, True)
}
_BEHIND_A_COUNT = ("a", "an", "as", "each", "every", "in", "more", "per")  # "5 times a day" multiplies nothing
_BRACE = re.compile(r"\s*\{")
_OPENING, _CLOSING = frozenset(("(", "[", r"\{")), frozenset((")", "]", r"\}"))


def normalised(text: str) -> str:
    """Return the text with one spelling for each sign, without spacing commands, and without its dollars."""
    text = unicodedata.normalize("NFC", text)
    text = _VULGAR.sub(_fraction, text)
    text = _RAISED_RUN.sub(lambda run: "^{" + "".join(_RAISED[sign] for sign in run[0]) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + "".join(_LOWERED[sign] for sign in run[0]) + "}", text)
    text = _ROOT.sub(lambda root: _ROOTS[root[1]] + (f"{{{root[2]}}}" if root[2] else " "), text)
    text = _BARRED.sub(lambda run: rf"\overline{{{run[0].replace(chr(0x305), '')}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text).translate(_CHARACTERS)
    text = _STYLED.sub(lambda sign: unicodedata.normalize("NFKC", sign[0]), text)
    text = "".join(_GREEK.get(sign, sign) for sign in text).strip()
    for pattern in _WRAPPED:
        if match := pattern.fullmatch(text):
            text = match[1].strip()
    for pattern, plain in _REWRITTEN:
        text = pattern.sub(plain, text)
    return text.strip()


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a normalised text.  Raises Unreadable for braces that do not match."""
    return _with_words_read(_split(text, is_upright=False))


def _fraction(sign: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _split(text: str, *, is_upright: bool) -> list[Token]:
    found: list[Token] = []
    place, depth = 0, 0
    while match := _TOKEN[depth > 0].match(text, place):
        place = match.end()
        token = _token(match, is_upright=is_upright)
        if token.kind == "command" and token.text[1:] in _FONTS:
            if brace := _BRACE.match(text, place):
                place = _end_of_braces(text, brace.end())
                inner = _split(text[brace.end() : place - 1], is_upright=token.text[1:] not in _SLANTED)
                found += [replace(first, has_gap=first.has_gap or token.has_gap) for first in inner[:1]] + inner[1:]
            continue
        depth += (token.text in _OPENING) - (token.text in _CLOSING and depth > 0)
        found.append(token)
    return found


def _end_of_braces(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    raise Unreadable("a brace is not closed")


def _token(match: re.Match[str], *, is_upright: bool) -> Token:
    has_gap = bool(match["gap"])
    if match["number"]:
        return Token("number", match["number"].replace(",", ""), has_gap, is_upright, _number(match))
    if match["command"]:
        return Token("command", match["command"], has_gap, is_upright)
    if letters := match["letters"]:
        return Token("letter" if len(letters) == 1 else "word", letters, has_gap, is_upright)
    return Token("sign", match["sign"], has_gap, is_upright)


def _number(match: re.Match[str]) -> Fraction:
    if match["plain"]:
        return Fraction(match["plain"].replace(",", "").rstrip("."))
    if match["scientific"]:
        mantissa, _, exponent = match["scientific"].lower().partition("e")
        if len(exponent) > 5 or abs(int(exponent)) > MOST_DIGITS:
            raise Unreadable("an exponent is too large")
        return Fraction(mantissa.rstrip(".")) * Fraction(10) ** int(exponent)
    whole, fixed = match["start"] or "0", match["fixed"]
    period = match["bar"] or match["digit"] or match["paren"] or "".join(re.findall("[0-9]", match["dots"] or ""))
    if not period:
        seen = re.fullmatch(r"([0-9]*?)([0-9]+?)\2{2,}|([0-9]*?)([0-9]{2,}?)\4", fixed)
        if seen is None:
            raise Unreadable("dots follow digits that do not repeat")
        fixed, period = (seen[1], seen[2]) if seen[2] else (seen[3], seen[4])
    value = Fraction(whole) + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
    return value + Fraction(int(fixed or 0), 10 ** len(fixed))


# ------------------------------------------------------------------------------------------------------------- words


def _with_words_read(tokens: list[Token]) -> list[Token]:
    """Return the tokens with words for operations and numbers replaced by these."""
    found: list[Token] = []
    place = int(_lower(tokens, 0) in ("a", "an", "the") and len(tokens) > 1 and _is_plain_word(tokens[1]))
    while place < len(tokens):
        token = tokens[place]
        if token.kind in ("word", "letter") and (read := _operation(tokens, place) or _quantity(tokens, place, found)):
            made, place = read
            found += made
        elif _is_hyphen(tokens, place, found):
            place += 1
        else:
            found.append(token)
            place += 1
    return found


def _is_hyphen(tokens: list[Token], place: int, before: list[Token]) -> bool:
    """True if a minus is the hyphen of "5-million" or "2-thirds"."""
    joins = before and before[-1].kind == "number" and tokens[place].text == "-" and not tokens[place].has_gap
    return bool(joins) and (_lower(tokens, place + 1) in SCALES or _lower(tokens, place + 1) in PARTS)


def _is_plain_word(token: Token) -> bool:
    """True for a word that is no number, scale or part, so that an article may precede it."""
    return token.kind == "word" and token.has_gap and token.text.lower() not in {*NUMBERS, *SCALES, *PARTS, "and", "or"}


def _lower(tokens: list[Token], place: int) -> str:
    """Return the word at a place, in lower case, "" if there is none; articles count as words."""
    if not 0 <= place < len(tokens) or tokens[place].kind not in ("word", "letter"):
        return ""
    return tokens[place].text.lower()


def _operation(tokens: list[Token], place: int) -> tuple[list[Token], int] | None:
    is_last = place + 1 == len(tokens)
    if _lower(tokens, place) == "times" and (is_last or _lower(tokens, place + 1) in _BEHIND_A_COUNT):
        return None
    for phrase, tex in OPERATIONS.get(_lower(tokens, place), ()):
        if tokens[place].kind == "word" and all(_lower(tokens, place + n) == word for n, word in enumerate(phrase)):
            made = _split(tex, is_upright=False)
            return [replace(made[0], has_gap=True), *made[1:]], place + len(phrase)
    return None


def _quantity(tokens: list[Token], place: int, before: list[Token]) -> tuple[list[Token], int] | None:
    """Read number words, scales and parts: "twenty-five", "million", "and a half"; joins the number before."""
    has_article = _lower(tokens, place) in ("a", "an")
    start = place + has_article
    if has_article and not {_lower(tokens, start)} & (SCALES.keys() | PARTS.keys()):
        return None
    value, end = _cardinal(tokens, start)
    scale, end = _scale(tokens, end)
    if end == start:
        return None
    gap = tokens[place].has_gap
    is_part = _lower(tokens, end - 1) in PARTS
    if value is None and not has_article and before and _ends_factor(before[-1]):
        if before[-1].kind != "number":
            return [Token("scale", "scale", gap, value=scale)], end
        last = before.pop()
        return [replace(last, value=last.value * scale, text="")], end
    if value is None and not has_article and is_part and _lower(tokens, end - 1) not in ("half", "quarter"):
        return None  # "third" alone is an ordinal
    amount = (1 if value is None else value) * scale
    if is_part and amount < 1 and len(before) > 1 and _lower(before, len(before) - 1) == "and":
        whole = before[-2]
        if whole.kind == "number" and whole.value.denominator == 1:
            del before[-2:]
            return [replace(whole, value=whole.value + amount, text="")], end
    return [Token("number", "", gap, value=Fraction(amount))], end


def _ends_factor(token: Token) -> bool:
    return token.kind in ("number", "letter", "scale") or token.text in ("}", ")", "]")


def _cardinal(tokens: list[Token], place: int) -> tuple[int | None, int]:
    """Return the value of "two hundred and twenty-five thousand six", and the next place; None: no number word."""
    if _lower(tokens, place) not in NUMBERS:
        return None, place
    total, current, room = 0, 0, 10**30
    while True:
        step = place + (place < len(tokens) and tokens[place].text == "-" and not tokens[place].has_gap)
        step += _lower(tokens, step) == "and" and current % 100 == 0 and current > 0
        word = _lower(tokens, step)
        if word in NUMBERS and NUMBERS[word] < room:
            current += NUMBERS[word]
            room = 10 if NUMBERS[word] in range(20, 100) else 1
        elif word in ("hundred", "hundreds") and 0 < current < 100:
            current, room = current * 100, 100
        elif word in SCALES and SCALES[word] % 1000 == 0 and current:
            total, current, room = total + current * SCALES[word], 0, 1000
        else:
            return total + current, place
        place = step + 1


def _scale(tokens: list[Token], place: int) -> tuple[Fraction, int]:
    """Return the product of the scales and parts that follow: "hundred thousand", "-thirds", "half a million"."""
    scale = Fraction(1)
    while place < len(tokens):
        step = place + (tokens[place].text == "-" and not tokens[place].has_gap)
        step += _lower(tokens, step) in ("a", "of") and _lower(tokens, step + 1) in SCALES
        word = _lower(tokens, step)
        if word not in SCALES and word not in PARTS:
            break
        scale *= SCALES.get(word) or PARTS[word]
        place = step + 1
    return scale, place


# ----------------------------------------------------------------------------------------------------------- math units
#
# Read units from tokens: "km/h", "m^2", "red balls in total", "dollars per day", "\frac{\text{m}}{\text{s}}".
#
# Input: tokens and a place among them.  Output: a Unit, or None if there is no unit at that place.

_PER = ("/", "per", "a", "an", "every")
_MOST_WORDS = 8  # beside a counted thing
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
        """Read counted things, words beside them, and measures: "red balls in total", "km/h", "m^2"."""
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
        """Read the "per hour" of "dollars per hour"; None, and nothing read, if there is none."""
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
        """True if an ambiguous letter is a unit, not a variable: upright, or alone behind a number and a gap."""
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
