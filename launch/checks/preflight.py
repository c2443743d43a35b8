"""Find every error that can be found before any process is started.

Input: Config.  Output: a summary of model and data; raises ConfigError that names the key.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checks.memory_verdict import refuse_small_cache, refuse_unfit_ranks
from launch.checks.model_files import read_model, refuse_other_vocabulary, refuse_unknown_tokens, refuse_untrainable
from launch.checks.services import refuse_unfit_services
from launch.checks.teachers import asked_teachers, refuse_unfit_teachers
from launch.common.text import counted, printable_line
from rlhpc.base.hf_config import language_model
from rlhpc.base.own_tools import name_of, schemas_of_servers, told_tools
from rlhpc.base.run_directory import RunLayout
from rlhpc.base.user_code import look_up
from rlhpc.config.rules import Config, supervised
from rlhpc.config.tables import AGENT, CONTAINER, OWN_REWARD, WHOLE_RECORD, DataConfig
from rlhpc.config.tables_services import LIBRARIES, runs_programs
from rlhpc.config.tables_sft import DemonstrationsConfig
from rlhpc.data.demonstrations import Demonstration, Demonstrations, open_demonstrations
from rlhpc.data.files import dataset_files, read_rows
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.prompts import validate_datasets
from rlhpc.data.tokenizer import THINKING_END, PromptTokenizer
from rlhpc.data.validation import TOOLS_FIELDS, DatasetSummary
from rlhpc.environments.tools import FORMS, Call, open_collection, schemas_of
from rlhpc.models.adapter import (
    chosen_layers,
    matrices_of,
    refuse_idle_stages,
    refuse_merged_tied_head,
    refuse_other_adapter,
    refuse_packed_base,
    refuse_unserved_adapters,
)
from rlhpc.models.routes import MixtureForm
from rlhpc.models.shape import ModelShape, ParallelLayout, refuse_unsupported
from rlhpc.protocol.environment import TOOL_SCHEMAS
from rlhpc.protocol.errors import ConfigError, SandboxError
from rlhpc.protocol.types import Bool, Int32
from rlhpc.rewards.code_place import check_sandbox, described_languages
from rlhpc.rewards.environments import validate_environment
from rlhpc.rewards.registry import BUILT_IN, JUDGE_EVERYTHING, asks_for_record, composite_reference_check, validate_task
from rlhpc.rewards.reward_model import label_of
from rlhpc.rewards.service_client import read_key

# --------------------------------------------------------------------------------------------------------- first prompt
#
# Lines of `rlhpc check` about a dataset: a prompt as the model sees it, and the tokens that end an answer.
#
# Input: DatasetSummary, tokenizer.  Output: lines.

_MOST_LINES = 12
_FIRST_WORDS = ("The", "the", "7")  # possible beginnings of an answer
_MOST_PROMPTS = 0.9  # share of a dataset whose properties are taken for those of all prompts
MARKS = ("boxed", "####")  # by which a prompt tells how to mark an answer


def first_prompt(config: Config, place: int, found: DatasetSummary) -> list[str]:
    """The first prompt of a dataset, and a warning if references are longer than a completion may be."""
    said = [f"prompt      {found.example_source}, {found.example_tokens:,} tokens:", *_quoted(found.example)]
    if found.num_references_longer:
        share = found.num_references_longer / found.num_references_counted
        limit = config.max_completion_tokens(place)
        said.append(f"warning     {share:.1%} of the references have more tokens than completions may have ({limit:,})")
    said += [f"warning     {each}" for each in _what_prompts_tell(config, place, found)]
    tasks = {part for task in config.data[place].all_tasks for part in config.parts_of(task)}
    if "math_answer" in tasks and not any(mark in found.example for mark in MARKS):
        said.append(
            "warning     this prompt asks for no \\boxed{…} and no ####, and math_answer reads no other answer; "
            "prompt_template or system_prompt can ask for it"
        )
    return said


def _quoted(text: str) -> list[str]:
    """Lines of a text, without the middle of a long one."""
    lines = text.split("\n")
    if len(lines) > _MOST_LINES:
        left_out = len(lines) - _MOST_LINES + 1
        lines = [*lines[: _MOST_LINES - 2], f"… {left_out} lines …", lines[-1]]
    return [f"  | {printable_line(line)}" for line in lines]


def _what_prompts_tell(config: Config, place: int, found: DatasetSummary) -> Iterator[str]:
    """Warn of prompts that spell control tokens, contain their answer, repeat each other, or need pictures."""
    data = config.data[place]
    if found.num_spelling_control:  # in texts from the web
        yield (
            f"{found.num_spelling_control:,} of {found.num_records:,} records spell control tokens in their own text, "
            f"the first {found.spelling_control}; the model reads them as the ends of messages"
        )
    if found.num_showing_reference >= _MOST_PROMPTS * found.num_records:
        yield (
            f"{found.num_showing_reference:,} of {found.num_records:,} prompts tell the answer that is looked for "
            f"(data.reference_field={data.reference_field!r}): to copy it is rewarded. In a template a literal brace "
            "is doubled: \\boxed{{answer}}"
        )
    if found.num_references_doubted:
        num, tried = found.num_references_doubted, found.num_references_checked
        are = "is" if num == 1 else "are"
        yield f"{num:,} of {tried:,} references {are} doubtful, the first at {found.doubted_reference}"
    is_agents = data.environment == AGENT  # its prompts are all the beginning of a dialogue
    if not is_agents and 0 < found.num_distinct < _MOST_PROMPTS * found.num_records:
        field, template = data.prompt_field, data.prompt_template
        key = f"data.prompt_field={field!r}" if field else f"prompt_template={template!r}"
        yield (
            f"only {counted(found.num_distinct, 'prompt')} of {found.num_records:,} differ: "
            f"{key} may name the wrong field, or the dataset repeats itself"
        )
    if found.tools_field and not data.environment:
        yield (
            f"records have {found.tools_field!r}, schemas of tools, of which prompts do not tell, and without a "
            'data.environment nobody runs calls; an own environment, or "agent", can offer them'
        )
    if found.num_with_pictures:
        beside = f", and records have {found.picture_field!r}, which nobody reads" if found.picture_field else ""
        yield (
            f"{found.num_with_pictures:,} of {found.num_records:,} prompts have a place for a picture or a sound "
            f"(<image> or the like){beside}: models here read texts, and take it for a word"
        )


def prompt_warnings(config: Config, tokenizer: PromptTokenizer, found: Sequence[DatasetSummary]) -> Iterator[str]:
    """Warn of today's date in prompts, of thinking that is judged, of prompts that end wrongly or name no tools.

    found: of each dataset.
    """
    if tokenizer.writes_date and any(each.may_be_chat or each.environment for each in config.data):
        yield (
            "the chat template writes today's date, so that prompts change from day to day, also within a run; "
            "model.chat_template_kwargs can set it, if the template has a variable for it"
        )
    for data, summary in zip(config.data, found, strict=True):
        tasks = {part for task in data.all_tasks for part in config.parts_of(task)} & JUDGE_EVERYTHING
        if tokenizer.may_think and tasks and data.may_be_chat and not data.thinking_end and not data.environment:
            yield (
                f"{data.title}: {', '.join(sorted(tasks))} may judge the model's thinking too; "
                f'data.thinking_end = "{THINKING_END}" leaves it out, if the model thinks'
            )
        if not data.environment and summary.last_token in tokenizer.stop_token_ids:
            yield (
                f"the prompt of {summary.example_source} ends with {_last_token(tokenizer, summary)!r}, which ends a "
                "completion: the chat template may lack what begins an answer (add_generation_prompt)"
            )
        if not data.may_be_chat and _ends_in_a_blank_that_moves(summary.example, tokenizer):
            yield (
                f"the prompt of {summary.example_source} ends in a blank (data.prompt_template="
                f"{data.prompt_template!r}), and the tokenizer writes a blank and the word behind it as one token: the "
                "model begins in the middle of it; usual: no blank at the end"
            )
        told = told_tools(config.environment.tools, config.tool_servers).schemas if data.environment == "tools" else ()
        if untold := [name for name in map(name_of, told) if name not in summary.example]:
            yield (
                f"environment.tools: the prompt names no {', '.join(untold)}: the chat template has no place for "
                "tools, and the model learns of them from nobody; a system_prompt, or a template that writes `tools`, "
                "can tell it"
            )
    has_calls = config.environment.tools or config.mcp or any(data.environment == AGENT for data in config.data)
    form, asked = form_of_calls(tokenizer) if has_calls else "", config.environment.call_form
    if form not in ("", asked):
        yield (
            f"environment.call_form={asked!r}, and the chat template writes calls as {form!r}: those of a model that "
            f"learnt from it are not read; usual: {form!r}"
        )
    number, groups = sum(each.num_records for each in found), config.admission.groups_per_step
    if number < groups:
        yield (
            f"admission.groups_per_step={groups}, and the datasets have {counted(number, 'record')}: a step takes the "
            "same prompt several times"
        )


def form_of_calls(tokenizer: PromptTokenizer) -> str:
    """The environment.call_form in which the chat template writes a call; "" if it is none of them."""
    call, tool = Call("calculator", {"expression": "a"}), TOOL_SCHEMAS["calculator"]
    told = {"name": call.name, "arguments": {**call.arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": told}]}
    try:
        turn = DialogueTemplate(tokenizer, [tool]).demonstration([{"role": "user", "content": "Q"}, said])[1]
    except ConfigError:  # it refuses calls, or an empty text
        return ""
    return next((form for form, calls_in in FORMS.items() if calls_in(turn, schemas_of([tool])) == [call]), "")


def _ends_in_a_blank_that_moves(text: str, tokenizer: PromptTokenizer) -> bool:
    """True if a text ends in a blank whose token changes when an answer follows."""
    if not text.endswith((" ", "\t")):
        return False
    alone = list(tokenizer.encode_rendered(text))
    return any(list(tokenizer.encode_rendered(text + word))[: len(alone)] != alone for word in _FIRST_WORDS)


def refuse_ended_prompts(data: DataConfig, tokenizer: PromptTokenizer, found: DatasetSummary) -> None:
    """Raise ConfigError if the tokenizer ends every prompt with an end of sequence, after which nothing follows."""
    if data.environment or found.last_token not in tokenizer.stop_token_ids:
        return
    if found.example.endswith(_last_token(tokenizer, found)):  # by its own text: a warning
        return
    raise ConfigError(
        f"model.path: tokenizer.json puts {_last_token(tokenizer, found)!r}, which ends a completion, behind the "
        f"prompt of {found.example_source}, as behind every text; legal: a post_processor that adds none (set "
        "add_eos_token to false, and save the tokenizer again), or data.use_chat_template=true"
    )


def _last_token(tokenizer: PromptTokenizer, found: DatasetSummary) -> str:
    return tokenizer.decode([found.last_token], keep_special_tokens=True)


def stop_tokens(tokenizer: PromptTokenizer, dialogue: DialogueTemplate | None = None, stop: Sequence[str] = ()) -> str:
    """Line about the tokens and texts that end a completion, or a turn of a dialogue.  stop: generation.stop."""
    tokens = tokenizer.stop_token_ids if dialogue is None else dialogue.stop_token_ids
    if not tokens and not stop:
        return "warning     the model names no end-of-sequence token: every completion ends at max_completion_tokens"
    named = [f"{tokenizer.decode([token], keep_special_tokens=True)!r} ({token})" for token in tokens]
    return f"stop        {', '.join([*named, *map(repr, stop)])}"


# ------------------------------------------------------------------------------------------------------------ preflight

_INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*|(?:ba|da|z|k)?sh|perl|ruby|node|Rscript|julia|php")
_PLAIN_FLAGS = ("-u", "-P", "-I", "-E", "-s", "-S", "-B", "-O", "-OO", "-x", "-e", "-l")  # without a value of their own


@dataclass(frozen=True, slots=True)
class Findings:
    """Facts about model and data that preflight has found."""

    model: Mapping[str, Any]  # config.json
    tokenizer: PromptTokenizer
    shape: ModelShape | None  # None: an unknown family
    max_positions: int
    datasets: Sequence[DatasetSummary]
    sandbox: str = ""  # isolation of programs on this node, if a task runs any
    containers: str = ""  # those of tasks, tried on this node
    demonstrations: Demonstrations | None = None  # of supervised fine-tuning

    @property
    def model_type(self) -> str:
        """The model's family in config.json."""
        return str(self.model.get("model_type", "?"))


