"""Compare two answers of mathematics for equality.

Input: two terms (math_values.py), and the run's rule for units.  Output: bool.

Nothing is rewritten or expanded: fractions are compared exactly (math_values.py), other numbers to a hundred digits,
and expressions with letters at several points where both are real.  So the time is bounded by the length of the
answers: 9^{9^9} is never computed, and only equals a term written alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any, Literal

import mpmath

from rlhpc.rewards.math_values import (
    HAS_NO_VALUE,
    Point,
    Term,
    TooLarge,
    Undefined,
    are_near,
    as_float,
    is_real,
    symbols,
    value_of,
    with_digits,
)
from rlhpc.rewards.math_words import may_be_variable, unit_of

_NUM_POINTS = 12
_FEWEST_POINTS = 3
_HIGHEST_DEGREE = 6  # of a relation that is solved
_GRID = tuple(Fraction(step, 2) + Fraction(1, 7) for step in range(-40, 41))  # few zeros and poles are among these
_NUM_HALVINGS = 120
_MOST_SEARCHED, _MOST_CHANGES, _LARGEST_SEARCHED = 2, 5, 30  # relations, zeros, parts of a relation
_MOST_DECIMALS = 30
_NEAR_MARK = mpmath.mpf(10) ** -30  # zeros of high multiplicity have fewer digits
_SETS = frozenset({"set", "bracketed", "union", "intersection", "difference", "both"})
_COLLECTIONS = ("set", "list", "either")
# "optional": one of both may lack its unit, two units must agree; "required": an answer must have the reference's.
Units = Literal["optional", "required", "ignored"]
_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


@dataclass(frozen=True, slots=True)
class _RealSet:
    """A set of real numbers: its membership test, and the marks at which membership may change."""

    contains: Callable[[Any], bool]
    marks: tuple[Any, ...]
    is_explicit: bool = True  # there are no other marks
    num_searched: int = 0  # relations that are not linear, whose marks take time to find


def are_equal(wanted: Term, answer: Term, units: Units) -> bool:
    """Return whether an answer equals a reference.  Raises Undefined if the reference has no value, as 1/0."""
    if wanted == answer:
        return True
    wanted, answer = _simplified(_expanded(wanted)), _simplified(_expanded(answer))
    for are_same in (
        _as_choices,
        _as_rounded,
        _as_times,
        _as_words,
        _in_bases,
        _as_residues,
        _as_relations,
        _as_matrices,
        _as_collections,
    ):
        verdict = are_same(wanted, answer, units)
        if verdict is not None:
            return verdict
    return _as_quantities(wanted, answer, units)


def is_in_lowest_terms(term: Term) -> bool:
    """True if no fraction of whole numbers in an answer can be reduced."""
    if term.kind == "quotient" and all(part.kind == "number" for part in term.parts):
        above, below = (part.value for part in term.parts)
        if above.denominator == below.denominator == 1:
            return below > 1 and (above / below).denominator == below
    return all(is_in_lowest_terms(part) for part in term.parts)


def check_defined(term: Term) -> None:
    """Raise Undefined if a part of a term has no value anywhere."""
    term = _simplified(_expanded(term))
    if term.kind == "rounded":
        term = term.parts[0]
    if term.kind in HAS_NO_VALUE:
        for part in term.parts:
            check_defined(part)
        return
    fault = Undefined("it has no value")
    for seed in range(_NUM_POINTS if symbols(term) else 1):
        try:
            value_of(term, Point(seed))
        except TooLarge:
            return
        except Undefined as error:
            fault = error
        else:
            return
    raise fault


# ---------------------------------------------------------------------------------------- kinds that are no expressions


def _as_times(wanted: Term, answer: Term, units: Units) -> bool | None:
    """Compare times of day; an answer such as 10:15 may be a ratio if the reference is one in lowest terms."""
    if wanted.kind != "time":
        if answer.kind != "time":
            return None
        is_lowest = wanted.kind != "ratio" or is_in_lowest_terms(Term("quotient", wanted.parts[:2]))
        hour, rest = divmod(answer.value, 3600)
        ratio = Term("ratio", (Term("number", value=Fraction(hour)), Term("number", value=rest / 60)))
        return is_lowest and not answer.name and are_equal(wanted, ratio, units)
    if answer.kind != "time":
        return False
    half_day = 43_200
    ours, theirs = (_seconds(term) for term in (wanted, answer))
    if wanted.name:
        return bool(answer.name and ours == theirs) or (not answer.name and theirs >= half_day and ours == theirs)
    return ours == theirs or bool(answer.name and ours < 13 * 3600 and (ours - theirs) % half_day == 0)


def _seconds(time: Term) -> int:
    seconds = int(time.value)
    return seconds % 43_200 + (43_200 if time.name == "p" else 0) if time.name else seconds


def _as_choices(wanted: Term, answer: Term, units: Units) -> bool | None:
    """Compare letters of choices; an answer "letter and text" may also match by its text."""
    if "choice" not in (wanted.kind, answer.kind):
        return None
    first = wanted.parts[0] if wanted.kind == "choice" else wanted
    if answer.kind != "choice":
        return are_equal(first, answer, units)
    return any(are_equal(first, part, units) for part in answer.parts[: 1 if first.kind == "symbol" else 2])


def _as_rounded(wanted: Term, answer: Term, units: Units) -> bool | None:
    """Compare "1/3 ≈ 0.33": a reference is the value before the sign; an answer may be either if the second fits."""
    if wanted.kind == "rounded":
        return are_equal(wanted.parts[0], answer, units)
    if answer.kind != "rounded":
        return None
    return any(are_equal(wanted, part, units) for part in answer.parts[not _is_rounded_well(*answer.parts) :])


def _is_rounded_well(exact: Term, rounded: Term) -> bool:
    """True if a decimal differs from a value by at most half a unit of its last digit."""
    exact, rounded = (term.parts[0] if term.kind == "quantity" else term for term in (exact, rounded))
    try:
        values = [value_of(term, Point(0)) for term in (exact, rounded)]
    except (Undefined, TooLarge):
        return False
    num_digits = next((n for n in range(_MOST_DECIMALS) if values[1] * 10**n % 1 == 0), None)
    if num_digits is None or not isinstance(values[1], Fraction) or symbols(exact) or not is_real(values[0]):
        return False
    with with_digits():
        return bool(abs(as_float(values[0]) - as_float(values[1])) * 10**num_digits <= 0.5)


def _as_words(wanted: Term, answer: Term, _units: Units) -> bool | None:
    if "words" not in (wanted.kind, answer.kind):
        return None
    return all(term.kind in ("words", "symbol") for term in (wanted, answer)) and wanted.name == answer.name


def _in_bases(wanted: Term, answer: Term, units: Units) -> bool | None:
    """Compare digits if one side states its base; also the bases if both do."""
    if "based" not in (wanted.kind, answer.kind):
        return None
    if wanted.kind == answer.kind:
        is_same = wanted.name.lstrip("0") == answer.name.lstrip("0")
        return is_same and are_equal(wanted.parts[0], answer.parts[0], units)
    based, other = (wanted, answer) if wanted.kind == "based" else (answer, wanted)
    if other.kind == "relation":
        return None
    return other.kind == "number" and other.value == Fraction(based.name)


def _as_residues(wanted: Term, answer: Term, units: Units) -> bool | None:
    if "modulo" not in (wanted.kind, answer.kind):
        return None
    if wanted.kind != answer.kind:
        first, second = (term.parts[0] if term.kind == "modulo" else term for term in (wanted, answer))
        return are_equal(first, second, units)
    (ours, modulus), (theirs, other) = wanted.parts, answer.parts
    if not are_equal(modulus, other, units):
        return False
    ours, theirs = _assigned(ours) or ours, _assigned(theirs) or theirs
    values = [term.value for term in (ours, theirs, modulus)]
    if all(term.kind == "number" for term in (ours, theirs, modulus)) and modulus.value:
        return (values[0] - values[1]) % values[2] == 0
    return are_equal(ours, theirs, units)


def _as_matrices(wanted: Term, answer: Term, units: Units) -> bool | None:
    """Compare entry by entry; a column may be written as a tuple."""
    if "matrix" not in (wanted.kind, answer.kind):
        return None
    ours, theirs = (_rows(term) for term in (wanted, answer))
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    return all(_in_order(row.parts, other.parts, units) for row, other in zip(ours, theirs, strict=True))


def _rows(term: Term) -> Sequence[Term] | None:
    if term.kind == "matrix":
        return term.parts
    is_tuple = term.kind == "bracketed" and term.name == "()"
    return [Term("list", (part,)) for part in term.parts] if is_tuple else None


# --------------------------------------------------------------------------------------------------------- relations


def _as_relations(wanted: Term, answer: Term, units: Units) -> bool | None:
    if "relation" not in (wanted.kind, answer.kind):
        return None
    if wanted.kind == answer.kind:
        return _are_same_relations(wanted, answer, units)
    if wanted.kind == "relation":
        value = _assigned(wanted)
        if value is None and set(wanted.name) == {"="} and not symbols(wanted):
            value = wanted.parts[-1]  # "5! = 120"
        return _are_same_sets(wanted, answer) if value is None else are_equal(value, answer, units)
    value = _assigned(answer)
    if value is None and set(answer.name) == {"="} and _is_calculated(answer.parts[0]) and not symbols(wanted):
        value = answer.parts[-1]  # "9 · 2 = 18", "a + b = 7"
    return _are_same_sets(wanted, answer) if value is None else are_equal(wanted, value, units)


def _are_same_relations(wanted: Term, answer: Term, units: Units) -> bool:
    ours, theirs = _assigned(wanted), _assigned(answer)
    if ours is not None and theirs is not None:
        first, second = (term.parts[0] for term in (wanted, answer))
        if first == second or any(each.kind == "product" or each.name in ("y", "f", "g") for each in (first, second)):
            return are_equal(ours, theirs, units)
    if len(wanted.name) == len(answer.name) == 1:
        if _are_proportional(wanted, answer):
            return True
    elif any(
        wanted.name == chain.name and _in_order(wanted.parts, chain.parts, units)
        for chain in (answer, _reversed(answer))
    ):
        return True
    return symbols(wanted) == symbols(answer) and _are_same_sets(wanted, answer)


def _assigned(term: Term) -> Term | None:
    """Return the value in "x = …", "f(x) = …", "x ∈ …", the last member of a chain; None for other relations."""
    if term.kind != "relation" or not (set(term.name) == {"="} or term.name == "∈"):
        return None
    name = term.parts[0]
    factors = name.parts if name.kind == "product" else (name,)
    first, value = factors[0], term.parts[-1]
    is_inverse = first.kind == "power" and first.parts[0].kind == "symbol" and first.parts[1].value == -1
    is_share = first.kind == "quotient" and all(part.kind in ("symbol", "opaque") for part in first.parts)
    is_name = is_inverse or is_share or first.kind in ("symbol", "opaque", "bracketed")
    has_its_letters = name.kind == "symbol" and name.name in symbols(value)
    return value if is_name and len(factors) <= 2 and not has_its_letters else None


def _is_calculated(side: Term) -> bool:
    """True if a side of an equation may be the quantity asked for: no letters, or a sum, product, quotient of names."""
    names = [part for part in side.parts if part.kind in ("symbol", "opaque", "call", "bracketed")]
    is_of_names = side.kind in ("sum", "product", "quotient") and len(names) == len(side.parts) > 1
    return not symbols(side) or is_of_names or side.kind == "call"


def _reversed(chain: Term) -> Term:
    return Term("relation", chain.parts[::-1], "".join(_FLIPPED.get(sign, sign) for sign in reversed(chain.name)))


def _are_proportional(wanted: Term, answer: Term) -> bool:
    """True if one relation is the other times a constant: 2x + 3y = 6 and 4x + 6y = 12, x − 3 ≥ 0 and x ≥ 3."""
    first, second = (_reversed(term) if term.name in ">≥" else term for term in (wanted, answer))
    if first.name != second.name or first.name in "∈∉":
        return False
    sides = [Term("sum", (term.parts[1], Term("negative", (term.parts[0],)))) for term in (first, second)]
    ratios = []
    for seed in range(_NUM_POINTS):
        try:
            ours, theirs = (as_float(value_of(side, Point(seed))) for side in sides)
        except Undefined:
            continue
        except TooLarge:
            return False
        if ours == 0 or theirs == 0:
            if ours != theirs:
                return False
            continue
        with with_digits():
            ratios.append(ours / theirs)
    is_constant = len(ratios) >= _FEWEST_POINTS and all(are_near(ratio, ratios[0]) for ratio in ratios)
    return is_constant and (first.name in "=≠" or (is_real(ratios[0]) and ratios[0] > 0))


# ------------------------------------------------------------------------------------------------------- collections


def _as_collections(wanted: Term, answer: Term, units: Units) -> bool | None:
    kinds = {wanted.kind, answer.kind}
    if kinds == {"bracketed"}:
        return wanted.name == answer.name and _in_order(wanted.parts, answer.parts, units)
    if "ratio" in kinds:
        return _are_same_ratios(wanted, answer, units)
    if kinds == {"bracketed", "list"} and {wanted.name, answer.name} & {"()", "[]"}:
        return _in_order(_values_in_order(wanted), _values_in_order(answer), units)
    if not kinds & {*_COLLECTIONS, "bracketed", "union", "intersection", "difference", "both"}:
        return True if wanted == answer else None
    if (
        "list" in kinds
        and not kinds & _SETS
        and {len(_elements(term)) > 1 for term in (wanted, answer)} == {True, False}
    ):
        return False  # "5, 5" is not 5
    if not kinds & {"bracketed", "union", "intersection", "difference", "both"}:
        ours, theirs = (_elements(term) for term in (wanted, answer))
        if _is_one_of_each(ours, theirs, units):
            return True
    elif wanted.kind == answer.kind:
        are_same = _is_one_of_each if wanted.kind in ("union", "intersection") else _in_order
        if are_same(wanted.parts, answer.parts, units):
            return True
    return _are_same_sets(wanted, answer)


def _in_order(ours: Sequence[Term], theirs: Sequence[Term], units: Units) -> bool:
    return len(ours) == len(theirs) and all(are_equal(a, b, units) for a, b in zip(ours, theirs, strict=True))


def _values_in_order(term: Term) -> list[Term]:
    """Return the elements of (1, 2) and of "x = 1, y = 2"."""
    return [value if (value := _assigned(part)) is not None else part for part in term.parts]


def _elements(term: Term) -> list[Term]:
    """Return the elements of a set, a list, "x = 1 or x = 2"; any other term alone."""
    if term.kind not in _COLLECTIONS:
        return [term]
    names = {part.parts[0] if part.kind == "relation" else None for part in term.parts}
    parts = _values_in_order(term) if len(names) == 1 else list(term.parts)
    return [each for part in parts for each in (_elements(part) if part.kind == "list" else [part])]


def _is_one_of_each(ours: Sequence[Term], theirs: Sequence[Term], units: Units) -> bool:
    """True if both have the same elements, in any order."""

    def holds_all(some: Sequence[Term], others: Sequence[Term]) -> bool:
        return all(any(are_equal(each, other, units) for other in others) for each in some)

    return bool(ours) == bool(theirs) and holds_all(ours, theirs) and holds_all(theirs, ours)


def _are_same_ratios(wanted: Term, answer: Term, units: Units) -> bool:
    """True if two ratios are proportional; 2:3 also equals 2/3."""
    if wanted.kind == answer.kind:
        ours, theirs = wanted.parts, answer.parts
        pairs = [
            (Term("product", (a, theirs[0])), Term("product", (b, ours[0])))
            for a, b in zip(ours[1:], theirs[1:], strict=False)
        ]
        return len(ours) == len(theirs) and all(are_equal(a, b, units) for a, b in pairs)
    ratio, other = (wanted, answer) if wanted.kind == "ratio" else (answer, wanted)
    return len(ratio.parts) == 2 and are_equal(Term("quotient", ratio.parts), other, units)


def _are_same_sets(wanted: Term, answer: Term) -> bool:
    """True if two terms are the same set of real numbers, tested at marks and points between them."""
    if any(len(symbols(term)) > 1 for term in (wanted, answer)):
        return False  # "a = 2, b = 3" is no set of numbers
    with with_digits():
        for joint in _joints(wanted, answer):
            if {wanted.kind, answer.kind} != {"list"}:
                wanted, answer = map(_joined_intervals, (wanted, answer))
            terms = [Term(joint, term.parts) if _is_system(term) else term for term in (wanted, answer)]
            ours, theirs = map(_real_set, terms)
            if ours is not None and theirs is not None and _agree(ours, theirs):
                return True
    return False


def _joined_intervals(term: Term) -> Term:
    """Return "(1, 2) or (3, 4)" as a union."""
    is_of_pairs = term.kind == "list" and all(part.kind == "bracketed" and len(part.parts) == 2 for part in term.parts)
    return Term("union", term.parts) if is_of_pairs else term


def _joints(*terms: Term) -> tuple[str, ...]:
    """Return possible meanings of lists of relations: "both" and "either"; only "either" for "x = 1, x = 2"."""
    has_equation = any(part.name == "=" for term in terms if _is_system(term) for part in term.parts)
    return ("either",) if has_equation else ("both", "either")


def _is_system(term: Term) -> bool:
    """True for a list of relations, which hold together or one by one."""
    return term.kind == "list" and all(part.kind in ("relation", "both", "either") for part in term.parts)


def _agree(ours: _RealSet, theirs: _RealSet) -> bool:
    marks: list[Any] = []
    for each in sorted((ours, theirs), key=lambda side: not side.is_explicit):  # the exact one first
        marks += [as_float(mark) for mark in each.marks if not _is_among(as_float(mark), marks)]
    marks.sort()
    places = list(marks)
    ends = (
        [marks[0] - 1000, marks[0] - 1, *marks, marks[-1] + 1, marks[-1] + 1000]
        if marks
        else [as_float(-50), as_float(50)]
    )
    for low, high in pairwise(ends):
        places += [low + (high - low) * step / 31 for step in (0, 1, 7, 16, 24, 30, 31)]
    if not (ours.is_explicit and theirs.is_explicit):
        places += [as_float(place) for place in _GRID]
    return all(ours.contains(place) == theirs.contains(place) for place in places)


def _real_set(term: Term) -> _RealSet | None:
    """Return the set of real numbers that a term denotes; None if it denotes none."""
    try:
        match term.kind:
            case "bracketed":
                return _interval(term)
            case "union" | "either":
                return _joined(term, any)
            case "intersection" | "both":
                return _joined(term, all)
            case "difference":
                return _without(term)
            case "relation":
                return _solutions(term)
            case "set" | "list":
                return _points(term)
            case "symbol":
                return _RealSet(lambda _place: True, ()) if term.name == "set R" else None
        return _points(Term("set", (term,)))
    except (Undefined, TooLarge):
        return None


def _number(term: Term) -> Any:
    """Return a real constant.  Raises Undefined for anything else."""
    value = Undefined if symbols(term) or term.kind in HAS_NO_VALUE else value_of(term, Point(0))
    if value is Undefined or not is_real(value):
        raise Undefined("no real number")
    return as_float(value)


def _interval(term: Term) -> _RealSet | None:
    if len(term.parts) != 2:
        return None
    low, high = map(_number, term.parts)

    def contains(place: Any) -> bool:
        if _is_among(place, (low,)):
            return term.name[0] == "[" and (not _is_among(place, (high,)) or term.name[1] == "]")
        return term.name[1] == "]" if _is_among(place, (high,)) else bool(low < place < high)

    return _RealSet(contains, tuple(end for end in (low, high) if abs(end) != float("inf")))


def _points(term: Term) -> _RealSet:
    values = tuple(map(_number, _elements(term)))
    return _RealSet(lambda place: _is_among(place, values), values)


def _joined(term: Term, hold: Callable[[Iterator[bool]], bool]) -> _RealSet | None:
    sets: list[_RealSet] = []
    for part in term.parts:
        found = _real_set(part)
        if found is None or sum(each.num_searched for each in sets) > _MOST_SEARCHED:
            return None
        sets.append(found)
    marks = tuple(mark for each in sets for mark in each.marks)
    is_explicit = all(each.is_explicit for each in sets)
    num_searched = sum(each.num_searched for each in sets)
    return _RealSet(lambda place: hold(each.contains(place) for each in sets), marks, is_explicit, num_searched)


def _without(term: Term) -> _RealSet | None:
    first, second = map(_real_set, term.parts)
    if first is None or second is None:
        return None
    marks = (*first.marks, *second.marks)
    return _RealSet(lambda place: first.contains(place) and not second.contains(place), marks, first.is_explicit)


def _solutions(term: Term) -> _RealSet | None:
    """Return the solutions of a relation in one letter."""
    if term.name in "∈∉":
        inside = _real_set(term.parts[1])
        if inside is None or term.name == "∈":
            return inside
        return _RealSet(lambda place: not inside.contains(place), inside.marks, inside.is_explicit)
    names = symbols(term)
    if len(names) != 1 or "∈" in term.name or "∉" in term.name:
        return None
    (name,) = names

    pairs = list(zip(term.name, term.parts, term.parts[1:], strict=False))
    zeros = [_where_equal(low, high, name) for _, low, high in pairs]
    if any(not found and sign in "=≠" for (sign, *_), found in zip(pairs, zeros, strict=True)):
        return None  # the places where both sides are equal are unknown, or there are none
    changes = [
        _changes(low, high, name) if found is None else found
        for (_, low, high), found in zip(pairs, zeros, strict=True)
    ]

    def contains(place: Any) -> bool:
        try:
            return all(
                _holds(sign, *_sides(low, high, {name: place}), is_near=_is_among(place, marks))
                for (sign, low, high), marks in zip(pairs, changes, strict=True)
            )
        except (Undefined, TooLarge):
            return False

    num_searched = sum(found is None or len(found) > 1 for found in zeros)
    return _RealSet(contains, tuple(chain.from_iterable(changes)), None not in zeros, num_searched)


def _is_among(place: Any, marks: Sequence[Any]) -> bool:
    return any(place == mark or abs(place - mark) <= _NEAR_MARK * (1 + abs(place)) for mark in marks)


def _sides(low: Term, high: Term, given: dict[str, Any]) -> tuple[Any, Any]:
    """Return the values of both sides.  Raises Undefined if one is not real."""
    values = [value_of(side, Point(0, given)) for side in (low, high)]
    if not all(map(is_real, values)):
        raise Undefined("no real number")
    return as_float(values[0]), as_float(values[1])


def _holds(sign: str, low: Any, high: Any, *, is_near: bool) -> bool:
    """True if a relation holds; is_near: both sides are equal there, and differ by an error of rounding."""
    if are_near(low, high) or (is_near and abs(low - high) <= _NEAR_MARK * (1 + abs(low))):
        return sign in "=≤≥"
    return bool({"<": low < high, "≤": low < high, ">": low > high, "≥": low > high, "≠": True}.get(sign))


def _changes(low: Term, high: Term, name: str) -> list[Any]:
    """Return where the sign of the difference changes between half steps, at a zero or at a pole."""

    def is_above(place: Any) -> bool | None:
        try:
            sides = _sides(low, high, {name: place})
        except (Undefined, TooLarge):
            return None
        return bool(sides[0] > sides[1])

    found: list[Any] = []
    if sum(map(_size, (low, high))) > _LARGEST_SEARCHED:
        raise TooLarge("it takes too long to find where both sides are equal")
    signs = [(place, is_above(place)) for place in map(as_float, _GRID)]
    for (left, is_left_above), (right, is_right_above) in pairwise(signs):
        if is_left_above != is_right_above:
            for _ in range(_NUM_HALVINGS):
                middle = (left + right) / 2
                left, right = (middle, right) if is_above(middle) == is_left_above else (left, middle)
            found.append(as_float(right))
            if len(found) > _MOST_CHANGES:
                raise TooLarge("both sides are equal too often")
    return found


def _size(term: Term) -> int:
    """Return the number of a term's parts; sums over a range count as too many."""
    if term.kind in ("sum-over", "product-over"):
        return _LARGEST_SEARCHED
    return 1 + sum(map(_size, term.parts))


