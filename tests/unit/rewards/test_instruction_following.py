"""Instructions that a program can check: agreement with a second implementation, and references that are refused."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from typing import Any

import pytest
from second_opinion import OPINIONS, is_followed

from rlhpc.config.tables_services import InstructionsConfig
from rlhpc.rewards import instructions
from rlhpc.rewards.instructions import INSTRUCTIONS, num_sentences
from rlhpc.rewards.task_settings import TaskSettings

CASES_EACH = 60
WORDS = [
    "tea",
    "Tea",
    "green",
    "leaf",
    "LEAF",
    "hot",
    "cup",
    "U.S. ports",
    "don't",
    "well-known",
    "NASA",
    "it",
    "I",
    "x2",
]
PIECES = [
    "* one point", "- another point", "** not a point", "---", "*warm* and **strong**", "* *", "[name]",
    "[address]", "[ ]", "P.S. call me", "P. S. call me", "P.P.S. more", "<<A cup of tea>>", "<< >>", "<<",
    "Section 1", "SECTION 2 about", "Section x", "***", "******", "My answer is yes.", "My answer is no.",
    "my answer is maybe.", "Is it all?", "Yes, it is!", "Dr. Green said so.", "1. First", '"quoted"', "That is all",
    "that is all.", "Mr. T. came at 5 p.m. today.", "", "", "Tea first, then a cup",
]  # fmt: skip
WHOLE = [
    '{"tea": 1}', '```json\n{"tea": [1, 2]}\n```', "```\n[1]\n```", "```json\n{tea}\n```", "HOT TEA, GREEN LEAF!",
    "hot tea.", '"Hot tea"', '"', "12 34", "Tea\n\ngreen tea\n\nhot", "one***two", "***one***two***",
    "one******two", "same******same", "******one******two", "That is all", '"That is all"', "<<Tea>> hot",
    "Tea, tea and tea", "My answer is maybe.", "* a\n* b\n- c", "P.S. x", "*a* *b* **c**",
    "Section 1 a\nSection 2 b", "[a] [b] [c]", "I. J. Smith vs. Dr. No. Who wins?", "One. Two! Three",
]  # fmt: skip


def make_text(draw: random.Random) -> str:
    if draw.random() < 0.4:
        return draw.choice(WHOLE)
    lines = []
    for _ in range(draw.randint(1, 6)):
        if draw.random() < 0.6:
            lines.append(draw.choice(PIECES))
        else:
            words = " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))
            lines.append(words + draw.choice([".", "!", "?", "", ", and so on", "..."]))
    text = draw.choice(["\n", "\n\n", " "]).join(lines)
    return draw.choice([str, str, str, str.upper, str.lower])(text)


def make_arguments(draw: random.Random, name: str, text: str) -> dict[str, Any]:
    def of(kind: str) -> Any:
        match kind:
            case "count":
                return draw.randint(0, 4) if "words" not in name else draw.randint(0, 25)
            case "place":
                return draw.randint(1, 3)
            case "relation":
                return draw.choice(["at least", "less than"])
            case "letter":
                return draw.choice("taeL.")
            case "texts":
                return draw.choices(["tea", "green", "LEAF", "le", "all", "it", "U.S."], k=draw.randint(1, 2))
        texts = {
            "postscript_marker": ["P.S.", "P.P.S"],
            "section_spliter": ["Section", "SECTION"],
            "end_phrase": ["that is all", "tea", "all."],
            "prompt_to_repeat": [text[: draw.randint(1, 9)] or "x", "Hot tea", "tea"],
            "first_word": ["tea", "I", "hot", "green", "one"],
        }
        return draw.choice(texts.get(kind, ["tea", "e", "LEAF", "it"]))

    kinds = INSTRUCTIONS[name].arguments
    found = {key: of(key if kind == "text" else kind) for key, kind in kinds.items()}
    found = {key: value if not isinstance(value, str) or value.strip() else "x" for key, value in found.items()}
    if "nth_paragraph" in found:
        found["nth_paragraph"] = min(found["nth_paragraph"], found["num_paragraphs"])
    return found


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_it_agrees_with_a_second_implementation(name: str):
    """1,440 cases over all instructions; of each some are followed and some are not."""
    draw, seen = random.Random(name), Counter()
    while min(seen[True], seen[False]) < CASES_EACH // 10 or seen.total() < CASES_EACH:
        assert seen.total() < 100 * CASES_EACH, "the cases are all of one kind"
        text = make_text(draw)
        arguments = make_arguments(draw, name, text)
        found = INSTRUCTIONS[name].follows(text, arguments)
        assert found == is_followed(name, text, arguments), (text, arguments)
        seen[found] += 1


def test_there_are_500_cases_and_more_and_every_instruction_of_the_paper_but_one():
    assert len(INSTRUCTIONS) * CASES_EACH >= 500
    assert set(OPINIONS) == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 24  # 25 in the paper's table 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Hello", 1),
        ("Hello. World.", 2),
        ("Dr. Smith came at 5 p.m. today. He left!", 2),
        ("So do I. And you?", 2),
        ("Version 2.5 is out. Get it at a.com now.", 2),
        ('He said "No." Then he left...', 2),
        ("1. First one.\n2. Second one.", 2),
        ("Wait... what?!", 2),
        ("x" * 50_000 + ".", 1),
    ],
)
def test_sentences_end_where_people_end_them(text, count):
    assert num_sentences(text) == count


def judge(completion: str, *wanted: tuple[str, dict[str, Any]]):
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
    assert not judge(text, (name, arguments)).is_correct
    assert time.thread_time() - began < 1.0


def test_titles_are_those_of_the_regular_expression():
    draw = random.Random(3)
    for _ in range(20_000):
        text = "".join(draw.choices("<<<>>>a \n", k=draw.randrange(14)))
        expected = any(title.strip(" <>") for title in re.findall(r"<<([^\n]+?)>>", text))
        assert INSTRUCTIONS["detectable_format:title"].follows(text, {}) is expected, repr(text)


def test_a_fence_and_blanks_without_an_end_take_no_time():
    began = time.thread_time()
    assert not judge("```" + " " * 100_000 + "x", ("detectable_format:json_format", {})).is_correct
    assert time.thread_time() - began < 0.5


COMMA, LOWER = ("punctuation:no_comma", {}), ("change_case:english_lowercase", {})


def test_all_have_to_be_followed_and_what_was_not_is_named():
    both = judge("tea is hot", COMMA, LOWER)
    assert (both.reward, both.is_correct, both.parts) == (1.0, True, {"strict": 1.0, "loose": 1.0})
    one = judge("Tea is hot", COMMA, LOWER)
    assert (one.reward, one.is_correct, one.parts["strict"]) == (0.0, False, 0.5)
    assert one.detail == "1 of 2; not: change_case:english_lowercase"


def test_loosely_a_first_line_a_last_line_and_asterisks_are_forgiven():
    end = ("startend:end_checker", {"end_phrase": "bye"})
    for text in ("Sure, here it is:\nhello, bye\nHope it helps!", "*bye*", "bye\n."):
        assert judge(text, end).parts == {"strict": 0.0, "loose": 1.0}
    assert judge("Hello\nbye\nthere\nfriend", end).parts["loose"] == 0.0
    twice = ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"})
    assert judge("Tea,\nhot\nTea", COMMA, twice).parts["loose"] == 1.0  # each may be followed by another version


@pytest.mark.parametrize("text", ["", " \n", "a"])
def test_an_empty_completion_follows_nothing(text):
    assert judge(text, COMMA).is_correct is bool(text.strip())


@pytest.mark.parametrize(("accuracy", "reward", "expected"), [
    ("strict", "all", 0.0), ("strict", "fraction", 0.5), ("loose", "all", 1.0), ("loose", "fraction", 1.0)
])  # fmt: skip
def test_the_run_file_says_what_is_rewarded(monkeypatch, accuracy, reward, expected):
    settings = TaskSettings(instructions=InstructionsConfig(accuracy=accuracy, reward=reward))
    monkeypatch.setattr(instructions, "task_settings", lambda: settings)
    outcome = judge("Sure:\ntea is hot", COMMA, LOWER)
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
