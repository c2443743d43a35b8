"""The table [evaluation] of a run file, and its rules; see config_sections.py.  Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rlhpc.config_data import title_of
from rlhpc.config_sections import COLDEST, LoosePath, Positive, Section, StopStrings

if TYPE_CHECKING:
    from rlhpc.config import Config


class EvaluationConfig(Section):
    """[evaluation]: how good the model is on held-out data while it trains; several are a table [[evaluation]] each."""

    path: LoosePath
    """A file or directory, as data.path."""
    split: str = ""
    """As data.split: "validation" or "test" of a directory."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Name in curves and directories; default: that of its file or directory, without suffix."""
    dataset: str = ""
    """Dataset of the run whose template, reward function and limits are used; default: the only one, or the one with
    this path."""
    task: str = ""
    """Reward function, if other than that dataset's."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt is refused before the run starts; none: as in training."""
    max_completion_tokens: Positive | None = None
    """Sampling stops after this many tokens; none: as in training. May be longer than in training."""
    stop: StopStrings | None = None
    """Texts that end a completion, as generation.stop; none: as in training."""
    every_steps: Positive | None = None
    """Minimum steps between two evaluations, a multiple of checkpoint.every_steps; none: every checkpoint, as far as
    time permits. The last step is always evaluated."""
    samples: Positive = 1
    """Samples per prompt."""
    prompts: Positive | None = None
    """Number of prompts, drawn at random, the same ones each time; none: all."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0: greedy; else at least 0.01, below which vLLM does not sample."""
    ema: bool = False
    """Evaluate the moving average of the weights (trainer.ema_decay) instead of the weights."""
    num_replicas: Positive = 1
    """Engines, each with generation.tensor_parallel GPUs in addition to those of the run."""
    keep_best: str = ""
    """Metric, such as "pass@1", whose best model is kept as an HF checkpoint; default: none is."""
    stop_after: Positive | None = None
    """Stop the run after this many consecutive evaluations without improvement; needs keep_best."""

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or title_of(self.path)

    @property
    def figures(self) -> list[str]:
        """What it says of a model."""
        majority = [f"maj@{self.samples}"] if self.samples > 1 else []
        return [*(f"pass@{k}" for k in sizes_of_sets(self.samples)), *majority, "reward"]


def sizes_of_sets(samples: int) -> list[int]:
    """Every k for which pass@k is told of so many samples of a prompt: 1, 2, 4, … and all of them."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return sorted({*powers, samples})


def evaluations_are_told_apart(config: Config) -> None:
    """Their directories and curves have their names."""
    titles = [evaluation.title for evaluation in config.evaluation]
    for place, title in enumerate(titles):
        if title in titles[:place]:
            raise ValueError(
                f"evaluation.{titles.index(title)} and evaluation.{place} are both called {title!r}; give one of them "
                "another name"
            )


def evaluations_are_like_a_dataset(config: Config) -> None:
    """Somebody has to say how prompts are asked and completions judged."""
    titles, paths = ([getattr(dataset, key) for dataset in config.data] for key in ("title", "path"))
    for place, evaluation in enumerate(config.evaluation):
        like = evaluation.dataset
        if like not in titles if like else len(titles) > 1 and evaluation.path not in paths:
            raise ValueError(
                f"{_key(config, place, 'dataset')}={like!r}: names no dataset whose template, reward function "
                f"and limits {str(evaluation.path)!r} can use; legal: {', '.join(map(repr, titles))}"
            )


def evaluations_have_checkpoints(config: Config) -> None:
    """What is evaluated is what was saved."""
    saved = config.checkpoint.every_steps
    for place, evaluation in enumerate(config.evaluation):
        every = evaluation.every_steps
        if every is not None and every % saved:
            raise ValueError(
                f"{_key(config, place, 'every_steps')}={every}: a checkpoint comes every {saved} steps "
                "(checkpoint.every_steps); legal: a multiple of it"
            )


def best_is_a_figure(config: Config) -> None:
    """Each evaluation has figures by its number of samples."""
    for place, evaluation in enumerate(config.evaluation):
        best, figures = evaluation.keep_best, evaluation.figures
        if best and best not in figures:
            raise ValueError(
                f"{_key(config, place, 'keep_best')}={best!r} with samples={evaluation.samples}; legal: "
                f"{', '.join(map(repr, figures))}"
            )
        if evaluation.stop_after is not None and not best:
            raise ValueError(
                f"{_key(config, place, 'stop_after')}={evaluation.stop_after}: needs keep_best, the metric "
                "that has to improve"
            )
        if 0 < evaluation.temperature < COLDEST:
            raise ValueError(
                f"{_key(config, place, 'temperature')}={evaluation.temperature:g}: vLLM would sample at {COLDEST:g}; "
                f"legal: 0, for the most likely token each time, or {COLDEST:g} to 2"
            )
        if evaluation.temperature == 0 and evaluation.samples > 1:
            raise ValueError(
                f"{_key(config, place, 'temperature')}=0 with samples={evaluation.samples}: all samples of a prompt "
                "would be the same; legal: samples=1, or above 0"
            )


def _key(config: Config, place: int, key: str) -> str:
    """As a run file with one table, or several, has it."""
    return f"evaluation.{place}.{key}" if len(config.evaluation) > 1 else f"evaluation.{key}"


def averages_are_kept(config: Config) -> None:
    """Checkpoints have an average where one is asked for."""
    for place, evaluation in enumerate(config.evaluation):
        if evaluation.ema and config.trainer.ema_decay == "off":
            raise ValueError(f"{_key(config, place, 'ema')}=true needs a trainer.ema_decay such as 0.99; it is 'off'")


EVALUATION = (
    evaluations_are_told_apart,
    evaluations_are_like_a_dataset,
    evaluations_have_checkpoints,
    best_is_a_figure,
    averages_are_kept,
)
