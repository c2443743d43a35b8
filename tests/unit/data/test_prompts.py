from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CHATML, make_tokenizer_files, sums, write_jsonl

from rlhpc.config.rules import Config
from rlhpc.config.tables import DataConfig
from rlhpc.data.curriculum import validate_datasets
from rlhpc.data.prompt_form import DialogueTemplate, PromptForm
from rlhpc.data.prompts import SeededPrompts, open_prompts
from rlhpc.data.record_source import Record, read_records, reference_of
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.errors import CheckpointError, ConfigError, DataError


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    return PromptTokenizer(make_tokenizer_files(tmp_path / "model", chat_template=CHATML))


def make_prompts(tokenizer: PromptTokenizer, num_records: int = 10, **changes: Any) -> SeededPrompts:
    records = changes.pop(
        "records", [Record(fields, f"train.jsonl:{i}") for i, fields in enumerate(sums(num_records), 1)]
    )
    seed, shuffle, dialogue = changes.pop("seed", 0), changes.pop("shuffle", True), changes.pop("dialogue", None)
    settings = {"path": "train.jsonl", "task": "integer", "prompt_template": "{question}"} | changes
    limits = {"max_prompt_tokens": 64, "max_completion_tokens": 8}
    form = PromptForm(DataConfig.model_validate(settings), tokenizer, **limits, dialogue=dialogue)
    return SeededPrompts(records, form, seed=seed, shuffle=shuffle)


def make_config(tmp_path: Path, records: list[dict[str, Any]], **data: Any) -> Config:
    make_tokenizer_files(tmp_path / "model")
    return Config.model_validate(
        {
            "run": {"name": "test", "num_steps": 1, "seed": 3},
            "model": {"path": tmp_path / "model"},
            "data": {
                "path": write_jsonl(tmp_path / "train.jsonl", records),
                "task": "integer",
                "prompt_template": "Q: {question}\nA:",
                **data,
            },
            "generation": {"max_prompt_tokens": 20, "max_completion_tokens": 8},
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"token_budget": 64},
        }
    )


def references(prompts: SeededPrompts, count: int) -> list[str]:
    return [prompts.draw().reference for _ in range(count)]


def test_every_epoch_holds_every_record_once_in_another_order(tokenizer):
    prompts = make_prompts(tokenizer)
    first, second = references(prompts, 10), references(prompts, 10)
    assert sorted(first) == sorted(second) == sorted(record["answer"] for record in sums(10))
    assert first != second