def preflight(config: Config, *, roles_run_here: bool = True) -> Findings:
    """Check model directory, layout, task, dataset and installed parts, cheapest first.  Raises ConfigError.

    roles_run_here: False if roles run in another environment, so that packages of this one do not matter.
    """
    model, tokenizer = _model_of(config)
    shape = _shape_that_fits_the_layout(config, model)
    refuse_untrainable(model, config.model.path / "config.json")
    _refuse_unfit_engine(config, model, shape)
    if config.algorithm.routing_replay:
        MixtureForm.of_replayed(config.model.path)
    refuse_packed_base(config, model)
    if shape is not None and config.lora.rank:
        _refuse_unfit_adapters(config, model, shape)
    refuse_unfit_services(config)
    if roles_run_here:
        require_parts(config)
    for key, path in config.algorithm.own_formulas:  # tried by the trainer, when the run starts
        look_up(key, path)
    if config.is_supervised:
        return _look_at_demonstrations(config, model, tokenizer, shape)
    return _look_at_prompts(config, model, tokenizer, shape, roles_run_here=roles_run_here)


def route_lines(config: Config, findings: Findings) -> Iterator[str]:
    """Lines of `rlhpc check` about a mixture's routes: what they cost, or what is missed without."""
    if (form := MixtureForm.of(findings.model)) is None or config.is_supervised:
        return
    name = f"{counted(len(form.layers), 'mixture')} of {form.num_experts} experts, {form.top_k} a token"
    if config.algorithm.routing_replay:
        kept = "kept in segments" if config.buffer.keep_routes else "in memory and on the wire alone"
        yield f"routes      {name}: {form.bytes_per_token} bytes a token before they are packed; {kept}"
    elif config.model.dtype != "float32":
        yield (
            f"warning     {name}, in {config.model.dtype}, without algorithm.routing_replay: where engine and trainer "
            "choose different experts, their log-probabilities differ (policy/mismatch_kl)"
        )


