"""The learning rate of every step.

Input: a step and the trainer's settings, the ages of a batch's tokens.  Output: a number.  Pure, so that a resume needs
no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from rlhpc.config_sections import TrainerConfig
from rlhpc.types import Int32


def learning_rate(step: int, config: TrainerConfig, num_steps: int) -> float:
    """Learning rate of optimiser step `step`, counted from 0, of a run of num_steps.

    Warm-up rises linearly from the 0 of a step before the first: (step + 1) / (warmup_steps + 1), so that no step is
    spent on a rate of 0 and step warmup_steps is the first at full rate.  Linear and cosine fall from there and reach
    min_learning_rate at step num_steps − 1; later steps stay there.
    Raises ValueError for a negative step.
    """
    if step < 0:
        raise ValueError(f"step={step}; legal: 0 or more")
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps))
    share = 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def rate_factor_by_age(versions: Iterable[Int32], policy_version: int) -> float:
    """1 / max(1, mean age) of the loss tokens of a batch: α / τ (Zhang et al. 2016, arXiv:1511.05950).

    versions: of the tokens of each row, −1 off the loss mask.  1 without a loss token.
    """
    ages = policy_version - np.concatenate([of_row[of_row >= 0] for of_row in versions])
    return 1.0 / max(1.0, float(ages.mean())) if ages.size else 1.0