def test_the_order_of_a_seed_never_changes(tokenizer):
    """Frozen figures: a run that resumes under another numpy must go on in the same order."""
    drawn = [int(reference.split("####")[1]) // 2 for reference in references(make_prompts(tokenizer), 20)]
    assert drawn == FROZEN_ORDER


def test_another_seed_is_another_order(tokenizer):
    assert references(make_prompts(tokenizer), 10) != references(make_prompts(tokenizer, seed=1), 10)


def test_without_shuffling_the_order_is_that_of_the_file(tokenizer):
    expected = [record["answer"] for record in sums(10)]
    assert references(make_prompts(tokenizer, shuffle=False), 20) == expected * 2


def test_the_prompt_id_counts_over_all_epochs(tokenizer):
    prompts = make_prompts(tokenizer, 3)
    assert [prompts.draw().prompt_id for _ in range(8)] == list(range(8))


def test_a_prompt_holds_the_filled_template_and_the_raw_reference(tokenizer):
    prompts = make_prompts(tokenizer, prompt_template="Question: {question} {{think}}", shuffle=False)
    prompt = prompts.draw()
    assert tokenizer.decode(prompt.token_ids) == "Question: 0+0=? {think}"
    assert (prompt.task, prompt.reference) == ("integer", "0 and 0.\n#### 0")


def test_braces_in_a_record_are_only_text(tokenizer):
    records = [Record({"question": "{answer} {0}", "answer": "1"}, "train.jsonl:1")]
    assert tokenizer.decode(make_prompts(tokenizer, records=records).draw().token_ids) == "{answer} {0}"


def test_a_chat_template_wraps_the_filled_template(tokenizer):
    prompts = make_prompts(tokenizer, prompt_template="Solve {question}", use_chat_template=True, shuffle=False)
    text = tokenizer.decode(prompts.draw().token_ids, keep_special_tokens=True)
    assert text == "<bos><turn>user: Solve 0+0=?</turn>\n<turn>assistant: "


@pytest.mark.parametrize("num_drawn", [0, 3, 10, 27])
def test_a_restart_draws_what_would_have_been_drawn(tokenizer, num_drawn):
    uninterrupted = make_prompts(tokenizer)
    references(uninterrupted, num_drawn)
    restarted = make_prompts(tokenizer)
    restarted.load_state(json.loads(json.dumps(uninterrupted.state())))
    for _ in range(15):
        mine, theirs = restarted.draw(), uninterrupted.draw()
        assert (mine.prompt_id, mine.reference) == (theirs.prompt_id, theirs.reference)


@pytest.mark.parametrize("changes", [{"seed": 1}, {"shuffle": False}, {"num_records": 9}])
def test_the_state_of_another_order_is_refused(tokenizer, changes):
    prompts = make_prompts(tokenizer, **changes)
    with pytest.raises(CheckpointError, match="start a new run"):
        prompts.load_state(make_prompts(tokenizer).state())
    assert prompts.draw().prompt_id == 0


@pytest.mark.parametrize("cursor", [None, -1, "3"])
def test_a_damaged_cursor_is_refused(tokenizer, cursor):
    prompts = make_prompts(tokenizer)
    with pytest.raises(CheckpointError, match="cursor"):
        prompts.load_state(prompts.state() | {"cursor": cursor})


def test_a_record_that_makes_no_prompt_is_named_and_not_skipped(tokenizer):
    records = [Record({"question": "x" * 65, "answer": "1"}, "train.jsonl:4")]
    prompts = make_prompts(tokenizer, records=records)
    for _ in range(2):
        with pytest.raises(DataError, match=r"train\.jsonl:4: the prompt has 65 tokens; legal: 1 to .*=64"):
            prompts.draw()
    assert prompts.state()["cursor"] == 0


def test_a_prompt_of_no_token_is_refused(tokenizer):
    with pytest.raises(DataError, match="is empty, and nothing else asks"):
        make_prompts(tokenizer, records=[Record({"question": "", "answer": "1"}, "train.jsonl:1")]).draw()


@pytest.mark.parametrize("template", ["{0}", "{}", "{question!r}", "{question:>9}", "{question", "?"])
def test_a_template_of_anything_but_plain_names_is_refused(tokenizer, template):
    with pytest.raises(ConfigError, match=r"data\.prompt_template"):
        make_prompts(tokenizer, prompt_template=template)


def test_a_dataset_is_validated_before_anything_is_started(tmp_path):
    (summary,) = validate_datasets(make_config(tmp_path, sums(12)))
    assert (summary.num_records, summary.longest_prompt_tokens) == (12, 13)
    assert summary.mean_prompt_tokens == pytest.approx((10 * 11 + 2 * 13) / 12)
    assert summary.longest_source == f"{tmp_path / 'train.jsonl'}:11"


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (
            {"question": "x" * 30, "answer": "1"},
            r"train\.jsonl:3: the prompt has 36 tokens; legal: .*max_prompt_tokens=20",
        ),
        ({"question": "1+1"}, r"train\.jsonl:3: no field 'answer', which data.reference_field names"),
        (
            {"problem": "1+1", "answer": "1"},
            r"train\.jsonl:3: no field 'question', which data.prompt_template names; .* 'problem', 'answer'",
        ),
        ({"question": None, "answer": "1"}, r"train\.jsonl:3: field 'question' is null"),
    ],
)
def test_the_first_bad_record_is_named_by_file_and_line(tmp_path, record, why):
    with pytest.raises(DataError, match=why):
        validate_datasets(make_config(tmp_path, [*sums(2), record]))


def test_a_run_opens_its_prompts_with_its_own_seed(tmp_path, tokenizer):
    config = make_config(tmp_path, sums(10))
    opened = open_prompts(config)
    expected = make_prompts(tokenizer, records=read_records(config.data[0].path), seed=3)
    assert references(opened, 10) == references(expected, 10)


FROZEN_ORDER = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 9, 8, 1, 6, 5, 0]


def test_stages_without_difficulties_are_found_before_anything_is_started(tmp_path: Path) -> None:
    config = make_config(tmp_path, sums(3))
    curriculum = config.curriculum.model_copy(update={"stages": (1.0,)})
    with pytest.raises(DataError, match=r"no field 'difficulty', which curriculum\.difficulty_field names"):
        validate_datasets(config.model_copy(update={"curriculum": curriculum}))


def test_an_environment_is_given_the_whole_record_and_its_task_a_reference(tokenizer):
    dialogue = DialogueTemplate(tokenizer)
    records = [Record({"question": "1+1", "answer": 2, "level": [3]}, "train.jsonl:1")]
    prompts = make_prompts(tokenizer, records=records, use_chat_template=True, dialogue=dialogue)
    prompt = prompts.draw()
    assert json.loads(prompt.reference) == records[0].fields
    assert reference_of(prompt.reference, "answer") == "2"
    assert tokenizer.decode(prompt.token_ids, keep_special_tokens=True) == "<bos><turn>user: 1+1</turn>\n"
    bare = [Record({"question": "1+1"}, "train.jsonl:7")]
    with pytest.raises(DataError, match=r"train.jsonl:7: no field 'answer', which data.reference_field names"):
        make_prompts(tokenizer, records=bare, use_chat_template=True, dialogue=dialogue).validate()
    judged_by_itself = make_prompts(
        tokenizer, records=bare, use_chat_template=True, dialogue=dialogue, task="environment"
    )
    assert judged_by_itself.validate(lambda task: None).num_references_counted == 0
    assert reference_of(judged_by_itself.draw().reference, "answer") == ""
