from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlhpc.algorithms.schedule import ScheduleProgress, learning_rate, rate_factor_by_age
from rlhpc.config.tables import TrainerConfig


def rates(num_steps: int, **settings: Any) -> list[float]:
    config = TrainerConfig(token_budget=1, learning_rate=1.0, **settings)
    return [learning_rate(ScheduleProgress(step), config, num_steps) for step in range(num_steps)]


def test_rates_over_steps_are_those_of_their_schedule_with_warm_up_before_it() -> None:
    assert rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]
    assert rates(5, lr_schedule="linear", min_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(5, lr_schedule="cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0])
    assert rates(6, lr_schedule="linear", warmup_steps=1) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(5, lr_schedule="linear", decay_steps=3) == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0])
    assert rates(3, lr_schedule="linear", decay_steps=5) == pytest.approx([1.0, 0.75, 0.5])
    config = TrainerConfig(token_budget=1, learning_rate=1.0, lr_schedule="linear", min_learning_rate=0.1)
    assert learning_rate(ScheduleProgress(99), config, 10) == 0.1
    with pytest.raises(ValueError, match="step=-1"):
        learning_rate(ScheduleProgress(-1), TrainerConfig(token_budget=1), 10)


@pytest.mark.parametrize(
    ("key", "at"),
    [
        ({"decay_tokens": 400}, lambda share: ScheduleProgress(7, num_tokens=int(400 * share), seconds=1e9)),
        ({"decay_hours": 0.5}, lambda share: ScheduleProgress(7, num_tokens=10**9, seconds=1800 * share)),
    ],
)
def test_over_tokens_or_hours_it_falls_by_their_share_whatever_the_step(
    key: dict[str, Any], at: Callable[[float], ScheduleProgress]
) -> None:
    """As linear and cosine over steps do, with warm-up as a factor."""
    for schedule, shape in (("linear", lambda x: 1 - x), ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2)):
        config = TrainerConfig(
            token_budget=1, learning_rate=0.2, min_learning_rate=0.05, lr_schedule=schedule, warmup_steps=9, **key
        )
        cool = config.model_copy(update={"warmup_steps": 0})
        for share in (0.0, 0.25, 0.5, 1.0, 3.0):
            expected = 0.05 + 0.15 * shape(min(share, 1.0))
            assert learning_rate(at(share), cool, 2) == pytest.approx(expected)
            assert learning_rate(at(share), config, 2) == pytest.approx(expected * 8 / 10)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_trains_at_full_rate(schedule: str) -> None:
    assert rates(1, lr_schedule=schedule) == [1.0]


def test_a_batch_of_old_tokens_is_learnt_from_at_a_lower_rate() -> None:
    rows = [np.array([-1, 7, 5, 3], np.int32), np.array([-1, -1, 4], np.int32)]  # ages 0, 2, 4, 3: mean 9 / 4
    assert rate_factor_by_age(rows, 7) == pytest.approx(4 / 9)
    assert rate_factor_by_age([np.array([7, 7, 6], np.int32)], 7) == 1.0
    assert rate_factor_by_age([np.array([-1], np.int32)], 7) == 1.0
    assert rate_factor_by_age([np.array([-1, 0, 2], np.int32)], 4) == pytest.approx(1 / 3)  # ages 4 and 2
