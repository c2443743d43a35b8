"""A reward pool as the run file says, for all who judge: the service, evaluations, `rlhpc reward`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhpc.config import Config
from rlhpc.rewards.environments.settings import variables_of
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.task_settings import worker_environment


def open_pool(
    config: Config,
    tasks: Sequence[str],
    num_workers: int = 0,
    *,
    judge_cache: Path | None = None,
    with_environments: bool = False,
) -> RewardPool:
    """A pool as the run file says, not started yet; num_workers: 0 for rewards.workers_per_replica.

    judge_cache: directory for replies of a judge; None: none is kept.  with_environments: workers import those of
    datasets, and what they look up, before they are ready.
    """
    rewards = config.rewards
    return RewardPool(
        num_workers or rewards.workers_per_replica,
        rewards.timeout_s,
        preload_tasks=tasks,
        memory_limit_bytes=rewards.memory_bytes,
        task_timeout_s=rewards.task_timeout_s,
        task_memory_bytes=rewards.task_memory_bytes,
        batch_size=rewards.batch_size,
        environment=worker_environment(config, judge_cache) | (variables_of(config) if with_environments else {}),
    )