def has_stage_before(config: Config) -> bool:
    """Whether supervised fine-tuning comes before this run; not of one that has its model already."""
    if config.is_supervised or not config.demonstrations:
        return False
    root = config.run_directory
    return config.model.path != RunLayout(root.with_name(f"{root.name}-sft")).model


def stage_of(config: Config) -> Config:
    """Settings of supervised fine-tuning, alone or before RL.  Tokenises all demonstrations to count the steps.

    Raises ConfigError, DataError.
    """
    if not config.demonstrations:
        raise ConfigError(
            "demonstrations: the run file has no table [[demonstrations]] to learn from; legal: 1 or more"
        )
    _model_of(config)  # else an error of the model would be reported as one of the data
    return supervised(config, open_demonstrations(config).num_conversations)


def preflight_sampling(config: Config, *, roles_run_here: bool = True) -> Findings:
    """Check what preflight() does, without training.  Raises ConfigError."""
    model, tokenizer = _model_of(config, is_trained=False)
    if roles_run_here:
        _engine_is_installed(config)
    return _look_at_prompts(config, model, tokenizer, None, roles_run_here=roles_run_here)


def _sandbox_here(config: Config) -> str:
    """Isolation of programs on this node; "" if no task runs any.  Raises ConfigError if it is too weak."""
    python = config.sandbox.python
    if python and runs_programs(config) and shutil.which(python) is None:
        raise ConfigError(f"sandbox.python={python!r}: no such program here; legal: an interpreter, 3.9 or later")
    try:
        layers = check_sandbox(config.sandbox, is_needed=runs_programs(config))
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    return f"{layers.described()}; {described_languages(config.sandbox)}" if layers else ""


