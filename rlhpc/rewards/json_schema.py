"""Task "json_schema": is the completion JSON that is valid under the schema of its record?

Input: a completion; reference: a JSON Schema, of the draft that its $schema names, 2020-12 where it names none.
Output: a RewardOutcome of 1.0 or 0.0; part `json` says whether it is JSON at all.

The last fenced block is judged, if it is marked json or not at all, or the whole completion if nothing is fenced.
Nothing is fetched: a $ref leads to a place in the schema.  Differs from jsonschema: (1) multipleOf is exact, 19.99 is a
multiple of 0.01; (2) formats are those of json_formats.py; (3) an object that constrains nothing is no schema, and one
around a schema, as APIs of models have it ({"name", "strict", "schema"}), is taken off.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NoReturn

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rlhpc.contracts import RewardOutcome
from rlhpc.rewards.fenced_blocks import last_block
from rlhpc.rewards.json_formats import format_checker, pattern_checker
from rlhpc.rewards.marked_answer import LONGEST_ANSWER

_FENCE = re.compile(r"^[ ]{0,3}```", re.MULTILINE)
_MOST_ERRORS = 50  # the most telling of these is shown
_SHOWN_CHARACTERS = 200
_OF_NUMBERS = {"multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_PLAIN_KEYWORDS = {"type", "enum", "const", "minLength", "maxLength", "pattern"} | _OF_NUMBERS
_DEEPEST = 64  # a document that is deeper may be more than the validator can follow


def judge(completion: str, reference: str) -> RewardOutcome:
    """Raises ValueError if the reference is no schema."""
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
        if _depth(value) <= _DEEPEST:  # it is the schema that has no end
            raise
        why = f"nested more than {_DEEPEST} deep"
        return RewardOutcome(0.0, is_correct=False, parts={"json": 1.0}, detail=why)
    detail = "valid" if fault is None else f"{fault.json_path}: {fault.message}"[:_SHOWN_CHARACTERS]
    return RewardOutcome(float(fault is None), fault is None, parts={"json": 1.0}, detail=detail, answer=answer)


def check_reference(reference: str) -> None:
    """Raises ValueError if it is no schema, or refers to another document."""
    _validator(reference)


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
        kind.check_schema(schema, format_checker=pattern_checker())
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
    return exact(schema, registry=Registry(), format_checker=format_checker(kind.__name__))


def _unwrapped(document: Any) -> Any:
    """The schema in {"name", "strict", "schema"}, alone or in {"type": "json_schema"}, as APIs of models have it."""
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
    """As written: a binary fraction is the shortest decimal that stands for it."""
    if validator.is_type(value, "number") and Fraction(_decimal(value)) % Fraction(_decimal(divisor)):
        yield ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def _decimal(number: float) -> Decimal:
    return Decimal(number) if isinstance(number, int) else Decimal(repr(number))


def _refuse_what_nothing_satisfies(part: Any, kind: Any) -> None:
    """A const, or every value of an enum, that the keywords beside it refuse: tables pad objects with such nulls."""
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
    """Every schema in a schema.  Raises ValueError for a $ref to something else."""
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
    """What is judged; None where the last block is not closed, or of another language."""
    if not _FENCE.search(completion):
        return completion
    block = last_block(completion)
    if block is None or len(_FENCE.findall(completion)) % 2 or block[0].lower() not in ("json", ""):
        return None
    return block[1]


def _depth(value: Any) -> int:
    """1 for a value that is neither object nor array."""
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
