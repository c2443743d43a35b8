"""A site file for the dev cluster, and a run for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.plan.jobs import JobPlan, plan_jobs
from launch.plan.site_file import Site
from launch.private_slurm.cluster import DevCluster
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config

ROOT = Path(__file__).parents[2]
GPUS = {"gpu_memory_gib": 1.0, "gpus_per_node": 2, "gres_type": "fake", "memory_gib_per_gpu": 1}


def site_of(shared: Path, **sections: dict[str, Any]) -> Site:
    """Partitions cpu, train and gen, half an hour; the test's own interpreter and tree."""
    document: dict[str, dict[str, Any]] = {
        "cluster": {"shared_directory": str(shared)},
        "common": {"time": 30},
        "controller": {"partition": "cpu"},
        "trainer": {"partition": "train", **GPUS},
        "generation": {"partition": "gen", **GPUS},
        "prologue": {"python": sys.executable, "code": str(ROOT)},
    }
    for name, keys in sections.items():
        document[name] = document.get(name, {}) | keys
    return Site.model_validate(document)


def config_of(shared: Path, *overrides: str) -> Config:
    words = [f"run.directory={shared}/run", "transport.kind=tcp", "trainer.device=cuda", *overrides]
    return load_config(ROOT / "configs" / "demo.toml", words)


def plan_of(shared: Path, *overrides: str, **sections: dict[str, Any]) -> JobPlan:
    config = config_of(shared, *overrides)
    return plan_jobs(config, site_of(shared, **sections), RunLayout(config.run_directory))


@contextmanager
def turned_to(cluster: DevCluster) -> Iterator[None]:
    """This process's Slurm commands go to the cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in cluster.environment().items():
            patch.setenv(key, value)
        yield
