"""`rlhpc plan RUN.toml SITE.toml --predict`: how fast a run will be, and what limits it, before it is submitted.

Input: a run file, a site file, perhaps a run that was measured.  Output: text, or JSON.  Nothing is started or written.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from launch.checks.memory_plan import ELEMENT_BYTES
from launch.common.text import aligned, span, three_digits, without_dots
from launch.plan.gpu_map import generation_shape, trainer_shape
from launch.plan.site_file import Site
from rlhpc.algorithms.packing import FlopCost
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved
from rlhpc.config.rules import Config
from rlhpc.metrics.curves import merged, read_curves
from rlhpc.models.shape import ModelShape
from rlhpc.models.weights import object_in
from rlhpc.protocol.errors import ConfigError

# ---------------------------------------------------------------------------------------------------------------- rates
#
# Rates and lengths for a prediction, each with its source.
#
# Input: a previous run's metrics, [rates] of the site file, options, GPU data sheets.  Output: a Figure for each name
# of Rates.  Measured figures are preferred to given ones, and those to guesses.
#
# Guesses: peak rates are the vendors' (NVIDIA data sheets: dense bfloat16, for V100 float16; memory bandwidth of the
# SXM form if there are two); the shares of them that software reaches are round numbers that were not measured here.

GUESS = "a guess"  # first words of the source of a guessed figure
_TFLOPS_AND_GB_S = {
    "a100-40": (312, 1555), "a100-80": (312, 2039), "h100": (989, 3350), "h100-94": (835, 3900), "h200": (989, 4800),
    "b200": (2250, 8000), "gh200": (989, 4000), "l4": (121, 300), "l40s": (362, 864), "a40": (150, 696),
    "a6000": (155, 768), "rtx4090": (165, 1008), "v100-16": (125, 900), "v100-32": (125, 900),
}  # fmt: skip
_OF_BANDWIDTH, _OF_PEAK_SAMPLING, _OF_PEAK_TRAINING = 0.6, 0.5, 0.4
_EVERY_STEP_S = 0.004  # an engine's overhead per step: scheduling, launches, sampling
_LINK_BYTES_S = 5e9  # bandwidth for weights from trainer to engines, and for a rank's state from GPU to host
_ANYWHERE = {"judge_s": 0.01, "between_steps_s": 0.3, "live_s": 0.5, "pause_s": 0.2, "save_s": 5.0}
_FAMILIES = ("time", "trainer", "tokens", "weights", "generator", "length", "reward", "verifier_mean_s")  # of metrics


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a run.  An engine decoding n rollouts takes engine_step_s + engine_sample_s · n for a token of each."""

    engine_step_s: float
    engine_sample_s: float
    judge_s: float  # for a reward worker to judge a completion
    trainer_tokens_per_s: float  # of one data-parallel rank, prompts included
    between_steps_s: float  # of the trainer, from the end of a step to the next batch: new weights, messages, packing
    live_s: float  # from the publication of new weights until all engines sample with them
    pause_s: float  # in which engines sample nothing while they load weights
    save_s: float  # for which a checkpoint blocks training
    prompt_tokens: float
    mean_tokens: float  # of a completion
    longest_tokens: float  # of the longest completion of a batch
    dropped_share: float  # share of groups with zero variance


