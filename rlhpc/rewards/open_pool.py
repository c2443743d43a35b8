"""A reward pool as the run file says, for all who judge: the service, evaluations, `rlhpc reward`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlhpc.config import Config
from rlhpc.rewards.environments.settings import variables_of
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.task_settings import worker_environment

_START_S, _START_OF_ONE_S = 60.0, 5.0  # the second: of a worker on a core that it shares with others


def open_pool(
    config: Config,
    tasks: Sequence[str],
    num_workers: int = 0,
    *,
    judge_cache: Path | None = None,
    with_environments: bool = False,
) -> RewardPool:
    """A pool as the run file says, not started yet; num_workers: 0 for rewards.workers_per_replica.

    judge_cache: directory for replies of a judge; None: none is kept.  with_environments: workers import the datasets'
    environments, and load what these need, before they are ready.
    """
    rewards = config.rewards
    num_workers = num_workers or rewards.workers_per_replica
    return RewardPool(
        num_workers,
        rewards.timeout_s,
        preload_tasks=tasks,
        memory_limit_bytes=rewards.memory_bytes,
        task_timeout_s=rewards.task_timeout_s,
        task_memory_bytes=rewards.task_memory_bytes,
        batch_size=rewards.batch_size,
        start_timeout_s=start_timeout_s(num_workers, len(os.sched_getaffinity(0))),
        environment=worker_environment(config, judge_cache) | (variables_of(config) if with_environments else {}),
    )


def start_timeout_s(num_workers: int, num_cores: int) -> float:
    """Seconds for workers that start at the same time: all import at once, on the cores that this process may use."""
    return _START_S + _START_OF_ONE_S * num_workers / num_cores
