"""Calls as Qwen3-Coder and Qwen3.5 write them: what the template writes is read as it was, damage is an error."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.agents.openai_format import completion, read_request
from rlhpc.agents.turns import SamplingSettings, turn_of
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.tokenizer import ChatTemplate
from rlhpc.environments.tools import (
    Call,
    CallError,
    Schema,
    ToolEnvironment,
    hermes_calls,
    qwen3_coder_calls,
    schemas_of,
)
from rlhpc.protocol.environment import TOOL_SCHEMAS
from tests.unit.data.checkpoints import QWEN35

TEMPLATE = ChatTemplate(QWEN35, {}, lambda: datetime.now(UTC))
ASKED = {"role": "user", "content": "Q"}


def tool(name: str, **properties: Schema) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def written(*calls: Call, content: str = "") -> str:
    """The turn that the template makes of calls."""
    told = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    said = {"role": "assistant", "content": content, "tool_calls": told}
    text = TEMPLATE.render([ASKED, said], add_generation_prompt=False)
    return text.removeprefix(TEMPLATE.render([ASKED])).removesuffix("<|im_end|>\n")


# --------------------------------------------------------------------------------------------------------- whole calls

_PLAIN = st.text(st.characters(codec="utf-8"), max_size=40)
_MARKUP = st.lists(st.sampled_from([*"ab \n<>=/{}\"'", "<b>", "</parameter>", "</function>"]), max_size=12).map("".join)
# What looks like the structure itself cannot be told from it; everything else can.
_IMITATES = re.compile(r"<parameter=|<function=|</?tool_call>")
_TEXTS = (_PLAIN | _MARKUP).filter(lambda text: not _IMITATES.search(text))
_NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
_LEAVES = st.none() | st.booleans() | st.integers() | _NUMBERS | _TEXTS
_NESTED = st.recursive(_LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(_TEXTS, each, max_size=3))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": _TEXTS,
    "integer": st.integers(),
    "number": _NUMBERS | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(_NESTED, max_size=3),
    "object": st.dictionaries(_TEXTS, _NESTED, max_size=3),
}
_NAMES = st.text("ab_-.é ", min_size=1).map(str.strip).filter(bool)


@st.composite
def calls_with_schemas(draw: st.DrawFn) -> tuple[list[Call], list[dict[str, Any]]]:
    calls, tools = list[Call](), list[dict[str, Any]]()
    for name in draw(st.lists(_NAMES, unique=True, min_size=1, max_size=3)):
        types = draw(st.dictionaries(_NAMES, st.sampled_from(sorted(_VALUES)), max_size=4))
        calls.append(Call(name, {key: draw(_VALUES[each]) for key, each in types.items()}))
        tools.append(tool(name, **{key: {"type": each} for key, each in types.items()}))
    return calls, tools


@settings(deadline=None)
@given(calls_with_schemas(), _TEXTS)
def test_what_the_template_writes_is_read_as_it_was(
    made: tuple[list[Call], list[dict[str, Any]]], content: str
) -> None:
    calls, tools = made
    assert qwen3_coder_calls(written(*calls, content=content), schemas_of(tools)) == calls


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, "\n two\nlines \n", "\n two\nlines \n"),
        ({"type": "integer"}, " 42 ", 42),
        ({"type": "integer"}, "42.0", 42),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "nothing", "nothing"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"$ref": "elsewhere.json"}, "7", "7"),
        ({}, "7", "7"),
        ({}, "[7]", [7]),
        ({"type": 3, "enum": 4, "anyOf": {}}, "7", "7"),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: dict[str, Any], text: str, value: Any) -> None:
    tools = [tool("f", key=schema)]
    tools[0]["function"]["parameters"]["$defs"] = {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}}
    turn = f"<tool_call>\n<function=f>\n<parameter=key>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = qwen3_coder_calls(turn, schemas_of(tools))
    assert call == Call("f", {"key": value})
    assert type(call.arguments["key"]) is type(value)


def test_a_text_without_its_end_takes_no_other_parameter_in() -> None:
    tools = schemas_of([tool("f", first={"type": "string"}, second={"type": "string"})])
    turn = "<tool_call><function=f><parameter=first>a<parameter=second>b</parameter></function></tool_call>"
    (found,) = qwen3_coder_calls(turn, tools)
    assert isinstance(found, CallError)
    assert found.why == "f: the parameter 'first' is without </parameter>"


@pytest.mark.parametrize("tools", [[{}], [{"function": 3}], [{"name": ["f"], "parameters": {}}], [{"name": "f"}]])
def test_tools_that_say_nothing_of_their_arguments_take_texts(tools: list[dict[str, Any]]) -> None:
    turn = "<tool_call><function=f><parameter=key>7</parameter></function></tool_call>"  # without a line for each tag
    assert qwen3_coder_calls(turn, schemas_of(tools)) == [Call("f", {"key": "7"})]


# -------------------------------------------------------------------------------------------------------------- damage

TOOLS = [tool("count", to={"type": "integer"}, of={"type": "string"}), tool("now")]
SCHEMAS = schemas_of(TOOLS)
CALLS = [Call("count", {"to": 3, "of": "a\nb"}), Call("now", {}), Call("count", {"to": -1, "of": "</b>"})]
TURN = written(*CALLS, content="So.")
TAGS = [found.span() for found in re.finditer(r"</?(tool_call|function|parameter)[^>]*>", TURN)]


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("", "a call is <function=…>"),
        ("<function=now>", "each tag with its end"),
        ('{"name": "now"}', "a call is <function=…>"),
        ("please <function=now></function>", "a call is <function=…>"),
        ("<function=></function>", "a call is <function=…>"),
        ('<function=count>{"to": 3}</function>', "is no <parameter=…>…</parameter>"),
        ("<function=count><parameter=to>3</function>", "is no <parameter=…>…</parameter>"),
        ("<function=count><parameter=to>3<parameter=of>a</parameter></function>", "'to' is without </parameter>"),
        ("<function=count><parameter=to>3</parameter> and so on</function>", "is no <parameter=…>…</parameter>"),
        ("<function=count><parameter=to>3</parameter><parameter=to>4</parameter></function>", "there twice"),
        ("<function=count><parameter=to>three</parameter></function>", "'to': 'three' is no integer"),
        ("<function=count><parameter=to>3.5</parameter></function>", "'to': '3.5' is no integer"),
        ("<function=count><parameter=to>NaN</parameter></function>", "'to': 'NaN' is no integer"),
        (f"<function=count><parameter=to>{'[' * 100_000}</parameter></function>", "is no integer"),
        (f"<function=count><parameter=to>{'9' * 5000}</parameter></function>", "is no integer"),
        ("<function=count></function><function=now></function>", "is no <parameter=…>…</parameter>"),
    ],
    ids=lambda each: each[:50],
)
def test_a_slip_within_a_call_is_an_error_that_names_it(inside: str, why: str) -> None:
    (error,) = qwen3_coder_calls(f"<tool_call>{inside}</tool_call>", SCHEMAS)
    assert isinstance(error, CallError)
    assert why in error.why


def test_a_turn_that_a_limit_has_cut_has_the_calls_before_the_cut_and_an_error() -> None:
    for end in range(len(TURN) + 1):
        found = qwen3_coder_calls(TURN[:end], SCHEMAS)
        num_begun, num_whole = TURN[:end].count("<tool_call>"), TURN[:end].count("</tool_call>")
        assert found[:num_whole] == CALLS[:num_whole]
        assert [isinstance(each, CallError) for each in found[num_whole:]] == [True] * (num_begun - num_whole)


@pytest.mark.parametrize("tag", TAGS, ids=lambda span: TURN[slice(*span)])
def test_a_tag_that_is_missing_is_an_error_and_never_another_call(tag: tuple[int, int]) -> None:
    found = qwen3_coder_calls(TURN[: tag[0]] + TURN[tag[1] :], SCHEMAS)
    assert sum(isinstance(each, CallError) for each in found) == 1
    whole = [each for each in found if isinstance(each, Call)]
    lost = TURN[: tag[1]].count("<tool_call>") - 1
    assert whole == CALLS[:lost] + CALLS[lost + 1 :]


@settings(deadline=None)
@given(st.data())
def test_no_damage_ends_the_environment(data: st.DataObject) -> None:
    """Pieces left out, repeated or moved: calls and errors, and every call is of an environment's types."""
    pieces = re.split(r"(?<=>)|(?=<)|(?<=\n)", TURN)
    order = data.draw(st.lists(st.sampled_from(range(len(pieces))), max_size=2 * len(pieces)))
    for each in qwen3_coder_calls("".join(pieces[place] for place in order), SCHEMAS):
        if isinstance(each, Call) and each.name == "count":
            assert type(each.arguments.get("to", 0)) is int
            assert type(each.arguments.get("of", "")) is str
        json.dumps(each.arguments if isinstance(each, Call) else each.why)


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</parameter> ", " "]
)
def test_a_turn_of_one_piece_over_and_over_is_read_to_its_end(piece: str) -> None:
    turn = f"<tool_call><function=f><parameter=a>{piece * (100_000 // len(piece))}"
    for end in ("", "</tool_call>", "</parameter></function></tool_call>"):
        assert qwen3_coder_calls(turn + end, SCHEMAS)


