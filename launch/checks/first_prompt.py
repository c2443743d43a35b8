"""Lines of `rlhpc check` about a dataset: a prompt as the model sees it, and the tokens that end an answer.

Input: DatasetSummary, tokenizer.  Output: lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.common.counted import counted
from launch.common.text_table import printable_line
from rlhpc.config import Config
from rlhpc.config_data import DataConfig
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.thinking import THINKING_END
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError
from rlhpc.rewards.registry import JUDGE_EVERYTHING

_MOST_LINES = 12
_MOST_PROMPTS = 0.9  # of a dataset: what is so of them is meant for all
MARKS = ("boxed", "####")  # by which a prompt tells how to mark an answer


def first_prompt(config: Config, place: int, found: DatasetSummary) -> list[str]:
    """The first prompt of a dataset, and a warning where references are longer than a completion may be."""
    lines = found.example.split("\n")
    if len(lines) > _MOST_LINES:
        left_out = len(lines) - _MOST_LINES + 1
        lines = [*lines[: _MOST_LINES - 2], f"… {left_out} lines …", lines[-1]]
    said = [f"prompt      {found.example_source}, {found.example_tokens:,} tokens:"]
    said += [f"  | {printable_line(line)}" for line in lines]
    if found.num_references_longer:
        share = found.num_references_longer / found.num_references_counted
        limit = config.max_completion_tokens(place)
        said.append(f"warning     {share:.1%} of the references have more tokens than completions may have ({limit:,})")
    said += [*control_tokens(found), *_what_prompts_tell(config, place, found)]
    tasks = {part for task in config.data[place].all_tasks for part in config.parts_of(task)}
    if "math_answer" in tasks and not any(mark in found.example for mark in MARKS):
        said.append(
            "warning     this prompt asks for no \\boxed{…} and no ####, and math_answer reads no other answer; "
            "prompt_template or system_prompt can ask for it"
        )
    return said


def control_tokens(found: DatasetSummary) -> list[str]:
    """A warning where records speak in the model's control tokens, as a text from the web may."""
    if not found.num_spelling_control:
        return []
    return [
        f"warning     {found.num_spelling_control:,} of {found.num_records:,} records spell control tokens in their "
        f"own text, the first {found.spelling_control}; the model reads them as the ends of messages"
    ]


def _what_prompts_tell(config: Config, place: int, found: DatasetSummary) -> list[str]:
    """A warning where prompts tell their answer, are mostly the same, have places for pictures, or are too few."""
    said, data = [], config.data[place]
    if found.num_showing_reference >= _MOST_PROMPTS * found.num_records:
        said.append(
            f"warning     {found.num_showing_reference:,} of {found.num_records:,} prompts tell the answer that is "
            f"looked for (data.reference_field={data.reference_field!r}): to copy it is rewarded. In a template a "
            "literal brace is doubled: \\boxed{{answer}}"
        )
    if 0 < found.num_distinct < _MOST_PROMPTS * found.num_records:
        said.append(
            f"warning     only {counted(found.num_distinct, 'prompt')} of {found.num_records:,} differ: "
            f"{_keys_of_prompt(config, place)} may name the wrong field, or the dataset repeats itself"
        )
    if found.num_with_pictures:
        beside = f", and records have {found.picture_field!r}, which nobody reads" if found.picture_field else ""
        said.append(
            f"warning     {found.num_with_pictures:,} of {found.num_records:,} prompts have a place for a picture or a "
            f"sound (<image> or the like){beside}: models here read texts, and take it for a word"
        )
    return said


def few_records(config: Config, found: Sequence[DatasetSummary]) -> list[str]:
    """A warning where a step takes more prompts than all datasets have."""
    number, groups = sum(each.num_records for each in found), config.admission.groups_per_step
    if number >= groups:
        return []
    return [
        f"warning     admission.groups_per_step={groups}, and the datasets have {counted(number, 'record')}: a step "
        "takes the same prompt several times"
    ]


