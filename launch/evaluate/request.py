"""Requests for evaluations: model, dataset and sampling, from a command or a table [[evaluation]] of a run file.

Input: options, or a Config.  Output: Requests, checked as far as possible without model and data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.common.text import quoted, without_dots
from launch.run_directory.inputs import look_at_adapter, look_at_model
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config, read_resolved, settled
from rlhpc.config.rules import Config
from rlhpc.config.setting import COLDEST
from rlhpc.config.tables import AGENT, DataConfig
from rlhpc.config.tables_algorithm import LoraConfig
from rlhpc.config.toml import toml_value
from rlhpc.data.files import ALL, dataset_files
from rlhpc.data.record_source import PREFIX
from rlhpc.models.adapter import (
    PEFT_CONFIG,
    base_digest,
    chosen_layers,
    refuse_unserved_adapters,
    sends_adapters,
    settings_of_peft,
    stored_matrices,
)
from rlhpc.models.weights import NotSafetensors, object_in
from rlhpc.protocol.errors import CheckpointError, ConfigError, DamagedCheckpoint
from rlhpc.training.checkpoint_directory import COMPLETE, Fate, KnownCheckpoints

# --------------------------------------------------------------------------------------------------------------- target
#
# The model that is evaluated: an HF checkpoint, or a checkpoint of a run.
#
# Input: a path.  Output: a Target, which holds the settings for its evaluation, and writes its weights as an HF
# checkpoint.


_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Target:
    """A model to be evaluated, with the settings of its run."""

    title: str  # for people, also in the names of files
    home: Path  # default directory for evaluations of it
    settings: Config | None  # of its run; None: it has none
    checkpoint: Path | None  # a step of that run; None: `model` is an HF checkpoint
    model: Path  # HF checkpoint: the model itself, or the run's initial model
    is_average: bool = False  # whether the moving average of that step's weights is evaluated
    attempt: int | None = None  # attempt of the run that wrote the checkpoint; None: no checkpoint, or not known
    run: Path | None = None  # run from which an HF checkpoint or adapter has its settings
    adapter: Path | None = None  # PEFT adapter directory for `model`
    lora: LoraConfig | None = None  # settings of adapters for `model`; None: whole weights

    @property
    def place(self) -> Path:
        """Directory of the checkpoint, adapter or model."""
        return self.checkpoint or self.adapter or self.model

    @property
    def digest(self) -> Any:
        """Digest of the model's files; of adapters without their base.  Raises OSError, RunDirectoryError."""
        if self.adapter is not None:
            return {name: entry.digest for name, entry in look_at_adapter(self.adapter).items()}
        if self.checkpoint is None:
            return {name: entry.digest for name, entry in look_at_model(self.model).items()}
        return checkpoint_digest(self.checkpoint) + ("-average" if self.is_average else "")

    def weights(self, place: Path, *, as_adapter: bool = False) -> Path:
        """Return an HF checkpoint with its verified weights; written to `place` if there is none.

        as_adapter: a PEFT adapter directory instead.  Raises CheckpointError, ConfigError.
        """
        if self.checkpoint is None:
            return self.place
        # Loads torch, which HF checkpoints and complete evaluations do not need here.
        from rlhpc.training.checkpoint_export import export_adapter, export_hf

        try:
            export = export_adapter if as_adapter else export_hf
            export(self.checkpoint, self.model, place, is_average=self.is_average)
        except DamagedCheckpoint as error:
            raise CheckpointError(f"{error}; `rlhpc evaluate RUN_DIR DATA --step N` takes another") from error
        return place


def checkpoint_digest(checkpoint: Path) -> str:
    """Digest of all files of a checkpoint, by the record of their checksums.  Raises OSError."""
    return hashlib.blake2b((checkpoint / COMPLETE).read_bytes(), digest_size=16).hexdigest()


def find_target(path: Path, step: int | None) -> Target:
    """Find a model.  path: HF checkpoint, run directory, or checkpoint in one.  step: None for the newest complete one.

    Only the sizes of a checkpoint's files are compared: Target.weights verifies the files that it needs, once, and not
    for a complete evaluation.  Raises ConfigError, CheckpointError.
    """
    if (match := _STEP.fullmatch(path.name)) and RunLayout(path.parent.parent).is_run:
        if step is not None:
            raise ConfigError(f"--step {step}: {path} is a step already")
        return _of_run(RunLayout(path.parent.parent), int(match[1]))
    if RunLayout(path).is_run:
        return _of_run(RunLayout(path), step)
    if step is not None:
        raise ConfigError(f"--step {step}: {path} is not a run directory")
    if not path.exists():
        raise ConfigError(
            f"{path}: no such directory; legal: an HF checkpoint, or a run directory (`rlhpc list` shows your runs)"
        )
    home = Path("evaluations").absolute()
    if (path / PEFT_CONFIG).is_file():
        base = Path(str(object_in(path / PEFT_CONFIG).get("base_model_name_or_path", "")))
        return Target(path.name, home, None, None, base, adapter=path.absolute())
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: neither an HF checkpoint directory (no config.json) nor an adapter of PEFT (no {PEFT_CONFIG}) "
            "nor a run directory"
        )
    return Target(path.name, home, None, None, path)


