"""Tools of the environment "tools", and how calls of them are read."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlhpc.config.tables_services import EnvironmentConfig, SandboxConfig
from rlhpc.environments.tools import (
    Call,
    CallError,
    Collection,
    ToolEnvironment,
    calculate,
    hermes_calls,
    llama3_calls,
    open_collection,
    run_python,
)
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards.code_place import environment_of, place
from tests.patience import PATIENCE_S

CALL = '{"name": "search", "arguments": {"query": "a b"}}'
SEARCH = Call("search", {"query": "a b"})


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ("It is 42.", []),
        (f"<tool_call>{CALL}</tool_call>", [SEARCH]),
        (f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", [SEARCH, SEARCH]),
        (f"<think>a <b> {{}}</think><tool_call>{CALL}</tool_call> so", [SEARCH]),
        ('<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"a b\\"}"}</tool_call>', [SEARCH]),
        (
            '<tool_call>{"name": "python", "arguments": {"code": "a\nb"}}</tool_call>',
            [Call("python", {"code": "a\nb"})],
        ),
        ('<tool_call>{"name": "now"}</tool_call>', [Call("now", {})]),
    ],
)
def test_calls_as_hermes_and_qwen_write_them(turn, calls):
    assert hermes_calls(turn) == calls


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (f"<tool_call>{CALL}", "without </tool_call>"),
        ("<tool_call>search a b</tool_call>", "not JSON"),
        (f"<tool_call>{CALL} please</tool_call>", "after the JSON comes 'please'"),
        ("<tool_call>[1]</tool_call>", "a call is"),
        ('<tool_call>{"name": "search", "arguments": [1]}</tool_call>', "no object"),
        ('<tool_call>{"name": "search", "arguments": "a"}</tool_call>', "are not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        ('<tool_call>{"name": "search", "arguments": "' + "[" * 100_000 + '"}</tool_call>', "are not JSON"),
    ],
)
def test_what_is_meant_as_a_call_and_is_none_is_an_error_and_not_an_answer(turn, why):
    (error,) = hermes_calls(turn)
    assert isinstance(error, CallError)
    assert why in error.why


def test_a_call_without_its_end_does_not_hide_the_next_one():
    first, second = hermes_calls(f"<tool_call>{CALL}<tool_call>{CALL}</tool_call>")
    assert isinstance(first, CallError)
    assert second == SEARCH


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        ("It is {42}.", []),
        ('{"answer": 42}', []),
        ('{"name": "search", "parameters": {"query": "a b"}}', [SEARCH]),
        (f"<|python_tag|>{CALL}", [SEARCH]),
        (f"{CALL}; {CALL}", [SEARCH, SEARCH]),
        ('<|python_tag|>search.call(query="a b")', [SEARCH]),
        ("<|python_tag|>print(6 * 7)", [Call("python", {"code": "print(6 * 7)"})]),
    ],
)
def test_calls_as_llama_writes_them(turn, calls):
    assert llama3_calls(turn) == calls


@pytest.mark.parametrize(
    "turn",
    [
        "<|python_tag|>search.call(open('x'))",
        "<|python_tag|>search.call(query=007)",
        f"<|python_tag|>search.call(query={'9' * 5000})",
        "<|python_tag|>{",
        '{"name": 3}',
        f"{CALL} and",
        '{"name": "a"',
        '{"name": ' + "[" * 100_000,
    ],
    ids=lambda turn: turn[:30],
)
def test_llamas_slips_are_errors(turn):
    assert isinstance(llama3_calls(turn)[-1], CallError)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12", "84"), ("7 / 2", "3.5"), ("6/3", "2"), ("-2 ** 2", "-4"),
        ("2^10", "1024"), ("7 // 2 % 2", "1"),
        ("2 ** 3 ** 2", "512"), (".5 - -1", "1.5"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"), ("1e3", "1000"),
        ("3 × 4 ÷ 2", "6"), ("007 + 1.05", "8.05"), ("1\n + 2", "3"),
        ("-" * 499 + "1", "-1"), ("1+" * 240 + "1", "241"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "x + 1", "__import__('os')", "1 / 0", "9 ** 9 ** 9", "2 ** 100000", "1e999", "(-8) ** 0.5", "True + 1",
        "'a' * 9", "2" + "**2" * 99, "0 ** -1", "9 ** 9 ** 9 ** 9", "().__class__", "\ud800", "1\0",
        "(" * 240 + "1" + ")" * 240, "[" * 190 + "]" * 190, "1 +", "[1, 2]", "1, 2", "2j", "1 if 1 else 1",
        "f'{1:999}'", "9" * 501, "abs(3)", "5.0 % 0", "1 << 9", "10.0 ** 400",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_refused_at_once(expression):
    with pytest.raises(ValueError, match=r"not|large|zero|at most"):
        calculate(expression)
    assert calculate("1 + 1") == "2"


def test_search_finds_rare_words_first_and_the_same_each_time():
    collection = Collection(["the cat sat", "the dog sat", "the the the", "a cat and a dog", "Zoë's key is 99"])
    assert collection.found("cat", 1) == "the cat sat"
    assert collection.found("zoë", 3) == "Zoë's key is 99"
    assert collection.found("dog cat", 1) == "a cat and a dog"
    assert collection.found("the", 2) == "the the the\n\nthe cat sat"
    assert collection.found("bird", 3) == "nothing was found"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no document"),
        ('{"text": "…"}\n', "no document with a word"),
        ('{"text": 3}\n', "corpus.jsonl:1: legal"),
        ('\n{"text"\n', "corpus.jsonl:2: malformed"),
        ('{"text": ' + "[" * 100_000, "corpus.jsonl:1: malformed"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused_with_its_line(tmp_path, content, why):
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=why):
        open_collection(tmp_path / "corpus.jsonl")


def test_documents_may_begin_with_a_byte_order_mark_as_datasets_may(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "first"}\r\n{"text": "second"}\r\n')
    assert open_collection(tmp_path / "corpus.jsonl").found("first", 3) == "first"


def test_a_document_may_hold_what_ends_a_line_elsewhere(tmp_path):
    texts = ["a\u2028cat", "a\u2029dog", "a\x85bird"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "corpus.jsonl").write_bytes("\r\n".join([*lines, "", ""]).encode())
    collection = open_collection(tmp_path / "corpus.jsonl")
    assert [collection.found(word, 3) for word in ("cat", "dog", "bird")] == texts


def environment(tmp_path, **changes) -> ToolEnvironment:
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"title": "Ann", "text": "her key is 99"}) + "\n")
    tools = {"tools": ["calculator", "search"], "corpus": str(tmp_path / "corpus.jsonl")}
    return ToolEnvironment.open(EnvironmentConfig(**(tools | changes)))


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def results(tools: ToolEnvironment, turn: str) -> list[str]:
    step = asyncio.run(tools.step(turn))
    assert step.is_done is (not step.messages)
    assert {message["role"] for message in step.messages} <= {"tool"}
    return [message["content"] for message in step.messages]


def test_every_call_of_a_turn_gets_its_result_and_a_turn_without_is_the_end(tmp_path):
    tools = environment(tmp_path)
    both = call("calculator", expression="6*7") + call("search", query="Ann")
    assert results(tools, both) == ["42", "Ann\nher key is 99"]
    assert results(tools, "It is 99.") == []


@pytest.mark.parametrize(
    ("turn", "why"),
    [
        (call("browse", url="x"), "error: there is no tool 'browse'; there are calculator, search"),
        (call("calculator", expression="1/0"), "error: division by zero"),
        (call("calculator"), 'error: calculator has one argument: {"expression": …}'),
        (call("search", query="a", more="b"), "error: search has one argument"),
        ("<tool_call>", "error: a <tool_call> without </tool_call>"),
    ],
)
def test_a_slip_of_the_policy_is_a_result_that_says_so(tmp_path, turn, why):
    (result,) = results(environment(tmp_path), turn)
    assert result.startswith(why)


def test_a_long_result_is_cut(tmp_path):
    (result,) = results(environment(tmp_path, max_result_characters=4), call("search", query="Ann"))
    assert result == "Ann\n… (13 more characters)"


@pytest.mark.starts
def test_the_python_tool_runs_programs_in_the_sandbox(monkeypatch):
    settings = SandboxConfig(cpu_s=30.0, wall_s=PATIENCE_S, require="none")
    for name, text in environment_of(settings).items():
        monkeypatch.setenv(name, text)
    place.cache_clear()
    assert run_python("print(6 * 7)") == "42"
    assert run_python("pass") == "(nothing was printed)"
    assert run_python("print('a')\n1 / 0").startswith("a\nerror: exit status 1: ZeroDivisionError")
    place()[0].close()
    place.cache_clear()


@pytest.mark.parametrize("number", ["007", "-01.5", "1" * 5000])
def test_a_number_that_is_none_in_json_is_the_policys_to_hear_of(number: str) -> None:
    (call,) = llama3_calls(f"<|python_tag|>search.call(query={number})")
    assert isinstance(call, CallError)
    assert call.why == f"search.call(query=…): {number[:40]} is no number"