# --------------------------------------------------------------------------------- environments, and agents over HTTP


def test_the_tools_of_an_environment_are_called_and_slips_are_told() -> None:
    tools = ToolEnvironment.open(EnvironmentConfig(tools=["calculator"], call_form="qwen3_coder"))
    turn = written(Call("calculator", {"expression": "6*7"}), Call("calculator", {"expression": "2024"}))
    step = asyncio.run(tools.step(turn + "<tool_call>\n<function=calculator>"))
    said = [message["content"] for message in step.messages]
    assert said == ["42", "2024", "error: a <tool_call> without </tool_call>"]
    assert asyncio.run(tools.step("It is 42.")).is_done
    (error,) = asyncio.run(tools.step("<function=calculator></function>")).messages
    assert error["content"] == "error: a <function=…> outside of <tool_call>"


def agents_turn(text: str) -> Any:
    return turn_of(text, text, "qwen3_coder", number=1, tools=TOOLS, is_cut=False, num_tokens=(1, 1))


def test_an_agent_gets_the_calls_with_their_types_and_broken_ones_as_text() -> None:
    turn = agents_turn(TURN)
    assert [call["function"] for call in turn.message["tool_calls"]] == [
        {"name": call.name, "arguments": call.arguments} for call in CALLS
    ]
    asked = read_request({"messages": [{"role": "user", "content": "go"}]}, SamplingSettings(1.0))
    (choice,) = completion("one", turn, asked)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("</think>\n\nSo.", "tool_calls")
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"to": 3, "of": "a\nb"}
    broken = agents_turn(TURN.removesuffix("</tool_call>"))
    assert (broken.calls, broken.content) == ((), TURN.removesuffix("</tool_call>"))


def test_the_two_forms_in_the_same_tag_are_not_taken_for_each_other() -> None:
    hermes = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    errors = itertools.chain(qwen3_coder_calls(hermes, SCHEMAS), hermes_calls(TURN))
    assert all(isinstance(each, CallError) for each in errors)


def test_the_environment_s_own_tools_have_one_text_each() -> None:
    for name, schema in schemas_of([*TOOL_SCHEMAS.values()]).items():
        (argument,) = schema["required"]
        turn = written(Call(name, {argument: "7"}))
        assert qwen3_coder_calls(turn, schemas_of([*TOOL_SCHEMAS.values()])) == [Call(name, {argument: "7"})]
