"""The task reward_model against a real HTTP server: templates, classes, steps, batches; no failure is a reward of 0."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from judge_server import judging

from rlhpc.config.rules import Config
from rlhpc.config.tables_models import RewardModelConfig, ServiceConfig
from rlhpc.config.tables_services import CompositeConfig, JudgeConfig
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.outcomes import JudgedOutcome, NoVerdict
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.registry import composite_reference_check
from rlhpc.rewards.reward_model import RewardModel, activated, label_of, reduced, steps_of
from rlhpc.rewards.service_client import ServiceClient, patience_with, places_of
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings
from tests.patience import PATIENCE_S

RECORD = json.dumps({"prompt": "2+2="})
STEPWISE = {"step_separator": "\n\n", "step_token": "<s>"}


def service_at(url: str, **changes: Any) -> ServiceConfig:
    known: dict[str, Any] = {"name": "scores", "kind": "reward", "url": url, "model": "m", "timeout_s": PATIENCE_S}
    return ServiceConfig(**known | changes)


def model_at(url: str, label: int | None = None, **settings: Any) -> RewardModel:
    service = service_at(url)
    client = ServiceClient(patience_with(service, backoff_s=0.001), places_of(service, ""))
    return RewardModel(RewardModelConfig(**settings), client, label)


def classes(*scores: Any) -> bytes:
    data = [{"index": 0, "label": "LABEL_0", "probs": scores, "num_classes": len(scores)}]
    return json.dumps({"data": data, "usage": {"prompt_tokens": 9}}).encode()


def ask(*script: Any, completion: str = "4", reference: str = RECORD, **settings: Any) -> Any:
    with judging(*script) as server:
        (found,) = model_at(server.endpoint, **settings).score_all([completion], [reference])
    return found


def why_not(*script: Any, **settings: Any) -> str:
    found = ask(*script, **settings)
    assert isinstance(found, NoVerdict)
    return str(found)


def test_prompt_and_completion_are_messages_and_the_score_is_scaled_and_clipped():
    with judging(classes(2.5)) as server:
        model = model_at(server.endpoint, prompt_template="Q: {prompt}", scale=2.0, shift=-1.0, correct_from=4.0)
        (found,) = model.score_all(["4"], [RECORD])
        assert isinstance(found, JudgedOutcome)
        assert (found.reward, found.is_correct, found.parts) == (4.0, True, {"score": 2.5})
        assert (found.costs["judge_requests"], found.costs["judge_prompt_tokens"]) == (1.0, 9.0)
        (request,) = server.requests
        assert (request["path"], request["model"], request["use_activation"]) == ("/classify", "m", False)
        assert request["messages"] == [{"role": "user", "content": "Q: 2+2="}, {"role": "assistant", "content": "4"}]
        (found,) = model_at(server.endpoint, use_chat_template=False).score_all(["{4}"], [RECORD])
        assert server.requests[-1]["input"] == "2+2={4}"
    assert ask(classes(9.0), clip_high=1.5).reward == 1.5
    assert ask(classes(-9.0), clip_low=-1.5, correct_from=-2.0).is_correct
    assert not ask(classes(-9.0)).is_correct


def test_activations_are_of_the_chosen_class():
    assert ask(classes(1.0, 2.0, 0.5), label=1).reward == 2.0
    softmax = math.exp(2) / sum(map(math.exp, (1.0, 2.0, 0.5)))
    assert ask(classes(1.0, 2.0, 0.5), label=1, activation="softmax").reward == pytest.approx(softmax)
    assert ask(classes(1.5), activation="sigmoid").reward == pytest.approx(1 / (1 + math.exp(-1.5)))
    assert (activated([-1e4], 0, "sigmoid"), activated([1e4], 0, "sigmoid")) == (0.0, 1.0)
    assert activated([1e4, 0.0], 0, "softmax") == 1.0


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (classes(math.nan), "finite numbers, not"),
        (classes(math.inf), "finite numbers, not"),
        (classes(None), "finite numbers, not"),
        (classes("0.5"), "finite numbers, not"),
        (classes(True), "finite numbers, not"),
        (classes(), "finite numbers, not"),
        (b'{"data": [{"probs": [0.5], "num_classes": 2}]}', "1 scores of 2 classes"),
        (b'{"data": [{"probs": 0.5}]}', "no answer in the reply: TypeError"),
        (b'{"data": []}', "no answer in the reply: ValueError"),
        (b'{"data": [{"probs": [0.5]}, {"probs": [0.5]}]}', "no answer in the reply: ValueError"),
        (b'{"data": {"probs": [0.5]}}', "no answer in the reply"),
        (b'{"error": {"message": "no"}}', "no answer in the reply: KeyError"),
        (b'[{"data": 1}]', "no answer in the reply"),
        (classes(0.5)[:-20], "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ("garbage", "no JSON"),
        (500, "status 500"),
        (400, "status 400"),
        ("redirect", "status 302"),
        (classes(0.5, 0.5), r"scores of 2 classes; legal: reward_model.label, a number from 0 to 1"),
    ],
)
def test_a_reply_without_a_score_is_no_reward(reply, why):
    assert why in why_not(reply)
    assert "service 'scores': " in why_not(reply)


def test_a_label_beyond_the_classes_is_no_reward():
    assert "scores of 1 classes, and the label is 3; legal: 0 to 0" in why_not(classes(0.5), label=3)


def test_passing_failures_are_tried_again():
    found = ask(503, "garbage", classes(math.nan), "close", classes(0.5))
    assert (found.reward, found.costs["judge_retries"]) == (0.5, 4.0)


def test_each_completion_of_a_batch_has_its_own_score_or_failure_and_several_are_asked_at_once():
    def score(request: dict[str, Any]) -> Any:
        text = request["messages"][1]["content"]
        return 400 if text == "bad" else classes(float(len(text)))

    completions = ["x" * number for number in range(1, 40)]
    completions[7] = "bad"
    with judging(score) as server:
        found = model_at(server.endpoint).score_all([*completions, "4"], [RECORD] * 39 + ["no record"])
        for completion, each in zip(completions, found[:-1], strict=True):
            if completion == "bad":
                assert isinstance(each, NoVerdict)
                assert "status 400" in str(each)
            else:
                assert isinstance(each, RewardOutcome)
                assert each.reward == len(completion)
        assert isinstance(found[-1], NoVerdict)
        assert "reward_model.prompt_template names {prompt}" in str(found[-1])


# --------------------------------------------------------------------------------------------------------------- steps


def test_steps_end_behind_their_separator_and_blank_ones_belong_to_the_one_before():
    text = "a\n\nbb\n\n\n\n\n\nc"
    assert [(step.text, text[: step.end]) for step in steps_of(text, "\n\n")] == [
        ("a", "a\n\n"), ("bb", "a\n\nbb\n\n\n\n\n\n"), ("c", text),
    ]  # fmt: skip
    assert [(step.text, step.end) for step in steps_of("a\n\n", "\n\n")] == [("a", 3)]
    assert [(step.text, step.end) for step in steps_of("\n\na", "\n\n")] == [("a", 3)]
    assert [(step.text, step.end) for step in steps_of("", "\n\n")] == [("", 0)]
    assert [(step.text, step.end) for step in steps_of(" ", "\n\n")] == [(" ", 1)]


def stepwise(scores: list[float], *, labels: int = 1) -> Any:
    """A server whose model has a token for each character and for <s>, and scores of every token."""

    def answer(request: dict[str, Any]) -> bytes:
        if request["path"] == "/pooling":
            assert request["task"] == "token_classify"
            left = iter(scores)
            rows = [[next(left) if each == 1 else 99.0] * labels for each in request["input"]]
            return json.dumps({"data": [{"data": rows}]}).encode()
        assert request["path"] == "/tokenize"
        text = request["prompt"] if "prompt" in request else "|".join(m["content"] for m in request["messages"])
        tokens = [1 if part == "<s>" else ord(part) for part in text.replace("<s>", "\1")] if text else []
        return json.dumps({"tokens": tokens, "count": len(tokens)}).encode()

    return answer


@pytest.mark.parametrize(
    ("reduction", "reward", "rewards_at"),
    [
        ("min", 0.25, {3: 0.5, 7: -0.25, 8: 0.0}),
        ("mean", 0.5, {3: 0.5, 7: -0.125, 8: 0.125}),
        ("last", 0.75, {3: 0.5, 7: -0.25, 8: 0.5}),
        ("product", 0.09375, {3: 0.5, 7: -0.375, 8: -0.03125}),
    ],
)
def test_what_each_step_earns_adds_up_to_the_reward(reduction, reward, rewards_at):
    found = ask(stepwise([0.5, 0.25, 0.75]), completion="a\n\nbb\n\nc", step_reduction=reduction, **STEPWISE)
    assert (found.reward, found.rewards_at) == (reward, rewards_at)
    assert sum(found.rewards_at.values()) == found.reward
    assert found.parts == {"score": reward, "steps": 3.0}
    assert reduced([0.5, 0.25, 0.75], reduction) == reward


def test_a_policy_that_writes_the_step_token_is_scored_at_its_steps_alone():
    with judging(stepwise([0.1, 0.5, 0.25])) as server:
        model = model_at(server.endpoint, prompt_template="<s>{prompt}", step_reduction="mean", **STEPWISE)
        (found,) = model.score_all(["a<s>\n\nbb<s>"], [RECORD])
        assert isinstance(found, RewardOutcome)
        assert found.reward == 0.375  # 0.1 is at the token in the prompt
        assert server.requests[1]["messages"][1]["content"] == "a<s>bb<s>"
        assert server.requests[1]["add_generation_prompt"] is False  # the default of /tokenize alone
        model.score_all(["c"], [RECORD])
        assert [each["path"] for each in server.requests].count("/tokenize") == 3  # the step token's own id once


def test_an_empty_completion_has_one_step_at_no_character():
    found = ask(stepwise([0.5]), completion="", **STEPWISE)
    assert (found.reward, found.rewards_at) == (0.5, {})


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (lambda request: b'{"tokens": [1, 2]}', "reward_model.step_token='<s>' is 2 tokens of the model"),
        (lambda request: b'{"tokens": []}', "tokens are numbers, not []"),
        (lambda request: b'{"tokens": [true]}', "tokens are numbers, not [true]"),
        (lambda request: b'{"tokens": [1]}' if request.get("prompt") else b'{"tokens": [5]}', "0 tokens '<s>'"),
        (lambda request: b'{"tokens": [1]}' if "task" not in request else b'{"data": [{"data": []}]}', "scores of 0"),
        (
            lambda request: b'{"tokens": [1]}' if "task" not in request else b'{"data": [{"data": [[NaN]]}]}',
            "finite numbers",
        ),
        (
            lambda request: b'{"tokens": [1]}' if "task" not in request else b'{"data": [{"data": [0.5]}]}',
            "finite numbers",
        ),
    ],
)
def test_steps_without_a_score_are_no_reward(script, why):
    assert why in why_not(script, **STEPWISE)


# ------------------------------------------------------------------------------------------------------------- settings


def test_a_class_is_named_or_numbered_as_the_checkpoint_knows_it(tmp_path):
    file = tmp_path / "config.json"
    at = ServiceConfig(name="scores", kind="reward", path=tmp_path)

    def label(name: str) -> int | None:
        return label_of(RewardModelConfig(label=name), at)

    file.write_text(json.dumps({"id2label": {"1": "good", "0": "bad", "3": "best", "2": "fair"}}))
    assert (label("bad"), label("good"), label("best"), label("2")) == (0, 1, 3, 2)
    for name in ("", "Good", "4", "-1"):
        with pytest.raises(ValueError, match=r"reward_model\.label.*legal.*'bad', 'good'"):
            label(name)
    file.write_text(json.dumps({"id2label": {"0": "LABEL_0"}}))
    assert label("") is None
    file.write_text("{}")
    assert (label(""), label("4")) == (None, 4)
    file.write_text('{"id2label": [1]}')
    with pytest.raises(ValueError, match="id2label cannot be read"):
        label("")
    file.unlink()
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        label("")
    assert label_of(RewardModelConfig(label="1"), service_at("http://x/v1")) == 1


def test_a_template_that_a_record_does_not_fill_is_found_before():
    part = {"both": CompositeConfig(tasks={"score": "reward_model", "form": "regex"}, correct="form")}
    for task in ("reward_model", "both"):
        asked = RewardModelConfig(prompt_template="{question}")
        check = composite_reference_check(task, part, JudgeConfig(), scores=asked)
        assert check is not None
        with pytest.raises(ValueError, match=r"reward_model\.prompt_template names \{question\}; legal: prompt"):
            check(RECORD)
    illegal = RewardModelConfig(prompt_template="{a.b}")
    check = composite_reference_check("reward_model", {}, JudgeConfig(), scores=illegal)
    assert check is not None
    with pytest.raises(ValueError, match="plain name of a field"):
        check(RECORD)


def make_config(service: dict[str, Any] | None = None, /, **settings: Any) -> Config:
    return Config.model_validate({
        "run": {"name": "a", "num_steps": 1}, "model": {"path": "m"}, "data": {"path": "d", "task": "reward_model"},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1}, "trainer": {"token_budget": 8},
        "admission": {"groups_per_step": 1, "group_size": 2},
        "service": {"name": "scores", "kind": "reward", "path": "/models/scores"} if service is None else service,
        "reward_model": settings,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"service": "other"}, r"reward_model\.service='other'; legal: 'scores'"),
        ({"activation": "softmax"}, r"reward_model\.activation='softmax' without reward_model\.label"),
        ({"clip_low": 1.0, "clip_high": 0.0}, "is not below"),
        ({"step_token": "<s>"}, "legal: both, or neither"),
        ({"step_reduction": "mean"}, r"reward_model\.step_reduction='mean' has no effect"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, why):
    make_config()
    with pytest.raises(ValueError, match=why):
        make_config(**settings)


def test_a_class_at_a_url_has_a_number_alone():
    there = {"name": "scores", "kind": "reward", "url": "http://x/v1"}
    make_config(there, label="1")
    with pytest.raises(ValueError, match=r"reward_model\.label='good' with service\.url"):
        make_config(there, label="good")


# ----------------------------------------------------------------------------------------------------------- in a pool


@pytest.mark.starts
async def test_in_a_composite_scores_rules_and_grades_are_weighed_and_what_is_down_is_an_error(tmp_path: Path):
    composite = CompositeConfig(
        tasks={"score": "reward_model", "form": "regex", "grade": "llm_judge"},
        weights={"score": 0.5, "grade": 2.0},
        correct="form",
        fields={"form": "pattern", "grade": "answer"},
    )
    record = json.dumps({"prompt": "2+2=", "pattern": "4", "answer": "4"})
    with judging(classes(3.0), classes(3.0), 400) as scores, judging("Grade: 8") as judge:
        settings = TaskSettings(
            composite={"all": composite},
            judge=JudgeConfig(endpoint=judge.endpoint, model="m", timeout_s=PATIENCE_S),
            reward_service=service_at(scores.endpoint),
        )
        async with RewardPool(1, 2 * PATIENCE_S, environment={VARIABLE: settings.model_dump_json()}) as pool:
            found = await pool.judge("all", "4", record)
            assert (found.verdict, found.parts["score"], found.parts["score.score"]) == (Verdict.CORRECT, 3.0, 3.0)
            assert found.reward == pytest.approx(0.5 * 3.0 + 1.0 + 2.0 * 0.8)
            assert (await pool.judge("reward_model", "4", record)).reward == 3.0
            assert pool.judges_together("reward_model") is False  # known once a worker has it from the start
            for task in ("all", "reward_model"):
                down = await pool.judge(task, "4", record)
                assert (down.verdict, down.reward, down.failure) == (Verdict.VERIFIER_ERROR, 0.0, "raised")
                assert "service 'scores': status 400" in down.detail
            assert pool.counts.of("reward_model", "judge_requests") == 2.0
            assert pool.num_restarts == 0


@pytest.mark.starts
async def test_a_batch_of_which_one_fails_is_not_judged_again():
    def score(request: dict[str, Any]) -> Any:
        text = request["messages"][1]["content"]
        return 400 if text == "bad" else classes(float(len(text)))

    with judging(score) as server:
        settings = TaskSettings(reward_service=service_at(server.endpoint))
        environment = {VARIABLE: settings.model_dump_json()}
        async with RewardPool(1, PATIENCE_S, preload_tasks=["reward_model"], environment=environment) as pool:
            assert pool.judges_together("reward_model")
            asked = [pool.judge("reward_model", text, RECORD) for text in ("a", "bad", "ccc", "dddd")]
            found = [await each for each in map(asyncio.ensure_future, asked)]
        assert [each.reward for each in found] == [1.0, 0.0, 3.0, 4.0]
        assert [each.verdict is Verdict.VERIFIER_ERROR for each in found] == [False, True, False, False]
        assert len(server.requests) == 4
        assert pool.counts.of("reward_model", "batch_failed") == 0