def _keys_of_prompt(config: Config, place: int) -> str:
    data = config.data[place]
    return (
        f"data.prompt_field={data.prompt_field!r}" if data.prompt_field else f"prompt_template={data.prompt_template!r}"
    )


def untold_tools(config: Config, found: Sequence[DatasetSummary]) -> list[str]:
    """A warning for tools that the first prompt does not name."""
    said = []
    for data, summary in zip(config.data, found, strict=True):
        untold = [name for name in config.environment.tools if name not in summary.example]
        if data.environment == "tools" and untold:
            said.append(
                f"warning     environment.tools: the prompt names no {', '.join(untold)}: the chat template has no "
                "place for tools, and the model learns of them from nobody; a system_prompt, or a template that writes "
                "`tools`, can tell it"
            )
    return said


def refuse_ended_prompts(data: DataConfig, tokenizer: PromptTokenizer, found: DatasetSummary) -> None:
    """Raises ConfigError where the tokenizer puts an end of sequence behind every prompt: nothing is to come then."""
    if data.environment or found.last_token not in tokenizer.stop_token_ids or _spells_its_end(tokenizer, found):
        return
    raise ConfigError(
        f"model.path: tokenizer.json puts {_last_token(tokenizer, found)!r}, which ends a completion, behind the "
        f"prompt of {found.example_source}, as behind every text; legal: a post_processor that adds none (set "
        "add_eos_token to false, and save the tokenizer again), or data.use_chat_template=true"
    )


def ended_prompts(config: Config, tokenizer: PromptTokenizer, found: Sequence[DatasetSummary]) -> list[str]:
    """A warning where a prompt ends by its own text with what ends a completion."""
    return [
        f"warning     the prompt of {each.example_source} ends with {_last_token(tokenizer, each)!r}, which ends a "
        "completion: the chat template may lack what begins an answer (add_generation_prompt)"
        for data, each in zip(config.data, found, strict=True)
        if not data.environment and each.last_token in tokenizer.stop_token_ids
    ]


def _last_token(tokenizer: PromptTokenizer, found: DatasetSummary) -> str:
    return tokenizer.decode([found.last_token], keep_special_tokens=True)


def _spells_its_end(tokenizer: PromptTokenizer, found: DatasetSummary) -> bool:
    return found.example.endswith(_last_token(tokenizer, found))


def date_in_prompts(config: Config, tokenizer: PromptTokenizer) -> list[str]:
    """A warning where the chat template writes today's date into prompts."""
    has_chats = any(each.may_be_chat or each.environment for each in config.data)
    if not has_chats or not tokenizer.writes_date:
        return []
    return [
        "warning     the chat template writes today's date, so that prompts change from day to day, also within a run; "
        "model.chat_template_kwargs can set it, if the template has a variable for it"
    ]


def thinking_in_answers(config: Config, tokenizer: PromptTokenizer) -> list[str]:
    """A warning for each dataset where the model may think, and what it thinks is judged."""
    if not tokenizer.may_think:
        return []
    said = []
    for dataset in config.data:
        tasks = {part for task in dataset.all_tasks for part in config.parts_of(task)} & JUDGE_EVERYTHING
        if tasks and dataset.may_be_chat and not dataset.thinking_end and not dataset.environment:
            said.append(
                f"warning     {dataset.title}: {', '.join(sorted(tasks))} may judge the model's thinking too; "
                f'data.thinking_end = "{THINKING_END}" leaves it out, if the model thinks'
            )
    return said


def stop_tokens(tokenizer: PromptTokenizer, dialogue: DialogueTemplate | None = None, stop: Sequence[str] = ()) -> str:
    """What ends a completion before its limit, or the turns of a dialogue.  stop: generation.stop."""
    tokens = tokenizer.stop_token_ids if dialogue is None else dialogue.stop_token_ids
    if not tokens and not stop:
        return "warning     the model names no end-of-sequence token: every completion ends at max_completion_tokens"
    named = [f"{tokenizer.decode([token], keep_special_tokens=True)!r} ({token})" for token in tokens]
    return f"stop        {', '.join([*named, *map(repr, stop)])}"
