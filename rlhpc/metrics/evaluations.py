"""The samples of an evaluation on disk: JSON lines that one process appends and a later one continues.

Input: samples as they are judged.  Output: samples-0.jsonl, samples-1.jsonl, … in the directory of the evaluation, one
file for each of its processes.  A killed process leaves complete lines and at most one incomplete one, which is ignored
and cut off.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rlhpc.base.files import naming, numbered_files, write_atomically
from rlhpc.config.rules import Config
from rlhpc.config.tables_services import sizes_of_sets
from rlhpc.protocol.errors import ConfigError, DataError

# ------------------------------------------------------------------------------------------------------------- settings
#
# Settings of an evaluation: written once to its directory, read by its processes.
#
# evaluation.json     these settings
# samples-0.jsonl     samples of its first process
# summary.json        the figures, once all samples are there

NAME = "evaluation.json"
OF_RUNS = {"path", "name", "weight", "max_prompt_tokens", "max_completion_tokens"}  # keys of [data] not in `identity`
SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Model, data and engine as in a run file, and the number of samples."""

    config: Config
    title: str  # the model and the data, for people
    samples_per_prompt: int
    num_prompts: int  # the first ones in the seeded order
    temperature: float  # 0: the most likely token each time
    inputs: dict[str, Any]  # digests of the files that samples depend on
    rendezvous: str = ""  # directory with addresses of services of a run that lives; "": none is asked

    @property
    def identity(self) -> dict[str, Any]:
        """Values that determine a sample, by key: samples under different values must not be mixed."""
        config = self.config
        return {
            **{f"inputs.{name}": value for name, value in self.inputs.items()},
            **{f"data.{key}": value for key, value in config.data[0].model_dump(mode="json", exclude=OF_RUNS).items()},
            **_of_environment(config),
            **_of_tasks(config),
            "generation.engine": config.generation.engine,
            "generation.max_prompt_tokens": config.generation.max_prompt_tokens,
            "generation.max_completion_tokens": config.generation.max_completion_tokens,
            "generation.stop": list(config.generation.stop),
            "model.chat_template_kwargs": config.model.chat_template_kwargs,
            "model.dtype": config.model.dtype,
            "run.seed": config.run.seed,
            "temperature": self.temperature,
        }

    @property
    def num_samples(self) -> int:
        """Number of samples of all prompts."""
        return self.num_prompts * self.samples_per_prompt

    def write(self, directory: Path) -> None:
        """Write the settings into an evaluation's directory.  Raises OSError."""
        document = {
            "config": self.config.model_dump(mode="json"),
            **{name: getattr(self, name) for name in (*_PLAIN, *_LATER)},
        }
        write_atomically(directory / NAME, json.dumps(document, indent=1).encode())


def _of_environment(config: Config) -> dict[str, Any]:
    """Values that determine a dialogue; a corpus counts by its digest, which is among the inputs."""
    if not config.data[0].environment:
        return {}
    table = config.environment.model_dump(mode="json", exclude={"corpus"})
    return {f"environment.{key}": value for key, value in table.items()}


def _of_tasks(config: Config) -> dict[str, Any]:
    """The tables that configure the dataset's tasks."""
    found: dict[str, Any] = {}
    for task in config.data_tasks:
        if task in config.composite:
            found[f"composite.{task}"] = config.composite[task].model_dump(mode="json")
        for part, key, table in (
            ("llm_judge", "judge", config.judge),
            ("instruction_following", "instructions", config.instructions),
            ("math_answer", "math", config.math),
            ("exact_match", "text", config.text),
            ("token_f1", "text", config.text),
            ("reward_model", "reward_model", config.reward_model),
        ):
            if part in config.parts_of(task):
                values = table.model_dump(mode="json", exclude=_EFFORT)
                if (service := config.service_asked_by(part)) is not None:
                    values |= {"service": service.identity}
                found |= {f"{key}.{name}": value for name, value in values.items()}
    return found


_EFFORT = {"timeout_s", "attempts", "backoff_s", "requests_per_s", "key_variable", "key_file", "cache"}  # of no verdict
_PLAIN = ("title", "samples_per_prompt", "num_prompts", "temperature", "inputs")
_LATER = ("rendezvous",)  # absent from older files


def read_settings(directory: Path) -> EvaluationSettings | None:
    """Read an evaluation's settings; None if there are none.  Raises ConfigError if the file is damaged."""
    path = directory / NAME
    try:
        document = json.loads(path.read_bytes())
        config = Config.model_validate(document["config"])
        later = {name: document[name] for name in _LATER if name in document}
        return EvaluationSettings(config, **{name: document[name] for name in _PLAIN}, **later)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{path}: damaged: {error}") from error


# ----------------------------------------------------------------------------------------------------------- statistics
#
# Statistics of an evaluation's samples: estimates and their confidence intervals.
#
# Input: for each prompt, the verdicts and answers of its samples.  Output: estimates with 95 % intervals.  Pure.
#
# Samples of one prompt depend on each other, prompts do not: intervals are taken over prompts (arXiv:2411.00640, §2.2).
# Samples that no verifier could judge are excluded.

