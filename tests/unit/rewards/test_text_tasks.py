"""Answers of text: compared, held to a schema, checked against instructions."""

from __future__ import annotations

import json
import random
import re
import string
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.tables_services import InstructionsConfig, TextConfig
from rlhpc.rewards import instructions, json_schema, outcomes, text_answer
from rlhpc.rewards.code_place import last_block, last_program
from rlhpc.rewards.instructions import INSTRUCTIONS, num_sentences
from rlhpc.rewards.task_settings import TaskSettings
from rlhpc.rewards.text_answer import exact_match, normalised, token_f1

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("completion", "reference", "is_right"),
    [
        ("The Eiffel Tower.", "eiffel tower", True),
        ("I think it is\n#### the Eiffel  tower", "Eiffel Tower", True),
        (r"so \boxed{Paris}", '["Lyon", "Paris"]', True),
        ("Paris #### Rome", "Paris", False),
        ("Paris, France", "Paris", False),
        ("theory", "ory", False),  # an article is a word
        ("[1]", "[1", True),  # a reference that begins like JSON and is none
        ("", "the", False),  # nothing is left of either by SQuAD's rules
        (r"\boxed{}", "A", False),  # a letter of a multiple choice, and an article
        ("The", "A", False),
        ("(A)", "A", True),
        ("!", "?", False),
        ("?", "?", True),
        ("", '["B", "a"]', False),
    ],
)
def test_exact_match_compares_as_squad_does(completion, reference, is_right):
    outcome = exact_match(completion, reference)
    assert (outcome.reward, outcome.is_correct) == (float(is_right), is_right)


@pytest.mark.parametrize(
    ("completion", "reference", "is_right"),
    [
        ("3.5", "35", False), ("1/2", "12", False), ("-5", "5", False), ("−5", "-5", True),
        ("It is -5.", "it is 5", False), ("x=-5", "x=5", False), ("(-5)", "-5", True), ("$-5", "-5", True),
        ("1,000", "1000", True), ("1,000,000.5", "1000000.5", True), ("3,5", "35", False), (".5", "5", False),
        (".5", "0.5", True), ("10:30", "1030", False), ("2019–2020", "2019-2020", True),
        ("2019-2020", "20192020", False), ("1e-05", "1e05", False), ("3.5.", "3.5", True),
        ("5-year", "5year", True),  # as SQuAD's program has it
        ("U.S.", "us", True), ("Cafe\u0301", "Café", True), ("It’s “here”", 'it\'s "here"', True),
        ("«Paris»…", "Paris", True), ("well—done", "welldone", True), ("5²", "52", False),
    ],
)  # fmt: skip
def test_numbers_keep_what_they_say_and_letters_count_however_they_are_composed(completion, reference, is_right):
    assert exact_match(completion, reference).is_correct is is_right
    assert exact_match(reference, completion).is_correct is is_right


def test_punctuation_of_numbers_may_be_left_out_as_by_squads_own_program(monkeypatch):
    settings = TaskSettings(text=TextConfig(punctuation="all"))
    monkeypatch.setattr(text_answer, "task_settings", lambda: settings)
    assert exact_match("3.5", "35").is_correct
    assert exact_match("-1,000", "1000").is_correct


def test_token_f1_is_the_harmonic_mean_of_precision_and_recall():
    draw = random.Random(0)
    words = ["red", "blue", "green", "one", "two"]
    for _ in range(500):
        answer, wanted = (draw.choices(words, k=draw.randint(1, 6)) for _ in range(2))
        left, common = list(wanted), 0
        for word in answer:
            if word in left:
                left.remove(word)
                common += 1
        precision, recall = common / len(answer), common / len(wanted)
        f1 = 2 * precision * recall / (precision + recall) if common else 0.0
        outcome = token_f1(" ".join(answer), " ".join(wanted))
        assert outcome.reward == pytest.approx(f1, abs=1e-12)
        assert outcome.is_correct is (sorted(answer) == sorted(wanted))


@pytest.mark.parametrize(("completion", "reference"), [("", "A"), ("the", "A"), (r"\boxed{.}", "an"), ("!", "?")])
def test_saying_nothing_shares_nothing_with_a_reference_that_is_an_article(completion, reference):
    assert token_f1(completion, reference).reward == 0.0
    assert token_f1(reference, reference).is_correct