def _containers_here(config: Config) -> str:
    """Containers of tasks, tried on this node; "" if the run has none.  Raises ConfigError, DataError."""
    if all(dataset.environment != CONTAINER for dataset in config.data):
        return ""
    from rlhpc.environments.container import check_containers  # loading numpy takes a while

    try:
        return check_containers(config)
    except SandboxError as error:
        raise ConfigError(str(error)) from error


def _models_can_be_asked(config: Config) -> None:
    """Raise ConfigError if a judge's or service's key is missing, or the reward model lacks the class that counts."""
    judge, tasks = config.judge, config.judging_tasks
    try:
        if "llm_judge" in tasks and not judge.service:
            read_key(judge.key_variable, judge.key_file, "judge.")
        for task in tasks:
            if (service := config.service_asked_by(task)) is not None:
                read_key(service.key_variable, service.key_file, f"service {service.name!r}: ")
        for service in asked_teachers(config).values():
            read_key(service.key_variable, service.key_file, f"service {service.name!r}: ")
        if "reward_model" in tasks and (service := config.service_asked_by("reward_model")) is not None:
            label_of(config.reward_model, service)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _look_at_prompts(
    config: Config, model: dict[str, Any], tokenizer: PromptTokenizer, shape: ModelShape | None, *, roles_run_here: bool
) -> Findings:
    _tasks_are_there(config)
    _environments_are_there(config)
    refuse_unfit_teachers(config, tokenizer)
    if roles_run_here:
        _models_can_be_asked(config)
    sandbox, containers = (_sandbox_here(config), _containers_here(config)) if roles_run_here else ("", "")
    longest = config.generation.max_tokens
    positions = int(model.get("max_position_embeddings") or longest)
    if longest > positions:
        raise ConfigError(
            f"generation.max_prompt_tokens + generation.max_completion_tokens = {longest} is more than the model's "
            f"context of {positions} (max_position_embeddings in {config.model.path / 'config.json'}); "
            f"legal: {positions} or less together"
        )
    found = validate_datasets(
        config,
        lambda task: composite_reference_check(
            task, config.composite, config.judge, config.sandbox, config.reward_model
        ),
    )
    for dataset, summary in zip(config.data, found, strict=True):
        refuse_unknown_tokens(model, config.model.path, summary.highest_token, summary.highest_source)
        _refuse_thinking_that_never_ends(dataset.thinking_end, tokenizer, summary)
        refuse_ended_prompts(dataset, tokenizer, summary)
    _refuse_stops_that_never_come(config.generation.stop, tokenizer)
    return Findings(model, tokenizer, shape, positions, found, sandbox, containers)


