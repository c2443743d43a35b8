"""A small site for tests, and edits of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.plan.jobs import Job, JobComponent, JobPlan, plan_jobs
from launch.plan.site_file import Site
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config

ROOT = Path(__file__).parents[3]
SHARED = Path("/shared")
GPUS = {"gpu": "h100", "gpus_per_node": 8, "partition": "gpu"}


def site_of(**sections: dict[str, Any]) -> Site:
    """Nodes of 8 GPUs, one hour; keys given as `section={key: value}` are put over it, None takes a key away."""
    document: dict[str, dict[str, Any]] = {
        "cluster": {"shared_directory": str(SHARED)},
        "common": {"time": 60},
        "trainer": dict(GPUS),
        "generation": dict(GPUS),
    }
    for name, keys in sections.items():
        document[name] = document.get(name, {}) | keys
        document[name] = {key: value for key, value in document[name].items() if value is not None}
    return Site.model_validate(document)


def config_of(*overrides: str, run_file: str = "configs/demo.toml") -> Config:
    """The demo, for nodes, with two ranks."""
    two = ["trainer.num_ranks=2"] if run_file == "configs/demo.toml" else []
    return load_config(ROOT / run_file, [f"run.directory={SHARED}/run", "transport.kind=tcp", *two, *overrides])


def plan_of(*overrides: str, **sections: dict[str, Any]) -> JobPlan:
    config = config_of(*overrides)
    return plan_jobs(config, site_of(**sections), RunLayout(config.run_directory))


def job_of(plan: JobPlan, name: str) -> Job:
    return next(job for job in plan.jobs if job.name == name)


def component_of(plan: JobPlan, name: str) -> JobComponent:
    return next(component for job in plan.jobs for component in job.components if component.name == name)