def find_targets(options: argparse.Namespace, tell: Callable[[str], None]) -> tuple[list[Target], int]:
    """Return the models that a command names, and the number of damaged steps, which are skipped with a message.

    Raises as find_target if the command names only one.
    """
    found, num_refused = list[Target](), 0
    models = [without_dots(path) for path in (options.model, *(options.others or ()))]
    places = [(model, step) for model in models for step in _steps_of(options, model)]
    for model, step in places:
        try:
            target = find_target(model, step)
            found.append(target if options.run is None else with_settings_of(target, without_dots(options.run)))
        except (ConfigError, CheckpointError) as error:
            if len(places) == 1:
                raise
            tell(f"{model}{'' if step is None else f', step {step},'} is not evaluated: {error}")
            num_refused += 1
    return found, num_refused


def _steps_of(options: argparse.Namespace, model: Path) -> list[int | None]:
    """Steps of a run that the options name; None for the newest, or for a model without run.  Raises ConfigError."""
    if options.steps is None or not RunLayout(model).is_run:
        if options.steps is not None and not options.others:
            raise ConfigError(f"--steps {options.steps}: {model} is not a run directory")
        return [options.step]
    if options.step is not None:
        raise ConfigError(f"--step {options.step}: not with --steps, which names steps too")
    known = [step for step, _ in KnownCheckpoints(RunLayout(model).checkpoints, read_up_to_bytes=0).steps()]
    if options.steps == "all":
        if not known:
            raise CheckpointError(f"{RunLayout(model).checkpoints}: no checkpoint")
        return [*sorted(known)]
    try:
        return [*sorted({int(word) for word in options.steps.split(",")})]
    except ValueError:
        there = ", ".join(map(str, sorted(known))) or "none"
        raise ConfigError(f"--steps {options.steps}; legal: all, or steps such as 10,20; there are {there}") from None


def with_settings_of(target: Target, run: Path) -> Target:
    """Give an HF checkpoint the settings of a run: its template, limits, reward and default datasets.

    run: a run file, or a run directory.  Raises ConfigError, also for a target that has a run.
    """
    if target.settings is not None:
        raise ConfigError(
            f"--run {run}: {target.title} is of a run, whose settings it has; legal: with an HF checkpoint"
        )
    settings = read_resolved(RunLayout(run))[0] if run.is_dir() else load_config(run)
    if target.adapter is None:
        return replace(target, settings=settings, run=run.absolute())
    named, model = target.model, settings.model.path
    if (named / "config.json").is_file() and base_digest(named) != base_digest(model):
        raise ConfigError(f"{target.adapter}: belongs to {named}, and --run {run} has the model {model}, other weights")
    return replace(target, settings=settings, run=run.absolute(), model=model)


def target_of(config: Config) -> Target:
    """The initial model of a run file."""
    return _of_settings(config, RunLayout(config.run_directory))


def target_of_run(layout: RunLayout) -> Target:
    """The initial model of a run.  Raises ConfigError."""
    config, _ = read_resolved(layout)
    if config.is_supervised:
        raise ConfigError(
            f"{layout.root}: supervised fine-tuning, whose settings say neither how to sample nor how to judge; legal: "
            f"`rlhpc evaluate {quoted(layout.model)} --run RUN.toml`, with the run file of an RL run"
        )
    return _of_settings(config, layout)


def _of_settings(config: Config, layout: RunLayout) -> Target:
    lora = config.lora.model_copy(update={"initial": None}) if sends_adapters(config) else None
    return Target(config.run.name, layout.evaluations, config, None, config.model.path, lora=lora)


def with_adapter(target: Target) -> Target:
    """Read the settings of a target's PEFT adapter.  Raises ConfigError if it is damaged, or of another base."""
    if target.adapter is None:
        return target
    if not (target.model / "config.json").is_file():
        raise ConfigError(
            f"{target.adapter}: its base {str(target.model)!r} is no directory here; legal: --run RUN, a run file or "
            "directory with the model that it belongs to"
        )
    lora = settings_of_peft(target.adapter, target.model)
    if target.settings is not None and target.settings.lora.rank:
        lora = lora.model_copy(update={"quantization": target.settings.lora.quantization})
    return replace(target, lora=lora)