def _where_equal(low: Term, high: Term, name: str) -> list[Any] | None:
    """Return all places where two sides are equal; None if they are no polynomials of a low degree."""
    gap = Term("sum", (low, Term("negative", (high,))))
    try:
        values = [value_of(gap, Point(0, {name: Fraction(place)})) for place in range(_HIGHEST_DEGREE + 3)]
    except (Undefined, TooLarge):
        return None
    if not all(map(is_real, values)):
        return None
    rows = [[as_float(value) for value in values]]
    while len(rows[-1]) > 1:
        rows.append([high - low for low, high in pairwise(rows[-1])])
    largest = max(map(abs, rows[0]))
    degree = max((n for n, row in enumerate(rows) if abs(row[0]) > _NEAR_MARK * largest), default=0)
    if degree > _HIGHEST_DEGREE:
        return None
    return _real_zeros([row[0] for row in rows[: degree + 1]])


def _real_zeros(differences: list[Any]) -> list[Any] | None:
    """Return the real zeros of the polynomial with these differences at 0, by Newton's formula."""
    coefficients, falling = [as_float(0)] * len(differences), [as_float(1)]  # of 1, x, x², …
    for step, difference in enumerate(differences):
        for power, factor in enumerate(falling):
            coefficients[power] += difference * factor
        shifted = [as_float(0), *falling]
        falling = [
            (upper - step * lower) / (step + 1) for upper, lower in zip(shifted, [*falling, as_float(0)], strict=True)
        ]
    if len(coefficients) == 1:
        return []
    try:
        zeros = mpmath.polyroots(coefficients[::-1], maxsteps=100, extraprec=300)
    except (mpmath.libmp.NoConvergence, ZeroDivisionError):
        return None
    return [mpmath.re(zero) for zero in zeros if abs(mpmath.im(zero)) <= _NEAR_MARK * (1 + abs(zero))]