def rates_of(
    config: Config, site: Site, model: Mapping[str, Any], run: RunLayout | None, options: Mapping[str, float | None]
) -> dict[str, Figure]:
    """All figures by the names of Rates.  options: mean_tokens and dropped_share, None where not given.

    Raises ConfigError: a figure without a source or legal value; a run that cannot be measured.
    """
    longest, given = config.generation.max_completion_tokens, {k: v for k, v in options.items() if v is not None}
    lengths = {"prompt_tokens": config.generation.max_prompt_tokens / 2, "mean_tokens": max(1.0, 0.4 * longest),
               "longest_tokens": float(longest), "dropped_share": 0.2}  # fmt: skip
    known = {name: Figure(value, f"{GUESS}: {value:g} anywhere") for name, value in (_ANYWHERE | lengths).items()}
    known |= {name: Figure(value, "given as an option") for name, value in given.items()}
    if not 1 <= known["mean_tokens"].value <= longest:
        raise ConfigError(
            f"--mean-tokens {given['mean_tokens']:g}: legal: 1 to generation.max_completion_tokens={longest}"
        )
    if not 0 <= known["dropped_share"].value < 1:
        raise ConfigError(f"--dropped-share {given['dropped_share']:g}: legal: from 0, below 1")
    if run is not None and given:
        raise ConfigError("--mean-tokens, --dropped-share: --from already provides them; legal: one of the two")
    measured = {} if run is None else _measured(run)
    for name in {"mean_tokens", "longest_tokens"} & measured.keys():
        measured[name] = replace(measured[name], value=min(measured[name].value, longest))
    known |= _from_data_sheets(config, site, model, measured.get("mean_tokens", known["mean_tokens"]).value)
    known |= {name: Figure(value, f"given: rates.{name} of the site file")
              for name, value in site.rates.model_dump().items() if value is not None}  # fmt: skip
    known |= _engine(measured, known) | measured
    names = [field.name for field in fields(Rates)]
    if missing := [name for name in names if name not in known]:
        raise ConfigError(
            f"rates.{missing[0]}: missing in the site file, and nothing to guess it from: "
            f"trainer.gpu={site.trainer.gpu!r}, generation.gpu={site.generation.gpu!r}, model_type="
            f"{model.get('model_type')!r}; legal: --from RUN_DIR, [rates] in the site file, or GPUs and a known model"
        )
    return {name: known[name] for name in names}


def _from_data_sheets(config: Config, site: Site, model: Mapping[str, Any], mean_tokens: float) -> dict[str, Figure]:
    """Guesses from the GPUs; {} if they or the model are not known.

    A step of an engine reads the weights, and for each rollout half its KV cache, and computes 2 operations a
    parameter.  A backward pass is two forward passes, recomputed activations another one (Narayanan et al. 2021,
    arXiv:2104.04473).
    """
    shape, gpus = ModelShape.of(model), (site.trainer.gpu or "", site.generation.gpu or "")
    if shape is None or any(gpu not in _TFLOPS_AND_GB_S for gpu in gpus):
        return {}
    (trainer_tflops, _), (engine_tflops, engine_gb_s) = (_TFLOPS_AND_GB_S[gpu] for gpu in gpus)
    layout, ranks, b = config.trainer, config.generation.tensor_parallel, ELEMENT_BYTES[config.model.dtype]
    cost, weights = FlopCost.from_hf_config(model), b * shape.num_parameters
    tokens = config.generation.max_prompt_tokens / 2 + mean_tokens
    read_s = ranks * engine_gb_s * 1e9 * _OF_BANDWIDTH
    cache = shape.token_bytes(b, ranks) * tokens / 2 + 2 * shape.request_bytes(b, ranks)  # states are read and written
    cache_s = ranks * cache / read_s
    passes = 4 if layout.recompute_activations == "full" else 3
    flops = trainer_tflops * 1e12 * _OF_PEAK_TRAINING * layout.num_ranks / layout.data_parallel
    found = {
        "engine_step_s": (_EVERY_STEP_S + weights / read_s, gpus[1]),
        "engine_sample_s": (cache_s + cost.linear / (ranks * engine_tflops * 1e12 * _OF_PEAK_SAMPLING), gpus[1]),
        "trainer_tokens_per_s": (flops / (passes * (cost.linear + cost.quadratic * tokens)), gpus[0]),
        "between_steps_s": (0.3 + weights / _LINK_BYTES_S, gpus[0]),
        "live_s": (0.3 + weights / ranks / _LINK_BYTES_S, gpus[1]),
        "save_s": (0.5 + 12 * shape.num_parameters / layout.num_ranks / _LINK_BYTES_S, gpus[0]),
    }
    return {name: Figure(value, f"{GUESS}: data sheet of {gpu}") for name, (value, gpu) in found.items()}


