"""Environments in worker processes: state is kept between turns, made again where it is not, and failures are named."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import sample_environments

from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.errors import ConfigError
from rlhpc.rewards import environments as host_module
from rlhpc.rewards.environments import VARIABLE, EnvironmentHost, resolve_environment, validate_environment
from rlhpc.rewards.frames import DialogueRequest
from rlhpc.rewards.outcomes import JudgedOutcome, as_outcome, by_task
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.registry import resolve
from tests.patience import PATIENCE_S
from tests.unit.rewards.test_reward_pool import wait_until_gone


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
        ("nothing", "is not an environment; legal: agent, gymnasium, tools, verifiers, package.module:Class"),
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
