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
    return json_schema.json_schema(completion, json.dumps(schema))


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


FORMATS = {
    "date": (["2026-11-24", "2024-02-29"], ["yesterday", "2026-02-29", "20261124", "2026-1-2"]),
    "time": (["08:30:06Z", "23:59:60Z", "01:00:00.5+05:30"], ["08:30:06", "24:00:00Z", "22:59:60Z", "8:30:06Z"]),
    "date-time": (["2026-11-24T08:30:06Z", "1998-12-31t15:59:60.12-08:00"], ["yesterday", "2026-11-24 08:30:06Z"]),
    "duration": (["P3Y6M4DT12H30M5S", "PT36H", "P2W"], ["long", "P", "PT", "P1D2W", "P2S", "P0.5Y"]),
    "email": (["joe.b+x@example.com", '"a b"@x.com', "a@[127.0.0.1]"], ["joe", "@x.com", "a..b@x.com", "a@-x.com"]),
    "idn-email": (["실례@실례.테스트"], ["실례"]),
    "hostname": (["www.example.com", "xn--bcher-kva.example"], ["-a.com", "a_b.com", "a..b", "x" * 64]),
    "idn-hostname": (["bücher.example"], ["bü cher.example", ""]),
    "ipv4": (["192.168.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::1", "12:34:56:78:9a:bc:de:f0"], ["::1%eth0", "12345::", "1.2.3.4"]),
    "uri": (["http://a.b/?x=%20#y", "urn:isbn:1", "http://[::1]:80/", "mailto:a@b"], ["not a uri", "//a.b", "a", "http://[:::]/"]),
    "uri-reference": (["/abc", "a/b:c", "#x", "http://a.b"], ["\\\\a", "a b", "1a:b", "http://a:b:c"]),
    "iri": (["http://ƒøø.ßår/?∂éœ"], ["ƒøø", "http://a b"]),
    "iri-reference": (["/âππ"], ["\\âππ"]),
    "uri-template": (["http://a.b/{term:1}/{?x,y*}"], ["http://a.b/{", "{a b}", "{}"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8-aa08"]),
    "json-pointer": (["", "/a/~0~1"], ["a", "/a~"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "-1", "01"]),
    "regex": (["a(b|c)*"], ["a(b"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("draft", [4, 7, None])
def test_every_format_is_checked_whatever_packages_there_are(name, draft):
    schema = {"format": name} | ({"$schema": f"http://json-schema.org/draft-0{draft}/schema#"} if draft else {})
    good, bad = FORMATS[name]
    assert [text for text in good if not judge(json.dumps(text), schema).is_correct] == []
    assert [text for text in bad if judge(json.dumps(text), schema).is_correct] == []
    assert judge("3", schema).is_correct  # of texts only
    assert judge('"anything"', {"format": "of-our-house"}).is_correct


DEEP_MULTIPLES = {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 0.01}


@pytest.mark.parametrize(
    ("text", "schema", "is_right"),
    [
        ("19.99", {"multipleOf": 0.01}, True),
        ("0.3", {"multipleOf": 0.1}, True),
        ("19.999", {"multipleOf": 0.01}, False),
        ("1e300", {"multipleOf": 7}, False),
        ("4.0", {"multipleOf": 2}, True),
        ("1e-7", {"multipleOf": 1e-8}, True),
        ("9007199254740993", {"multipleOf": 2}, False),
        ("19.99", DEEP_MULTIPLES, True),
        ("19.995", DEEP_MULTIPLES, False),
        ('"text"', {"multipleOf": 0.1}, True),
        ("9" * 400, {"multipleOf": 0.01}, True),
    ],
)
def test_multiples_are_those_of_the_decimals_that_are_written(text, schema, is_right):
    assert judge(text, schema).is_correct is is_right


@pytest.mark.parametrize(
    "wrapper",
    [
        {"name": "person", "strict": True, "schema": PERSON},
        {"type": "json_schema", "json_schema": {"name": "person", "description": "one", "schema": PERSON}},
        {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON},
        {"schema": PERSON},
    ],
)
def test_what_apis_of_models_put_around_a_schema_is_taken_off(wrapper):
    assert judge('{"name": "Ada"}', wrapper).is_correct
    assert not judge('"nonsense"', wrapper).is_correct


def test_a_document_with_line_ends_of_windows_is_read():
    assert judge('Here:\r\n```json\r\n{"name": "Ada"}\r\n```\r\nDone.\r\n').is_correct


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
            json_schema.check_json_schema(json.dumps({"properties": {"a": {"$ref": elsewhere}}}))


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("an object", "is not JSON"),
        ("[1]", "legal: an object, true or false"),
        ('{"type": "text"}', "at $.type: 'text' is not valid"),
        ('{"$schema": "http://json-schema.org/draft-99/schema#"}', "is not known; legal: drafts 3 to 7"),
        ('{"a": 1, "b": "text"}', "no keyword that constrains anything, its keys are 'a', 'b'"),
        ('{"name": "f", "parameters": {"type": "object"}}', "no keyword that constrains anything"),
        ('{"schema": "{}"}', "no keyword that constrains anything"),
        (
            '{"properties": {"v": {"type": "integer", "const": null}}}',
            'const=null beside {"type": "integer"}: no value',
        ),
        ('{"items": {"type": "string", "enum": [1, null]}}', "enum=[1, null] beside"),
        ('{"multipleOf": NaN}', "NaN is not JSON"),
        ('{"pattern": "a(b"}', "at $.pattern"),
    ],
)
def test_a_reference_that_is_no_schema_is_refused(reference, why):
    with pytest.raises(ValueError, match="legal") as refusal:
        json_schema.check_json_schema(reference)
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
