"""Several datasets as one source: each has its share in every stretch, and a restart draws the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_tokenizer_files, write_jsonl

from rlhpc.config.rules import Config
from rlhpc.data.curriculum import Curriculum, open_prompt_source, validate_datasets
from rlhpc.protocol.contracts import PromptSource
from rlhpc.protocol.errors import CheckpointError, DataError
from rlhpc.protocol.types import Prompt

WEIGHTS = {"math": 5.0, "code": 2.0, "chat": 0.5}
SIZES = {"math": 7, "code": 4, "chat": 4}


@pytest.fixture
def make(tmp_path: Path):
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


def test_every_dataset_has_its_share_in_every_stretch_of_prompts(make) -> None:
    source, total = make(), sum(WEIGHTS.values())
    drawn = [dataset_of(source.draw(0)) for _ in range(300)]
    for first in range(0, 300, 17):
        for last in range(first + 1, 301, 23):
            for name, weight in WEIGHTS.items():
                expected = (last - first) * weight / total
                assert abs(drawn[first:last].count(name) - expected) < 2
    assert {name: drawn.count(name) for name in WEIGHTS} == {"math": 200, "code": 80, "chat": 20}


def test_a_record_is_named_the_same_in_every_epoch_and_attempt_and_as_no_other(make) -> None:
    source, records = make(), {}
    for prompt in (source.draw(0) for _ in range(100)):
        name = source.record_of(prompt.prompt_id)
        assert records.setdefault(name.key, prompt.reference) == prompt.reference
        assert name.source.endswith(f"{dataset_of(prompt)}.jsonl:{int(prompt.reference.split()[1]) + 1}")
        assert make().record_of(prompt.prompt_id) == name
    assert len(records) == sum(SIZES.values())
    assert make(("math",)).record_of(3).key in map(str, range(SIZES["math"]))


def test_the_number_of_a_prompt_tells_its_dataset_and_grows_within_it(make) -> None:
    source = make()
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


def test_datasets_of_one_size_have_orders_of_their_own_and_the_first_has_that_of_a_run_on_it_alone(make) -> None:
    def order(source: PromptSource, name: str) -> list[str]:
        references = (source.draw(0).reference for _ in range(100))
        return [each.partition(" ")[2] for each in references if each.startswith(name)][: SIZES[name]]

    alone = make(("code",))
    assert isinstance(alone, Curriculum)
    both = ("code", "chat")
    assert order(make(both), "code") == order(alone, "code") != order(make(both), "chat")


def test_a_restart_draws_what_the_uninterrupted_run_draws(make) -> None:
    rules = {"curriculum": {"solved_rest_epochs": 2, "hopeless_rest_epochs": 1}}

    def ask(source: PromptSource, first: int, last: int) -> list[int]:
        drawn = []
        for group_id in range(first, last):
            prompt = source.draw(group_id)
            drawn.append(prompt.prompt_id)
            source.learn(group_id, group_id, prompt.prompt_id, (prompt.prompt_id * 7 % 5) / 4)
        return drawn

    uninterrupted = make(**rules)
    ask(uninterrupted, 0, 41)
    restarted = make(**rules)
    restarted.load_state(json.loads(json.dumps(uninterrupted.state())))
    assert ask(restarted, 41, 150) == ask(uninterrupted, 41, 150)
    assert restarted.figures() == uninterrupted.figures()


def test_what_was_drawn_is_drawn_again_by_number_and_a_lost_one_is_of_whose_turn_it_was(make) -> None:
    source, again = make(), make()
    drawn = [source.draw(0).prompt_id for _ in range(40)]
    lost = {3, 4, 17}
    assert [again.draw_again(None if n in lost else prompt_id).prompt_id for n, prompt_id in enumerate(drawn)] == drawn
    assert again.state() == source.state()


def test_a_checkpoint_of_other_datasets_is_refused(make) -> None:
    source = make()
    with pytest.raises(CheckpointError, match=r"of 1 datasets, and this run has 3"):
        source.load_state(make(("math",)).state())
    with pytest.raises(CheckpointError, match=r"of 2 datasets, and this run has 3"):
        source.load_state(make(("math", "code")).state())
    with pytest.raises(CheckpointError, match="dataset math: the checkpoint's prompts have dataset="):
        source.load_state(make(("code", "math", "chat")).state())
    state = source.state()
    state["datasets"][1]["dataset"] = "another"
    with pytest.raises(CheckpointError, match="dataset code: the checkpoint's prompts have dataset='another'"):
        source.load_state(state)
    with pytest.raises(CheckpointError, match="have seed=None"):
        make(("math",)).load_state(source.state())


def test_figures_are_those_of_all_prompts_and_of_every_dataset(make) -> None:
    source = make()
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


def test_every_dataset_is_looked_through_before_a_run_is_started(make, tmp_path: Path) -> None:
    make()
    config = config_of(tmp_path, tuple(WEIGHTS))
    assert [found.num_records for found in validate_datasets(config)] == list(SIZES.values())
    write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "1", "answer": "2"}, {"prompt": "1"}])
    with pytest.raises(DataError, match=r"chat.jsonl:2: no field 'answer'"):
        validate_datasets(config)


def test_a_dataset_may_allow_shorter_prompts_than_the_others(make, tmp_path: Path) -> None:
    make()
    config = config_of(tmp_path, tuple(WEIGHTS))
    short = config.data[1].model_copy(update={"max_prompt_tokens": 2})
    with pytest.raises(DataError, match=r"code.jsonl:1: the prompt has \d tokens; legal: 1 to .*=2"):
        validate_datasets(config.model_copy(update={"data": (config.data[0], short)}))


def test_a_dataset_without_a_name_may_be_moved(make, tmp_path: Path) -> None:
    source = make()
    drawn = [source.draw(0).prompt_id for _ in range(9)]
    (tmp_path / "code.jsonl").rename(tmp_path / "moved.jsonl")
    config = config_of(tmp_path, tuple(WEIGHTS))
    moved = config.data[1].model_copy(update={"path": tmp_path / "moved.jsonl"})
    again = open_prompt_source(config.model_copy(update={"data": (config.data[0], moved, config.data[2])}))
    again.load_state(source.state())
    expected = [source.draw(0).prompt_id for _ in range(20)]
    assert len(drawn) == 9
    assert [again.draw(0).prompt_id for _ in range(20)] == expected