def test_the_best_reference_counts_and_true_and_false_are_rewards():
    assert token_f1("a big red house", '["small hut", "big house"]').reward == pytest.approx(0.8)
    assert [outcomes.as_outcome(value).reward for value in (True, False)] == [1.0, 0.0]
    assert outcomes.as_outcome(True).is_correct
    assert outcomes.as_outcome({"reward": True, "is_correct": False}).is_correct is False


def test_normalising_twice_is_normalising_once():
    draw = random.Random(1)
    for _ in range(500):
        text = "".join(draw.choices(string.printable + " a an the ", k=30))
        assert normalised(normalised(text)) == normalised(text)


@pytest.mark.parametrize(
    ("completion", "pattern", "is_right"),
    [
        ("2026-11-24", r"\d{4}-\d\d-\d\d", True),
        ("on 2026-11-24", r"\d{4}-\d\d-\d\d", False),
        ("It is #### YES", "(?i)yes|no", True),
    ],
)
def test_a_pattern_matches_the_whole_answer(completion, pattern, is_right):
    assert text_answer.regex(completion, pattern).is_correct is is_right


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("B", "B"), ("(b)", "B"), ("B. Paris", "B"), ("B. Vitamin A", "B"), (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{A} no, \boxed{C}", "C"), ("Because of that:\n**Answer:** D", "D"), ("**Answer**: D", "D"),
        (r"\boxed{\textbf{(D)}\ 12}", "D"),  # as in the solutions of AMC
        (r"\boxed{\textbf{(D)}~12}", "D"), (r"\boxed{\textbf{(D)}\ \textbf{(E)}}", ""), ("Answer: A\n#### B", "B"),
        ("#### B\nAnswer: A", "A"), ("A or B", ""), ("A. or B", ""), ("B) and (C)", ""), ("A, B, C, D", ""),
        ("The answer is B", ""),  # nothing is marked, and it is not a choice alone
        ("Because", ""), ("", ""),
    ],
)  # fmt: skip
def test_one_marked_letter_is_a_choice_and_several_are_none(completion, chosen):
    outcome = text_answer.multiple_choice(completion, chosen or "A")
    assert (outcome.answer, outcome.is_correct) == (chosen, bool(chosen))
    assert not text_answer.multiple_choice(completion, "E").is_correct


@pytest.mark.parametrize("reference", ["", "AB", "A or B", "1"])
def test_a_reference_is_one_letter(reference):
    with pytest.raises(ValueError, match="is not one letter"):
        text_answer.multiple_choice("A", reference)


# ---------------------------------------------------------------------------------------------------------- json_schema

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


def test_a_schema_may_allow_everything_its_draft_is_the_one_named_and_faults_have_a_place():
    assert judge("3", schema=True).is_correct
    assert not judge("3", schema=False).is_correct
    assert judge('{"name": "Ada", "age": "36"}').detail == "$.age: '36' is not of type 'integer'"
    assert judge("{").detail.startswith("no JSON: ")
    tuple_of_two = {"items": [{"type": "integer"}, {"type": "string"}]}
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#", **tuple_of_two}
    assert judge('[1, "a"]', draft_7).is_correct
    assert not judge('["a", 1]', draft_7).is_correct
    with pytest.raises(ValueError, match="Draft202012Validator"):  # where items is one schema
        judge("[]", tuple_of_two)
    assert judge('Here:\r\n```json\r\n{"name": "Ada"}\r\n```\r\nDone.\r\n').is_correct


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
        ("19.99", {"multipleOf": 0.01}, True), ("0.3", {"multipleOf": 0.1}, True),
        ("19.999", {"multipleOf": 0.01}, False), ("1e300", {"multipleOf": 7}, False),
        ("4.0", {"multipleOf": 2}, True), ("1e-7", {"multipleOf": 1e-8}, True),
        ("9007199254740993", {"multipleOf": 2}, False), ("19.99", DEEP_MULTIPLES, True),
        ("19.995", DEEP_MULTIPLES, False), ('"text"', {"multipleOf": 0.1}, True),
        ("9" * 400, {"multipleOf": 0.01}, True),
    ],
)  # fmt: skip
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


