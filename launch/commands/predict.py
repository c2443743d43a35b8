"""`rlhpc plan RUN.toml SITE.toml --predict`: how fast a run will be, and what limits it, before it is submitted.

Input: a run file, a site file, perhaps a run that was measured.  Output: text, or JSON.  Nothing is started or written.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict
from typing import Any

from launch.common.counted import three_digits
from launch.common.paths import without_dots
from launch.common.text_table import aligned, span
from launch.plan.shape import generation_shape, trainer_shape
from launch.plan.site_file import Site
from launch.prediction.bottleneck import Pace, Split, other_splits, pace_of
from launch.prediction.rates import GUESS, Rates, rates_of
from rlhpc.config import Config
from rlhpc.errors import ConfigError
from rlhpc.model_weights import object_in
from rlhpc.run_layout import RunLayout

WITHIN = 0.05  # of the fastest split: counts as equally fast
_KEYS = ("generation.num_replicas", "trainer.num_ranks")  # that set a split
_MOST_ROWS = 6  # of the table of splits
_NEVER_IN_IT = (
    "start, queue, requeues, faults, evaluations; reading prompts, unless the engine's rates are measured; ranks that "
    "wait for each other; varying lengths"
)


def predict(config: Config, site: Site, options: argparse.Namespace) -> str:
    """The text to print.  Raises ConfigError: no model, no rates, options or a run that cannot be used."""
    run = RunLayout(without_dots(options.from_run)) if options.from_run is not None else None
    lengths = {"mean_tokens": options.mean_tokens, "dropped_share": options.dropped_share}
    model = config.model.path / "config.json"
    if not model.is_file():
        raise ConfigError(f"model.path={str(model.parent)!r}: no config.json there; its sizes are needed")
    figures = rates_of(config, site, object_in(model), run, lengths)
    rates = Rates(**{name: figure.value for name, figure in figures.items()})
    gpus = (trainer_shape(config, site.trainer).gpus_per_task, generation_shape(config, site.generation).gpus_per_task)
    unit, (of_rank, of_generator) = ("GPUs", gpus) if all(gpus) else ("processes", (1, 1))
    trainer, this = config.trainer, pace_of(config, rates, Split.of(config))
    num_units = trainer.num_ranks * of_rank + config.generation.num_replicas * of_generator
    others = other_splits(config, rates, trainer.num_ranks // trainer.data_parallel * of_rank, of_generator)
    seconds = config.run.num_steps * this.step_s
    document = {
        "run": config.run.name,
        "num_steps": config.run.num_steps,
        "left_out": [_NEVER_IN_IT, *_left_out(config)],
        "rates": {name: asdict(figure) for name, figure in figures.items()},
        "stages": {
            name: {"step_s": stage_s, "samples_per_s": this.num_samples / stage_s}
            for name, stage_s in this.stages_s.items()
            if stage_s > 0
        },
        "this_split": _described(config, this),
        "seconds": seconds,
        "num_units": num_units,
        "unit": unit,
        "hours": num_units * seconds / 3600,
        "other_splits": [_described(config, pace) for pace in others],
        "recommended": _described(config, this if this.step_s <= (1 + WITHIN) * others[0].step_s else others[0]),
    }
    return json.dumps(document, indent=1) if options.json else _as_text(document)


def _left_out(config: Config) -> list[str]:
    """Return remarks on settings that change the pace of this run and are not in the formula."""
    settings = {
        "run.deterministic=true": config.run.deterministic,
        "what environments take to answer": any(dataset.environment for dataset in config.data),
        "groups of more than admission.group_size": config.largest_group > config.admission.group_size,
        "the critic's own time": config.has_critic,
    }
    return [words for words, is_on in settings.items() if is_on]


def _described(config: Config, pace: Pace) -> dict[str, Any]:
    """A split by the keys that set it."""
    trainer = config.trainer
    numbers = (pace.split.generators, pace.split.data_parallel * trainer.num_ranks // trainer.data_parallel)
    return dict(zip(_KEYS, numbers, strict=True)) | {"step_s": pace.step_s, "bottleneck": pace.bottleneck}


def _as_text(document: dict[str, Any]) -> str:
    this, rates, units = document["this_split"], document["rates"], f"{document['num_units']} {document['unit']}"
    guessed = sum(figure["source"].startswith(GUESS) for figure in rates.values())
    splits = document["other_splits"][:_MOST_ROWS]
    splits += [this] if this not in splits else []
    stages = [(name, *map(three_digits, reversed(stage.values()))) for name, stage in document["stages"].items()]
    rows = [
        (*(str(each[key]) for key in _KEYS), three_digits(each["step_s"]), each["bottleneck"], "this" * (each == this))
        for each in splits
    ]
    best = document["recommended"]
    advice = "this split" if best == this else " ".join(f"{key}={best[key]}" for key in _KEYS)
    return "\n".join(
        [
            f"prediction  {document['run']}, {document['num_steps']} steps; nothing is started",
            *_wrapped("not in it", "; ".join(document["left_out"])),
            *(_wrapped("remark", f"{guessed} figures are guessed, and perhaps off by half") if guessed else []),
            "",
            *aligned([(name, three_digits(each["value"]), each["source"]) for name, each in rates.items()]),
            "",
            *aligned([("stage", "samples/s", "s a step"), *stages]),
            "",
            f"bottleneck  {this['bottleneck']}: {three_digits(this['step_s'])} s a step",
            f"all steps   {span(round(document['seconds']))}, {three_digits(document['hours'])} hours of {units}",
            f"recommended {advice}",
            "",
            f"splits of {units}, fastest first",
            *aligned([(*_KEYS, "s a step", "bottleneck", ""), *rows]),
        ]
    )


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(f"{title:<12}{text}", 80, subsequent_indent=" " * 12, break_on_hyphens=False)
