"""Find every error that can be found before any process is started.

Input: Config.  Output: a summary of model and data; raises ConfigError that names the key.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checks.first_prompt import refuse_ended_prompts
from launch.checks.memory.engine_verdict import refuse_small_cache, refuse_unfit_ranks
from launch.checks.model_files import (
    read_model,
    refuse_other_vocabulary,
    refuse_unknown_tokens,
    refuse_untrainable,
)
from rlhpc.config import Config
from rlhpc.config_data import AGENT, OWN_REWARD, WHOLE_RECORD
from rlhpc.config_environment import LIBRARIES
from rlhpc.config_sandbox import runs_programs
from rlhpc.data.dataset_summary import DatasetSummary
from rlhpc.data.mixture import validate_datasets
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.errors import ConfigError, SandboxError
from rlhpc.megatron_models import refuse_unsupported
from rlhpc.model_shape import ModelShape
from rlhpc.parallel_layout import ParallelLayout
from rlhpc.rewards.code_place import check_sandbox, described_languages
from rlhpc.rewards.composite import reference_check
from rlhpc.rewards.environments.registry import validate_environment
from rlhpc.rewards.environments.search import open_collection
from rlhpc.rewards.judge_endpoint import read_key
from rlhpc.rewards.registry import BUILT_IN, asks_for_record, validate_task
from rlhpc.user_code import look_up

_INTERPRETER = re.compile(r"(?:python|pypy)[\d.]*|(?:ba|da|z|k)?sh|perl|ruby|node|Rscript|julia|php")
_PLAIN_FLAGS = ("-u", "-P", "-I", "-E", "-s", "-S", "-B", "-O", "-OO", "-x", "-e", "-l")  # without a value of their own


@dataclass(frozen=True, slots=True)
class Findings:
    """What preflight learnt about model and data."""

    model: Mapping[str, Any]  # config.json
    tokenizer: PromptTokenizer
    shape: ModelShape | None  # None: a family whose sizes are not known here
    max_positions: int
    datasets: Sequence[DatasetSummary]
    sandbox: str = ""  # how programs are isolated on this node, where a task runs any

    @property
    def model_type(self) -> str:
        """The family, as config.json names it."""
        return str(self.model.get("model_type", "?"))


def preflight(config: Config, *, roles_run_here: bool = True) -> Findings:
    """Check model directory, layout, task, dataset and installed parts, cheapest first.  Raises ConfigError.

    roles_run_here: False where they run in another environment than this process, whose packages then say nothing.
    """
    model, tokenizer = _model_of(config)
    shape = _shape_that_fits_the_layout(config, model)
    refuse_untrainable(model, config.model.path / "config.json")
    _refuse_unfit_engine(config, model, shape)
    if roles_run_here:
        require_parts(config)
    for key, path in config.algorithm.own_formulas:  # tried where they are used, when the run starts
        look_up(key, path)
    return _look_at_prompts(config, model, tokenizer, shape, roles_run_here=roles_run_here)


def preflight_sampling(config: Config, *, roles_run_here: bool = True) -> Findings:
    """As preflight(), where nothing is trained.  Raises ConfigError."""
    model, tokenizer = _model_of(config, is_trained=False)
    if roles_run_here:
        _engine_is_installed(config)
    return _look_at_prompts(config, model, tokenizer, None, roles_run_here=roles_run_here)


def _sandbox_here(config: Config) -> str:
    """How programs are isolated on this node; "" where no task runs any.  Raises ConfigError if less than required."""
    python = config.sandbox.python
    if python and runs_programs(config) and shutil.which(python) is None:
        raise ConfigError(f"sandbox.python={python!r}: no such program here; legal: an interpreter, 3.9 or later")
    try:
        layers = check_sandbox(config.sandbox, is_needed=runs_programs(config))
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    return f"{layers.described()}; {described_languages(config.sandbox)}" if layers else ""


def _judge_has_its_key(config: Config) -> None:
    if "llm_judge" in config.judging_tasks:
        try:
            read_key(config.judge)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _look_at_prompts(
    config: Config,
    model: dict[str, Any],
    tokenizer: PromptTokenizer,
    shape: ModelShape | None,
    *,
    roles_run_here: bool,
) -> Findings:
    _tasks_are_there(config)
    _environments_are_there(config)
    if roles_run_here:
        _judge_has_its_key(config)
    sandbox = _sandbox_here(config) if roles_run_here else ""
    longest = config.generation.max_tokens
    positions = int(model.get("max_position_embeddings") or longest)
    if longest > positions:
        raise ConfigError(
            f"generation.max_prompt_tokens + generation.max_completion_tokens = {longest} is more than the model's "
            f"context of {positions} (max_position_embeddings in {config.model.path / 'config.json'}); "
            f"legal: {positions} or less together"
        )
    found = validate_datasets(
        config, lambda task: reference_check(task, config.composite, config.judge, config.sandbox)
    )
    for dataset, summary in zip(config.data, found, strict=True):
        refuse_unknown_tokens(model, config.model.path, summary.highest_token, summary.highest_source)
        _refuse_thinking_that_never_ends(dataset.thinking_end, tokenizer, summary)
        refuse_ended_prompts(dataset, tokenizer, summary)
    _refuse_stops_that_never_come(config.generation.stop, tokenizer)
    return Findings(model, tokenizer, shape, positions, found, sandbox)


def _refuse_thinking_that_never_ends(end: str, tokenizer: PromptTokenizer, found: DatasetSummary) -> None:
    """Nothing would be judged, and every reward would be that of an empty answer."""
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
    """A stop string is looked for in the text of a completion; one that is a special token counts as a stop token."""
    for text in stop:
        special = tokenizer.spelt_control(text)
        if special and special != text:
            raise ConfigError(
                f"generation.stop={text!r} has the special token {special!r} in it, which no text of a completion "
                f"shows; legal: {special!r} alone, or a text without it"
            )
        written = tokenizer.decode(tokenizer.encode_rendered(f"a{text}"))  # some drop a space at the beginning
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
    if config.agent.function:
        look_up("agent.function", config.agent.function)
    if config.environment.corpus is not None:
        open_collection(config.environment.corpus)


def _model_of(config: Config, *, is_trained: bool = True) -> tuple[dict[str, Any], PromptTokenizer]:
    """config.json and the tokenizer of the policy, after a look at whether a critic begins with the same tokens."""
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
    """Megatron's layers are written for these families only; the other backends run whatever transformers runs."""
    place = config.model.path / "config.json"
    try:
        if config.trainer.backend == "megatron":
            refuse_unsupported(model, place)
            ParallelLayout.of(config.trainer).refuse_unfit(model)
        return ModelShape.of(model)
    except KeyError as error:
        raise ConfigError(f"{place}: no {error}, which every {model.get('model_type')} has") from error