def _of_run(layout: RunLayout, step: int | None) -> Target:
    run, checkpoint = target_of_run(layout), _complete_checkpoint(layout, step)
    title, attempt = f"{run.title}-{checkpoint.name}", _attempt_of(checkpoint)
    return replace(run, title=title, checkpoint=checkpoint, attempt=attempt)


def _attempt_of(checkpoint: Path) -> int | None:
    """Attempt that wrote a checkpoint; None if not known.  Raises OSError: the run has deleted the checkpoint."""
    attempt = json.loads((checkpoint / COMPLETE).read_bytes()).get("attempt")
    return attempt if isinstance(attempt, int) else None


def _complete_checkpoint(layout: RunLayout, step: int | None) -> Path:
    known, problems = KnownCheckpoints(layout.checkpoints, read_up_to_bytes=0), []
    for state in known.newest_first(lambda at: step in (None, at)):
        if state.fate is Fate.SOUND:
            return state.path
        problems.append(f"{state.path.name}: {state.problem}")
    there = ", ".join(str(at) for at, _ in known.steps()) or "none"
    what = "no sound checkpoint" if step is None else f"no sound checkpoint of step {step}"
    raise CheckpointError("\n".join([f"{layout.checkpoints}: {what}; available steps: {there}", *problems]))


# ------------------------------------------------------------------------------------------------------------- settings
#
# The settings of an evaluation, made from a target, a dataset and the user's words.
#
# Input: Target, path of a dataset, overrides.  Output: Config, of which an evaluation uses [model], [data],
# [generation] and [rewards].  A run's model is evaluated with the settings of its training, unless the words differ,
# but not with its seed, so that all models get the same prompts of a dataset.


# Sections that overrides may change.
OPEN = ("data", "generation", "rewards", "sandbox", "instructions", "math", "text", "composite", "judge", "environment",
        "mcp", "reward_model", "service")  # fmt: skip
OPEN_KEYS = ("model.dtype", "model.chat_template_kwargs", "run.seed")
_LIMITS = ("max_prompt_tokens", "max_completion_tokens")
_NO_SOURCE: dict[str, Any] = {"source": "", "size": 1000, "source_seed": 0, "levels": [], "settings": {}}


def document_without_run(
    name: str, data: dict[str, Any], generation: dict[str, Any], model: Path | str = "."
) -> dict[str, Any]:
    """Run file for a command that trains nothing, with required tables that have no effect filled in."""
    return {
        "run": {"name": name, "num_steps": 1},
        "model": {"path": str(model)},
        "data": data,
        "generation": generation,
        "admission": {"groups_per_step": 1, "group_size": 2},
        "trainer": {"backend": "reference", "device": "cpu", "token_budget": 1 << 40},
    }


def evaluation_config(target: Target, data: Path, words: Sequence[str], *, has_gpus: bool = True) -> Config:
    """Make the settings of an evaluation; if engines cannot hold a run's adapters, for merged weights.

    has_gpus: whether its engines run on GPUs.
    Raises ConfigError: a key that an evaluation does not have, and as load_config; OSError.
    """
    _refuse_other_words(words)
    # Seeded samples: those that a killed evaluation had begun are drawn again alike.  An engine has its GPUs to itself
    # and takes their free memory; on CPU it takes the memory that the settings give.
    data_here = {"path": str(data), "split": "", "shuffle": True, **_NO_SOURCE}
    generation: dict[str, Any] = {"seeded_samples": True} | ({"kv_cache_bytes": None} if has_gpus else {})
    document = document_without_run("evaluation", data_here, generation, target.model)
    if (run := target.settings) is not None:
        document["model"] |= {"dtype": run.model.dtype, "chat_template_kwargs": run.model.chat_template_kwargs}
        like = _like(run, data, words)
        task = _said("data.task", words, like.task)
        document["data"] = like.model_dump(mode="json", exclude={*_LIMITS, "weight"}) | data_here
        limits = {key: limit for key in _LIMITS if (limit := getattr(like, key)) is not None}
        document["generation"] = run.generation.model_dump(mode="json") | limits | generation | {"temperature": 1.0}
        document["rewards"] = _limits_of_task(run.rewards.model_dump(mode="json"), task, run.parts_of(task))
        document["sandbox"] = run.sandbox.model_dump(mode="json")
        if _said("data.environment", words, like.environment):
            document["environment"] = run.environment.model_dump(mode="json")
            document["mcp"] = {name: server.model_dump(mode="json") for name, server in run.mcp.items()}
        document |= _settings_of_task(run, task)
    if _said("data.environment", words, str(document["data"].get("environment", ""))) == AGENT:
        raise ConfigError(
            f'data.environment="{AGENT}": agents are not evaluated; legal: data.environment= with a data.task that '
            "judges one turn"
        )
    if target.lora is not None:
        document["lora"] = target.lora.model_dump(mode="json")
    try:
        config = settled(document, words, "evaluation")
    except ConfigError as error:
        if target.settings is not None or "missing; it has no default" not in str(error):
            raise
        raise ConfigError(
            f"{error}\n{target.model}: an HF checkpoint says none of this; legal: --run RUN.toml, a run file or "
            "directory whose settings it is evaluated with"
        ) from None
    why = "" if target.lora is None else _why_merged(config, has_gpus=has_gpus)
    if why and target.adapter is not None:
        raise ConfigError(f"{target.adapter}: {why}")
    return evaluation_config(replace(target, lora=None), data, words, has_gpus=has_gpus) if why else config