def _look_at_demonstrations(
    config: Config, model: dict[str, Any], tokenizer: PromptTokenizer, shape: ModelShape | None
) -> Findings:
    longest = config.longest_conversation
    positions = int(model.get("max_position_embeddings") or longest)
    if longest > positions:
        raise ConfigError(
            f"sft.max_tokens={longest} (none: trainer.token_budget) is more than the model's context of {positions} "
            f"(max_position_embeddings in {config.model.path / 'config.json'}); legal: {positions} or less"
        )
    found = open_demonstrations(config)
    for table, corpus in zip(config.demonstrations, found.corpora, strict=True):
        refuse_unknown_tokens(model, config.model.path, corpus.highest_token, str(table.path))
    return Findings(model, tokenizer, shape, positions, (), demonstrations=found)


def demonstration_lines(config: Config, findings: Findings) -> Iterator[str]:
    """Lines of `rlhpc check` about demonstrations: sizes, and the beginning of the first conversation."""
    found = findings.demonstrations
    assert found is not None
    kind = config.sft.counts
    for table, corpus in zip(config.demonstrations, found.corpora, strict=True):
        dropped = f", {corpus.num_dropped:,} longer ones left out" if corpus.num_dropped else ""
        use = "for the held-out loss" if table.held_out else f"{corpus.num_learnt:,} of their tokens are learnt"
        yield f"data        {table.path}: {counted(len(corpus), kind)}{dropped}; {use}"
    are = "is" if found.num_held_out == 1 else "are"
    held_out = f"; {found.num_held_out:,} {are} held out" if found.num_held_out else ""
    yield f"epoch       {counted(found.num_conversations, kind)}{held_out}"
    for title, each in zip(("first      ", "rejected   "), found.learnt(0).sequences, strict=False):
        yield f"{title} {counted(len(each.token_ids), 'token')}; what is learnt stands in «»:"
        yield from _quoted(with_marks(each, findings.tokenizer))
    yield from (f"warning     {each}" for each in doubts_of_demonstrations(config, findings))