# -------------------------------------------------------------------------------- Instructions that a program can check

# instruction_pairs.tsv: 576 texts, drawn at random; two implementations that share nothing agreed on each verdict.
FOLLOWED = [line.split("\t") for line in (HERE / "instruction_pairs.tsv").read_text("utf-8").splitlines()[1:]]


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_text_follows_an_instruction_where_two_implementations_agreed(name: str):
    cases = [(verdict == "followed", *map(json.loads, case)) for verdict, of, *case in FOLLOWED if of == name]
    assert len(cases) == 24
    for is_followed, arguments, text in cases:
        assert INSTRUCTIONS[name].follows(text, arguments) == is_followed, (text, arguments)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0), ("Hello", 1), ("Hello. World.", 2), ("Dr. Smith came at 5 p.m. today. He left!", 2),
        ("So do I. And you?", 2), ("Version 2.5 is out. Get it at a.com now.", 2),
        ('He said "No." Then he left...', 2), ("1. First one.\n2. Second one.", 2), ("Wait... what?!", 2),
        ("x" * 50_000 + ".", 1),
    ],
)  # fmt: skip
def test_sentences_end_where_people_end_them(text, count):
    assert num_sentences(text) == count


def judge_instructions(completion: str, *wanted: tuple[str, dict[str, Any]]):
    reference = [{"id": name, "kwargs": arguments} for name, arguments in wanted]
    return instructions.instruction_following(completion, json.dumps(reference))


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("detectable_format:title", {}, "<<" * 100_000),
        ("detectable_format:title", {}, "<<a" * 70_000),
        ("detectable_format:title", {}, "<<>>>" * 40_000),
        ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, "." * 200_000 + "x"),
        ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, ".'" * 100_000 + "x"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_completion_that_repeats_itself_takes_no_time(name, arguments, text):
    began = time.thread_time()
    assert not judge_instructions(text, (name, arguments)).is_correct
    assert time.thread_time() - began < 1.0


def test_titles_are_those_of_the_regular_expression():
    draw = random.Random(3)
    for _ in range(20_000):
        text = "".join(draw.choices("<<<>>>a \n", k=draw.randrange(14)))
        expected = any(title.strip(" <>") for title in re.findall(r"<<([^\n]+?)>>", text))
        assert INSTRUCTIONS["detectable_format:title"].follows(text, {}) is expected, repr(text)


def test_a_fence_and_blanks_without_an_end_take_no_time():
    began = time.thread_time()
    assert not judge_instructions("```" + " " * 100_000 + "x", ("detectable_format:json_format", {})).is_correct
    assert time.thread_time() - began < 0.5


COMMA, LOWER = ("punctuation:no_comma", {}), ("change_case:english_lowercase", {})


def test_all_have_to_be_followed_and_what_was_not_is_named():
    both = judge_instructions("tea is hot", COMMA, LOWER)
    assert (both.reward, both.is_correct, both.parts) == (1.0, True, {"strict": 1.0, "loose": 1.0})
    one = judge_instructions("Tea is hot", COMMA, LOWER)
    assert (one.reward, one.is_correct, one.parts["strict"]) == (0.0, False, 0.5)
    assert one.detail == "1 of 2; not: change_case:english_lowercase"


def test_loosely_a_first_line_a_last_line_and_asterisks_are_forgiven():
    end = ("startend:end_checker", {"end_phrase": "bye"})
    for text in ("Sure, here it is:\nhello, bye\nHope it helps!", "*bye*", "bye\n."):
        assert judge_instructions(text, end).parts == {"strict": 0.0, "loose": 1.0}
    assert judge_instructions("Hello\nbye\nthere\nfriend", end).parts["loose"] == 0.0
    twice = ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"})
    assert (
        judge_instructions("Tea,\nhot\nTea", COMMA, twice).parts["loose"] == 1.0
    )  # each may be followed by another version


@pytest.mark.parametrize("text", ["", " \n", "a"])
def test_an_empty_completion_follows_nothing(text):
    assert judge_instructions(text, COMMA).is_correct is bool(text.strip())


