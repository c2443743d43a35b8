"""What `rlhpc check` shows of prompts."""

from __future__ import annotations

from pathlib import Path

from launch.checks.first_prompt import first_prompt, stop_tokens
from rlhpc.config import Config
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files

CONFIG = Config.model_validate(
    {
        "run": {"name": "test", "num_steps": 1},
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "task": "regex", "max_completion_tokens": 7},
        "generation": {"max_prompt_tokens": 8, "max_completion_tokens": 8},
        "admission": {"groups_per_step": 2, "group_size": 2},
        "trainer": {"token_budget": 64},
    }
)


def found(text: str, longer: int = 0) -> DatasetSummary:
    return DatasetSummary(40, 9, 9.0, "train.jsonl:3", text, "train.jsonl:1", 1234, 40, longer)


def test_a_prompt_is_shown_with_its_tokens_and_without_what_a_terminal_obeys() -> None:
    assert first_prompt(CONFIG, 0, found("Q:\x1b[2J  two  blanks\nA:")) == [
        "prompt      train.jsonl:1, 1,234 tokens:",
        "  | Q:?[2J  two  blanks",
        "  | A:",
    ]


def test_a_long_prompt_is_shown_by_its_ends() -> None:
    lines = first_prompt(CONFIG, 0, found("\n".join(str(n) for n in range(100))))
    assert len(lines) == 13
    assert lines[-2:] == ["  | … 89 lines …", "  | 99"]


def test_references_that_do_not_fit_are_a_warning() -> None:
    assert first_prompt(CONFIG, 0, found("Q", longer=3))[-1] == (
        "warning     7.5% of the references have more tokens than completions may have (7)"
    )


def test_a_model_without_an_end_is_a_warning(tmp_path: Path) -> None:
    assert stop_tokens(PromptTokenizer(make_tokenizer_files(tmp_path / "model"))) == "stop        '<eos>' (2)"
    nameless = PromptTokenizer(make_tokenizer_files(tmp_path / "nameless", eos_token=None))
    ends = DialogueTemplate(PromptTokenizer(make_tokenizer_files(tmp_path / "chat", chat_template=CHATML)))
    assert stop_tokens(PromptTokenizer(tmp_path / "chat")) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(PromptTokenizer(tmp_path / "chat"), ends) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(nameless).startswith("warning     the model names no end-of-sequence token")