def _refuse_other_words(words: Sequence[str]) -> None:
    for word in words:
        key = word.partition("=")[0].strip()
        if key == "generation.temperature":
            raise ConfigError(f"{word!r}: an evaluation has --temperature for it")
        if key == "data.path":
            raise ConfigError(f"{word!r}: the dataset is the second argument of `rlhpc evaluate`")
        if key.partition(".")[0] not in OPEN and key not in OPEN_KEYS:
            legal = ", ".join((*(f"{section}.…" for section in OPEN), *OPEN_KEYS))
            raise ConfigError(f"{word!r}: not a setting of an evaluation; legal: {legal}")


def _why_merged(config: Config, *, has_gpus: bool) -> str:
    """Reason why an engine cannot hold the adapters of these settings; "" if it can.  Raises OSError."""
    if not config.generation.has_model:
        return f"generation.engine={config.generation.engine!r}: holds no adapters; legal: 'vllm', 'transformers'"
    try:
        model, device = config.model.path, "cuda" if has_gpus else "cpu"
        layers = chosen_layers(config.lora, stored_matrices(model))
        refuse_unserved_adapters(config, layers, object_in(model / "config.json"), device=device)
    except (ConfigError, NotSafetensors) as error:
        return str(error)
    is_of_experts = any(".experts." in f"{name}." for name in layers)
    return "lora.rslora=true: PEFT joins adapters of experts" if is_of_experts and config.lora.rslora else ""


def _said(key: str, words: Sequence[str], otherwise: str) -> str:
    said = [word.partition("=")[2].strip() for word in words if word.partition("=")[0].strip() == key]
    return said[-1] if said else otherwise


def _limits_of_task(rewards: dict[str, Any], task: str, parts: Sequence[str]) -> dict[str, Any]:
    for key, named in (("task_timeout_s", (task,)), ("task_memory_bytes", (task,)), ("task_arguments", parts)):
        rewards[key] = {name: limit for name, limit in rewards[key].items() if name in named}
    return rewards


def _settings_of_task(run: Config, task: str) -> dict[str, Any]:
    """Tables of the run's file with effect on this task."""
    found: dict[str, Any] = {}
    for part, key in (
        ("instruction_following", "instructions"),
        ("math_answer", "math"),
        ("exact_match", "text"),
        ("token_f1", "text"),
        ("llm_judge", "judge"),
        ("reward_model", "reward_model"),
    ):
        if part in run.parts_of(task):
            found[key] = getattr(run, key).model_dump(mode="json")
    if services := run.services_asked_by(task):
        found["service"] = [each.model_dump(mode="json") for each in services]
    if task in run.composite:
        found["composite"] = {task: run.composite[task].model_dump(mode="json")}
    return found


def _like(run: Config, data: Path, words: Sequence[str]) -> DataConfig:
    """The run's dataset whose template, reward and limits apply.  Raises ConfigError if several may."""
    if len(run.data) == 1:
        return run.data[0]
    named = [word.partition("=")[2].strip() for word in words if word.partition("=")[0].strip() == "data.name"]
    for dataset in run.data:
        is_here = dataset.path is not None and dataset.path.absolute() == data.absolute()
        if dataset.title in named or (not named and is_here):
            return dataset
    if not str(data).startswith(PREFIX):
        dataset_files(data, ALL if data.is_dir() else "")  # first: a file that does not exist is of no dataset
    names = ", ".join(dataset.title for dataset in run.data)
    said = f"data.name={named[0]}: no such dataset" if named else f"{data}: belongs to none of the run's datasets"
    raise ConfigError(f"{said}; add data.name=NAME, to use its template, reward and limits; legal: {names}")


