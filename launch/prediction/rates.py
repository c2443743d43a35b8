"""Rates and lengths that a prediction starts from, each with its source.

Input: a previous run's metrics, [rates] of the site file, options, GPU data sheets.  Output: a Figure by each name of
Rates.  If several sources know a figure, a measured one comes before a given one, and that before a guess.

Guesses: peak rates are the vendors' (NVIDIA data sheets: dense bfloat16, for V100 float16; memory bandwidth of the SXM
form where there are two); the shares of them that software reaches are round numbers that nobody measured here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from launch.checks.memory.plan import ELEMENT_BYTES
from launch.plan.site_file import Site
from rlhpc.config import Config
from rlhpc.config_file import read_resolved
from rlhpc.errors import ConfigError
from rlhpc.metrics.curves import merged, read_curves
from rlhpc.model_shape import ModelShape
from rlhpc.packing.cost import FlopCost
from rlhpc.run_layout import RunLayout

GUESS = "a guess"  # how the source of a guessed figure begins
_TFLOPS_AND_GB_S = {
    "a100-40": (312, 1555), "a100-80": (312, 2039), "h100": (989, 3350), "h100-94": (835, 3900), "h200": (989, 4800),
    "b200": (2250, 8000), "gh200": (989, 4000), "l4": (121, 300), "l40s": (362, 864), "a40": (150, 696),
    "a6000": (155, 768), "rtx4090": (165, 1008), "v100-16": (125, 900), "v100-32": (125, 900),
}  # fmt: skip
_OF_BANDWIDTH, _OF_PEAK_SAMPLING, _OF_PEAK_TRAINING = 0.6, 0.5, 0.4
_EVERY_STEP_S = 0.004  # of an engine: scheduling, launches, sampling
_LINK_BYTES_S = 5e9  # weights from trainer to engines; a rank's state from its GPU to host memory
_ANYWHERE = {"judge_s": 0.01, "between_steps_s": 0.3, "live_s": 0.5, "pause_s": 0.2, "save_s": 5.0}
_FAMILIES = ("time", "trainer", "tokens", "weights", "generator", "length", "reward", "verifier_mean_s")  # of metrics


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Rates:
    """An engine that decodes n rollouts at once gives each its next token every engine_step_s + engine_sample_s · n."""

    engine_step_s: float
    engine_sample_s: float
    judge_s: float  # of a reward worker, a completion
    trainer_tokens_per_s: float  # of one data-parallel rank, prompts included
    between_steps_s: float  # the trainer, from the end of a step to the next batch: new weights, messages, packing
    live_s: float  # from the publication of new weights until all engines sample with them
    pause_s: float  # in which engines sample nothing for it
    save_s: float  # a checkpoint holds up training
    prompt_tokens: float
    mean_tokens: float  # of a completion
    longest_tokens: float  # of the completions of a batch
    dropped_share: float  # of groups: zero variance


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
    cache = b * shape.num_layers * shape.num_key_heads * shape.head_size * tokens  # half of keys and values
    cache_s = cache / (read_s * min(1.0, shape.num_key_heads / ranks))  # of more ranks than heads, several read one
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
    waiting_s = np.maximum(0.0, of["time/wait_for_weights_s"] - working_s)  # for the version before to be live
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
        "dropped_share": np.minimum(0.99, _mean(of["reward/zero_spread_share"])),
        "token_s": _mean(of["generator/token_s"]),
        "together": _mean(of["generator/decoded_together"]),
    }
    source = f"{run.root}, steps {steps[0]} to {steps[-1]}"
    return {name: Figure(float(value), source) for name, value in found.items() if np.isfinite(value)}


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The mean of what is finite; nan if nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _engine(measured: dict[str, Figure], known: Mapping[str, Figure]) -> dict[str, Figure]:
    """Divide the measured time between two tokens, taken out of `measured`, as the guess is divided.

    Without a guess it is taken to be proportional to the rollouts decoded together, as on a CPU (docs/log.md).
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
