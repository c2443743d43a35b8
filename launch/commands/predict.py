"""`rlhpc plan RUN.toml SITE.toml --predict`: how fast a run will be and what it will cost, before it is submitted.

Input: a run file, a site file, perhaps a run that was measured.  Output: text, or JSON.  Nothing is started or written.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from launch.common.paths import without_dots
from launch.plan.shape import generation_shape, trainer_shape
from launch.plan.site_file import Site
from launch.prediction.measured import Measured, measure
from launch.prediction.report import Prediction, as_json, as_text, guesses_among
from launch.prediction.ring import RingShape
from launch.prediction.sources import LengthOptions, lengths_of, rates_of
from launch.prediction.splits import Price, other_splits, recommended, this_split
from rlhpc.config import Config
from rlhpc.errors import ConfigError
from rlhpc.packing.cost import FlopCost
from rlhpc.run_layout import RunLayout


def predict(config: Config, site: Site, options: argparse.Namespace) -> str:
    """The text to print.  Raises ConfigError: no model, no rates, options or a run that cannot be used."""
    model = model_of(config)
    cost = FlopCost.from_hf_config(model)
    measured = measure(RunLayout(without_dots(options.from_run)), cost) if options.from_run is not None else None
    given = LengthOptions(options.mean_tokens, options.length_law, options.dropped_share)
    lengths = lengths_of(config, measured, given)
    rates = rates_of(config, site, model, measured, lengths.mean_tokens)
    shape, price, steps = RingShape.of(config, cost), _price(config, site, rates.start_s.value), config.run.num_steps
    this = this_split(shape, rates, lengths, price, steps)
    others = other_splits(shape, rates, lengths, price, steps)
    prediction = Prediction(
        run=config.run.name,
        rates=rates,
        lengths=lengths,
        this=this,
        others=others,
        best=recommended(others, this.max_staleness),
        left_out=_left_out(config),
        remarks=[*guesses_among(rates, lengths), *_differences(config, measured)],
    )
    return as_json(prediction) if options.json else as_text(prediction)


def model_of(config: Config) -> dict[str, Any]:
    """Its config.json.  Raises ConfigError."""
    path = config.model.path / "config.json"
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"model.path={str(config.model.path)!r}: no config.json there; its sizes are needed"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    return document


def _price(config: Config, site: Site, start_s: float) -> Price:
    trainer, engine = trainer_shape(config, site.trainer), generation_shape(config, site.generation)
    gpus = (config.trainer.num_ranks * trainer.gpus_per_task, engine.gpus_per_task)
    if any(gpus):
        return Price(*gpus, "GPU-hours", start_s)
    return Price(config.trainer.num_ranks, 1, "process-hours", start_s)


def _left_out(config: Config) -> list[str]:
    """What of this run changes its pace and is not simulated."""
    settings = {
        f"admission.oversample={config.admission.oversample:g}": config.admission.oversample > 0,
        "run.deterministic=true": config.run.deterministic,
        "what environments take to answer": any(dataset.environment for dataset in config.data),
        "groups of more than admission.group_size": config.largest_group > config.admission.group_size,
        "the critic's own time": config.has_critic,
    }
    return [words for words, is_on in settings.items() if is_on]


def _differences(config: Config, measured: Measured | None) -> list[str]:
    """Settings of the measured run on which its rates hang, where this run has others."""
    then = measured.run.config if measured is not None else None
    if measured is None or then is None:
        return []
    pairs = {
        "model.path": (then.model.path.name, config.model.path.name),
        "model.dtype": (then.model.dtype, config.model.dtype),
        "generation.engine": (then.generation.engine, config.generation.engine),
        "generation.tensor_parallel": (then.generation.tensor_parallel, config.generation.tensor_parallel),
        "trainer.backend": (then.trainer.backend, config.trainer.backend),
    }
    changed = [f"{key} was {old}" for key, (old, new) in pairs.items() if old != new]
    return [f"the run that was measured is another: {', '.join(changed)}"] if changed else []