# -------------------------------------------------------------------------------------------------------------- request


# Options that are keys of a table [[evaluation]].
_OF_TABLES = ("ema", "out", "samples", "prompts", "temperature", "every", "keep_best", "stop_after")


@dataclass(frozen=True, slots=True)
class Request:
    """An evaluation on one dataset, with its sampling."""

    name: str  # in directories and curves
    data: Path
    words: tuple[str, ...] = ()  # overrides of the model's settings: key=value
    samples: int = 1  # per prompt
    prompts: int | None = None  # number of prompts; None: all
    temperature: float = 1.0
    out: Path | None = None  # directory of the samples; None: beside the model's other evaluations
    every: int = 1  # least number of steps between two evaluations of a followed run
    best: str | None = None  # figure by which the best model is kept
    stop_after: int | None = None  # consecutive evaluations without improvement after which the run is stopped
    is_average: bool = False  # evaluate the moving average of a run's weights


def requests_of(options: argparse.Namespace, target: Target) -> list[Request]:
    """Requests for the dataset of the command, or those of the run's file.  Raises ConfigError: none, or both."""
    if options.data is not None:
        return [_of_command(options)]
    settings = target.settings
    if settings is None or not settings.evaluation:
        raise ConfigError(f"{options.model}: DATA is missing, {_why_needed(options, settings)}")
    for key in _OF_TABLES:
        if (value := getattr(options, key)) is not None:
            option = f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise ConfigError(f"{option}: without DATA, [[evaluation]] of the run file says it; name DATA")
    return of_run_file(settings)


def _why_needed(options: argparse.Namespace, settings: Config | None) -> str:
    if settings is not None:
        return (
            "and the run has no [[evaluation]] that names any; legal: a file or directory, such as the run's data.path"
        )
    also = "" if options.follow else ", here or of --run RUN"
    return f"and only a run has datasets of its own{also}, in [[evaluation]]"


def of_run_file(config: Config) -> list[Request]:
    """Make a request for each table [[evaluation]]."""
    found = []
    for table in config.evaluation:
        words = {
            "data.name": table.dataset,
            "data.split": table.split,
            "data.task": table.task,
            "generation.max_prompt_tokens": table.max_prompt_tokens,
            "generation.max_completion_tokens": table.max_completion_tokens,
            "generation.num_replicas": table.num_replicas,
        }
        stop = [f"generation.stop={toml_value(table.stop)}"] if table.stop is not None else []
        request = Request(
            name=table.title,
            data=table.path,
            words=(*(f"{key}={value}" for key, value in words.items() if value), *stop),
            samples=table.samples,
            prompts=table.prompts,
            temperature=table.temperature,
            every=table.every_steps or 1,
            best=table.keep_best or None,
            stop_after=table.stop_after,
            is_average=table.ema,
        )
        found.append(request)
    return found


def _of_command(options: argparse.Namespace) -> Request:
    if "=" in str(options.data) and not options.data.exists():
        raise ConfigError(f"{options.data}: DATA comes before settings; without DATA none is taken")
    samples = 1 if options.samples is None else options.samples
    temperature = 1.0 if options.temperature is None else options.temperature
    for option, value in (("--samples", samples), ("--prompts", options.prompts), ("--every", options.every),
                          ("--stop-after", options.stop_after)):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}; legal: 1 or more")
    if temperature != 0 and not COLDEST <= temperature <= 2:
        raise ConfigError(
            f"--temperature {temperature:g}; legal: 0 (the most likely token each time), or {COLDEST:g} to 2"
        )
    if temperature == 0 and samples > 1:
        raise ConfigError(f"--temperature 0 with --samples {samples}: all samples of a prompt would be the same")
    if options.stop_after is not None and options.keep_best is None:
        raise ConfigError(f"--stop-after {options.stop_after}: needs --keep-best FIGURE, which has to improve")
    is_average = bool(options.ema)
    return Request(
        name=f"{options.data.stem}-ema" if is_average else options.data.stem,
        data=options.data,
        words=tuple(options.overrides),
        samples=samples,
        prompts=options.prompts,
        temperature=temperature,
        out=options.out,
        every=options.every or 1,
        best=options.keep_best,
        stop_after=options.stop_after,
        is_average=is_average,
    )