# ------------------------------------------------------------------------------------------------------- expressions


def _as_quantities(wanted: Term, answer: Term, units: Units) -> bool:
    ours, theirs = _pushed_in(wanted), _pushed_in(answer)
    for one, other in ((ours, theirs), (theirs, ours)):
        if one.kind == "quantity" and len(one.parts) == 2 and symbols(other) and other.kind != "quantity":
            return _have_same_value(one.parts[1], other) if one is ours else _have_same_value(other, one.parts[1])
    kinds = {ours.kind, theirs.kind}
    if ours.kind == "quantity" and ours.unit.dimensions and symbols(theirs) and theirs.kind != "quantity":
        return _have_same_value(ours, _with_units(theirs))
    if kinds & {"percent", "degree"}:
        return _as_shares(ours, theirs)
    if kinds == {"quantity"} and ours.unit.dimensions and theirs.unit.dimensions and units != "ignored":
        if ours.unit.dimensions != theirs.unit.dimensions:
            return False
        return _have_same_value(*(_times(term.parts[0], term.unit.factor) for term in (ours, theirs)))
    is_lacking = ours.kind == "quantity" and ours.unit.dimensions and not theirs.unit.dimensions
    if units == "required" and is_lacking:
        return False
    return _have_same_value(*(term.parts[0] if term.kind == "quantity" else term for term in (ours, theirs)))


