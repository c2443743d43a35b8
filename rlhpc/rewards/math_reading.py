r"""Read an answer of mathematics into a term.

Input: a text such as "\frac12", "5 km/h", "x \le 2 \text{ or } x > 3", "\text{Tuesday}".  Output: a Term; Unreadable.
Nothing is computed or guessed here: letters multiply ("2xy"), a word stays a word ("ABC" is not A·B·C), and a rest
after an expression makes the whole text unreadable.  Work and depth are bounded by the text's length.

The grammar, loosest first:

    answer    items joined by "," ";" "or" "and"
    item      sets joined by = < ≤ > ≥ ≠ ∈
    set       ratios joined by ∪ ∩ ∖
    ratio     sums joined by ":"
    sum       products joined by + − ±
    product   factors joined by · × / ÷ or nothing; a unit behind it
    factor    an atom with its powers, "!", "%", "°", "'"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from rlhpc.rewards.math_tokens import TIMES, Token, UnitReader, Unreadable, normalised, tokens_of
from rlhpc.rewards.math_values import (
    LONGEST_TEXT,
    Term,
    added,
    depth_of,
    joined_quantity,
    letter,
    negative,
    proper_fraction,
    times,
    with_unit_of_last,
)
from rlhpc.rewards.math_words import CURRENCY_SIGNS, DEGREES_WORDS, PHRASES, Unit, unit_of

_DEEPEST = 40  # brackets, fractions and roots in one another
_DEEPEST_TERM = 80  # also 1/2/3/4 and x!!!!
_MOST_SIGNS = 16  # of one relation
_MOST_PARTS = 64  # of a set or a list

_RELATIONS = {
    "=": "=", "==": "=", r"\equiv": "=", r"\approx": "≈", r"\simeq": "=", r"\cong": "=", "<": "<", ">": ">", "<=": "≤",
    ">=": "≥", r"\le": "≤", r"\leq": "≤", r"\leqslant": "≤", r"\ge": "≥", r"\geq": "≥", r"\geqslant": "≥", r"\lt": "<",
    r"\gt": ">", r"\ne": "≠", r"\neq": "≠", "!=": "≠", "<>": "≠", r"\in": "∈", r"\notin": "∉", r"\to": "=",
    r"\rightarrow": "=", r"\implies": "=", r"\Rightarrow": "=", r"\sim": "=",
}  # fmt: skip
_SET_SIGNS = {r"\cup": "union", r"\cap": "intersection", r"\setminus": "difference", r"\backslash": "difference"}
_JOINING = {",": ",", ";": ",", "or": "or", "and": "and", r"\lor": "or", r"\land": "and", r"\vee": "or",
            r"\wedge": "and", "&": "and"}  # fmt: skip
_MODULO = ("mod", r"\bmod", r"\mod")
_DIVIDED = frozenset({"/", r"\div"})
_FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "sinh",
     "cosh", "tanh", "coth", "arcsinh", "arccosh", "arctanh", "asin", "acos", "atan", "ln", "exp", "log", "lg", "arg",
     "Re", "Im", "re", "im", "sgn", "sign", "abs", "floor", "ceil", "gcd", "lcm", "max", "min", "det", "sqrt", "cbrt",
     "factorial", "cis", "binom", "Gamma"}
)  # fmt: skip
_SAME_FUNCTION = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10", "Re": "re", "Im": "im",
                  "sign": "sgn"}  # fmt: skip
_CONSTANTS = {"pi": "pi", "Pi": "pi", "infty": "infinity", "infinity": "infinity", "inf": "infinity", "oo": "infinity",
              "Infinity": "infinity"}  # fmt: skip
_ACCENTS = frozenset(
    {"overline", "bar", "hat", "widehat", "vec", "tilde", "widetilde", "dot", "ddot", "overrightarrow", "mathcal",
     "mathfrak", "mathscr", "overleftrightarrow", "wideparen", "overarc"}
)  # fmt: skip
_SAME_ACCENT = {"bar": "overline", "widehat": "hat", "widetilde": "tilde", "overrightarrow": "vec"}
_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}", "|": "|", r"\lvert": r"\rvert", r"\vert": r"\vert", r"\|": r"\|",
             r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle", r"\lbrace": r"\rbrace",
             r"\lbrack": r"\rbrack", r"\lVert": r"\rVert"}  # fmt: skip
_AS_CALL = {"|": "abs", r"\lvert": "abs", r"\vert": "abs", r"\|": "norm", r"\lVert": "norm", r"\lfloor": "floor",
            r"\lceil": "ceil"}  # fmt: skip
_NO_ATOM = frozenset(
    {"}", ")", "]", r"\}", r"\rvert", r"\rfloor", r"\rceil", r"\rangle", r"\rbrace", r"\rbrack", r"\rVert", r"\\", "&",
     r"\mid", r"\end", r"\choose", r"\over", r"\ldots", r"\dots", r"\cdots", "...", r"\pmod", r"\bmod", r"\mod", ":",
     "?", "_", "^", "'", "!", "%", "°", "@", "#", "`", '"', "\\", ".", *_RELATIONS, *_SET_SIGNS, *_JOINING, *TIMES,
     *_DIVIDED, "+", "-", r"\pm", r"\mp"}
)  # fmt: skip
_TIME = re.compile(
    r"([01]?[0-9]|2[0-4])\s*(?::\s*([0-5][0-9])(?::([0-5][0-9]))?)?\s*"
    r"(?:([ap])\.?\s*m\.?|(noon|midnight)|o['’]?clock|h(?:ours|rs|r)?)?\s*\.?",
    re.IGNORECASE,
)
# Letters in a row that are multiplied, "xy", "abc", "bi", "xe"; all others are a word.
_SPELT_PRODUCT = re.compile(
    r"[abcxyz]{2,3}|[b-df-hj-np-tv-z]{2,4}|[abcd]{4}|[a-df-hj-z][ei]|[ei][a-df-hj-z]|[abckntxyz]{2}[ei]|"
    r"[B-DF-HJ-NP-TV-Z][b-df-hj-np-tv-z]|[b-df-hj-np-tv-z][B-DF-HJ-NP-TV-Z]"
)
_ENDING = re.compile(r"(?:(?<!\.)\.|[,;\s])+$")  # punctuation at the end of a sentence, but no "..."
_FONT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_FOR_ALL = re.compile(  # "for all …": a quantifier, which is dropped
    r"\s*,\s*[a-z]\s*\\in\s*\\mathbb\s*\{?[ZN]\}?$|"
    r"[\s,;(]*(?:\\(?:text|mathrm)\s*\{)?[\s,]*(?:\\forall|for (?:all|any|every|each)|where)\}?\s*"
    r"(?:\\text\s*\{)?(?:(?:real|integer|positive|natural|rational|any|an?|numbers?|integers|is|values|of)\s+)*\}?\s*"
    r"(?:[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*)?(?:\\in\s*(?:\\mathbb\s*\{?[A-Z]\}?|[A-Z]))?"
    r"(?:\\text\s*\{)?\s*(?:is)?\s*(?:an?|any)?\s*(?:real|positive)?\s*(?:integers?|numbers?|constant)?\s*\}?\)?$"
)
_CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+\(?(?P<named>[A-J])\)?|\(?(?P<letter>[A-J])[.)]?)"
    r"(?:(?<=\))[\s~]+(?P<rest>.+))?"
)
_A_WORD = re.compile(r"[^\W\d_]+")


@lru_cache(512)
def read(text: str) -> Term:
    """Return a text as a Term.  Raises Unreadable if it is no mathematics, no word and no phrase."""
    if len(text) > LONGEST_TEXT:
        raise Unreadable(f"{len(text)} characters; legal: at most {LONGEST_TEXT}")
    text = _ENDING.sub("", normalised(text))
    text = _FOR_ALL.sub("", text) or text
    if not text:
        raise Unreadable("it is empty")
    bare = _without_fonts(text)
    if choice := _CHOICE.fullmatch(bare):
        letters = Term("symbol", name=choice["letter"] or choice["named"])
        return Term("choice", (letters, read(choice["rest"]))) if choice["rest"] else letter(letters.name)
    return _time(bare) or _read_tokens(PHRASES.get(bare.casefold(), text))


def _time(text: str) -> Term | None:
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    half = {"noon": "p", "midnight": "a"}.get((match[5] or "").lower(), (match[4] or "").lower())
    if not half and not match[2]:
        return None
    hour, minute, second = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    return Term("time", name=half, value=Fraction(hour * 3600 + minute * 60 + second))


def _read_tokens(text: str) -> Term:
    try:
        found = _Parser(tokens_of(text)).whole()
    except Unreadable:
        if (words := _words(text)) is not None:
            return words
        raise
    if depth_of(found) > _DEEPEST_TERM:
        raise Unreadable("it is nested too deeply")
    return found


def _without_fonts(text: str) -> str:
    """Return a text without \text{…} around its words."""
    return _ENDING.sub("", " ".join(_FONT.sub(r"\1", text).split()))


def _words(text: str) -> Term | None:
    """Read a phrase: words and plain numbers, without mathematical signs."""
    bare = re.sub(r"\\(?:text[a-z]*|mbox|mathrm|mathbf|operatorname)\s*(?=\{)", "", text).translate(_NO_BRACES)
    words = re.findall(r"[^\W_]+", bare.casefold())
    if "\\" in bare or not set(bare) & _PHRASE_SIGNS >= set(re.findall(r"[^\w\s]", bare)):
        return None
    return Term("words", name=" ".join(words)) if any(map(_A_WORD.fullmatch, words)) else None


_NO_BRACES = str.maketrans("{}", "  ")
_PHRASE_SIGNS = frozenset(".,;:'-()/!?&\"$%")


class _Parser(UnitReader):
    """Reads tokens into terms.  All methods raise Unreadable."""

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self._depth = 0
        self._bars = 0  # open |
        self._is_outward = False  # in ]a, b[

    def _deeper(self, parse: Callable[[], Term]) -> Term:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("it is nested too deeply")
        found = parse()
        self._depth -= 1
        return found

    # -------------------------------------------------------------------------------------------------- answers

    def whole(self) -> Term:
        """Read all tokens."""
        found = self._items()
        if self._accept(r"\over"):
            found = Term("quotient", (found, self._items()))
        if self._next.kind != "end":
            raise Unreadable(f"{self._next.text!r} is left over")
        return found

    def _items(self) -> Term:
        """Read items up to a closing bracket or the end; one item stands for itself."""
        items, joints = [self._item()], []
        while (joint := _JOINING.get(self._next.text)) and self._next.kind != "number":
            self._take()
            if joint == "," and self._next.text in ("and", "or"):
                joint = self._take().text
            joints.append(joint)
            if self._next.text in (r"\ldots", r"\dots", "..."):
                items.append(Term("opaque", name=self._take().text.strip("\\")))
            else:
                items.append(self._item())
            if len(items) > _MOST_PARTS:
                raise Unreadable("it has too many parts")
        if len(items) == 1:
            return items[0]
        if (whole := joined_quantity(items, joints)) is not None:
            return whole
        has_equations_only = {*joints} == {"and"} and all(set(item.name) == {"="} for item in items)
        if (
            all(item.kind in ("relation", "both", "either") for item in items)
            and "," not in joints
            and not has_equations_only
        ):
            if len({*joints}) == 1:
                return Term("either" if joints[0] == "or" else "both", tuple(items))
            raise Unreadable('"and" and "or" are mixed')
        return Term("list", tuple(items))

    def _item(self) -> Term:
        parts, signs = [self._set()], []
        while (sign := _RELATIONS.get(self._next.text)) and self._next.kind != "number":
            self._take()
            signs.append(sign)
            parts.append(self._set())
            if len(signs) > _MOST_SIGNS:
                raise Unreadable("it has too many signs")
        while len(signs) > 0 and signs[-1] == "≈":
            signs.pop()
            rounded = parts.pop()
            is_name = parts[-1].kind in ("symbol", "opaque")
            parts[-1] = parts[-1] if is_name else Term("rounded", (parts[-1], rounded))
            if is_name:
                signs.append("=")
                parts.append(rounded)
        name = "".join(signs).replace("≈", "=")
        return self._modulus(Term("relation", tuple(parts), name) if signs else parts[0])

    def _modulus(self, found: Term) -> Term:
        r"""Read "\pmod 7", "(mod 7)", "mod 7" behind an item."""
        if self._accept(r"\pmod"):
            return Term("modulo", (found, self._tex_argument()))
        has_bracket = self._next.text == "(" and self._ahead(1).text in _MODULO
        if not has_bracket and self._next.text not in _MODULO:
            return found
        self._place += 1 + has_bracket
        modulus = self._sum()
        if has_bracket:
            self._expect(")")
        return Term("modulo", (found, modulus))

    def _set(self) -> Term:
        found = self._ratio()
        while self._next.text in _SET_SIGNS or (self._next.text == "U" and self._joins_brackets()):
            kind = _SET_SIGNS.get(self._take().text, "union")
            found = Term(kind, (found, self._ratio()))
        return found

    def _joins_brackets(self) -> bool:
        before = self._tokens[self._place - 1].text if self._place else ""
        return before in (")", "]", r"\}") and self._ahead(1).text in ("(", "[", r"\{")

    def _ratio(self) -> Term:
        parts = [self._sum()]
        while self._depth == 0 and (self._accept(":") or self._accept_to(parts[-1])):
            parts.append(self._sum())
        return Term("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    def _accept_to(self, before: Term) -> bool:
        """Read the "to" of "3 to 4"."""
        is_ratio = before.kind == "number" and self._next.text == "to" and self._ahead(1).kind == "number"
        return is_ratio and self._accept("to") is not None

    # -------------------------------------------------------------------------------------------------- expressions

    def _sum(self) -> Term:
        found = self._signed()
        while sign := self._accept("+", "-", r"\pm", r"\mp"):
            right = self._signed()
            if sign.text in (r"\pm", r"\mp"):
                found = Term("plus-minus", (found, right), sign.text)
            else:
                parts = found.parts if found.kind == "sum" else (found,)
                found = Term("sum", (*parts, right if sign.text == "+" else negative(right)))
        return with_unit_of_last(found)

    def _signed(self) -> Term:
        sign = self._accept("+", "-", r"\pm", r"\mp")
        if sign is None:
            return self._product()
        found = self._deeper(self._signed)
        match sign.text:
            case "+":
                return found
            case "-":
                return negative(found)
        return Term("plus-minus", (Term("number"), found), sign.text)

    def _product(self) -> Term:
        currency = self._currency()
        found = self._factor()
        while True:
            if currency is not None and (below := self._per(currency)) is not None:
                found, currency = Term("quantity", (found,), unit=below), None
            elif self._next.kind == "scale":
                found = times(found, Term("number", value=self._take().value))
            elif (quantity := self._with_unit(found)) is not None:
                found = quantity
            elif found.kind == "quantity" and self._next.kind == "number":
                found = added(found, self._product())
            elif self._next.text in TIMES:
                self._take()
                found = times(found, self._signed_factor())
            elif self._next.text in _DIVIDED:
                self._take()
                found = Term("quotient", (found, self._signed_factor()))
            elif self._begins_factor():
                found = times(found, self._factor())
            else:
                break
        if currency is not None and found.kind != "quantity":
            found = Term("quantity", (found,), unit=currency)
        return found

    def _currency(self) -> Unit | None:
        sign = self._next
        if sign.kind == "sign" and sign.text in CURRENCY_SIGNS:
            self._take()
            return unit_of(sign.text)
        if (
            sign.kind == "word"
            and sign.text.isupper()
            and (unit := unit_of(sign.text))
            and self._ahead(1).kind == "number"
        ):
            self._take()
            return unit
        if sign.text in ("US", "Rs") and self._ahead(1).text in ("$", "."):
            self._place += 2
            return unit_of("$" if sign.text == "US" else "Rs")
        return None

    def _signed_factor(self) -> Term:
        if self._accept("-"):
            return negative(self._factor())
        return self._factor()

    def _begins_factor(self) -> bool:
        token = self._next
        if token.kind == "number":
            if self._place and self._tokens[self._place - 1].kind == "number":
                raise Unreadable("two numbers stand beside one another")
            return True
        if token.kind in ("end", "scale") or token.text in _NO_ATOM or token.text in CURRENCY_SIGNS:
            return False
        if (token.text == "[" and self._is_outward) or (token.text == "(" and self._ahead(1).text in _MODULO):
            return False
        if token.text == "to" or (token.text == "U" and self._joins_brackets()):
            return False
        return not (token.text in ("|", r"\vert", r"\|") and self._bars)

    def _factor(self) -> Term:
        found = self._postfixed(self._atom())
        while True:
            if self._accept("^"):
                found = self._raised(found)
            elif self._next.text in ("!", "'", "%", "°") and self._next.kind == "sign":
                found = self._postfixed(found)
            else:
                return found

    def _raised(self, base: Term) -> Term:
        if self._next.text in ("*", r"\ast", r"\dagger", r"\top", "T") and self._ahead(1).kind == "end":
            return Term("opaque", (base,), "^" + self._take().text)
        return Term("power", (base, self._exponent()))

    def _exponent(self) -> Term:
        if self._next.text == "{":
            return self._group()
        if self._accept("-"):
            return negative(self._exponent())
        base = self._atom()
        return Term("power", (base, self._deeper(self._exponent))) if self._accept("^") else base

    def _postfixed(self, found: Term) -> Term:
        while self._next.kind == "sign" and (sign := self._accept("!", "'", "%", "°")):
            match sign.text:
                case "!":
                    is_double = self._next.text == "!" and not self._next.has_gap
                    found = Term("call", (found,), "factorial")
                    if is_double and self._take():
                        found = Term("opaque", found.parts, "!!")
                case "'":
                    found = Term("opaque", (found,), "prime")
                case "%":
                    found = Term("percent", (found,))
                case _:
                    found = Term("degree", (found,))
        return found

    # -------------------------------------------------------------------------------------------------- atoms

    def _atom(self) -> Term:
        token = self._next
        if token.kind == "number":
            return self._number()
        if token.kind == "scale":
            return Term("number", value=self._take().value)
        if token.kind == "letter":
            self._take()
            return self._subscripted(letter(token.text), token.text)
        if token.kind == "word":
            return self._word()
        if token.text == "{":
            return self._group()
        if token.text in _BRACKETS:
            return self._bracketed()
        if token.text == "]":
            return self._outward()
        if token.kind == "command":
            return self._command()
        raise Unreadable(f"{token.text or 'the end'!r} stands where a value is due")

    def _number(self) -> Term:
        token = self._take()
        found = Term("number", value=token.value)
        if self._next.text == "_" and token.text:
            self._take()
            return self._based(token.text)
        steps = 1 + (self._next.text == "in")
        if token.text and self._ahead(steps - 1).text == "base" and self._ahead(steps).kind == "number":
            self._place += steps
            return self._based(token.text)
        if (part := self._mixed_part(token)) is not None:
            return Term("number", value=token.value + part)
        return found

    def _based(self, digits: str) -> Term:
        base = self._tex_argument()
        if base.kind != "number" or not digits.isdigit() or int(max(digits)) >= base.value:
            raise Unreadable("digits are below their base")
        return Term("based", (base,), digits)

    def _mixed_part(self, whole: Token) -> Fraction | None:
        r"""Read the fraction of a mixed number: "1/4" behind "1 ", "\frac14" behind "1"; None if there is none."""
        if whole.value.denominator != 1 or "." in whole.text:
            return None
        above, sign, below, behind = (self._ahead(step) for step in range(4))
        if above.kind == "number" and above.has_gap and sign.text == "/" and below.kind == "number":
            part = proper_fraction(above.value, below.value)
            if part is not None and behind.text not in ("^", "/"):
                self._place += 3
                return part
        if above.text == r"\frac":
            start = self._place
            fraction = self._command()
            if fraction.kind == "quotient" and all(part.kind == "number" for part in fraction.parts):
                part = proper_fraction(fraction.parts[0].value, fraction.parts[1].value)
                if part is not None and self._next.text != "^":
                    return part
            self._place = start
        return None

    def _word(self) -> Term:
        token = self._take()
        word = token.text
        if word in _FUNCTIONS:
            return self._function(word, is_tex=False)
        if word in _CONSTANTS:
            return Term("constant", name=_CONSTANTS[word])
        if word in ("or", "and", "mod"):
            raise Unreadable(f"{word!r} joins nothing")
        if not token.is_upright and _SPELT_PRODUCT.fullmatch(word):
            letters = [Token("letter", letter) for letter in word]
            self._tokens[self._place : self._place] = letters[1:]
            return self._subscripted(letter(word[0]), word[0])
        words = [word]
        while self._next.kind == "word" and self._next.has_gap and not self._is_known(self._next.text):
            words.append(self._take().text)
        return self._subscripted(Term("symbol", name=" ".join(words).casefold()), " ".join(words))

    @staticmethod
    def _is_known(word: str) -> bool:
        return word in _FUNCTIONS or word in _CONSTANTS or word in ("or", "and", "mod")

    def _subscripted(self, found: Term, name: str) -> Term:
        """Read a subscript, which becomes part of the name."""
        if not self._accept("_"):
            return found
        below = self._next.text
        if self._accept("{"):
            start, depth = self._place, 1
            while depth:
                depth += {"{": 1, "}": -1}.get(self._take().text, 0)
            below = "".join(token.text for token in self._tokens[start : self._place - 1])
        elif self._next.kind in ("number", "letter", "word") or below[:1] == "\\":
            self._take()
        else:
            raise Unreadable(f"{below or 'the end'!r} stands where a subscript is due")
        return Term("symbol", name=f"{name}_{below}")

    def _group(self) -> Term:
        self._expect("{")
        found = self._deeper(self._items)
        if self._accept(r"\choose"):
            found = Term("call", (found, self._deeper(self._items)), "binom")
        elif self._accept(r"\over"):
            found = Term("quotient", (found, self._deeper(self._items)))
        self._expect("}")
        return found

    def _bracketed(self) -> Term:
        opening = self._take().text
        closing = _BRACKETS[opening]
        if opening in (r"\{", r"\lbrace"):
            return self._braces(closing)
        is_bar = closing in ("|", r"\vert", r"\|")
        bars, self._bars = self._bars, int(is_bar)
        found = self._deeper(self._items)
        self._bars = bars
        opening, closing = {r"\lbrack": "[", r"\langle": "("}.get(opening, opening), closing.replace(r"\rbrack", "]")
        if opening in "([" and self._accept("]", ")", r"\rbrack", r"\rangle"):
            ending = {"]": "]", r"\rbrack": "]"}.get(self._tokens[self._place - 1].text, ")")
            if found.kind == "list":
                return Term("bracketed", found.parts, opening + ending)
            if opening + ending in ("()", "[]"):
                is_based = found.kind == "number" and found.value.denominator == 1 and self._accept("_")
                return self._based(str(found.value)) if is_based else found
            raise Unreadable("brackets do not match")
        self._expect(closing)
        return Term("call", (found,), _AS_CALL[opening])

    def _outward(self) -> Term:
        """Read ]a, b[ and ]a, b], the notation of open intervals in some countries."""
        self._expect("]")
        outward, self._is_outward = self._is_outward, True
        found = self._deeper(self._items)
        self._is_outward = outward
        closing = "]" if self._accept("]") else ")"
        if closing == ")":
            self._expect("[")
        if found.kind != "list" or len(found.parts) != 2:
            raise Unreadable("brackets do not match")
        return Term("bracketed", found.parts, "(" + closing)

    def _braces(self, closing: str) -> Term:
        r"""Read \{1, 2\} or \{x \mid x > 0\}."""
        if self._accept(closing):
            return Term("set")
        bars, self._bars = self._bars, self._num_bars_before(closing) % 2
        found = self._deeper(self._items)
        self._bars = bars
        if self._accept("|", r"\mid", r"\vert", ":"):
            condition = self._deeper(self._items)
            self._expect(closing)
            is_set = found.kind == "symbol" or (found.kind == "relation" and found.name == "∈")
            return condition if is_set else Term("opaque", (found, condition), "set of all")
        self._expect(closing)
        return Term("set", found.parts if found.kind == "list" else (found,))

    def _num_bars_before(self, closing: str) -> int:
        texts = [token.text for token in self._tokens[self._place :]]
        end = texts.index(closing) if closing in texts else len(texts)
        return sum(text in ("|", r"\vert") for text in texts[:end])

    # -------------------------------------------------------------------------------------------------- commands

    def _command(self) -> Term:
        name = self._take().text[1:]
        if name in _COMMANDS:
            return self._deeper(lambda: _COMMANDS[name](self))
        if name in _FUNCTIONS:
            return self._function(name, is_tex=True)
        if name in _CONSTANTS and name != "Pi":
            return Term("constant", name=_CONSTANTS[name])
        if name in _ACCENTS:
            name = _SAME_ACCENT.get(name, name)
            return self._subscripted(Term("opaque", (self._tex_argument(),), name), name)
        if not name.isalpha() or "\\" + name in _NO_ATOM:
            raise Unreadable(f"\\{name} stands where a value is due")
        return self._subscripted(Term("symbol", name="\\" + name), "\\" + name)

    def _tex_argument(self, *, is_root: bool = False) -> Term:
        r"""Read an argument as TeX does: a group, a command, a letter, or one digit."""
        token = self._next
        if token.text == "{":
            return self._group()
        if token.kind == "number" and token.text[:1].isdigit():
            if is_root and token.text.isdigit():
                return Term("number", value=self._take().value)  # \sqrt 10 is meant as a root of ten
            if rest := token.text[1:]:
                if not rest.isdigit():
                    raise Unreadable("an argument without braces is one digit")
                digits = [Token("number", part, value=Fraction(part)) for part in (token.text[0], rest)]
                self._tokens[self._place : self._place + 1] = digits
            return Term("number", value=self._take().value)
        if token.kind == "word":
            letters = [Token("letter", letter, is_upright=token.is_upright) for letter in token.text]
            self._tokens[self._place : self._place + 1] = letters
        if self._next.kind in ("letter", "command"):
            return self._deeper(self._atom)
        raise Unreadable(f"{token.text or 'the end'!r} stands where an argument is due")

    def _fraction(self) -> Term:
        return Term("quotient", (self._tex_argument(), self._tex_argument()))

    def _binomial(self) -> Term:
        return Term("call", (self._tex_argument(), self._tex_argument()), "binom")

    def _root(self) -> Term:
        degree = Term("number", value=Fraction(2))
        if self._accept("["):
            degree = self._sum()
            self._expect("]")
        return Term("root", (self._tex_argument(is_root=True), degree))

    def _double_struck(self) -> Term:
        name = self._take().text if self._accept("{") else self._next.text
        self._take()  # the closing brace, or the name itself
        return self._subscripted(Term("symbol", name=f"set {name}"), f"set {name}")

    def _function(self, name: str, *, is_tex: bool) -> Term:
        base = exponent = None
        if name in ("sqrt", "cbrt") and not is_tex:
            return Term("root", (self._deeper(self._atom), Term("number", value=Fraction(2 + (name == "cbrt")))))
        while self._next.text in ("_", "^"):
            if self._take().text == "_":
                base = self._base()
            else:
                exponent = self._exponent()
        argument = self._argument()
        name = _SAME_FUNCTION.get(name, name)
        if exponent == negative(Term("number", value=Fraction(1))) and "arc" + name in _FUNCTIONS:
            name, exponent = "arc" + name, None
        parts = argument.parts if argument.kind == "bracketed" or argument.kind == "list" else (argument,)
        found = Term("call", parts if base is None else (*parts, base), name if base is None else name + "_")
        return found if exponent is None else Term("power", (found, exponent))

    def _base(self) -> Term:
        r"""Read the base of \log_2 8, \log_{10}100, \log_10 100; in \log_23 it is 2."""
        token, behind = self._next, self._ahead(1)
        has_argument = behind.kind in ("number", "letter", "word") or behind.text in ("{", "(", "^", "|")
        if token.kind == "number" and (has_argument or behind.text[:1] == "\\"):
            self._take()
            return Term("number", value=token.value)
        return self._tex_argument()

    def _argument(self) -> Term:
        r"""Read the argument of a function: one bracket, or factors up to a sign or the next function."""
        if self._next.text in ("(", "{", "[", "|"):
            found = self._atom()
            return self._postfixed(found) if self._next.text in ("!", "°") else found
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Unreadable("it is nested too deeply")
        sign = self._accept("-")
        found = self._factor()
        while self._begins_factor() and self._next.text.strip("\\") not in _FUNCTIONS and self._next.text != "(":
            found = times(found, self._factor())
        if self._accept("/"):
            found = Term("quotient", (found, self._factor()))
        self._depth -= 1
        return negative(found) if sign else found

    def _matrix(self) -> Term:
        self._expect("{")
        name = self._take().text
        while self._next.text not in ("}", ""):
            name += self._take().text
        self._expect("}")
        if name in ("cases", "aligned", "align", "split"):
            return self._cases()
        if name.strip("*") not in ("pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "array", "smallmatrix"):
            raise Unreadable(f"{name} is not understood")
        if name == "array":
            self._group()
        rows: list[Term] = [Term("list")]
        while not self._accept(r"\end"):
            rows[-1] = Term("list", (*rows[-1].parts, self._sum()))
            if self._accept(r"\\"):
                if self._next.text != r"\end":
                    rows.append(Term("list"))
            elif not self._accept("&") and self._next.text != r"\end":
                raise Unreadable("a matrix has cells between & and \\\\")
        while not self._accept("}"):
            self._take()
        found = Term("matrix", tuple(rows))
        return Term("call", (found,), "det") if name == "vmatrix" else found

    def _cases(self) -> Term:
        """Read lines of relations, or cases with their conditions, which are compared as written."""
        parts, has_conditions = [self._item()], False
        while not self._accept(r"\end"):
            if not (joint := self._accept(r"\\", "&", ",")):
                raise Unreadable("lines end with \\\\")
            has_conditions = has_conditions or joint.text == "&"
            if self._next.text not in (r"\end", r"\\", "&"):
                parts.append(self._item())
        while not self._accept("}"):
            self._take()
        return Term("opaque", tuple(parts), "cases") if has_conditions else Term("list", tuple(parts))

    def _repeated(self, kind: str) -> Term:
        self._expect("_")
        self._expect("{")
        index = self._take()
        self._expect("=")
        first = self._sum()
        self._expect("}")
        self._expect("^")
        last = self._exponent()
        body = self._product()
        return Term(kind, (first, last, body), index.text)

    # -------------------------------------------------------------------------------------------------- units

    def _with_unit(self, value: Term) -> Term | None:
        """Read a unit behind a value; None, and nothing read, if there is none."""
        if value.kind == "quantity" or (self._next.kind not in ("word", "letter", "sign", "command")):
            return None
        start, tokens = self._place, list(self._tokens)
        if self._next.text.lower() in DEGREES_WORDS:
            self._take()
            if unit_of(self._next.text) is None:
                return Term("degree", (value,))
        first = self._next
        unit = self._unit()
        if unit is None:
            self._place, self._tokens = start, tokens
            return None
        is_letter = first.kind == "letter" and not first.is_upright
        product: tuple[Term, ...] = ()
        if is_letter:
            behind, place = (self._place, self._tokens), self._place
            self._place, self._tokens = start, list(tokens)
            product = (self._product_of_letters(value, place),)
            self._place, self._tokens = behind
        return Term("quantity", (value, *product), unit=unit)

    def _product_of_letters(self, value: Term, end: int) -> Term:
        """Read a unit such as "m" again as letters that are multiplied."""
        found = value
        while self._place < end:
            is_below = self._accept("/", *TIMES) is not None and self._tokens[self._place - 1].text == "/"
            factor = self._factor()
            found = Term("quotient", (found, factor)) if is_below else times(found, factor)
        return found


_COMMANDS: dict[str, Callable[[_Parser], Term]] = {
    "frac": _Parser._fraction,
    "binom": _Parser._binomial,
    "sqrt": _Parser._root,
    "cbrt": lambda parser: Term("root", (parser._factor(), Term("number", value=Fraction(3)))),
    "begin": _Parser._matrix,
    "mathbb": _Parser._double_struck,
    "emptyset": lambda _parser: Term("set"),
    "sum": lambda parser: parser._repeated("sum-over"),
    "prod": lambda parser: parser._repeated("product-over"),
}
