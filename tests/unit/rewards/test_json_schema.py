"""json_schema: which text is judged, what is valid, and which references are refused; nothing is fetched."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from rlhpc.rewards import json_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def judge(completion: str, schema: Any = PERSON):
    return json_schema.judge(completion, json.dumps(schema))


@pytest.mark.parametrize(
    ("completion", "is_json", "is_right"),
    [
        ('{"name": "Ada", "age": 36}', True, True),
        ('\n  {"name": "Ada"}\n', True, True),
        ('```json\n{"name": "Ada"}\n```', True, True),
        ('Here it is:\n```\n{"name": "Ada"}\n```\nDone.', True, True),
        ('```json\n{"name": 1}\n```\nno,\n```json\n{"name": "Ada"}\n```', True, True),
        ('```json\n{"name": "Ada"}\n```\nno,\n```json\n{"name": 1}\n```', True, False),
        ('{"age": 36}', True, False),
        ('{"name": "Ada", "age": -1}', True, False),
        ('{"name": "Ada", "born": 1815}', True, False),
        ('[{"name": "Ada"}]', True, False),
        ("null", True, False),
        ('Here it is: {"name": "Ada"}', False, False),
        ('{"name": "Ada"} {"name": "Ada"}', False, False),
        ("{'name': 'Ada'}", False, False),
        ('{"name": "Ada", "age": NaN}', False, False),
        ('```json\n{"name": "Ada"}', False, False),  # not closed: it was cut off
        ('```json\n{"name": "Ada"}\n```\n```json\n{"name":', False, False),
        ('```python\n{"name": "Ada"}\n```', False, False),
        ("[" * 100_000, False, False),
        ("", False, False),
    ],
)
def test_the_last_block_or_the_whole_completion_is_valid_or_not(completion, is_json, is_right):
    outcome = judge(completion)
    assert (outcome.reward, outcome.is_correct) == (float(is_right), is_right)
    assert outcome.parts == {"json": float(is_json)}


def test_a_schema_may_allow_everything_or_nothing():
    assert judge("3", schema=True).is_correct
    assert not judge("3", schema=False).is_correct


def test_what_is_wrong_is_said_with_its_place():
    assert judge('{"name": "Ada", "age": "36"}').detail == "$.age: '36' is not of type 'integer'"
    assert judge("{").detail.startswith("no JSON: ")


def test_a_draft_is_the_one_that_the_schema_names():
    tuple_of_two = {"items": [{"type": "integer"}, {"type": "string"}]}
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", **tuple_of_two}
    assert judge('[1, "a"]', draft_7).is_correct
    assert not judge('["a", 1]', draft_7).is_correct
    with pytest.raises(ValueError, match="Draft202012Validator"):  # where items is one schema
        judge("[]", tuple_of_two)


def test_formats_that_need_no_other_package_are_checked():
    assert judge('"2026-11-24"', {"format": "date"}).is_correct
    assert not judge('"yesterday"', {"format": "date"}).is_correct


def test_references_lead_within_the_schema_and_nothing_is_fetched(monkeypatch):
    def refuse(*arguments: object, **settings: object):
        raise AssertionError("something was fetched")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    tree = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert judge("[[], [[]]]", tree).is_correct
    assert not judge("[[], [1]]", tree).is_correct
    nested = {"$id": "http://a.example/", "$defs": {"n": {"$id": "n", "type": "integer"}}, "$ref": "n"}
    assert judge("3", nested).is_correct
    for elsewhere in ("http://a.example/schema.json", "#/$defs/leaf", "other.json#/a"):
        with pytest.raises(ValueError, match="does not resolve; legal: a place in the schema itself"):
            json_schema.check_reference(json.dumps({"properties": {"a": {"$ref": elsewhere}}}))


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("an object", "is not JSON"),
        ("[1]", "legal: an object, true or false"),
        ('{"type": "text"}', "at $.type: 'text' is not valid"),
        ('{"$schema": "http://json-schema.org/draft-99/schema#"}', "is not known; legal: drafts 3 to 7"),
    ],
)
def test_a_reference_that_is_no_schema_is_refused(reference, why):
    with pytest.raises(ValueError, match="legal") as refusal:
        json_schema.check_reference(reference)
    assert why in str(refusal.value)


NESTED = {"$ref": "#/$defs/any", "$defs": {"any": {"additionalProperties": {"$ref": "#/$defs/any"}}}}


def test_a_document_too_deep_for_the_validator_is_wrong_and_a_schema_without_end_is_no_verdict():
    deep = judge('{"a":' * 900 + "1" + "}" * 900, NESTED)
    assert (deep.reward, deep.parts, deep.detail) == (0.0, {"json": 1.0}, "nested more than 64 deep")
    assert judge('{"a":' * 20 + "1" + "}" * 20, NESTED).is_correct
    with pytest.raises(RecursionError):
        judge("1", {"$ref": "#"})


def test_a_number_beyond_all_floats_is_wrong_and_no_error_of_the_verifier():
    found = judge("1e999", {"type": "number", "multipleOf": 0.5})
    assert (found.is_correct, found.parts, found.detail) == (False, {"json": 0.0}, "no JSON: 1e999 is too large")
    assert judge("1e300", {"type": "number"}).is_correct


def test_a_whole_number_beyond_all_floats_is_wrong_where_a_float_divides_it():
    found = judge("9" * 400, {"multipleOf": 0.01})
    assert (found.is_correct, found.parts, found.detail) == (
        False, {"json": 1.0}, "holds a whole number that is too large"
    )  # fmt: skip
    assert judge("9" * 400, {"multipleOf": 3}).is_correct
