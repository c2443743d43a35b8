"""What is found out about a dataset before a run, and that it is found out once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CHATML, make_tokenizer_files, sums, write_jsonl

from rlhpc.config.rules import Config
from rlhpc.config.tables_services import JudgeConfig
from rlhpc.data import validation
from rlhpc.data.curriculum import validate_datasets
from rlhpc.protocol.errors import DataError


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLHPC_CACHE", str(tmp_path / "cache"))
    make_tokenizer_files(tmp_path / "model", chat_template=CHATML)

    def config(records: list[dict[str, Any]] | None = None, limit: int = 40, **data: Any) -> Config:
        if records is not None:
            write_jsonl(tmp_path / "train.jsonl", records)
        return Config.model_validate(
            {
                "run": {"name": "test", "num_steps": 1},
                "model": {"path": tmp_path / "model"},
                "data": {"path": tmp_path / "train.jsonl", "task": "regex", "prompt_template": "Q: {question}", **data},
                "generation": {"max_prompt_tokens": limit, "max_completion_tokens": 16},
                "admission": {"groups_per_step": 2, "group_size": 2},
                "trainer": {"token_budget": 64},
            }
        )

    return config


def test_the_first_prompt_is_shown_as_the_tokenizer_gets_it(make) -> None:
    (found,) = validate_datasets(make(sums(3), use_chat_template=True))
    assert found.example == "<bos><turn>user: Q: 0+0=?</turn>\n<turn>assistant: "
    assert (found.example_tokens, found.example_source[-2:]) == (30, ":1")


def test_references_that_no_completion_can_hold_are_counted(make) -> None:
    records = [{"question": "?", "answer": "x" * length} for length in (3, 16, 17, 40)]
    (found,) = validate_datasets(make(records))
    assert (found.num_references_counted, found.num_references_longer) == (4, 2)
    (found,) = validate_datasets(make([{"question": "?", "answer": ["x" * 40]}]))  # tests of a program are no answer
    assert found.num_references_counted == 0


def test_how_many_prompts_are_too_long_is_said_with_the_first(make) -> None:
    records = [{"question": "x" * length, "answer": "1"} for length in (3, 38, 5, 90, 37)]
    with pytest.raises(DataError, match=r":2: the prompt has 41 tokens; .* \(2 of 5 prompts, the longest 93 tokens\)$"):
        validate_datasets(make(records))
    with pytest.raises(DataError, match=r":4: the prompt has 93 tokens; legal: 1 to .*=41$"):
        validate_datasets(make(records, limit=41))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that a dataset was looked at."""
    looks: list[int] = []
    summarise = validation.summarise

    def counted(records: Any, form: Any, check_of: Any) -> Any:
        looks.append(len(records))
        return summarise(records, form, check_of)

    monkeypatch.setattr("rlhpc.data.prompts.summarise", counted)
    return looks


def test_a_dataset_is_looked_at_once(make, looked: list[int]) -> None:
    assert validate_datasets(make(sums(3))) == validate_datasets(make())
    assert looked == [3]


def test_it_is_looked_at_again_once_anything_has_changed(make, looked: list[int], tmp_path: Path) -> None:
    validate_datasets(make(sums(3)))
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace("0+0", "0-0"))
    assert validate_datasets(make())[0].example == "Q: 0-0=?"
    validate_datasets(make(limit=39))
    validate_datasets(make(reference_field="question"))
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<pad>"}))
    validate_datasets(make())
    model = {"chat_template_kwargs": {"style": "short"}}
    validate_datasets(make().model_copy(update={"model": make().model.model_copy(update=model)}))
    assert looked == [3] * 6


def test_references_are_checked_again_when_the_file_of_the_judges_template_has_changed(
    make, looked: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "template.txt"
    config = make(sums(3)).model_copy(update={"judge": JudgeConfig(template_file=str(file))})
    for text in ("{completion}", "{completion}", "{reference} {completion}"):
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        validate_datasets(config)
    assert looked == [3, 3]


@pytest.mark.parametrize("left", ["", '{"num_rec', "[1]", "{}", '{"of_another": 1}', "\\ud800"])
def test_what_was_kept_and_is_damaged_is_made_again(make, looked: list[int], tmp_path: Path, left: str) -> None:
    found = validate_datasets(make(sums(3)))
    (file,) = (tmp_path / "cache" / "datasets").iterdir()
    file.write_text(left)
    assert validate_datasets(make()) == validate_datasets(make()) == found
    assert looked == [3, 3]


def test_a_fault_is_looked_for_again(make, looked: list[int]) -> None:
    config = make([{"question": "x" * 90, "answer": "1"}])
    for _ in range(2):
        with pytest.raises(DataError, match="93 tokens"):
            validate_datasets(config)
    assert looked == [1, 1]
