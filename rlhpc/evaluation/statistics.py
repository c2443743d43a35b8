"""Statistics of an evaluation's samples: estimates and their confidence intervals.

Input: for each prompt, the verdicts and answers of its samples.  Output: estimates with 95 % intervals.  Pure.

Samples of one prompt depend on each other, prompts do not: intervals are taken over prompts (arXiv:2411.00640, §2.2).
Samples that no verifier could judge are excluded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhpc.config_evaluation import sizes_of_sets

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
    answer: str  # "": none was found, or the reward function names none
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
    """pass@k for k = 1, 2, 4, … and samples_per_prompt, maj@k for that last one, and reward, in this order.

    A prompt with fewer than k judged samples is left out of pass@k and of maj@k; a figure without prompts is left out.
    maj@k needs a reward function that names answers.
    """
    found = of_prompts(prompts, samples_per_prompt)
    return {name: (mean if name == REWARD else share)(np.array([*values.values()])) for name, values in found.items()}


def of_prompts(prompts: Sequence[Sequence[JudgedSample]], samples_per_prompt: int) -> dict[str, dict[int, float]]:
    """The figures of single prompts, by the prompt's place, whose means estimates() returns."""
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

    The interval is that of the differences (arXiv:2411.00640, §4.2): what makes a prompt hard for both cancels out.
    """
    return mean(second - first)
