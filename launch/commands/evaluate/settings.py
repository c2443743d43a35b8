"""From a target, a dataset and the user's words to the settings of an evaluation.

Input: Target, path of a dataset, overrides.  Output: Config, of which an evaluation uses [model], [data], [generation]
and [rewards].  A model from a run is evaluated as it was trained, unless the words say otherwise; but for the seed, so
that of a dataset all models get the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.commands.evaluate.target import Target
from rlhpc.config import Config
from rlhpc.config_data import AGENT, DataConfig
from rlhpc.config_file import settled
from rlhpc.errors import ConfigError

# Sections that the words may change.
OPEN = ("data", "generation", "rewards", "sandbox", "instructions", "math", "text", "composite", "judge", "environment")
OPEN_KEYS = ("model.dtype", "model.chat_template_kwargs", "run.seed")
_LIMITS = ("max_prompt_tokens", "max_completion_tokens")
_NO_SOURCE: dict[str, Any] = {"source": "", "size": 1000, "source_seed": 0, "levels": [], "settings": {}}


def document_without_run(
    name: str, data: dict[str, Any], generation: dict[str, Any], model: Path | str = "."
) -> dict[str, Any]:
    """A run file for a command that trains nothing: what it has to hold, and what has no effect there."""
    return {
        "run": {"name": name, "num_steps": 1},
        "model": {"path": str(model)},
        "data": data,
        "generation": generation,
        "admission": {"groups_per_step": 1, "group_size": 2},
        "trainer": {"backend": "reference", "device": "cpu", "token_budget": 1 << 40},
    }


def evaluation_config(target: Target, data: Path, words: Sequence[str], *, has_gpus: bool = True) -> Config:
    """has_gpus: where its engines run.

    Raises ConfigError: a key that an evaluation does not have, and what config_file.load_config raises.
    """
    for word in words:
        key = word.partition("=")[0].strip()
        if key == "generation.temperature":
            raise ConfigError(f"{word!r}: an evaluation has --temperature for it")
        if key == "data.path":
            raise ConfigError(f"{word!r}: the dataset is the second argument of `rlhpc evaluate`")
        if key.partition(".")[0] not in OPEN and key not in OPEN_KEYS:
            legal = ", ".join((*(f"{section}.…" for section in OPEN), *OPEN_KEYS))
            raise ConfigError(f"{word!r}: not a setting of an evaluation; legal: {legal}")
    # Seeds: what a killed evaluation had begun is drawn again alike.  An engine has its GPUs to itself, and takes what
    # is free; on CPU it takes what it is told.
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
        document |= _settings_of_task(run, task)
    if _said("data.environment", words, str(document["data"].get("environment", ""))) == AGENT:
        raise ConfigError(
            f'data.environment="{AGENT}": agents are not evaluated; legal: data.environment= with a data.task that '
            "judges one turn"
        )
    try:
        return settled(document, words, "evaluation")
    except ConfigError as error:
        if target.settings is not None or "missing; it has no default" not in str(error):
            raise
        raise ConfigError(
            f"{error}\n{target.model}: an HF checkpoint says none of this; legal: --run RUN.toml, a run file or "
            "directory whose settings it is evaluated with"
        ) from None


def _said(key: str, words: Sequence[str], otherwise: str) -> str:
    said = [word.partition("=")[2].strip() for word in words if word.partition("=")[0].strip() == key]
    return said[-1] if said else otherwise


def _limits_of_task(rewards: dict[str, Any], task: str, parts: Sequence[str]) -> dict[str, Any]:
    for key, named in (("task_timeout_s", (task,)), ("task_memory_bytes", (task,)), ("task_arguments", parts)):
        rewards[key] = {name: limit for name, limit in rewards[key].items() if name in named}
    return rewards


def _settings_of_task(run: Config, task: str) -> dict[str, Any]:
    """Tables of the run's file that are about the task alone; others would have no effect."""
    found: dict[str, Any] = {}
    for part, key in (
        ("instruction_following", "instructions"),
        ("math_answer", "math"),
        ("exact_match", "text"),
        ("token_f1", "text"),
        ("llm_judge", "judge"),
    ):
        if part in run.parts_of(task):
            found[key] = getattr(run, key).model_dump(mode="json")
    if task in run.composite:
        found["composite"] = {task: run.composite[task].model_dump(mode="json")}
    return found


def _like(run: Config, data: Path, words: Sequence[str]) -> DataConfig:
    """The dataset of a run whose template, reward and limits are meant.  Raises ConfigError if that is not clear."""
    if len(run.data) == 1:
        return run.data[0]
    named = [word.partition("=")[2].strip() for word in words if word.partition("=")[0].strip() == "data.name"]
    for dataset in run.data:
        is_here = dataset.path is not None and dataset.path.absolute() == data.absolute()
        if dataset.title in named or (not named and is_here):
            return dataset
    names = ", ".join(dataset.title for dataset in run.data)
    said = f"data.name={named[0]}: no such dataset" if named else f"{data}: belongs to none of the run's datasets"
    raise ConfigError(f"{said}; add data.name=NAME, to use its template, reward and limits; legal: {names}")