@pytest.mark.parametrize(("accuracy", "reward", "expected"), [
    ("strict", "all", 0.0), ("strict", "fraction", 0.5), ("loose", "all", 1.0), ("loose", "fraction", 1.0)
])  # fmt: skip
def test_the_run_file_says_what_is_rewarded(monkeypatch, accuracy, reward, expected):
    settings = TaskSettings(instructions=InstructionsConfig(accuracy=accuracy, reward=reward))
    monkeypatch.setattr(instructions, "task_settings", lambda: settings)
    outcome = judge_instructions("Sure:\ntea is hot", COMMA, LOWER)
    assert outcome.reward == expected
    assert outcome.is_correct is (accuracy == "loose")


def test_records_of_ifeval_are_references_as_they_are():
    record = {
        "key": 1000,
        "prompt": "Write about tea. Do not use commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        # A table has a column for each argument, and numbers with holes are floats.
        "kwargs": [{"num_words": None, "relation": None}, {"num_words": 3.0, "relation": "at least"}],
    }
    assert instructions.instruction_following("one two three", json.dumps(record)).is_correct
    assert not instructions.instruction_following("one two", json.dumps(record)).is_correct


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("no commas", "is not JSON"),
        ("[]", "has no instruction; legal"),
        ("{}", "KeyError: 'instruction_id_list'"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}', "is shorter"),
        ('[{"id": "punctuation:no_commas"}]', "'punctuation:no_commas' is unknown; legal: keywords:existence"),
        ('[{"id": "language:response_language", "kwargs": {"language": "de"}}]', "takes a detector of languages"),
        ('[{"id": "punctuation:no_comma", "kwargs": {"n": 1}}]', "has the arguments n; legal: none"),
        ('[{"id": "punctuation:no_comma", "kwargs": [1]}]', "legal: an object"),
        ('[{"id": "keywords:existence", "kwargs": {"keywords": "tea"}}]', "legal: a list of texts"),
        ('[{"id": "keywords:existence", "kwargs": {"keywords": [""]}}]', "legal: a list of texts"),
        ('[{"id": "startend:end_checker", "kwargs": {"end_phrase": " "}}]', "legal: a text that is not empty"),
        (
            '[{"id": "length_constraints:number_words", "kwargs": {"num_words": 2.5, "relation": "at least"}}]',
            "num_words=2.5; legal: a whole number from 0",
        ),
        (
            '[{"id": "length_constraints:number_words", "kwargs": {"num_words": 2, "relation": "about"}}]',
            "relation='about'; legal: 'at least' or 'less than'",
        ),
        (
            '[{"id": "length_constraints:nth_paragraph_first_word", '
            '"kwargs": {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "tea"}}]',
            "nth_paragraph=3; legal: 1 to num_paragraphs=2",
        ),
    ],
)  # fmt: skip
def test_a_reference_that_is_none_is_refused_by_name(reference, why):
    with pytest.raises(ValueError, match="legal") as refusal:
        instructions.check_instruction_following(reference)
    assert why in str(refusal.value)


# -------------------------------------------------------------------------------------------------------- Fenced blocks

# Says the same, in time that grows with the square of the fences that are never closed.
BLOCK = re.compile(r"^[ ]{0,3}```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ ]{0,3}```[ \t]*$", re.DOTALL | re.MULTILINE)
FENCED_PIECES = (
    "\n", "\n```", "```\n", "\n```\n", "```", "````", "``", "python", "c++", "json", " ", "   ", "    ", "\t", "\r\n",
    "\x0b", "\x85", "\u2028", "x = 1", "~~~",
)  # fmt: skip


def test_blocks_are_those_of_the_regular_expression() -> None:
    draw = random.Random(7)
    num_blocks = 0
    for _ in range(20_000):
        text = "".join(draw.choices(FENCED_PIECES, k=draw.randrange(30)))
        expected = BLOCK.findall(text.replace("\r\n", "\n"))[-1:]
        num_blocks += len(expected)
        assert [*filter(None, [last_block(text)])] == expected, repr(text)
    assert num_blocks > 2_000


@pytest.mark.parametrize("text", ["```python\n" * 5_000, "```python\n" * 5_000 + "```python", "``` " * 20_000])
def test_fences_that_are_never_closed_take_little_time(text: str) -> None:
    began = time.thread_time()
    assert last_program(text) is None
    assert json_schema.json_schema(text, "{}").reward == 0.0
    assert time.thread_time() - began < 0.5