def _pushed_in(term: Term) -> Term:
    """Return −(5 cm) as (−5) cm."""
    if term.kind == "negative" and term.parts[0].kind in ("quantity", "percent", "degree"):
        inner = term.parts[0]
        value = Term("negative", inner.parts[:1])
        return Term(inner.kind, (value,), unit=inner.unit)
    if term.kind == "quantity" and term.parts[0].kind in ("percent", "degree"):
        return term.parts[0]
    return term


def _with_units(term: Term) -> Term:
    """Return a term with letters read as units: 5m as 5 metres."""
    if term.kind == "symbol" and may_be_variable(term.name) and (unit := unit_of(term.name)) is not None:
        return Term("quantity", (Term("number", value=Fraction(1)),), unit=unit)
    return Term(term.kind, tuple(map(_with_units, term.parts)), term.name, term.value, term.unit)


def _times(term: Term, factor: Fraction) -> Term:
    return Term("product", (term, Term("number", value=factor)))


def _as_shares(wanted: Term, answer: Term) -> bool:
    """Compare percentages and degrees: with each other, as the number before the sign, and as share or radians.

    A reference without a sign may be in percent or degrees; an answer without one may be the share, or in radians.
    """
    inner = [term.parts[0] if term.kind in ("percent", "degree", "quantity") else term for term in (wanted, answer)]
    if _have_same_value(*inner):
        return True
    return wanted.kind != answer.kind and _have_same_value(
        *(term.parts[0] if term.kind == "quantity" else term for term in (wanted, answer))
    )


