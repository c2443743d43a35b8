"""`rlhpc compare FIRST SECOND`: is the second of two evaluated models better, and how surely?

Input: directories of two evaluations on the same data.  Output: figures of the prompts that both have, and their
differences, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.commands.evaluate.report import wanted_samples
from launch.common.text_table import aligned
from rlhpc.errors import ConfigError
from rlhpc.evaluation.samples_file import EvaluatedSample, read_samples
from rlhpc.evaluation.settings import NAME, EvaluationSettings, read_settings
from rlhpc.evaluation.statistics import Estimate, JudgedSample, difference, of_prompts
from rlhpc.types import Verdict

# What has to be equal, or a difference would be of more than the models.
ALIKE = ("inputs.data", "data.task", "data.prompt_template", "data.prompt_field", "data.system_prompt",
         "data.use_chat_template", "data.reference_field", "data.environment", "inputs.corpus",
         "generation.max_completion_tokens", "generation.stop", "temperature")  # fmt: skip
ALIKE_BELOW = ("environment.", "composite.", "judge.", "instructions.")
FEW = 20  # prompts; the interval of fewer says too much


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same prompts."""

    first: str
    second: str
    num_prompts: int  # that both have samples of
    figures: dict[str, tuple[float, float, Estimate]]  # of the first, of the second, and the difference

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        figures = {
            name: {"first": one, "second": other, "difference": asdict(change)}
            for name, (one, other, change) in self.figures.items()
        }
        return {"first": self.first, "second": self.second, "num_prompts": self.num_prompts, "figures": figures}

    def as_text(self) -> str:
        """A line for each figure."""
        rows = [self._row(name, *values) for name, values in self.figures.items()]
        heads = [f"first   {self.first}", f"second  {self.second}", f"{self.num_prompts} prompts that both have"]
        return "\n".join([*heads, *aligned(rows)])

    def _row(self, name: str, one: float, other: float, change: Estimate) -> tuple[str, ...]:
        interval = f"[{change.low:+.3f}, {change.high:+.3f}]"
        of = "" if change.num_prompts == self.num_prompts else f"of {change.num_prompts} prompts"
        return f"  {name}", f"{one:.3f}", f"{other:.3f}", f"{change.value:+.3f}", interval, _verdict(change), of


def compare(options: argparse.Namespace) -> int:
    """Returns the exit status.  Raises ConfigError, DataError."""
    comparison = comparison_of(options.first, options.second)
    print(json.dumps(comparison.as_json(), indent=1) if options.json else comparison.as_text())
    return 0


def comparison_of(first: Path, second: Path) -> Comparison:
    """Raises ConfigError: no evaluation, one of something else, or no prompt that both have; DataError."""
    settings = [_settings(path) for path in (first, second)]
    _refuse_unlike(settings)
    wanted = [_wanted(path, each) for path, each in zip((first, second), settings, strict=True)]
    num_parts = 1 + any(map(_has_namesakes, wanted))
    judged = [_judged(samples, num_parts) for samples in wanted]
    common = sorted(judged[0].keys() & judged[1].keys())
    if not common:
        raise ConfigError(f"{first} and {second}: have no prompt in common")
    numbers = {each.samples_per_prompt for each in settings}
    one, other = (of_prompts([of_model[source] for source in common], min(numbers)) for of_model in judged)
    if len(numbers) > 1:  # a majority of more votes is another figure
        one.pop(f"maj@{min(numbers)}", None)
    figures = {}
    for name in (name for name in one if name in other):
        places = sorted(one[name].keys() & other[name].keys())
        values = [np.array([of_model[name][place] for place in places]) for of_model in (one, other)]
        if places:
            figures[name] = float(values[0].mean()), float(values[1].mean()), difference(*values)
    return Comparison(settings[0].title, settings[1].title, len(common), figures)


def _settings(directory: Path) -> EvaluationSettings:
    settings = read_settings(directory)
    if settings is None:
        raise ConfigError(f"{directory}: not an evaluation (no {NAME}); `rlhpc evaluate` prints where it writes one")
    return settings


def _refuse_unlike(settings: Sequence[EvaluationSettings]) -> None:
    first, second = (each.identity for each in settings)
    keys = [*ALIKE, *(key for key in dict.fromkeys((*first, *second)) if key.startswith(ALIKE_BELOW))]
    unlike = [f"{key}: {first.get(key)!r} and {second.get(key)!r}" for key in keys if first.get(key) != second.get(key)]
    if unlike:
        raise ConfigError(
            "\n".join(["the two evaluations differ in more than the model:", *map("  {}".format, unlike)])
        )


def _wanted(directory: Path, settings: EvaluationSettings) -> list[EvaluatedSample]:
    """All of an evaluation.  Raises ConfigError: some are missing."""
    wanted = wanted_samples(settings, read_samples(directory))
    if len(wanted) < settings.num_samples:  # those that are there first are short ones
        raise ConfigError(
            f"{directory}: {len(wanted)} of {settings.num_samples} samples are there; repeat its `rlhpc evaluate` "
            "command to draw the others"
        )
    return wanted


def _has_namesakes(samples: Sequence[EvaluatedSample]) -> bool:
    """Whether files of one name lie in several directories, as those of splits may."""
    files = {_file_of(each.source) for each in samples}
    return len({file.name for file in files}) < len(files)


def _judged(samples: Sequence[EvaluatedSample], num_parts: int) -> dict[str, list[JudgedSample]]:
    """Samples by the record of their prompt, wherever the dataset lay; num_parts: of a path that tell files apart."""
    found: defaultdict[str, list[JudgedSample]] = defaultdict(list)
    for each in samples:
        if each.verdict != Verdict.VERIFIER_ERROR.value:
            sample = JudgedSample(each.verdict == Verdict.CORRECT.value, each.answer, each.reward)
            found["/".join(Path(each.source).parts[-num_parts:])].append(sample)
    return found


def _file_of(source: str) -> Path:
    """Without the line."""
    return Path(source.rpartition(":")[0])


def _verdict(change: Estimate) -> str:
    """What the interval says."""
    if change.num_prompts < FEW:
        return "too few prompts"
    if change.low > 0:
        return "better"
    return "worse" if change.high < 0 else "no difference shown"