def doubts_of_demonstrations(config: Config, findings: Findings) -> Iterator[str]:
    """Warn of pairs without a difference, of empty answers, of a batch beyond the data, and of little to learn from."""
    if (found := findings.demonstrations) is None:
        return
    own, sft = found.num_conversations, config.sft
    for table, corpus in zip(config.demonstrations, found.corpora, strict=True):
        if corpus.num_equal:
            yield f"{table.path}: {corpus.num_equal:,} of {len(corpus):,} pairs are of two equal answers"
        if corpus.num_empty:
            empty = counted(corpus.num_empty, "answer")
            yield f"{table.path}: {empty} without a text, which teach the model when to say nothing"
        if corpus.num_untold:
            untold = counted(corpus.num_untold, "conversation")
            yield (
                f"{table.path}: {untold} with calls of a tool that no message and no field {table.tools_field!r} "
                f"(demonstrations.tools_field) describes: the model learns to make up tools{_with_schemas(table)}"
            )
    if sft.batch_size > own:
        yield (
            f"sft.batch_size={sft.batch_size} with an epoch of {counted(own, sft.counts)}: a step learns some of them "
            "several times"
        )
    if found.num_held_out > own and not any(table.held_out for table in config.demonstrations):
        left = f"{counted(own, sft.counts)} of {own + found.num_held_out:,}"
        yield f"sft.held_out={sft.held_out:g} leaves {left} to learn from"


def _with_schemas(table: DemonstrationsConfig) -> str:
    """A hint at a field of the first record that has schemas of tools, by its usual names."""
    fields = next((row for file in dataset_files(table.path, table.split) for row, _ in read_rows(file)), {})
    found = [name for name in TOOLS_FIELDS if name in fields and name != table.tools_field]
    return f"; demonstrations.tools_field={found[0]!r} tells of them" if found else ""


def with_marks(one: Demonstration, tokenizer: PromptTokenizer) -> str:
    """The text of a conversation, with what is learnt in «»."""
    runs = _runs(one.token_ids, one.loss_mask, tokenizer)
    return "".join(f"«{text}»" if is_learnt else text for is_learnt, text in runs)


def _runs(token_ids: Int32, loss_mask: Bool, tokenizer: PromptTokenizer) -> Iterator[tuple[bool, str]]:
    """(is learnt, text with special tokens) of stretches of a conversation, alternating."""
    borders = [0, *(place for place in range(1, len(token_ids)) if loss_mask[place] != loss_mask[place - 1]), None]
    for begin, end in itertools.pairwise(borders):
        yield bool(loss_mask[begin]), tokenizer.decode(token_ids[begin:end], keep_special_tokens=True)


def _refuse_thinking_that_never_ends(end: str, tokenizer: PromptTokenizer, found: DatasetSummary) -> None:
    """Raise ConfigError for an end of thinking that completions cannot have: every answer would be empty."""
    if end and end not in tokenizer.decode(tokenizer.encode_rendered(end)):
        raise ConfigError(
            f"data.thinking_end={end!r} is a special token, which the text that is judged does not show; legal: a text "
            "that it shows"
        )
    if end and found.example.rstrip().endswith(end):
        raise ConfigError(
            f"data.thinking_end={end!r}: the prompt of {found.example_source} ends with it already, so completions "
            "lack it; legal: leave it out, or a chat template that lets the model think"
        )


