"""What `rlhpc check` shows of prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.checks.preflight import (
    date_in_prompts,
    few_records,
    first_prompt,
    stop_tokens,
    thinking_in_answers,
    untold_tools,
)
from rlhpc.config.rules import Config
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.data.validation import DatasetSummary
from tests import build
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files

CONFIG = build.config(data={"path": "train.jsonl", "task": "regex", "max_completion_tokens": 7})


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


def test_a_prompt_that_does_not_say_how_to_mark_an_answer_is_a_warning() -> None:
    config = CONFIG.model_copy(update={"data": (CONFIG.data[0].model_copy(update={"task": "math_answer"}),)})
    warned = "warning     this prompt asks for no \\boxed{…} and no ####"
    assert first_prompt(config, 0, found("1+1=?"))[-1].startswith(warned)
    for text in ("1+1=? Answer in \\boxed{}.", "1+1=?\n#### "):
        assert not any("warning" in line for line in first_prompt(config, 0, found(text)))
    assert not any("warning" in line for line in first_prompt(CONFIG, 0, found("1+1=?")))


def test_prompts_that_tell_their_answer_are_a_warning() -> None:
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_showing_reference=40))[2:]
    assert line.startswith(
        "warning     40 of 40 prompts tell the answer that is looked for (data.reference_field='answer')"
    )
    assert len(first_prompt(CONFIG, 0, replace(found("Q"), num_showing_reference=20))) == 2


def test_prompts_that_are_all_the_same_are_a_warning() -> None:
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_distinct=4))[2:]
    assert line.startswith(
        "warning     only 4 prompts of 40 differ: prompt_template='{prompt}' may name the wrong field"
    )
    assert len(first_prompt(CONFIG, 0, replace(found("Q"), num_distinct=39))) == 2


def test_places_for_pictures_are_a_warning() -> None:
    (line,) = first_prompt(CONFIG, 0, replace(found("Q"), num_with_pictures=3, picture_field="images"))[2:]
    assert "3 of 40 prompts have a place for a picture" in line
    assert "and records have 'images', which nobody reads" in line


def test_fewer_records_than_a_step_takes_are_a_warning() -> None:
    (line,) = few_records(CONFIG, [replace(found("Q"), num_records=1)])
    assert "admission.groups_per_step=2, and the datasets have 1 record" in line
    assert few_records(CONFIG, [found("Q")]) == []


def test_tools_that_no_prompt_names_are_a_warning() -> None:
    settings = {"task": "regex", "environment": "tools", "use_chat_template": True}
    config = build.config(data=settings, environment={"tools": ["calculator"]})
    (line,) = untold_tools(config, [found("Q")])
    assert "the prompt names no calculator" in line
    assert untold_tools(config, [found("You have a calculator.")]) == []


def test_a_date_in_prompts_is_a_warning_unless_it_is_set(tmp_path: Path) -> None:
    template = "{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}{{ day }}"
    make_tokenizer_files(tmp_path, chat_template=template)
    chat = CONFIG.model_copy(update={"data": (CONFIG.data[0].model_copy(update={"use_chat_template": True}),)})
    assert "writes today's date" in date_in_prompts(chat, PromptTokenizer(tmp_path))[0]
    assert date_in_prompts(chat, PromptTokenizer(tmp_path, {"day": "1"})) == []
    assert date_in_prompts(CONFIG, PromptTokenizer(tmp_path)) == []


def test_thinking_that_is_judged_too_is_a_warning_unless_it_is_left_out(tmp_path: Path) -> None:
    thinks = PromptTokenizer(make_tokenizer_files(tmp_path / "thinks", chat_template=CHATML + "<think></think>"))
    plain = PromptTokenizer(make_tokenizer_files(tmp_path / "plain", chat_template=CHATML))

    def config(**changes: object) -> Config:
        data = CONFIG.data[0].model_copy(update={"use_chat_template": True, **changes})
        return CONFIG.model_copy(update={"data": (data,)})

    assert thinking_in_answers(config(), thinks) == [
        "warning     train: regex may judge the model's thinking too; "
        'data.thinking_end = "</think>" leaves it out, if the model thinks'
    ]
    for settings in (
        config(thinking_end="</think>"),
        config(task="math_answer"),
        config(use_chat_template=False),
        config(environment="tools"),
    ):
        assert thinking_in_answers(settings, thinks) == []
    assert thinking_in_answers(config(), plain) == []


def test_a_model_without_an_end_is_a_warning(tmp_path: Path) -> None:
    assert stop_tokens(PromptTokenizer(make_tokenizer_files(tmp_path / "model"))) == "stop        '<eos>' (2)"
    nameless = PromptTokenizer(make_tokenizer_files(tmp_path / "nameless", eos_token=None))
    ends = DialogueTemplate(PromptTokenizer(make_tokenizer_files(tmp_path / "chat", chat_template=CHATML)))
    assert stop_tokens(PromptTokenizer(tmp_path / "chat")) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(PromptTokenizer(tmp_path / "chat"), ends) == "stop        '<eos>' (2), '</turn>' (5)"
    assert stop_tokens(nameless).startswith("warning     the model names no end-of-sequence token")