def _have_same_value(wanted: Term, answer: Term) -> bool:
    if wanted.kind in HAS_NO_VALUE or answer.kind in HAS_NO_VALUE:
        return wanted == answer
    ours, theirs = symbols(wanted), symbols(answer)
    if wanted.kind == "sum" and ours - theirs == {"C"} and theirs - ours == {"c"}:
        answer = _renamed(answer, "c", "C")  # a constant of integration
    is_open = any("log" in _calls(term) for term in (wanted, answer))
    return any(_agree_at_points(wanted, answer, base) for base in ((None, 10) if is_open else (None,)))


def _renamed(term: Term, old: str, new: str) -> Term:
    name = new if term.kind == "symbol" and term.name == old else term.name
    return Term(term.kind, tuple(_renamed(part, old, new) for part in term.parts), name, term.value, term.unit)


def _calls(term: Term) -> set[str]:
    found = {term.name} if term.kind == "call" else set()
    return found.union(*map(_calls, term.parts))


def _agree_at_points(wanted: Term, answer: Term, log_base: int | None) -> bool:
    """True if both have the same value at all points where both are real, or at all points if there are none.

    Roots and logarithms of negative numbers depend on convention, so such points do not count.
    """
    num_points = _NUM_POINTS if symbols(wanted) | symbols(answer) else 1
    num_real, num_others, others_agree = 0, 0, True
    for seed in range(num_points):
        point = Point(seed, log_base=log_base)
        try:
            ours, theirs = value_of(wanted, point), value_of(answer, point)
        except Undefined:
            continue
        except TooLarge:
            return _key(wanted) == _key(answer)
        if is_real(ours) and is_real(theirs):
            if not are_near(ours, theirs):
                return False
            num_real += 1
        else:
            num_others += 1
            others_agree = others_agree and are_near(ours, theirs)
    fewest = min(_FEWEST_POINTS, num_points)
    return num_real >= fewest or (num_others >= fewest and others_agree)


