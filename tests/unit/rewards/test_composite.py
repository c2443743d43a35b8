"""A task made of others: rewards by weight, parts by name, one part that says what is correct."""

from __future__ import annotations

import json

import pytest

from rlhpc.config.rules import Config
from rlhpc.config.tables_services import CompositeConfig, JudgeConfig
from rlhpc.data.record_source import Record
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.types import Verdict
from rlhpc.rewards import registry
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings
from tests.patience import PATIENCE_S

GRADED = CompositeConfig(
    tasks={"answer": "math_answer", "form": "regex", "instructions": "instruction_following"},
    weights={"form": 0.25, "instructions": 0.5},
    correct="answer",
    fields={"answer": "solution", "form": "pattern"},
)
RECORD = {
    "solution": "#### 7",
    "pattern": r"\d+",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
}


def judge(settings: CompositeConfig, completion: str, record: object) -> RewardOutcome:
    return registry.Composite(settings)(completion, record if isinstance(record, str) else json.dumps(record))


def test_the_reward_is_the_weighted_sum_and_one_part_says_what_is_correct():
    right = judge(GRADED, "3 + 4, so #### 7", RECORD)
    assert (right.reward, right.is_correct, right.answer) == (1.0 + 0.25 + 0.5 * 0.0, True, "7")
    assert right.parts == {
        "answer": 1.0, "form": 1.0, "instructions": 0.0, "instructions.strict": 0.0, "instructions.loose": 0.0
    }  # fmt: skip
    assert right.detail == "answer: answer 7; form: answer 7; instructions: 0 of 1; not: punctuation:no_comma"
    wrong = judge(GRADED, "#### 8", RECORD)
    assert (wrong.reward, wrong.is_correct) == (0.25 + 0.5, False)


def test_without_fields_every_part_has_the_same_reference():
    both = CompositeConfig(tasks={"exact": "exact_match", "words": "token_f1"}, correct="exact")
    outcome = judge(both, "a red house", "red house")
    assert (outcome.reward, outcome.is_correct) == (2.0, True)
    assert judge(both, "red hut", "red house").reward == pytest.approx(0.5)


@pytest.mark.parametrize("number", [1e16, 1e-5, -2.5, 7])
def test_a_number_in_a_field_is_the_reference_that_it_is_without_a_composite(number):
    record = RECORD | {"solution": number}
    whole = json.dumps(record)
    assert registry.references(GRADED, whole)["answer"] == Record(record, "a:1").reference("solution")


def test_places_of_rewards_are_weighted_like_the_rewards():
    placed = CompositeConfig(
        tasks={"a": "sample_rewards:rewards_of_words", "b": "sample_rewards:rewards_of_words"},
        weights={"a": 0.5, "b": 2.0},
        correct="a",
    )
    outcome = judge(placed, "two words", "")
    assert (outcome.reward, outcome.rewards_at) == (5.0, {3: 2.5, 9: 2.5})


def test_a_part_that_cannot_judge_leaves_the_whole_without_a_verdict():
    for broken in ("sample_rewards:fail", "sample_rewards:return_nothing"):
        settings = CompositeConfig(tasks={"a": "exact_match", "b": broken}, correct="a")
        with pytest.raises((ValueError, TypeError)):
            judge(settings, "a", "a")
    with pytest.raises(ValueError, match=r"no field 'pattern', which composite\.fields names; it has solution"):
        judge(GRADED, "#### 7", {"solution": "7"})


@pytest.mark.starts
async def test_a_worker_knows_the_composites_of_its_run():
    settings = TaskSettings(composite={"graded": GRADED})
    async with RewardPool(
        1, PATIENCE_S, preload_tasks=["graded"], environment={VARIABLE: settings.model_dump_json()}
    ) as pool:
        judgement = await pool.judge("graded", "#### 7", json.dumps(RECORD))
        assert (judgement.verdict, judgement.reward, judgement.parts["form"]) == (Verdict.CORRECT, 1.75, 1.0)
        spoilt = await pool.judge("graded", "#### 7", json.dumps(RECORD | {"solution": ""}))
        assert (spoilt.verdict, spoilt.reward) == (Verdict.VERIFIER_ERROR, 0.0)


def test_references_of_all_parts_are_checked_each_in_its_field():
    check = registry.composite_reference_check("graded", {"graded": GRADED}, JudgeConfig())
    assert check is not None
    check(json.dumps(RECORD))
    for change, why in (
        ({"pattern": "("}, "not a regular expression"),
        ({"solution": ""}, "cannot be read as mathematics"),
        ({"solution": None}, "no field 'solution'"),
        ({"kwargs": []}, "is shorter"),
    ):
        with pytest.raises(ValueError, match=why):
            check(json.dumps(RECORD | change))
    assert registry.composite_reference_check("math_answer", {"graded": GRADED}, JudgeConfig()) is not None


def make_config(**changes: object) -> Config:
    document = {
        "run": {"name": "a", "num_steps": 1},
        "model": {"path": "m"},
        "data": {"path": "d.jsonl", "task": "graded", "reference_field": "*"},
        "composite": {"graded": GRADED.model_dump()},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1},
        "admission": {"groups_per_step": 1, "group_size": 2},
        "trainer": {"token_budget": 8},
    }
    return Config.model_validate(document | changes)


def test_a_run_knows_the_tasks_behind_its_composites():
    config = make_config(instructions={"reward": "fraction"})  # which has an effect, since a part follows instructions
    assert config.judging_tasks == ("math_answer", "regex", "instruction_following")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": {"path": "d", "task": "graded"}}, r"data\.reference_field='answer' with composite\.graded\.fields"),
        ({"data": {"path": "d", "task": "regex"}}, r"composite\.graded has no effect"),
        ({"composite": {"graded": {"tasks": {}, "correct": "a"}}}, "has no part"),
        ({"composite": {"graded": {"tasks": {"a": "regex"}, "correct": "b"}}}, "names 'b', not one of its parts"),
        (
            {"composite": {"graded": {"tasks": {"a": "regex"}, "correct": "a", "weights": {"c": 1.0}}}},
            r"composite\.graded\.weights names 'c', not one of its parts; legal: a",
        ),
        (
            {"composite": {"graded": {"tasks": {"a": "graded"}, "correct": "a"}}},
            r"a='graded' is a composite; legal: a task that is none",
        ),
        ({"composite": {"a:b": GRADED.model_dump()}}, "should match pattern"),
    ],
)
def test_a_composite_that_makes_no_sense_is_refused(changes, why):
    with pytest.raises(ValueError, match=why):
        make_config(**changes)