Z = 1.959964  # 97.5 % of a normal distribution lie below
REWARD = "reward"  # the only figure that is not a share


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its interval of 95 %."""

    value: float
    low: float
    high: float
    num_prompts: int  # over which it is a mean


@dataclass(frozen=True, slots=True)
class JudgedSample:
    """A sample with a verdict."""

    is_correct: bool
    answer: str  # "": none was found, or the reward function reports none
    reward: float


def pass_at_k(num_judged: int, num_correct: int, k: int) -> float:
    """Probability that of k samples of a prompt at least one is correct, unbiased (arXiv:2107.03374, eq. 1).

    num_judged: n ≥ k samples, of which num_correct were correct.
    """
    wrong = num_judged - num_correct
    return 1.0 - math.prod(1.0 - k / i for i in range(wrong + 1, num_judged + 1)) if wrong >= k else 1.0


def majority(samples: Sequence[JudgedSample]) -> float:
    """Probability that the most frequent answer is correct, ties broken at random (arXiv:2203.11171).

    Correct answers count as one answer, however they are spelt.  A wrong sample without an answer has no vote;
    0 without votes.
    """
    votes = Counter((sample.is_correct, "" if sample.is_correct else sample.answer) for sample in _voters(samples))
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, number in votes.items() if number == most]
    return sum(is_correct for is_correct, _ in winners) / len(winners)


def _voters(samples: Sequence[JudgedSample]) -> list[JudgedSample]:
    return [sample for sample in samples if sample.is_correct or sample.answer]


def share(values: NDArray[np.float64]) -> Estimate:
    """Mean of values [N] between 0 and 1, one for each prompt; N ≥ 1.

    Wilson's interval (1927) with the number of independent trials that have the variance which was measured over
    prompts: within 0 and 1, and not empty where all prompts are alike.
    """
    number, mean = len(values), float(values.mean())
    are_alike = values.min() == values.max()  # their mean, and so their variance, may be off by rounding
    variance = 0.0 if are_alike else float(values.var(ddof=1)) / number
    trials = mean * (1 - mean) / variance if variance > 0 and 0 < mean < 1 else number
    centre = (mean + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z / (1 + Z**2 / trials) * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2))
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)), number)


def mean(values: NDArray[np.float64]) -> Estimate:
    """Mean of values [N] of any size, one for each prompt; N ≥ 1.  A normal interval, of width 0 for N = 1."""
    number, centre = len(values), float(values.mean())
    half = Z * math.sqrt(float(values.var(ddof=1)) / number) if number > 1 else 0.0
    return Estimate(centre, centre - half, centre + half, number)


def estimates(prompts: Sequence[Sequence[JudgedSample]], samples_per_prompt: int) -> dict[str, Estimate]:
    """pass@k for k = 1, 2, 4, … and samples_per_prompt, maj@k for the last of these, and reward, in this order.

    A prompt with fewer than k judged samples is left out of pass@k and of maj@k; a figure without prompts is left out.
    maj@k needs a reward function that reports answers.
    """
    found = of_prompts(prompts, samples_per_prompt)
    return {name: (mean if name == REWARD else share)(np.array([*values.values()])) for name, values in found.items()}


def of_prompts(prompts: Sequence[Sequence[JudgedSample]], samples_per_prompt: int) -> dict[str, dict[int, float]]:
    """Figures of single prompts, by the prompt's place; estimates() returns their means."""
    found: dict[str, dict[int, float]] = {}
    for k in sizes_of_sets(samples_per_prompt):
        found[f"pass@{k}"] = {
            place: pass_at_k(len(samples), sum(each.is_correct for each in samples), k)
            for place, samples in enumerate(prompts)
            if len(samples) >= k
        }
    if samples_per_prompt > 1 and any(sample.answer for samples in prompts for sample in samples):
        found[f"maj@{samples_per_prompt}"] = {
            place: majority(samples) for place, samples in enumerate(prompts) if len(samples) >= samples_per_prompt
        }
    found[REWARD] = {
        place: float(np.mean([each.reward for each in samples])) for place, samples in enumerate(prompts) if samples
    }
    return {name: values for name, values in found.items() if values}


def difference(first: NDArray[np.float64], second: NDArray[np.float64]) -> Estimate:
    """Mean of second − first, values [N] of the same prompts; N ≥ 1.

    The interval is that of the differences (arXiv:2411.00640, §4.2): the difficulty of a prompt for both cancels out.
    """
    return mean(second - first)


# --------------------------------------------------------------------------------------------------------- samples file

_NAME = re.compile(r"samples-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One completion and its verdict."""

    prompt: int  # its place in the order of prompts
    sample: int  # 0 … samples per prompt − 1
    source: str  # file and line of the record
    completion: str
    num_tokens: int
    finish_reason: str  # "stop", or "length" if it was cut off
    verdict: str
    reward: float  # meaningless if the verdict is verifier_error
    answer: str = ""
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)


class SamplesFile:
    """The file of one process.  Use as a context manager."""

    def __init__(self, directory: Path, index: int) -> None:
        """Continue the file, or begin it.  Raises OSError."""
        self._path = directory / f"samples-{index}.jsonl"
        self._file = self._path.open("ab")
        os.ftruncate(self._file.fileno(), _length_of_whole_lines(self._path))

    def append(self, sample: EvaluatedSample) -> None:
        """Hand a sample to the kernel: it survives the end of this process.  Raises OSError that names the file."""
        with naming(self._path):
            self._file.write(json.dumps(asdict(sample)).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with naming(self._path), self._file:
            os.fsync(self._file.fileno())


def read_samples(directory: Path) -> Iterator[EvaluatedSample]:
    """All whole samples, duplicates of a prompt and number included.  Raises DataError for a damaged line, OSError."""
    for _, path in numbered_files(directory, _NAME):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # it was being written when the process was killed
                try:
                    yield EvaluatedSample(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise DataError(f"{path}:{number}: not a sample of an evaluation: {error}") from error


def _length_of_whole_lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(len(line) for line in lines if line.endswith(b"\n"))