def _refuse_unfit_engine(config: Config, model: Mapping[str, Any], shape: ModelShape | None) -> None:
    """What vLLM refuses after it has been loaded."""
    if config.generation.engine != "vllm":
        return
    refuse_unfit_ranks(config, model, shape)
    if shape is not None:
        refuse_small_cache(config, shape)


def require_parts(config: Config) -> None:
    """Raise ConfigError if a package or a program that the settings need is not here."""
    trainer = config.trainer
    backend = f"trainer.backend={trainer.backend!r}"
    needed = [("torch", backend, "extra 'trainer'"), ("transformers", backend, "extra 'trainer'")]
    if trainer.backend == "megatron":
        needed.append(("megatron.core", backend, "extra 'trainer'"))
    if trainer.backend == "deepspeed":
        needed.append(("deepspeed", backend, "extra 'deepspeed'"))
    if trainer.transformer_engine:
        needed.append(("transformer_engine", "trainer.transformer_engine=true", "NVIDIA's wheels, or set it to false"))
    _engine_is_installed(config)
    _require(needed)


def _engine_is_installed(config: Config) -> None:
    if config.generation.engine == "vllm":
        _require([("vllm", "generation.engine='vllm'", "extra 'cpu' or 'gpu'")])
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
    """Return the script that an interpreter is to run; None: another program, a module, or a text such as after -c."""
    if not command or not _INTERPRETER.fullmatch(Path(command[0]).name):
        return None
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    flags = list(options)
    rest = command[1 + len(flags) :]
    return rest[0] if rest and all(flag in _PLAIN_FLAGS for flag in flags) else None


def _require(needed: Iterable[tuple[str, str, str]]) -> None:
    """needed: (module, the key that needs it, where it comes from)."""
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
