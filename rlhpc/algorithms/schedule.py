"""The learning rate of every step.

Input: progress of a run, its settings, the ages of a batch's tokens.  Output: a number.  Pure, so that a resume needs
no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rlhpc.config.tables import TrainerConfig
from rlhpc.protocol.types import Int32

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class ScheduleProgress:
    """Progress of a run at the beginning of a step."""

    step: int  # counted from 0
    num_tokens: int = 0  # trained before it, as in tokens/trained_total
    seconds: float = 0.0  # of training before it


def learning_rate(at: ScheduleProgress, config: TrainerConfig, num_steps: int) -> float:
    """Learning rate of a step of a run of num_steps.

    Warm-up rises linearly from the 0 of a step before the first: (step + 1) / (warmup_steps + 1), so that no step is
    spent on a rate of 0 and step warmup_steps is the first at full rate.  Over steps, linear and cosine fall from there
    and reach min_learning_rate at step decay_steps − 1 (num_steps − 1); later steps stay there.  Over tokens and hours
    they fall from the run's beginning and reach it with the first step that begins after decay_tokens or decay_hours;
    warm-up is a factor, so that the rate depends on the position alone.
    Raises ValueError for a negative step.
    """
    if at.step < 0:
        raise ValueError(f"step={at.step}; legal: 0 or more")
    rate = _fallen(at, config, num_steps)
    if at.step < config.warmup_steps:
        return rate * (at.step + 1) / (config.warmup_steps + 1)
    return rate


def _fallen(at: ScheduleProgress, config: TrainerConfig, num_steps: int) -> float:
    """The rate without warm-up."""
    progress = _progress(at, config, num_steps)
    if config.lr_schedule == "constant" or progress < 0:
        return config.learning_rate
    share = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def _progress(at: ScheduleProgress, config: TrainerConfig, num_steps: int) -> float:
    """Progress from 0 to 1 over the fall; below 0 before it."""
    if config.decay_tokens is not None:
        return min(1.0, at.num_tokens / config.decay_tokens)
    if config.decay_hours is not None:
        return min(1.0, at.seconds / (SECONDS_PER_HOUR * config.decay_hours))
    last = (config.decay_steps or num_steps) - 1
    return min(1.0, (at.step - config.warmup_steps) / max(1, last - config.warmup_steps))


def rate_factor_by_age(versions: Iterable[Int32], policy_version: int) -> float:
    """1 / max(1, mean age) of the loss tokens of a batch: α / τ (Zhang et al. 2016, arXiv:1511.05950).

    versions: of the tokens of each row, −1 off the loss mask.  1 without a loss token.
    """
    ages = policy_version - np.concatenate([of_row[of_row >= 0] for of_row in versions])
    return 1.0 / max(1.0, float(ages.mean())) if ages.size else 1.0
