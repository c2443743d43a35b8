"""Who is left out when its turn comes; several datasets as one source; a restart draws the same."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_tokenizer_files, write_jsonl

from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.config.tables_algorithm import CurriculumConfig
from rlhpc.data.prompt_form import PromptForm
from rlhpc.data.prompts import (
    Curriculum,
    Origins,
    SeededPrompts,
    open_prompt_source,
    rollouts_for_a_pass,
    validate_datasets,
)
from rlhpc.data.record_source import Record
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.contracts import PromptSource
from rlhpc.protocol.errors import CheckpointError, DataError
from rlhpc.protocol.types import Prompt

NUM = 10  # records; the reference of each is its number, its difficulty too


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer_files(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make(tokenizer: PromptTokenizer):
    def make_curriculum(num_records: int = NUM, seed: int = 0, shuffle: bool = True, **rules: Any) -> Curriculum:
        fields = [{"question": f"{n} + 0 =", "answer": str(n), "difficulty": n} for n in range(num_records)]
        data = DataConfig(path=Path("train.jsonl"), task="integer", prompt_template="{question}")
        prompts = SeededPrompts(
            [Record(each, f"train.jsonl:{n}") for n, each in enumerate(fields, 1)],
            PromptForm(data, tokenizer, max_prompt_tokens=64, max_completion_tokens=8),
            seed=seed,
            shuffle=shuffle,
        )
        return Curriculum(prompts, CurriculumConfig(**rules), seed=seed)

    return make_curriculum


class Student:
    """Draws and answers; every prompt is passed at a rate of its own."""

    def __init__(self, curriculum: Curriculum, rates: dict[int, float]) -> None:
        self.curriculum, self.rates, self.version, self.group_id = curriculum, rates, 0, 0

    def ask(self, count: int) -> list[int]:
        """Draw so many prompts one after the other, and answer each before the next; return their records."""
        return [self._ask() for _ in range(count)]

    def _ask(self) -> int:
        prompt = self.curriculum.draw(self.version)
        record = int(prompt.reference)
        self.curriculum.learn(self.group_id, self.version, prompt.prompt_id, self.rates.get(record, 0.5))
        self.group_id, self.version = self.group_id + 1, self.version + 1
        return record


# -------------------------------------------------------------------------------------------------------------- rules


def test_without_rules_the_order_is_that_of_the_seed_and_pass_rates_are_remembered(make) -> None:
    curriculum, plain = make(), make()
    records = Student(curriculum, {0: 1.0, 1: 0.0, 2: 0.0}).ask(3 * NUM)
    assert records == [int(plain.draw(0).reference) for _ in range(3 * NUM)]
    curriculum.draw(1000)  # settles the last one
    figures = curriculum.figures()
    assert figures["prompt/known_share"] == 1.0
    assert figures["prompt/solved_share"] == pytest.approx(0.1)
    assert figures["prompt/hopeless_share"] == pytest.approx(0.2)
    assert figures["prompt/pass_rate_mean"] == pytest.approx((1 + 7 * 0.5) / 10)
    assert figures["prompt/left_out_total"] == 0


def test_solved_and_hopeless_prompts_rest_for_so_many_epochs_and_come_back(make) -> None:
    student = Student(make(solved_rest_epochs=2, hopeless_rest_epochs=1), {3: 1.0, 4: 0.0})
    assert sorted(student.ask(NUM)) == list(range(NUM))
    assert sorted(student.ask(NUM - 2)) == sorted(set(range(NUM)) - {3, 4})
    assert sorted(student.ask(NUM - 1)) == sorted(set(range(NUM)) - {3})
    student.rates[3] = 0.5  # no longer: neither solved nor hopeless
    assert sorted(student.ask(NUM - 1)) == sorted(set(range(NUM)) - {4})  # asked in the third, it rests again
    assert sorted(student.ask(NUM)) == list(range(NUM))
    assert student.curriculum.figures()["prompt/left_out_total"] == 4


def test_who_is_solved_or_hopeless_is_a_matter_of_bounds_and_one_just_at_a_bound_counts(make) -> None:
    rules = {"solved_rest_epochs": 9, "solved_at": 0.75, "hopeless_rest_epochs": 9, "hopeless_at": 0.25}
    student = Student(make(**rules), {0: 0.75, 1: 0.74, 2: 0.25, 3: 0.26})
    student.ask(NUM)
    assert sorted(student.ask(NUM - 2)) == sorted(set(range(NUM)) - {0, 2})
    rules = {"solved_rest_epochs": 9, "solved_at": 0.9, "hopeless_rest_epochs": 9, "hopeless_at": 0.1}
    student = Student(make(**rules), {0: 0.9, 1: 0.1})  # 9 of 10 and 1 of 10, which float32 has not exactly
    student.ask(NUM)
    assert sorted(student.ask(NUM - 2)) == sorted(set(range(NUM)) - {0, 1})
    figures = student.curriculum.figures()
    assert (figures["prompt/solved_share"], figures["prompt/hopeless_share"]) == pytest.approx((0.1, 0.1))


def test_a_prompt_that_was_learnt_rests_after_one_perfect_group_whatever_came_before(make) -> None:
    student = Student(make(solved_rest_epochs=1, hopeless_rest_epochs=1), {3: 0.0, 4: 0.125})
    student.ask(NUM)
    student.rates |= {3: 1.0, 4: 0.0}  # learnt after a failure, failed after one pass in eight
    for resting in (3, 4, 3):
        assert sorted(student.ask(NUM - 1)) == sorted(set(range(NUM)) - {resting})
    figures = student.curriculum.figures()
    assert (figures["prompt/solved_share"], figures["prompt/hopeless_share"]) == pytest.approx((0.1, 0.1))


def test_where_all_rest_epochs_pass_until_one_comes_back(make) -> None:
    student = Student(make(solved_rest_epochs=1000), dict.fromkeys(range(NUM), 1.0))
    first = student.ask(NUM)
    assert sorted(student.ask(NUM)) == sorted(first)
    assert student.curriculum.figures()["prompt/left_out_total"] == 1000 * NUM


def test_a_target_makes_prompts_rarer_the_farther_they_are_from_it_by_the_seeds_chances(make) -> None:
    rates = {n: n / (NUM - 1) for n in range(NUM)}
    student = Student(make(target_pass_rate=0.5, min_chance=0.1), rates)
    asked = np.bincount(student.ask(4000), minlength=NUM)
    chance = np.array([1 - 0.9 * abs(rates[n] - 0.5) / 0.5 for n in range(NUM)])
    expected = 4000 * chance / chance.sum()
    assert np.abs(asked - expected).max() < 5 * np.sqrt(expected.max())
    assert asked[0] < asked[2] < asked[4]
    student = Student(make(200, target_pass_rate=0.9, min_chance=0.01), {})
    assert len(set(student.ask(200))) == 200
    first, second = (Student(make(target_pass_rate=0.5, seed=seed), {0: 0.0, 1: 1.0}) for seed in (1, 2))
    assert first.ask(100) != second.ask(100)


def test_a_stage_is_left_when_its_newest_groups_pass_and_easier_prompts_stay_in(make) -> None:
    rules = {"stages": (2.0, 5.0), "stage_pass_rate": 0.75, "stage_groups": 4}
    student = Student(make(**rules), dict.fromkeys(range(NUM), 0.5))
    assert set(student.ask(30)) == {0, 1, 2}
    student.rates |= dict.fromkeys(range(3), 1.0)
    asked = student.ask(60)
    assert set(asked) == {0, 1, 2, 3, 4, 5}  # those of the second stage do not pass, and only they count
    assert student.curriculum.figures()["prompt/stage"] == 1
    student.rates |= dict.fromkeys(range(6), 0.75)
    student.ask(60)
    assert student.curriculum.figures()["prompt/stage"] == 2
    assert set(student.ask(40)) == set(range(NUM))


# ------------------------------------------------------------------------------------------- what is drawn by whom


def test_what_counts_hangs_on_versions_and_not_on_who_is_finished_first(make) -> None:
    """Eight groups a version; within one they may be finished in any order, some before others are drawn."""

    def run(shuffling: random.Random) -> list[int]:
        curriculum = make(4, solved_rest_epochs=1, hopeless_rest_epochs=2, target_pass_rate=0.5, newest_weight=0.3)
        drawn, group_id, late = list[int](), 0, list[tuple[int, int, int, float]]()
        for version in range(12):
            for _ in range(8):
                prompt = curriculum.draw(version)
                drawn.append(prompt.prompt_id)
                late.append((group_id, version, prompt.prompt_id, (7 * group_id % 5) / 4))
                group_id += 1
                if shuffling.random() < 0.5:
                    curriculum.learn(*late.pop(shuffling.randrange(len(late))))
            shuffling.shuffle(late)
            while late:
                curriculum.learn(*late.pop())
        return drawn

    assert run(random.Random(1)) == run(random.Random(2)) == run(random.Random(3))


def test_a_restart_draws_what_the_uninterrupted_run_draws(make) -> None:
    rules = {"solved_rest_epochs": 1, "hopeless_rest_epochs": 1, "target_pass_rate": 0.5, "stages": (6.0,)}
    rates = {n: (n % 5) / 4 for n in range(NUM)}
    student = Student(make(**rules, stage_groups=8, stage_pass_rate=0.4), rates)
    student.ask(37)
    state = json.loads(json.dumps(student.curriculum.state()))
    restarted = Student(make(**rules, stage_groups=8, stage_pass_rate=0.4), rates)
    restarted.curriculum.load_state(state)
    restarted.group_id, restarted.version = student.group_id, student.version
    assert restarted.ask(100) == student.ask(100)
    assert restarted.curriculum.figures() == student.curriculum.figures()


def test_drawn_prompts_are_drawn_again_whatever_is_remembered_by_then(make) -> None:
    student = Student(make(solved_rest_epochs=3), {1: 1.0, 2: 1.0})
    student.ask(NUM + 3)
    again = make(solved_rest_epochs=3)
    drawn = [again.draw(v).prompt_id for v in range(NUM + 3)]
    fresh = make(solved_rest_epochs=3)
    assert [fresh.draw_again(prompt_id).prompt_id for prompt_id in drawn] == drawn
    assert fresh.draw_again(drawn[-1] + 4).prompt_id == drawn[-1] + 4
    assert fresh.draw_again(None).prompt_id == drawn[-1] + 5
    assert fresh.state()["left_out"] == 3
    with pytest.raises(CheckpointError, match=r"prompt 2 was drawn, and the next one is 18: the order of prompts has"):
        fresh.draw_again(2)


def test_without_rules_a_gap_in_the_order_is_an_error_unless_there_were_rules_before(make) -> None:
    with pytest.raises(CheckpointError, match="prompt 9 was drawn, and the next one is 0"):
        make().draw_again(9)
    before = make(solved_rest_epochs=1)
    before.draw_again(3)
    after = make()
    after.load_state(before.state())
    assert after.draw_again(9).prompt_id == 9


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory": {"rates": "!", "newest": "", "epochs": "", "unsettled": []}}, "memory of prompts is malformed"),
        ({"memory": {}}, "memory of prompts is malformed: KeyError"),
        ({"stage": "third"}, "curriculum is malformed"),
        ({"dataset": "other"}, "order of prompts cannot be continued"),
    ],
)
def test_a_damaged_state_is_refused(make, change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        make().load_state(make().state() | change)


def test_a_memory_of_another_number_of_records_is_refused(make) -> None:
    state = make().state() | {"memory": make(NUM + 1).state()["memory"]}
    with pytest.raises(CheckpointError, match="11 records, and the dataset has 10"):
        make().load_state(state)


def test_stages_need_a_difficulty_in_every_record_and_somebody_to_begin_with(make) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:1: no field 'level', which curriculum.difficulty_field names"):
        make(stages=(1.0,), difficulty_field="level")
    with pytest.raises(
        DataError, match=r"train.jsonl:1: field 'question', which curriculum.difficulty_field names, is"
    ):
        make(stages=(1.0,), difficulty_field="question")
    with pytest.raises(
        DataError, match=r"the least 'difficulty' of all records is 0, and the first stage asks for none"
    ):
        make(stages=(-1.0,))


def test_a_dataset_of_a_million_is_drawn_from_without_delay(make) -> None:
    """All but one rest: the next one is found by looking at arrays, and not prompt by prompt."""
    curriculum = make(20_000, solved_rest_epochs=50)
    memory = curriculum._memory
    memory.newest[:], memory.epochs[:] = 1.0, 0
    memory.newest[7] = 0.5
    assert [int(curriculum.draw(0).reference) for _ in range(20)] == [7] * 20
    assert len(json.dumps(curriculum.state())) < 100_000


# --------------------------------------------------------------------------------------------- how often one is sampled


@pytest.mark.parametrize("chance", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.75, 0.9])
def test_a_prompt_gets_the_fewest_rollouts_of_which_one_passes_with_the_chance(rate: float, chance: float) -> None:
    count = rollouts_for_a_pass(rate, chance, most=10_000)
    assert 1 - (1 - rate) ** count >= chance - 1e-12
    assert count == 1 or 1 - (1 - rate) ** (count - 1) < chance
    assert rollouts_for_a_pass(rate, chance, most=3) == min(count, 3)


def test_hopeless_prompts_get_the_most_solved_ones_one_and_unknown_ones_say_nothing() -> None:
    assert [rollouts_for_a_pass(rate, 0.9, most=32) for rate in (0.0, 1.0, float("nan"))] == [32, 1, 0]


def test_what_was_learnt_before_the_live_version_says_how_often_a_prompt_is_sampled(make: Any) -> None:
    curriculum = make(2, shuffle=False, max_group_size=20, pass_chance=0.9, newest_weight=1.0)
    first = curriculum.draw(0)
    assert curriculum.num_rollouts(first.prompt_id) == 0
    curriculum.learn(0, 0, first.prompt_id, 0.2)
    curriculum.draw(0)
    again = curriculum.draw(0)  # of the next epoch; what version 0 has learnt does not count yet
    assert curriculum.num_rollouts(again.prompt_id) == 0
    curriculum.draw(1)
    again = curriculum.draw(1)
    assert (again.reference, curriculum.num_rollouts(again.prompt_id)) == ("0", 11)
    assert make(2, shuffle=False).num_rollouts(again.prompt_id) == 0  # off


# --------------------------------------------------------------------------------------- Several datasets as one source

WEIGHTS = {"math": 5.0, "code": 2.0, "chat": 0.5}
SIZES = {"math": 7, "code": 4, "chat": 4}


@pytest.fixture
def open_source_of(tmp_path: Path):
    make_tokenizer_files(tmp_path / "model")
    for name, size in SIZES.items():
        write_jsonl(
            tmp_path / f"{name}.jsonl", [{"prompt": f"{n} + 0 =", "answer": f"{name} {n}"} for n in range(size)]
        )

    def open_source(names: tuple[str, ...] = tuple(WEIGHTS), **changes: Any) -> PromptSource:
        return open_prompt_source(config_of(tmp_path, names, **changes))

    return open_source


def config_of(root: Path, names: tuple[str, ...], **changes: Any) -> Config:
    tables = {
        "run": {"name": "test", "num_steps": 1, "seed": 3},
        "model": {"path": root / "model"},
        "data": [{"path": root / f"{name}.jsonl", "task": f"task_{name}", "weight": WEIGHTS[name]} for name in names],
        "generation": {"max_prompt_tokens": 20, "max_completion_tokens": 8},
        "admission": {"groups_per_step": 2, "group_size": 2},
        "trainer": {"token_budget": 64},
    }
    return Config.model_validate(tables | changes)


def dataset_of(prompt: Prompt) -> str:
    return prompt.reference.partition(" ")[0]


def test_every_dataset_has_its_share_in_every_stretch_of_prompts(open_source_of) -> None:
    source, total = open_source_of(), sum(WEIGHTS.values())
    drawn = [dataset_of(source.draw(0)) for _ in range(300)]
    for first in range(0, 300, 17):
        for last in range(first + 1, 301, 23):
            for name, weight in WEIGHTS.items():
                expected = (last - first) * weight / total
                assert abs(drawn[first:last].count(name) - expected) < 2
    assert {name: drawn.count(name) for name in WEIGHTS} == {"math": 200, "code": 80, "chat": 20}


@pytest.mark.parametrize("names", [tuple(WEIGHTS), ("code",)])
def test_dataset_and_record_of_a_prompt_are_told_from_its_number_alone(tmp_path, open_source_of, names) -> None:
    source, told = open_source_of(names), list[str]()
    origins = Origins(config_of(tmp_path, names), told.append)
    prompts = [source.draw(0) for _ in range(60)]
    for prompt in prompts[::-1]:  # as in any order of finished groups
        assert origins.dataset(prompt.prompt_id) == dataset_of(prompt)
        assert origins.record(prompt) == source.record_of(prompt.prompt_id).source
    assert told == []


def test_records_of_files_that_are_others_now_are_not_named(tmp_path, open_source_of) -> None:
    prompts = [source.draw(0) for source in [open_source_of()] for _ in range(40)]
    write_jsonl(tmp_path / "code.jsonl", [{"prompt": "0", "answer": f"code {n}"} for n in range(3)])
    (tmp_path / "chat.jsonl").unlink()
    told = list[str]()
    origins = Origins(config_of(tmp_path, tuple(WEIGHTS)), told.append)
    named = {name: [origins.record(each) for each in prompts if dataset_of(each) == name] for name in WEIGHTS}
    assert all(named["math"])
    assert not named["code"][-1]
    assert not any(named["chat"])
    assert sorted(line.partition(": ")[0].partition("=")[0] for line in told) == ["code", "data.path"]


def test_a_record_is_named_the_same_in_every_epoch_and_attempt_and_as_no_other(open_source_of) -> None:
    source, records = open_source_of(), {}
    for prompt in (source.draw(0) for _ in range(100)):
        name = source.record_of(prompt.prompt_id)
        assert records.setdefault(name.key, prompt.reference) == prompt.reference
        assert name.source.endswith(f"{dataset_of(prompt)}.jsonl:{int(prompt.reference.split()[1]) + 1}")
        assert open_source_of().record_of(prompt.prompt_id) == name
    assert len(records) == sum(SIZES.values())
    assert open_source_of(("math",)).record_of(3).key in map(str, range(SIZES["math"]))


def test_the_number_of_a_prompt_tells_its_dataset_and_grows_within_it(open_source_of) -> None:
    source = open_source_of()
    drawn = [source.draw(0) for _ in range(60)]
    names = list(WEIGHTS)
    for place, name in enumerate(names):
        own = [prompt for prompt in drawn if dataset_of(prompt) == name]
        assert [prompt.prompt_id for prompt in own] == [place + len(names) * n for n in range(len(own))]
        assert {prompt.task for prompt in own} == {f"task_{name}"}
    for prompt in drawn:
        assert source.peek(prompt.prompt_id).reference == prompt.reference
    epoch = [prompt.reference for prompt in drawn if dataset_of(prompt) == "math"][: SIZES["math"]]
    assert sorted(epoch) == [f"math {n}" for n in range(SIZES["math"])]


def test_datasets_of_one_size_have_orders_of_their_own_and_the_first_has_that_of_a_run_on_it_alone(
    open_source_of,
) -> None:
    def order(source: PromptSource, name: str) -> list[str]:
        references = (source.draw(0).reference for _ in range(100))
        return [each.partition(" ")[2] for each in references if each.startswith(name)][: SIZES[name]]

    alone = open_source_of(("code",))
    assert isinstance(alone, Curriculum)
    both = ("code", "chat")
    assert order(open_source_of(both), "code") == order(alone, "code") != order(open_source_of(both), "chat")


def test_a_restart_draws_from_several_datasets_what_the_uninterrupted_run_draws(open_source_of) -> None:
    rules = {"curriculum": {"solved_rest_epochs": 2, "hopeless_rest_epochs": 1}}

    def ask(source: PromptSource, first: int, last: int) -> list[int]:
        drawn = []
        for group_id in range(first, last):
            prompt = source.draw(group_id)
            drawn.append(prompt.prompt_id)
            source.learn(group_id, group_id, prompt.prompt_id, (prompt.prompt_id * 7 % 5) / 4)
        return drawn

    uninterrupted = open_source_of(**rules)
    ask(uninterrupted, 0, 41)
    restarted = open_source_of(**rules)
    restarted.load_state(json.loads(json.dumps(uninterrupted.state())))
    assert ask(restarted, 41, 150) == ask(uninterrupted, 41, 150)
    assert restarted.figures() == uninterrupted.figures()


def test_what_was_drawn_is_drawn_again_by_number_and_a_lost_one_is_of_whose_turn_it_was(open_source_of) -> None:
    source, again = open_source_of(), open_source_of()
    drawn = [source.draw(0).prompt_id for _ in range(40)]
    lost = {3, 4, 17}
    assert [again.draw_again(None if n in lost else prompt_id).prompt_id for n, prompt_id in enumerate(drawn)] == drawn
    assert again.state() == source.state()


def test_a_checkpoint_of_other_datasets_is_refused(open_source_of) -> None:
    source = open_source_of()
    with pytest.raises(CheckpointError, match=r"of 1 datasets, and this run has 3"):
        source.load_state(open_source_of(("math",)).state())
    with pytest.raises(CheckpointError, match=r"of 2 datasets, and this run has 3"):
        source.load_state(open_source_of(("math", "code")).state())
    with pytest.raises(CheckpointError, match="dataset math: the checkpoint's prompts have dataset="):
        source.load_state(open_source_of(("code", "math", "chat")).state())
    state = source.state()
    state["datasets"][1]["dataset"] = "another"
    with pytest.raises(CheckpointError, match="dataset code: the checkpoint's prompts have dataset='another'"):
        source.load_state(state)
    with pytest.raises(CheckpointError, match="have seed=None"):
        open_source_of(("math",)).load_state(source.state())


def test_figures_are_those_of_all_prompts_and_of_every_dataset(open_source_of) -> None:
    source = open_source_of()
    for group_id in range(40):
        prompt = source.draw(group_id)
        source.learn(group_id, group_id, prompt.prompt_id, 1.0 if dataset_of(prompt) == "code" else 0.0)
    source.draw(1000)
    figures = source.figures()
    assert figures["dataset_solved_share/code"] == figures["dataset_hopeless_share/math"] == 1.0
    num_known = {name: figures[f"dataset_known_share/{name}"] * SIZES[name] for name in WEIGHTS}
    assert figures["prompt/known_share"] == pytest.approx(sum(num_known.values()) / sum(SIZES.values()))
    assert figures["prompt/solved_share"] == pytest.approx(num_known["code"] / sum(num_known.values()))
    assert figures["prompt/stage"] == 0


def test_every_dataset_is_looked_through_before_a_run_is_started_by_its_own_limit(
    open_source_of, tmp_path: Path
) -> None:
    open_source_of()
    config = config_of(tmp_path, tuple(WEIGHTS))
    short = config.data[1].model_copy(update={"max_prompt_tokens": 2})
    with pytest.raises(DataError, match=r"code.jsonl:1: the prompt has \d tokens; legal: 1 to .*=2"):
        validate_datasets(config.model_copy(update={"data": (config.data[0], short)}))
    open_source_of()
    config = config_of(tmp_path, tuple(WEIGHTS))
    assert [found.num_records for found in validate_datasets(config)] == list(SIZES.values())
    write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "1", "answer": "2"}, {"prompt": "1"}])
    with pytest.raises(DataError, match=r"chat.jsonl:2: no field 'answer'"):
        validate_datasets(config)


def test_a_dataset_without_a_name_may_be_moved(open_source_of, tmp_path: Path) -> None:
    source = open_source_of()
    drawn = [source.draw(0).prompt_id for _ in range(9)]
    (tmp_path / "code.jsonl").rename(tmp_path / "moved.jsonl")
    config = config_of(tmp_path, tuple(WEIGHTS))
    moved = config.data[1].model_copy(update={"path": tmp_path / "moved.jsonl"})
    again = open_prompt_source(config.model_copy(update={"data": (config.data[0], moved, config.data[2])}))
    again.load_state(source.state())
    expected = [source.draw(0).prompt_id for _ in range(20)]
    assert len(drawn) == 9
    assert [again.draw(0).prompt_id for _ in range(20)] == expected
