"""What is to be evaluated on which dataset, and how: as a command says it, or a table [[evaluation]] of a run file.

Input: options, or a Config.  Output: Requests, checked as far as they go without model and data.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from launch.commands.evaluate.target import Target
from rlhpc.config import Config
from rlhpc.config_sections import COLDEST
from rlhpc.errors import ConfigError
from rlhpc.toml_text import toml_value

# Options that a table has as keys.
_OF_TABLES = ("ema", "out", "samples", "prompts", "temperature", "every", "keep_best", "stop_after")


@dataclass(frozen=True, slots=True)
class Request:
    """One dataset, and how it is sampled."""

    name: str  # in directories and curves
    data: Path
    words: tuple[str, ...] = ()  # settings other than those that come with the model: key=value
    samples: int = 1  # of each prompt
    prompts: int | None = None  # None: all
    temperature: float = 1.0
    out: Path | None = None  # where samples go; None: beside the model's other evaluations
    every: int = 1  # least number of steps between two evaluations of a run that is followed
    best: str | None = None  # figure whose best model is kept
    stop_after: int | None = None  # evaluations in a row without a better one: the run is stopped
    is_average: bool = False  # of the moving average of a run's weights


def requests_of(options: argparse.Namespace, target: Target) -> list[Request]:
    """The dataset of the command, or those of the run's file.  Raises ConfigError: none, or both say something."""
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
    """A request for each table [[evaluation]]."""
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