def _refuse_stops_that_never_come(stop: Sequence[str], tokenizer: PromptTokenizer) -> None:
    """Raise ConfigError for a stop string that no completion's text contains; special tokens are stop tokens."""
    for text in stop:
        special = tokenizer.spelt_control(text)
        if special and special != text:
            raise ConfigError(
                f"generation.stop={text!r} has the special token {special!r} in it, which no text of a completion "
                f"shows; legal: {special!r} alone, or a text without it"
            )
        written = tokenizer.decode(tokenizer.encode_rendered(f"a{text}"))  # some tokenizers drop a leading space
        if not special and text not in written:
            raise ConfigError(
                f"generation.stop={text!r}: the tokenizer of model.path cannot write it, and makes {written[1:]!r} of "
                "it; legal: a text that it can write"
            )


def _tasks_are_there(config: Config) -> None:
    for name in config.composite:
        if name in BUILT_IN:
            raise ConfigError(f"composite.{name}: there is a task {name!r} already; legal: another name")
    for dataset in config.data:
        named = (task for task in dataset.all_tasks if task != OWN_REWARD)
        for task in (part for each in named for part in config.parts_of(each)):
            arguments = config.rewards.task_arguments.get(task, {})
            validate_task(task, arguments)
            if asks_for_record(task, arguments) and dataset.reference_field != WHOLE_RECORD:
                raise ConfigError(
                    f"data.reference_field={dataset.reference_field!r}: data.task={task!r} asks for the whole record "
                    f'(its parameters say so); legal: "{WHOLE_RECORD}" (docs/rewards.md, Your own reward function)'
                )


def _environments_are_there(config: Config) -> None:
    for dataset in config.data:
        if dataset.environment not in ("", AGENT):
            validate_environment(dataset.environment)
    schemas_of_servers(config.tool_servers, anew=True)  # they may have changed since the check before, in a notebook
    told_tools(config.environment.tools, config.tool_servers)
    if config.agent.function:
        look_up("agent.function", config.agent.function)
    if config.environment.corpus is not None:
        open_collection(config.environment.corpus)


def _model_of(config: Config, *, is_trained: bool = True) -> tuple[dict[str, Any], PromptTokenizer]:
    """config.json and the tokenizer of the policy, after a check that a critic's tokens are the same."""
    document = read_model(config.model.path)
    place = config.model.path / "config.json"
    tokenizer = PromptTokenizer.of(config.model)
    refuse_other_vocabulary(document, place, tokenizer.num_words, tokenizer.eos_tokens)
    if is_trained and config.critic.path is not None:
        _refuse_other_critic(config.critic.path, document, place)
    return document, tokenizer


def _refuse_other_critic(path: Path, model: Mapping[str, Any], place: Path) -> None:
    critic = read_model(path, "critic.path")
    refuse_untrainable(critic, path / "config.json")
    size, wanted = critic.get("vocab_size"), model.get("vocab_size")
    if size != wanted:
        raise ConfigError(
            f"critic.path={str(path)!r}: vocab_size={size}, and {place} has {wanted}: it would read other tokens than "
            "the policy writes; legal: a model with the policy's tokenizer"
        )


def _shape_that_fits_the_layout(config: Config, model: Mapping[str, Any]) -> ModelShape | None:
    """ModelShape, checked against the layout: Megatron supports some families, other backends all of transformers."""
    place = config.model.path / "config.json"
    try:
        if config.trainer.backend == "megatron":
            refuse_unsupported(model, place)
            ParallelLayout.of(config.trainer).refuse_unfit(model)
        return ModelShape.of(model)
    except KeyError as error:
        raise ConfigError(f"{place}: no {error}, which every {model.get('model_type')} has") from error


def _refuse_unfit_engine(config: Config, model: Mapping[str, Any], shape: ModelShape | None) -> None:
    """Raise ConfigError for settings that the engine would refuse after loading."""
    if not config.generation.has_model:
        return
    refuse_unfit_ranks(config, model, shape)
    if shape is not None:
        refuse_small_cache(config, shape)


