"""How many reward workers a process starts, and how long they may take to come up."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import pytest

from rlhpc.config.rules import Config
from rlhpc.metrics.evaluations import EvaluationSettings
from rlhpc.protocol.errors import RoleFailed
from rlhpc.rewards import pool as place
from rlhpc.rewards.pool import open_pool, start_timeout_s
from rlhpc.roles import evaluator


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "expected"), [(1, 1, 65.0), (1, 64, 60.078125), (64, 64, 65.0), (128, 2, 380.0)]
)
def test_workers_that_share_a_core_have_longer_to_start(num_workers: int, num_cores: int, expected: float) -> None:
    assert start_timeout_s(num_workers, num_cores) == expected


@pytest.mark.parametrize(("own", "expected"), [(0, 24), (3, 3)])
def test_a_pool_has_the_time_that_its_workers_need(monkeypatch: pytest.MonkeyPatch, own: int, expected: int) -> None:
    opened: list[tuple[int, Any]] = []

    def note(num_workers: int, _timeout_s: float, **settings: Any) -> None:
        opened.append((num_workers, settings["start_timeout_s"]))

    monkeypatch.setattr(place, "RewardPool", note)
    open_pool(make_config(), ["regex"], own)
    assert opened == [(expected, 60.0 + 5.0 * expected / len(os.sched_getaffinity(0)))]


@pytest.mark.parametrize(("num_shares", "expected"), [(1, 24), (5, 4), (24, 1), (100, 1)])
async def test_evaluators_share_the_workers_of_a_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_shares: int, expected: int
) -> None:
    opened: list[int] = []

    async def engine(*_arguments: Any, **_settings: Any) -> Any:
        return SimpleNamespace(close=AsyncMock())

    def note(_config: Config, _tasks: object, num_workers: int = 0, **_settings: Any) -> NoReturn:
        opened.append(num_workers)
        raise RoleFailed("that is all")

    monkeypatch.setattr(evaluator, "start_engine", engine)
    monkeypatch.setattr(evaluator, "open_pool", note)
    EvaluationSettings(make_config(), "a model", 1, 100, 0.0, {}).write(tmp_path)
    with pytest.raises(RoleFailed, match="that is all"):
        await evaluator._evaluate(tmp_path, num_shares - 1, num_shares)
    assert opened == [expected]


def make_config() -> Config:
    return Config.model_validate({
        "run": {"name": "a", "num_steps": 1}, "model": {"path": "m"}, "data": {"path": "d", "task": "regex"},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1}, "trainer": {"token_budget": 8},
        "admission": {"groups_per_step": 1, "group_size": 2}, "rewards": {"workers_per_replica": 24},
    })  # fmt: skip