def _key(term: Term) -> tuple[Any, ...]:
    """Return a key that is equal for terms that only differ in the order of sums and products."""
    parts = [_key(part) for part in term.parts]
    if term.kind in ("sum", "product"):
        parts.sort(key=repr)
    return (term.kind, term.name, term.value, tuple(parts))


def _expanded(term: Term) -> Term:
    """Replace ± by a list of both values."""
    if not _has_two_values(term):
        return term
    return Term("list", tuple(_with_sign(term, is_upper=is_upper) for is_upper in (True, False)))


def _simplified(term: Term) -> Term:
    """Replace the product of a matrix and a number by a matrix."""
    factors = term.parts if term.kind in ("product", "quotient", "negative") else ()
    matrices = [part for part in factors if part.kind == "matrix"]
    if len(matrices) != 1 or (term.kind == "quotient" and factors[0].kind != "matrix"):
        return term

    def scaled(cell: Term) -> Term:
        return Term(term.kind, tuple(cell if part is matrices[0] else part for part in factors))

    rows = (Term("list", tuple(map(scaled, row.parts))) for row in matrices[0].parts)
    return Term("matrix", tuple(rows))


def _has_two_values(term: Term) -> bool:
    return term.kind == "plus-minus" or any(map(_has_two_values, term.parts))


def _with_sign(term: Term, *, is_upper: bool) -> Term:
    parts = tuple(_with_sign(part, is_upper=is_upper) for part in term.parts)
    if term.kind != "plus-minus":
        return Term(term.kind, parts, term.name, term.value, term.unit)
    is_plus = is_upper == (term.name == r"\pm")
    return Term("sum", (parts[0], parts[1] if is_plus else Term("negative", (parts[1],))))