# Sizes of heads that vLLM's attention has kernels for on a CPU, those of models whose keys are latents left out.
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def refuse_heads_of_gpus(config: Config, model: Mapping[str, Any]) -> None:
    """Raise ConfigError for a model that vLLM samples on GPUs alone, where there are none; model: config.json."""
    model = language_model(model)
    heads, hidden = model.get("num_attention_heads"), model.get("hidden_size")
    if config.generation.engine != "vllm" or not heads or not hidden or model.get("kv_lora_rank"):
        return
    size = model.get("head_dim") or hidden // heads
    if size not in CPU_HEADS:
        raise ConfigError(
            f"{config.model.path / 'config.json'}: heads of {size} (head_dim, or hidden_size / num_attention_heads), "
            f"which vLLM does not compute on a CPU; legal: {', '.join(map(str, CPU_HEADS))}, or a GPU"
        )


def _refuse_unfit_adapters(config: Config, model: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise ConfigError for lora.targets that the model or vLLM lacks, and for an adapter of other settings."""
    layers = chosen_layers(config.lora, matrices_of(shape.tensors))
    refuse_merged_tied_head(config, layers, is_tied=shape.is_tied)
    refuse_idle_stages(config, layers, shape.num_layers)
    where = config.trainer.device  # engines are on GPUs if trainers are
    refuse_unserved_adapters(config, layers, model, device="" if where == "auto" else where)
    if config.lora.initial is not None:
        refuse_other_adapter(config.lora, layers)


def require_parts(config: Config) -> None:
    """Raise ConfigError if a package or a program that the settings need is missing."""
    trainer = config.trainer
    backend = f"trainer.backend={trainer.backend!r}"
    needed = [("torch", backend, "extra 'trainer'"), ("transformers", backend, "extra 'trainer'")]
    if trainer.backend == "megatron":
        needed.append(("megatron.core", backend, "extra 'trainer'"))
    if trainer.backend == "deepspeed":
        needed.append(("deepspeed", backend, "extra 'deepspeed'"))
    if config.lora.quantization != "off":
        quantization = f"lora.quantization={config.lora.quantization!r}"
        needed.append(("bitsandbytes", quantization, "extra 'nf4', or set it to 'off'"))
    if trainer.transformer_engine:
        needed.append(("transformer_engine", "trainer.transformer_engine=true", "NVIDIA's wheels, or set it to false"))
    _engine_is_installed(config)
    _require(needed)


def _engine_is_installed(config: Config) -> None:
    if config.generation.engine == "vllm":
        _require([("vllm", "generation.engine='vllm'", "extra 'cpu' or 'gpu', or engine='transformers'")])
    elif config.generation.engine == "transformers":
        _require([("transformers", "generation.engine='transformers'", "extra 'trainer'")])
    environments = {dataset.environment for dataset in config.data}
    if AGENT in environments:
        _require([("aiohttp", "data.environment='agent'", "extra 'agents'")])
    _require([(each, f"data.environment={each!r}", f"extra {each!r}") for each in LIBRARIES if each in environments])
    command = config.agent.command
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"agent.command={list(command)}: no program {command[0]!r} here; legal: one on PATH, or with its directory"
        )
    script = _script_of(command)
    if script is not None and not Path(script).is_file():
        raise ConfigError(
            f"agent.command={list(command)}: no file {script!r} in {Path.cwd()}; legal: a script that is there, "
            "best with its whole path"
        )


def _script_of(command: Sequence[str]) -> str | None:
    """Return the script of an interpreter's command; None: another program, a module, or code after -c."""
    if not command or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return None
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    flags = list(options)
    rest = command[1 + len(flags) :]
    return rest[0] if rest and all(flag in _PLAIN_FLAGS for flag in flags) else None


def _require(needed: Iterable[tuple[str, str, str]]) -> None:
    """Raise ConfigError for missing modules; needed: (module, the key that needs it, its source)."""
    for module, key, source in needed:
        if not _is_installed(module):
            raise ConfigError(
                f"{key} needs the package {module}, which is not installed here ({source}; README, Install)"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
