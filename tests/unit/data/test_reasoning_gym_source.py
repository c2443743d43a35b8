"""Problems that a library makes: the same for a seed, judged by their own scorers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_tokenizer_files

from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.data.prompts import open_prompt_source
from rlhpc.data.record_source import FLAWED, Record, problems_of, records_of
from rlhpc.protocol.errors import CheckpointError, DataError
from rlhpc.sandbox.values import encode

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
from reasoning_gym.factory import DATASETS

from rlhpc.rewards.reasoning_gym import final_answer, reasoning_gym

pytestmark = pytest.mark.starts  # a child process makes the problems

TWO = "reasoning_gym:chain_sum,leg_counting"
SETS = "reasoning_gym:ransom_note,isomorphic_strings"  # whose sets have another order in every process
TUPLES = "reasoning_gym:arc_agi,rearc"  # which JSON does not have


def made(source: str = TWO, **keys: Any) -> list[Record]:
    return list(records_of(DataConfig.model_validate({"source": source, "size": 8, **keys})))


@pytest.fixture
def without_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_datasets_take_turns_and_have_their_prompts_answers_and_difficulties() -> None:
    records = made()
    assert [record.fields["dataset"] for record in records] == ["chain_sum", "leg_counting"] * 4
    assert records[2].source == f"{TWO}:2"
    first = records[0].fields
    assert first["prompt"].endswith(f"{first['metadata']['expression']} =")
    assert eval(first["metadata"]["expression"]) == int(first["answer"])
    assert records[0].number("metadata.num_terms", "curriculum.difficulty_field") == first["metadata"]["num_terms"]


def test_a_seed_has_the_same_problems_in_every_process_and_another_seed_others(
    without_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    before = [record.fields for record in made(SETS)]
    for file in without_cache.rglob("reasoning_gym/*"):
        file.unlink()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert [record.fields for record in made(SETS, size=6)] == before[:6]
    others = {record.fields["prompt"] for record in made(SETS, source_seed=1)}
    assert not others & {fields["prompt"] for fields in before}


def test_problems_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made()
    monkeypatch.setattr("rlhpc.data.record_source._made_in_a_child", lambda question: pytest.fail("made again"))
    assert made() == before


def assert_solved(records: list[Record]) -> None:
    for record in records:
        reference, answer = record.reference("entry"), record.fields["answer"]
        outcome = reasoning_gym(f"I think it is <answer>1</answer>, no: <answer> {answer} </answer>", reference)
        assert (outcome.reward, outcome.is_correct) == (1.0, True), record.fields["dataset"]
        assert outcome.answer == str(answer).strip()
        wrong = reasoning_gym("no idea", reference)
        assert wrong.reward < 1.0
        assert not wrong.is_correct


def test_a_problem_is_solved_by_its_own_answer_and_not_by_another() -> None:
    assert_solved(made())


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_no_error_of_the_verifier() -> None:
    (record,) = made("reasoning_gym:prime_factorization", size=1)
    for answer in ("no idea", "2 x", ""):
        assert reasoning_gym(answer, record.reference("entry")).reward < 1.0
    entry = json.loads(record.reference("entry"))
    entry["entry"] = encode({"question": "?", "answer": "of nobody", "metadata": {}})
    with pytest.raises(ValueError, match="of nobody"):  # no answer could be read
        reasoning_gym("2 x", json.dumps(entry))


@pytest.mark.parametrize("name", FLAWED)
def test_a_kind_whose_scorer_rewards_nonsense_is_refused_but_for_other_tasks(name: str) -> None:
    with pytest.raises(DataError, match=f"{name}.*legal: other kinds, or another data.task"):
        made(f"reasoning_gym:chain_sum,{name}")
    assert made(f"reasoning_gym:{name}", size=1, task="exact_match", reference_field="answer")


def test_a_kind_for_which_one_answer_solves_all_problems_is_refused() -> None:
    records = made("reasoning_gym:puzzle24", size=3, task="exact_match", reference_field="answer")
    assert all(reasoning_gym("6*4*1*1", json.dumps(record.fields["entry"])).is_correct for record in records)
    assert "puzzle24" in FLAWED


@pytest.mark.long
def test_a_problem_of_any_dataset_is_solved_by_its_own_answer() -> None:
    slow = {"composite", "knight_swap"}
    names = sorted(set(DATASETS) - slow - set(FLAWED))
    records = made(f"reasoning_gym:{','.join(names)}", size=len(names))
    assert_solved([record for record in records if record.fields["answer"] is not None])
    assert len(names) > 100
    assert_solved(made(TUPLES))


def test_the_last_tag_is_the_answer_then_a_mark_then_everything() -> None:
    assert final_answer("<answer>1</answer> <answer>\n2 </answer> #### 3") == "2"
    assert final_answer(r"so \boxed{4}") == "4"
    assert final_answer(" 5 ") == "5"


def test_a_reference_of_another_kind_is_an_error_and_no_wrong_answer() -> None:
    for reference in ("7", "[]", '{"dataset": "chain_sum"}'):
        with pytest.raises(ValueError, match=r'data\.reference_field = "entry"'):
            reasoning_gym("7", reference)


def test_levels_are_as_hard_as_the_curriculum_says_and_settings_are_kept() -> None:
    records = made("reasoning_gym:chain_sum", levels=[0, 4])
    assert [record.fields["level"] for record in records] == [0, 4] * 4
    assert {record.fields["metadata"]["num_terms"] for record in records[::2]} == {2}
    longest = max(record.fields["metadata"]["num_digits"] for record in records[1::2])
    assert longest > 1
    settings, problems = problems_of("chain_sum", wanted(min_terms=9, max_terms=9), None)
    assert settings == {"min_terms": 9, "max_terms": 9}
    assert problems[0]["metadata"]["num_terms"] == 9


def wanted(**settings: Any) -> dict[str, Any]:
    return {"settings": settings, "levels": [], "seed": 0, "size": 2}


@pytest.mark.parametrize(
    ("name", "settings", "level", "why"),
    [
        ("chain_sum", {"max_term": 3}, None, r"data\.settings\.max_term: .*did you mean max_terms"),
        ("chain_sum", {"max_terms": 1}, None, r"max_terms must be >= min_terms"),
        ("composite", {}, 0, r"'composite' of reasoning_gym has no levels"),
    ],
)
def test_what_a_dataset_does_not_have_is_named(name: str, settings: Any, level: int | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        problems_of(name, wanted(**settings), level)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("reasoning_gym:chain_summ", r"'chain_summ', which .* does not have; .* \(did you mean chain_sum"),
        ("reasoning_gym:", r'legal: "reasoning_gym:NAME"'),
        ("gym:chain_sum", r'legal: "reasoning_gym:NAME"'),
    ],
)
def test_what_the_library_does_not_have_is_named(source: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        made(source)


def test_a_run_goes_on_with_the_problems_that_it_would_have_had(tmp_path: Path) -> None:
    make_tokenizer_files(tmp_path / "model")

    def prompts(**keys: Any) -> Any:
        settings: dict[str, Any] = {
            "run": {"name": "test", "num_steps": 1, "seed": 3},
            "model": {"path": tmp_path / "model"},
            "data": {"source": TWO, "size": 8, **keys},
            "generation": {"max_prompt_tokens": 2000, "max_completion_tokens": 8},
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"token_budget": 3000},
        }
        config = Config.model_validate(settings)
        assert (config.data[0].task, config.data[0].reference_field, config.data[0].title) == (
            "reasoning_gym",
            "entry",
            "chain_sum,leg_counting",
        )
        return open_prompt_source(config)

    uninterrupted = prompts()
    for _ in range(13):
        uninterrupted.draw(0)
    restarted = prompts()
    restarted.load_state(json.loads(json.dumps(uninterrupted.state())))
    for _ in range(15):
        mine, theirs = restarted.draw(0), uninterrupted.draw(0)
        assert (mine.prompt_id, mine.reference) == (theirs.prompt_id, theirs.reference)
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
    with pytest.raises(CheckpointError, match="start a new run"):
        prompts(shuffle=False).load_state(uninterrupted.state())