def _measured(run: RunLayout) -> dict[str, Figure]:
    """Means over the metrics of a run, its first tenth left out, which includes compilation.  Raises ConfigError."""
    run.require_run()
    config, curves = read_resolved(run)[0], read_curves(run.tensorboard)
    steps, table = merged(curves, [name for name in curves if name.partition("/")[0] in _FAMILIES])
    if len(steps) < 10:
        raise ConfigError(f"--from {run.root}: {len(steps)} steps are done; legal: a run of 10 or more")
    steps = steps[len(steps) // 10 :]
    of = defaultdict(lambda: np.full(len(steps), np.nan), {name: each[-len(steps) :] for name, each in table.items()})
    trained, step_s, saves_s = of["tokens/trained_total"], of["trainer/step_s"], of["time/checkpoint_s"]
    working_s = step_s + of["time/wait_for_groups_s"]
    waiting_s = np.maximum(0.0, of["time/wait_for_weights_s"] - working_s)  # until the previous version is live
    found = {
        "judge_s": _mean(np.array([_mean(of[name]) for name in of if name.startswith("verifier_mean_s/")])),
        "trainer_tokens_per_s": np.diff(trained).sum() / step_s[1:].sum() / config.trainer.data_parallel,
        "between_steps_s": max(0.0, float(np.nanmedian(of["time/step_s"] - working_s - waiting_s))),
        "live_s": _mean(of["time/wait_for_weights_s"]),
        "pause_s": _mean(of["weights/pause_s"]),
        "save_s": _mean(saves_s[saves_s > 0]),
        "prompt_tokens": _mean(of["length/prompt_mean"]),
        "mean_tokens": _mean(of["length/completion_mean"]),
        "longest_tokens": _mean(of["length/completion_max"]),
        "dropped_share": np.minimum(0.99, _mean(of["reward/zero_variance_share"])),
        "token_s": _mean(of["generator/token_s"]),
        "together": _mean(of["generator/decoded_together"]),
    }
    source = f"{run.root}, steps {steps[0]} to {steps[-1]}"
    return {name: Figure(float(value), source) for name, value in found.items() if np.isfinite(value)}


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Mean of the finite values; nan if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _engine(measured: dict[str, Figure], known: Mapping[str, Figure]) -> dict[str, Figure]:
    """Divide the measured time between two tokens, taken out of `measured`, as the guess is divided.

    Without a guess it is assumed to be proportional to the rollouts decoded together, as on a CPU (docs/log.md).
    """
    token_s, together = measured.pop("token_s", None), measured.pop("together", None)
    if token_s is None or together is None:
        return {}
    names = ("engine_step_s", "engine_sample_s")
    is_guessed = all(name in known and known[name].source.startswith(GUESS) for name in names)
    step, sample = (known[name].value for name in names) if is_guessed else (0.0, 1.0)
    scale = token_s.value / (step + sample * together.value)
    source = f"{token_s.source}, {'divided like the guess' if is_guessed else 'taken as proportional'}"
    return {name: Figure(scale * part, source) for name, part in zip(names, (step, sample), strict=True)}


# ----------------------------------------------------------------------------------------------------------- bottleneck
#
# The bottleneck formula: how many samples each stage of a run can make a second; the slowest sets the pace.
#
# Input: Config, Rates, a Split of the processes.  Output: Pace.  Pure.
#
# Legend: a batch has B = groups_per_step · group_size samples, for which sampled = B / (1 − dropped_share) are decoded;
# each of E generators decodes n = min(max_num_seqs, (S + 1)·B / E) at once, S = max_staleness, a token of each every τ
# seconds; L is the mean number of tokens of a completion.  Seconds a batch:
#   generation   g = sampled · L · τ / (n·E), and pause_s for new weights
#   rewards      sampled · judge_s / workers
#   training     t = tokens / (data-parallel ranks · trainer_tokens_per_s), and what a step takes besides
#   staleness    (longest · τ + max(0, g − L·τ) + judge_s + t' + between_steps_s + live_s) / (S + 1): at most S + 1
#                batches are in flight, and the slots of one are free once it is sampled to its longest completion,
#                judged, trained and live (docs/staleness.md); t' is the share of t that steps in parts leave to the end


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of processes, and the bound on staleness."""

    generators: int
    data_parallel: int  # ranks of the trainer
    max_staleness: int

    @classmethod
    def of(cls, config: Config) -> Split:
        """The split of a run file."""
        return cls(config.generation.num_replicas, config.trainer.data_parallel, config.admission.max_staleness)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per batch in each stage."""

    split: Split
    num_samples: int  # of a batch
    stages_s: dict[str, float]

    @property
    def step_s(self) -> float:
        """Expected seconds between two steps."""
        return max(self.stages_s.values())

    @property
    def bottleneck(self) -> str:
        """The slowest stage."""
        return max(self.stages_s, key=self.stages_s.__getitem__)


def pace_of(config: Config, rates: Rates, split: Split) -> Pace:
    """Compute the pace by the formula above."""
    admission, part, num_batches = config.admission, config.smallest_part, split.max_staleness + 1
    batch = admission.groups_per_step * admission.group_size
    sampled = batch / (1 - rates.dropped_share) if admission.active_sampling else batch
    together = min(config.generation.max_num_seqs, num_batches * batch / split.generators)
    token_s = rates.engine_step_s + rates.engine_sample_s * together
    decode_s = sampled * rates.mean_tokens * token_s / (together * split.generators)
    sampled_s = rates.longest_tokens * token_s + max(0.0, decode_s - rates.mean_tokens * token_s)
    tokens = batch * (rates.prompt_tokens + rates.mean_tokens)
    train_s = config.algorithm.epochs * tokens / (split.data_parallel * rates.trainer_tokens_per_s)
    last_part_s = train_s * max(part.groups / admission.groups_per_step, min(1.0, part.tokens / tokens))
    in_turn_s = sampled_s + rates.judge_s + last_part_s + rates.between_steps_s + rates.live_s
    num_workers = config.rewards.num_replicas * config.rewards.workers_per_replica
    stages_s = {
        "generation": decode_s + rates.pause_s,
        "rewards": sampled * rates.judge_s / num_workers,
        "training": train_s + rates.between_steps_s + rates.save_s / config.checkpoint.every_steps,
        "staleness": in_turn_s / num_batches,
    }
    return Pace(split, batch, stages_s)


def other_splits(config: Config, rates: Rates, rank_units: int, generator_units: int) -> list[Pace]:
    """All splits of the same number of GPUs (or processes), this one included, fastest first.

    rank_units, generator_units: of one data-parallel rank, and of one generator.
    """
    this, batch = Split.of(config), config.admission.groups_per_step * config.admission.group_size
    total = this.data_parallel * rank_units + this.generators * generator_units
    splits = [
        replace(this, data_parallel=ranks, generators=(total - ranks * rank_units) // generator_units)
        for ranks in range(1, min((total - generator_units) // rank_units, batch) + 1)
    ]
    paces = (pace_of(config, rates, split) for split in splits)
    return sorted(paces, key=lambda pace: (pace.step_s, abs(pace.split.data_parallel - this.data_parallel)))


# -------------------------------------------------------------------------------------------------------------- predict

WITHIN = 0.05  # splits this close to the fastest count as equally fast
_KEYS = ("generation.num_replicas", "trainer.num_ranks")  # keys that set a split
_MOST_ROWS = 6  # in the table of splits
_NEVER_IN_IT = (
    "start, queue, requeues, faults, evaluations; reading prompts, unless the engine's rates are measured; ranks that "
    "wait for each other; varying lengths"
)


def predict(config: Config, site: Site, options: argparse.Namespace) -> str:
    """Make the text to print.  Raises ConfigError: no model, no rates, options or a run that cannot be used."""
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


def first_save_s(config: Config, site: Site) -> float | None:
    """Estimate the seconds from the first prompt until a step is trained and saved; None if there are no rates."""
    try:
        figures = rates_of(config, site, object_in(config.model.path / "config.json"), None, {})
    except (ConfigError, OSError):  # an image may have its model elsewhere
        return None
    rates, split = Rates(**{name: figure.value for name, figure in figures.items()}), Split.of(config)
    return pace_of(config, rates, split).stages_s["staleness"] * (split.max_staleness + 1) + rates.save_s


def _left_out(config: Config) -> list[str]:
    """Return remarks on settings that affect the pace of this run and are not in the formula."""
    settings = {
        "run.deterministic=true": config.run.deterministic,
        "what environments take to answer": any(dataset.environment for dataset in config.data),
        "groups of more than admission.group_size": config.largest_group > config.admission.group_size,
        "the critic's own time": config.has_critic,
    }
    return [words for words, is_on in settings.items() if is_on]


def _described(config: Config, pace: Pace) -> dict[str, Any]:
    """Describe a split by its keys."""
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
