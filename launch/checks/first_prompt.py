"""Lines of `rlhpc check` about a dataset: a prompt as the model sees it, and the tokens that end an answer.

Input: DatasetSummary, tokenizer.  Output: lines.
"""

from __future__ import annotations

from launch.common.text_table import printable_line
from rlhpc.config import Config
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.dialogue_template import DialogueTemplate
from rlhpc.data.thinking import THINKING_END
from rlhpc.data.tokenizer import PromptTokenizer

_MOST_LINES = 12
# Tasks that read what stands before an answer, or take it for one.
JUDGE_EVERYTHING = frozenset(
    ("exact_match", "instruction_following", "json_schema", "llm_judge", "multiple_choice", "regex", "token_f1")
)
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
    said += control_tokens(found)
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


def stop_tokens(tokenizer: PromptTokenizer, dialogue: DialogueTemplate | None = None) -> str:
    """What ends a completion before its limit, or the turns of a dialogue."""
    tokens = tokenizer.stop_token_ids if dialogue is None else dialogue.stop_token_ids
    if not tokens:
        return "warning     the model names no end-of-sequence token: every completion ends at max_completion_tokens"
    named = ", ".join(f"{tokenizer.decode([token], keep_special_tokens=True)!r} ({token})" for token in tokens)
    return f"stop        {named}"
