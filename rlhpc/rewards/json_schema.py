"""Task "json_schema": is the completion JSON that is valid under the schema of its record?

Input: a completion; reference: a JSON Schema, of the draft in its $schema, 2020-12 by default.  Output: a RewardOutcome
of 1.0 or 0.0; part `json` says whether it is JSON at all.

The last fenced block is judged, if it is marked json or not at all, or the whole completion if nothing is fenced.
Nothing is fetched: a $ref refers to a place in the schema.  Differs from jsonschema: (1) multipleOf is exact, 19.99 is
a multiple of 0.01; (2) formats are those below; (3) an object that constrains nothing is no schema, and the wrapper
that APIs of models put around a schema, {"name", "strict", "schema"}, is removed.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.code_place import last_block
from rlhpc.rewards.text_answer import LONGEST_ANSWER

# --------------------------------------------------------------------------------------------------------- json formats
#
# The formats of JSON Schema, checked alike on every machine.
#
# Input: a text.  Output: whether it has the format.  jsonschema checks a format only if the package for it happens to
# be installed; these need none.  By RFC 3339 (dates, times, durations), 3986 and 3987 (URI, IRI), 6570 (templates),
# 6901 (pointers), 5321 and 6531 (mail), 1123 and IDNA (hosts).

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(
    r"([01]\d|2[0-3]):([0-5]\d):([0-5]\d|60)(?:\.\d+)?(?:[Zz]|([+-])([01]\d|2[0-3]):([0-5]\d))", re.ASCII
)
_OF_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_OF_HOURS = r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
_DURATION = re.compile(rf"P(?:\d+W|{_OF_DAYS}{_OF_HOURS}?|{_OF_HOURS})", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_POINTER = re.compile(r"(?:/(?:[^~/]|~[01])*)*")
_RELATIVE_POINTER = re.compile(r"(?:0|[1-9][0-9]*)(?:[+-][1-9][0-9]*)?(?:#|(?:/(?:[^~/]|~[01])*)*)")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.IGNORECASE | re.ASCII)
_OTHER_DOTS = re.compile("[\u3002\uff0e\uff61]")
_LONGEST_HOST = 253
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~{more}-]+"
_QUOTED = r'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
_BEYOND_ASCII = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr(plane << 16)}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 15)
)
_IDENTIFIER = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)  # RFC 3986, B
_FUTURE_ADDRESS = re.compile(r"[vV][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_VARIABLE = r"(?:\w|%[0-9A-Fa-f]{2})(?:\.?(?:\w|%[0-9A-Fa-f]{2}))*(?::[1-9]\d{0,3}|\*)?"
_TEMPLATE = re.compile(
    rf"(?:[^\x00-\x20\"%<>\\^`{{|}}\x7f]|%[0-9A-Fa-f]{{2}}|{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*}})*", re.ASCII
)


def _is_date(text: str) -> bool:
    match = _DATE.fullmatch(text)
    try:
        return match is not None and bool(date(*map(int, match.groups())))
    except ValueError:
        return False


def _is_time(text: str) -> bool:
    """True for a time with its offset; a leap second is the last one of a day in UTC."""
    if (match := _TIME.fullmatch(text)) is None:
        return False
    hours, minutes, seconds, sign, ahead_hours, ahead_minutes = match.groups()
    ahead = (int(ahead_hours) * 60 + int(ahead_minutes)) * (-1 if sign == "-" else 1) if sign else 0
    return seconds != "60" or (int(hours) * 60 + int(minutes) - ahead) % 1440 == 1439


def _is_host(text: str) -> bool:
    return len(text) <= _LONGEST_HOST and all(map(_is_label, text.split(".")))


def _is_label(label: str) -> bool:
    if _LABEL.fullmatch(label) is None:
        return False
    if label[2:4] != "--":
        return True
    try:  # names with hyphens in these places are legal only if they encode another name
        return label[:4].lower() == "xn--" and label.encode().decode("idna").encode("idna").decode() == label.lower()
    except UnicodeError:
        return False


def _is_international_host(text: str) -> bool:
    try:
        return _is_host(_OTHER_DOTS.sub(".", text).encode("idna").decode())
    except UnicodeError:
        return False


def _mail(more: str, is_host: Callable[[str], bool]) -> Callable[[str], bool]:
    atom, quoted = _ATOM.replace("{more}", more), _QUOTED.replace("{more}", more)
    local = re.compile(rf"(?:{atom}(?:\.{atom})*|{quoted})")

    def is_mail(text: str) -> bool:
        name, at, host = text.rpartition("@")
        if not at or local.fullmatch(name) is None:
            return False
        if host.startswith("[") and host.endswith("]"):
            inner = host[1:-1]
            return _is_ipv6(inner[5:]) if inner[:5].lower() == "ipv6:" else _is_ipv4(inner)
        return is_host(host)

    return is_mail


def _is_ipv4(text: str) -> bool:
    try:
        return bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.IPv6Address(text) or True)
    except ValueError:
        return False


def _is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _identifier(more: str, *, may_be_relative: bool) -> Callable[[str], bool]:
    """Check of a URI or IRI; more: characters beyond those of a URI."""
    part = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:{more}\-%s]|%%[0-9A-Fa-f]{{2}})*"
    path_like, query_like, user_like = re.compile(part % "@/"), re.compile(part % "@/?"), re.compile(part % "")

    def is_identifier(text: str) -> bool:
        parts = _IDENTIFIER.fullmatch(text)
        assert parts is not None  # the pattern matches every text
        scheme, authority, path, query, fragment = parts.groups()
        if not (may_be_relative if scheme is None else _SCHEME.fullmatch(scheme)):
            return False
        if not path_like.fullmatch(path) or not all(query_like.fullmatch(each or "") for each in (query, fragment)):
            return False
        user, _, place = (authority or "").rpartition("@")
        is_address = place.startswith("[")
        host, _, port = place[1:].partition("]") if is_address else place.partition(":")
        if not user_like.fullmatch(user) or not re.fullmatch(r":[0-9]*|" if is_address else r"[0-9]*", port):
            return False
        if is_address:
            return _is_ipv6(host) or _FUTURE_ADDRESS.fullmatch(host) is not None
        return user_like.fullmatch(host) is not None

    return is_identifier


def _matches(pattern: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda text: pattern.fullmatch(text) is not None


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": lambda text: text[10:11] in ("T", "t") and _is_date(text[:10]) and _is_time(text[11:]),
    "duration": _matches(_DURATION),
    "email": _mail("", _is_host),
    "idn-email": _mail(_BEYOND_ASCII, _is_international_host),
    "hostname": _is_host,
    "host-name": _is_host,
    "idn-hostname": _is_international_host,
    "ipv4": _is_ipv4,
    "ip-address": _is_ipv4,
    "ipv6": _is_ipv6,
    "uri": _identifier("", may_be_relative=False),
    "uri-reference": _identifier("", may_be_relative=True),
    "iri": _identifier(_BEYOND_ASCII, may_be_relative=False),
    "iri-reference": _identifier(_BEYOND_ASCII, may_be_relative=True),
    "uri-template": _matches(_TEMPLATE),
    "uuid": _matches(_UUID),
    "json-pointer": _matches(_POINTER),
    "relative-json-pointer": _matches(_RELATIVE_POINTER),
    "regex": _is_regex,
}
_DRAFT_3 = {"time": _matches(re.compile(r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d", re.ASCII))}


def _checker(formats: dict[str, Callable[[str], bool]]) -> FormatChecker:
    checker = FormatChecker(formats=())
    for name, has_format in formats.items():
        checker.checks(name)(lambda value, has_format=has_format: not isinstance(value, str) or has_format(value))
    return checker


# ---------------------------------------------------------------------------------------------------------- json schema

_FENCE = re.compile(r"^[ ]{0,3}```", re.MULTILINE)
_MOST_ERRORS = 50  # of which the most relevant is shown
_SHOWN_CHARACTERS = 200
_OF_NUMBERS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_PLAIN_KEYWORDS = {"type", "enum", "const", "minLength", "maxLength", "pattern"} | _OF_NUMBERS
_DEEPEST = 64  # a deeper document may exceed the validator's recursion


def json_schema(completion: str, reference: str) -> RewardOutcome:
    """Validate the completion.  Raises ValueError if the reference is no schema."""
    validator = _validator(reference)
    text = _document(completion)
    if text is None:
        return RewardOutcome(0.0, is_correct=False, parts={"json": 0.0}, detail="the last fenced block is not JSON")
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        why = f"no JSON: {error}"[:_SHOWN_CHARACTERS]
        return RewardOutcome(0.0, is_correct=False, parts={"json": 0.0}, detail=why)
    try:
        fault = best_match(islice(validator.iter_errors(value), _MOST_ERRORS))
        answer = json.dumps(value, sort_keys=True)[:LONGEST_ANSWER]
    except RecursionError:
        if _depth(value) <= _DEEPEST:  # so the schema recurses without end
            raise
        why = f"nested more than {_DEEPEST} deep"
        return RewardOutcome(0.0, is_correct=False, parts={"json": 1.0}, detail=why)
    detail = "valid" if fault is None else f"{fault.json_path}: {fault.message}"[:_SHOWN_CHARACTERS]
    return RewardOutcome(float(fault is None), fault is None, parts={"json": 1.0}, detail=detail, answer=answer)


def check_json_schema(reference: str) -> None:
    """Raise ValueError for a reference that is no schema, or refers to another document."""
    _validator(reference)


def why_invalid(value: Any, schema: str) -> str:
    """Return the fault of a value under a schema in JSON, "" for none.  Raises ValueError if that is no schema."""
    fault = best_match(islice(_validator(schema).iter_errors(value), _MOST_ERRORS))
    return "" if fault is None else f"{fault.json_path}: {fault.message}"[:_SHOWN_CHARACTERS]


@lru_cache(maxsize=256)
def _validator(reference: str) -> Any:
    try:
        schema = _unwrapped(json.loads(reference, parse_constant=_refuse_constant))
    except ValueError as error:
        raise ValueError(f"reference {reference[:80]!r} is not JSON: {error}; legal: a JSON Schema") from error
    is_schema = isinstance(schema, dict | bool)
    if not is_schema:
        raise ValueError(f"reference {reference[:80]!r} is not a JSON Schema; legal: an object, true or false")
    kind = validator_for(schema, default=Draft202012Validator)
    if isinstance(schema, dict) and "$schema" in schema and validator_for(schema, default=None) is None:
        raise ValueError(f"$schema={schema['$schema']!r} is not known; legal: drafts 3 to 7, 2019-09 and 2020-12")
    try:
        kind.check_schema(schema, format_checker=_checker({"regex": _is_regex}))
    except SchemaError as error:
        raise ValueError(
            f"no JSON Schema: at {error.json_path}: {error.message}; legal: what {kind.__name__} knows"
        ) from error
    if schema and isinstance(schema, dict) and not schema.keys() & kind.VALIDATORS.keys():
        raise ValueError(
            f"reference {reference[:80]!r} has no keyword that constrains anything, its keys are "
            f"{', '.join(map(repr, schema))}: every JSON would be valid; legal: a JSON Schema, or true if so meant"
        )
    exact = _exact(kind)
    for part in _parts_followed(schema):
        _refuse_what_nothing_satisfies(part, exact)
    formats = FORMATS | (_DRAFT_3 if kind.__name__ == "Draft3Validator" else {})
    return exact(schema, registry=Registry(), format_checker=_checker(formats))


def _unwrapped(document: Any) -> Any:
    """The schema in {"name", "strict", "schema"}, alone or in {"type": "json_schema"}, as in APIs of models."""
    if not isinstance(document, dict) or document.get("type", "json_schema") != "json_schema":
        return document
    inner = document.get("json_schema", document)
    is_wrapper = isinstance(inner, dict) and inner.keys() <= {"type", "name", "strict", "description", "schema"}
    return inner["schema"] if is_wrapper and isinstance(inner.get("schema"), dict | bool) else document


@cache
def _exact(kind: Any) -> Any:
    """The validator of a draft, with decimals for multiples."""
    return extend(kind, {name: _is_multiple for name in ("multipleOf", "divisibleBy") if name in kind.VALIDATORS})


def _is_multiple(validator: Any, divisor: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    """Check multiples as written: a binary fraction counts as its shortest decimal."""
    if validator.is_type(value, "number") and Fraction(_decimal(value)) % Fraction(_decimal(divisor)):
        yield ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def _decimal(number: float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def _refuse_what_nothing_satisfies(part: Any, kind: Any) -> None:
    """Raise ValueError for a const or enum whose values the other keywords all refuse: tables pad with such nulls."""
    if not isinstance(part, dict) or "$ref" in part:
        return
    beside = {key: part[key] for key in _PLAIN_KEYWORDS & part.keys()}
    for key, values in (("const", [part.get("const")]), ("enum", part.get("enum") or [])):
        rest = kind({name: value for name, value in beside.items() if name != key})
        if key in part and not any(map(rest.is_valid, values)):
            raise ValueError(
                f"the schema has {key}={json.dumps(part[key])[:40]} beside {json.dumps(rest.schema)[:80]}: no value "
                "is valid; legal: a value of that kind, or no such keyword (tables pad objects with nulls)"
            )


def _parts_followed(schema: Any) -> Iterator[Any]:
    """Yield every subschema.  Raises ValueError for a $ref to anything else."""
    root: Resource[Any] = Resource.from_contents(schema, default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource(root.id() or "", root)
    waiting = [(root, registry.resolver_with_root(root))]
    while waiting:
        resource, resolver = waiting.pop()
        yield resource.contents
        target = resource.contents.get("$ref") if isinstance(resource.contents, dict) else None
        if isinstance(target, str):
            try:
                resolver.lookup(target)
            except Unresolvable as error:
                raise ValueError(f"$ref={target!r} does not resolve; legal: a place in the schema itself") from error
        waiting += [(part, resolver.in_subresource(part)) for part in resource.subresources()]


def _document(completion: str) -> str | None:
    """The document to judge; None if the last block is not closed, or in another language."""
    if not _FENCE.search(completion):
        return completion
    block = last_block(completion)
    if block is None or len(_FENCE.findall(completion)) % 2 or block[0].lower() not in ("json", ""):
        return None
    return block[1]


def _depth(value: Any) -> int:
    """Nesting depth; 1 for a value that is neither object nor array."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:40]} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
