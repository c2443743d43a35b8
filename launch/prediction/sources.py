"""Choose between several sources of a figure: measured, then given, then guessed.

Input: a run's measurements, the site file, the model.  Output: Rates and Lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launch.plan.site_file import Site
from launch.prediction.guesses import NAMES, fixed_guesses, gpu_named, guessed
from launch.prediction.lengths import LawfulLengths, LengthLaw, Lengths
from launch.prediction.measured import Measured
from launch.prediction.rates import GUESS, Figure, Rates
from rlhpc.config import Config
from rlhpc.errors import ConfigError
from rlhpc.model_shape import ModelShape

GUESSED_LAW = "lognormal:0.8"
GUESSED_SHARE_OF_LONGEST, GUESSED_DROPPED = 0.4, 0.2
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class LengthOptions:
    """Options of the command line; None: not given."""

    mean_tokens: float | None = None
    law: str | None = None
    dropped_share: float | None = None

    @property
    def given(self) -> list[str]:
        """Names of the given options."""
        pairs = {"--mean-tokens": self.mean_tokens, "--length-law": self.law, "--dropped-share": self.dropped_share}
        return [name for name, value in pairs.items() if value is not None]


def lengths_of(config: Config, measured: Measured | None, options: LengthOptions) -> Lengths:
    """Choose the lengths.  Raises ConfigError: options contradict each other or have no legal value."""
    longest = config.generation.max_completion_tokens
    if measured is not None:
        if options.given:
            raise ConfigError(f"{options.given[0]}: --from already provides lengths; legal: one of the two")
        return measured.lengths.cut_off(config.generation.max_prompt_tokens, longest)
    share = options.dropped_share
    if share is not None and not 0 <= share < 1:
        raise ConfigError(f"--dropped-share {share:g}: legal: from 0, below 1")
    guesses = [name for name in ("--mean-tokens", "--length-law", "--dropped-share") if name not in options.given]
    return LawfulLengths(
        LengthLaw.parsed(options.law or GUESSED_LAW),
        options.mean_tokens if options.mean_tokens is not None else max(1.0, GUESSED_SHARE_OF_LONGEST * longest),
        longest,
        prompt_tokens=max(1, config.generation.max_prompt_tokens // 2),
        dropped_share=GUESSED_DROPPED if share is None else share,
        source=f"{GUESS}: no {', '.join(guesses)}" if guesses else GIVEN,
    )


def rates_of(
    config: Config, site: Site, model: Mapping[str, Any], measured: Measured | None, mean_tokens: float
) -> Rates:
    """Choose the rates.  mean_tokens: of a completion.  Raises ConfigError naming the first rate without a source."""
    shape = ModelShape.of(model)
    trainer, engine = gpu_named(site.trainer.gpu), gpu_named(site.generation.gpu)
    guesses = fixed_guesses()
    if shape is not None and trainer is not None and engine is not None:
        guesses = guessed(config, model, shape, trainer, engine, mean_tokens)
    given = {
        name: Figure(value, f"{GIVEN}: rates.{name} of the site file")
        for name, value in site.rates.model_dump().items()
        if value is not None
    }
    known = guesses | given | (_measured(measured, guesses, config.generation.engine) if measured is not None else {})
    for name in NAMES:
        if name not in known:
            raise ConfigError(
                f"rates.{name}: missing in the site file, and nothing to guess it from: "
                f"trainer.gpu={site.trainer.gpu!r}, generation.gpu={site.generation.gpu!r}, "
                f"model_type={model.get('model_type')!r}; "
                "legal: --from RUN_DIR, [rates] in the site file, or GPUs and a model whose figures are known"
            )
    for one, other in (("engine_step_s", "engine_sample_s"), ("trainer_step_s", "trainer_pflop_s")):
        if known[one].value == known[other].value == 0:
            raise ConfigError(f"rates.{one}=0 and rates.{other}=0: nothing is that fast; legal: one of them above 0")
    return Rates(**{name: known[name] for name in NAMES})


def _measured(measured: Measured, guesses: Mapping[str, Figure], engine: str) -> dict[str, Figure]:
    """A run that always decoded the same number at once gives one figure instead of two: divide it as the guess does.

    vLLM without a known GPU is taken to run on a CPU, where a step is bound by arithmetic and takes twice as long for
    twice as many (docs/log.md).  The scripted engine only sleeps.
    """
    found = dict(measured.figures)
    is_guessed = "engine_sample_s" in guesses
    if measured.tells_slope or not (is_guessed or engine == "vllm"):
        return found
    step, sample, n = 0.0, 1.0, measured.decoded_together
    if is_guessed:
        step, sample = guesses["engine_step_s"].value, guesses["engine_sample_s"].value
    whole = found["engine_step_s"]
    scale = whole.value / (step + sample * n)
    divided = f"{whole.source}, {'divided like the guess' if is_guessed else 'assumed proportional'}"
    return found | {
        "engine_step_s": replace(whole, value=scale * step, source=divided),
        "engine_sample_s": Figure(scale * sample, divided),
    }
