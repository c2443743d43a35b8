"""Environments: hosted in workers, of libraries, with tools; and the page that lists them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import sample_environments

from rlhpc.config.tables_services import EnvironmentConfig, SandboxConfig
from rlhpc.environments.dialogue import TurnsTaken, answered
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
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.environment import Environment
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.messages import TurnReply, TurnRequest
from rlhpc.rewards import environments as host_module
from rlhpc.rewards.code_place import environment_of, place
from rlhpc.rewards.environments import VARIABLE, EnvironmentHost, resolve_environment, validate_environment
from rlhpc.rewards.outcomes import DialogueRequest, JudgedOutcome, as_outcome, by_task
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.registry import resolve
from tests.patience import PATIENCE_S
from tests.unit.doc_pages import ROOT, blocks
from tests.unit.rewards.test_reward_pool import wait_until_gone
from tests.unit.roles.test_dialogue import check_tokens, dialogue_of, engine_of, speeches  # noqa: F401


def dialogue(*turns: str, key: str = "a", environment: str = "Counting", **changes: Any) -> DialogueRequest:
    settled: dict[str, Any] = {"task": "environment", "answer": turns[-1] if turns else "", "reference": ""}
    record = json.dumps({"name": "you"})
    settled |= {"is_last": False} | changes
    return DialogueRequest(key, f"sample_environments:{environment}", record, list(turns), **settled)


@pytest.fixture
def host() -> Iterator[EnvironmentHost]:
    made = EnvironmentHost(
        EnvironmentConfig(), lambda task, *asked: RewardOutcome(2.0, is_correct=True, detail=f"{task} {asked}")
    )
    yield made
    made.close()


def said(turn: Any) -> str:
    (message,) = turn.messages
    return message["content"]


def test_a_dialogue_takes_one_step_a_turn(host):
    assert said(host.answer(dialogue())) == "go, you"
    assert said(host.answer(dialogue("a"))).startswith("1 ")
    second = host.answer(dialogue("a", "b"))
    assert said(second).startswith("2 ")
    assert (second.reward, second.parts, second.is_over) == (1.0, {"n": 2.0}, False)


def test_the_same_request_again_gets_the_same_answer_without_a_step(host):
    host.answer(dialogue())
    assert host.answer(dialogue("a")) == host.answer(dialogue("a"))
    assert said(host.answer(dialogue("a", "b"))).startswith("2 ")


def test_members_of_a_group_that_say_the_same_have_an_environment_each(host):
    for key in ("a", "b"):
        host.answer(dialogue(key=key))
    assert said(host.answer(dialogue("x", key="a"))).startswith("1 ")
    assert said(host.answer(dialogue("x", key="b"))).startswith("1 ")


@pytest.mark.parametrize("turns", [("a", "b"), ("c",), ("c", "d", "e")])
def test_what_does_not_continue_the_dialogue_that_is_here_is_begun_again(host, turns):
    host.answer(dialogue("a", environment="Talking"))
    heard = host.answer(dialogue(*turns, environment="Talking"))
    assert heard.messages[0]["content"] == f"{len(turns)}: {', '.join(turns)}"


@pytest.mark.parametrize(("function", "reward"), [("return_later", 0.5), ("lengths_later", 1.0), ("lengths", 1.0)])
def test_the_task_behind_a_dialogue_may_be_async_and_batched(function, reward):
    host = EnvironmentHost(EnvironmentConfig(), lambda task, *asked: as_outcome(resolve(task)(*asked)))
    last = dialogue("x", task=f"sample_rewards:{function}", reference='{"per": 1}', is_last=True)
    counted = host.answer(dialogue("x", is_last=True)).reward  # what the environment itself gives
    assert host.answer(last).reward == counted + reward
    host.close()


def test_a_dialogue_that_was_forgotten_is_played_again(host, monkeypatch):
    monkeypatch.setattr(host_module, "MOST_KEPT", 2)
    for key in "abc":
        host.answer(dialogue("x", key=key))
    assert said(host.answer(dialogue("x", "y", key="a"))).startswith("2 ")


@pytest.mark.parametrize("turn", ["step", "odd", "judge", "reset"])
def test_an_environment_whose_dialogue_fails_is_closed(turn):
    def judge(*_: str) -> RewardOutcome:
        raise ValueError("no judgement")

    host, closed = EnvironmentHost(EnvironmentConfig(), judge), sample_environments.Holding.closed
    closed.clear()
    if turn != "reset":
        host.answer(dialogue(environment="Holding"))
    failing = () if turn == "reset" else (turn,)
    asked = dialogue(*failing, environment="Holding", task="exact_match", is_last=turn == "judge")
    if turn == "reset":
        asked = msgspec.structs.replace(asked, record=json.dumps({"name": turn}))
    with pytest.raises((RuntimeError, TypeError, ValueError), match=r"door|a message is|no judgement|lock"):
        host.answer(asked)
    assert closed == [turn if turn == "reset" else "you"]
    host.close()


def test_an_environment_that_cannot_be_closed_spoils_no_other_dialogue(host, monkeypatch, caplog):
    monkeypatch.setattr(host_module, "MOST_KEPT", 1)
    stuck = msgspec.structs.replace(dialogue(environment="Holding"), record=json.dumps({"name": "stuck"}))
    host.answer(stuck)
    assert said(host.answer(dialogue(environment="Holding", key="b"))) == "go, you"
    assert "an environment cannot be closed: RuntimeError('the bolt is bent')" in caplog.text
    host.answer(stuck)
    assert said(host.answer(dialogue("x"))).startswith("1 ")  # of the same key, another one


def test_dialogues_that_are_under_way_when_their_host_ends_are_closed():
    host, closed = (
        EnvironmentHost(EnvironmentConfig(), lambda *_: RewardOutcome(0.0)),
        sample_environments.Holding.closed,
    )
    closed.clear()
    for key in "ab":
        host.answer(dialogue("x", environment="Holding", key=key))
    host.close()
    assert closed == ["you", "you"]


def test_at_its_end_the_task_judges_the_last_turn_and_its_reward_is_added(host):
    over = host.answer(dialogue("a", "stop", task="exact_match", answer="stop", reference="42"))
    assert (over.reward, over.is_correct, over.is_done, over.is_over) == (3.0, True, True, True)
    assert over.detail == "exact_match ('stop', '42')"
    assert over.messages == ()


def test_what_a_judge_of_the_last_turn_has_cost_is_told():
    judged = JudgedOutcome(1.0, is_correct=True, costs={"judge_requests": 2.0})
    host = EnvironmentHost(EnvironmentConfig(), lambda *_: judged)
    assert host.answer(dialogue("a", task="llm_judge")).costs == {}
    assert host.answer(dialogue("a", "stop", task="llm_judge")).costs == {"judge_requests": 2.0}
    host.close()


def test_a_limit_ends_a_dialogue_that_its_environment_would_go_on_with(host):
    host.answer(dialogue("a"))
    over = host.answer(dialogue("a", is_last=True))
    assert (over.reward, over.is_correct, over.is_done, over.is_over) == (0.5, False, False, True)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "nothing",
            "is not an environment; legal: agent, container, gymnasium, tools, verifiers, package.module:Class",
        ),
        ("sample_environments:Missing", "has no 'Missing'|has no function 'Missing'"),
        ("sample_environments:os", "not a subclass|cannot|no function"),
        ("sample_environments:Bare", "lacks step"),
        ("json:loads", "not a subclass"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name, why):
    with pytest.raises(ConfigError, match=rf"data\.environment=.*({why})"):
        resolve_environment(name)


def test_an_environment_is_looked_up_without_being_imported():
    validate_environment("sample_environments:Counting")
    with pytest.raises(ConfigError, match="has no 'Missing'"):
        validate_environment("sample_environments:Missing")


# ------------------------------------------------------------------------------------------------------ in real workers


@pytest.mark.starts
@pytest.mark.parametrize(
    ("turn", "why"),
    [
        ("die", "worker died: signal SIGKILL"),
        ("hang", "no answer within"),
        ("raise", "RuntimeError: the board fell off the table"),
        ("nan", "reward must be a finite number"),
        ("huge", "reward must lie within ±1e+30, not 1e+39"),
        ("endless", "reward must lie within ±1e+30, not a number beyond 1.8e308"),
        ("odd", "a message is"),
        ("strange", "a message has the role 'environment'; legal: 'system'"),
    ],
)
async def test_an_environment_that_fails_is_an_error_with_its_reason_and_the_next_dialogue_is_served(turn, why):
    known = {VARIABLE: json.dumps({"names": ["sample_environments:Failing"]})}  # imported before the clock runs
    async with RewardPool(1, PATIENCE_S, task_timeout_s={"exact_match": 1.0}, environment=known) as pool:
        assert said(await pool.answer(dialogue(environment="Failing"))) == "go, you"
        task = "exact_match" if turn == "hang" else "environment"  # whose limit nobody else has to meet
        failed = await pool.answer(dialogue(turn, environment="Failing", task=task))
        assert why in failed.error
        other = await pool.answer(dialogue("x", environment="Failing", key="b"))
        assert said(other).startswith("1 ")
        assert not other.error


@pytest.mark.starts
async def test_a_dialogue_stays_with_its_worker_and_survives_it():
    async with RewardPool(3, 60.0) as pool:
        for key in "abcd":
            await pool.answer(dialogue(key=key))
        pids = dict[str, set[str]]()
        for turns in (("x",), ("x", "y"), ("x", "y", "z")):
            for key in "abcd":
                pids.setdefault(key, set()).add(said(await pool.answer(dialogue(*turns, key=key))).split()[1])
        assert {len(each) for each in pids.values()} == {1}
        (pid,) = pids["a"]
        os.kill(int(pid), signal.SIGKILL)
        await wait_until_gone(int(pid))
        lost = await pool.answer(dialogue("x", "y", "z", "w"))
        again = await pool.answer(dialogue("x", "y", "z", "w")) if lost.error else lost
        number, other = said(again).split()
        assert number == "4"
        assert other != pid


@pytest.mark.starts
async def test_a_turn_has_the_limits_of_its_task_and_failures_are_counted_under_the_environments_name():
    async with RewardPool(1, 60.0, task_timeout_s={"exact_match": 0.5}) as pool:
        hung = await pool.answer(dialogue("hang", environment="Failing", task="exact_match"))
        assert "no answer within 0.5 s" in hung.error
        for turn in ("raise", "nan", "die", "x"):
            await pool.answer(dialogue(turn, environment="Failing", key=turn))
        counted = by_task(pool.counts.as_metrics())["sample_environments:Failing"]
    assert {name: value for name, value in counted.items() if name != "seconds"} == {
        "judged": 5.0, "timed_out": 1.0, "raised": 1.0, "invalid": 1.0, "died": 1.0
    }  # fmt: skip


# --------------------------------------------------------------------------- Environments of Gymnasium and of verifiers

IDS = {"gymnasium": "sample_games:Echo-v0", "verifiers": "sample_verifiers"}
RECORDS = {
    "gymnasium": {"prompt": "Play.", "seed": 7},
    "verifiers": {"prompt": [{"role": "user", "content": "What is 2?"}], "answer": "2", "example_id": 2},
}


def settings(library: str, **arguments: int) -> EnvironmentConfig:
    return EnvironmentConfig(id=IDS[library], arguments=arguments)


@pytest.fixture(scope="module", params=sorted(IDS))
def library(request):
    pytest.importorskip(request.param, reason=f"extra {request.param!r}")
    return request.param


@pytest.fixture
async def pool(library):
    here = {VARIABLE: json.dumps({"settings": settings(library, **most(library, 3)).model_dump(), "names": [library]})}
    async with RewardPool(1, PATIENCE_S, environment=here) as pool:
        yield pool


def most(library: str, number: int) -> dict[str, int]:
    return {"most" if library == "gymnasium" else "max_turns": number}


@dataclass
class Table:
    """Asks a pool, as a generator asks a reward service."""

    pool: RewardPool
    library: str
    key: str
    asked: list[TurnsTaken] = field(default_factory=list)

    async def __call__(self, taken: TurnsTaken) -> TurnReply:
        self.asked.append(taken)
        record = json.dumps(RECORDS[self.library])
        return await answered(
            self.pool,
            TurnRequest(0, self.key, self.library, record, taken.turns, "environment", taken.answer, "", taken.is_last),
        )


async def answer(pool, library, *turns, key="a", is_last=False):
    return await Table(pool, library, key)(TurnsTaken(turns, turns[-1] if turns else "", is_last))


@pytest.mark.starts
async def test_turns_rewards_and_the_end_are_those_of_the_library(pool, library):
    opening = await answer(pool, library)
    first = await answer(pool, library, "four")
    assert first.messages[0]["role"] == "user"
    assert first.messages[0]["content"].startswith("4 characters 🙂 <|im_end|> and ")
    last = await answer(pool, library, "four", "three", "won")
    assert last.is_done
    if library == "gymnasium":
        assert opening.messages[0]["content"].startswith("begin with ")
        assert (last.reward, last.verdict) == (0.75, "correct")  # as its info says
    else:
        assert opening.messages == ()
        assert (last.reward, last.reward_parts) == (1.5, {"half_of_turns": 1.5, "num_turns": 3.0})
        assert last.detail == "max_turns_reached"


@pytest.mark.starts
async def test_a_limit_of_the_run_ends_it_and_what_there_is_is_judged(pool, library):
    cut = await answer(pool, library, "four", "three", is_last=True)
    assert cut.is_over
    assert not cut.is_done
    assert cut.reward == (0.5 if library == "gymnasium" else 1.0)


@pytest.mark.starts
async def test_a_dialogue_is_played_again_the_same_in_another_process(pool, library):
    first = await answer(pool, library, "a", "b")
    here = {VARIABLE: json.dumps({"settings": settings(library, **most(library, 3)).model_dump(), "names": [library]})}
    async with RewardPool(1, PATIENCE_S, environment=here) as other:
        assert await answer(other, library, "a", "b") == first


@pytest.mark.starts
@pytest.mark.parametrize(("family", "seed"), [("qwen2.5", 3), ("llama3", 4)])
async def test_tokens_fed_are_tokens_trained_also_where_a_dialogue_goes_on_elsewhere(
    pool,
    library,
    speeches,  # noqa: F811
    family,
    seed,
):
    speech = speeches[family, False]
    limits, max_tokens = {"max_turns": 3, "max_turn_tokens": 30}, 2000
    engine, table = await engine_of(speech, seed, 0.1), Table(pool, library, "whole")
    whole = await dialogue_of(speech, engine, table, limits, max_tokens).run()
    check_tokens(whole, engine, table, speech, limits, max_tokens)
    assert whole.num_turns == 3
    beginning = engine.fed[1][0].prefix  # two turns are in it, with what was said between them
    again = Table(pool, library, "elsewhere")
    goes_on = await dialogue_of(speech, await engine_of(speech, seed, 0.1), again, limits, max_tokens, beginning).run()
    length = len(beginning.token_ids)
    assert goes_on.rollout.token_ids[:length].tolist() == whole.rollout.token_ids[:length].tolist()
    assert goes_on.rollout.loss_mask[:length].tolist() == whole.rollout.loss_mask[:length].tolist()
    assert goes_on.num_turns == 3


@pytest.mark.parametrize(("name", "why"), [("no_such:Game-v0", "tried on"), ("CartPole-v1", "tried on|Box")])
def test_what_is_not_there_or_no_text_is_refused_by_its_id(library, name, why):
    with pytest.raises(ConfigError, match=rf"environment\.id='{name}'.*({why})"):
        resolve_environment(library).open(EnvironmentConfig(id=name))


def test_a_game_that_is_refused_is_closed():
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="its actions are Discrete"):
        resolve_environment("gymnasium").open(EnvironmentConfig(id="sample_games:Counted-v0"))
    assert importlib.import_module("sample_games").Counted.num_closed == 1


@pytest.mark.starts
async def test_an_environment_that_fails_is_a_verifier_error(pool, library):
    if library == "verifiers":
        await answer(pool, library)
        failed = await answer(pool, library, "break")
        assert failed.verdict == "verifier_error"
        assert "the board fell off the table" in failed.detail


@pytest.mark.starts
async def test_a_pool_whose_environment_is_not_there_says_which(library):
    here = {VARIABLE: json.dumps({"settings": EnvironmentConfig(id="no-such-game").model_dump(), "names": [library]})}
    with pytest.raises(RoleFailed, match=r"environment\.id='no-such-game', tried on"):
        await RewardPool(1, PATIENCE_S, environment=here).start()


# ---------------------------------------------------- Tools of the environment "tools", and how calls of them are read

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
        "<|python_tag|>search.call(open('x'))", "<|python_tag|>search.call(query=007)",
        f"<|python_tag|>search.call(query={'9' * 5000})", "<|python_tag|>{", '{"name": 3}', f"{CALL} and",
        '{"name": "a"', '{"name": ' + "[" * 100_000,
    ],
    ids=lambda turn: turn[:30],
)  # fmt: skip
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


# ----------------------------------------------------- The environment of docs/environments.md does what the page says


def test_the_environment_of_the_page_plays() -> None:
    (text,) = blocks(ROOT / "docs" / "environments.md", "python", heading="Your own environment")
    module: dict[str, type[Environment]] = {}
    exec(compile(text, "environments.md", "exec"), module)

    async def play() -> None:
        game = module["GuessTheNumber"]()
        assert list(await game.reset({"answer": "42"})) == []
        for guess, hint in (("7", "higher"), ("99", "lower"), ("what?", "higher")):
            (message,) = (await game.step(guess)).messages
            assert message["content"] == hint
        won = await game.step(" 42 ")
        assert (won.reward, won.is_done) == (1.0, True)

    asyncio.run(play())
