"""A small site for tests, and edits of it; jobs and their supervisors; programs in the place of Slurm's commands."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.plan.jobs import Job, JobComponent, JobPlan, plan_jobs
from launch.plan.site_file import Site, load_site
from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import EventLog
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor.controller_job import ControllerJobSupervisor
from launch.supervisor.other_jobs import WorkerJobSupervisor
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config

ROOT = Path(__file__).parents[3]
SHARED = Path("/shared")
GPUS = {"gpu": "h100", "gpus_per_node": 8, "partition": "gpu"}
GOLDEN = ROOT / "tests" / "golden" / "job_scripts"
# Not the recipes: they bring larger numbers, no other words, and test_job_plan.py plans them.
RUN_FILES = sorted(path for path in (ROOT / "configs").rglob("*.toml") if path.parent.name not in ("lora", "recipes"))
SITE_FILES = sorted((ROOT / "slurm" / "sites").glob("*.toml"))
AWAY = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'


@dataclass(frozen=True)
class Pair:
    run_file: Path
    site_file: Path

    @property
    def golden(self) -> Path:
        return GOLDEN / self.site_file.stem / f"{self.run_file.stem}.txt"

    @property
    def site(self) -> Site:
        return load_site(self.site_file)

    @property
    def overrides(self) -> list[str]:
        """A run directory that the site shares; the demo's processes are of one machine unless told otherwise."""
        assert self.site.cluster is not None
        return [f"run.directory={self.site.cluster.shared_directory}/runs/{self.run_file.stem}", "transport.kind=tcp"]

    @property
    def config(self) -> Config:
        return load_config(self.run_file, self.overrides)

    def __str__(self) -> str:
        return f"{self.run_file.stem}@{self.site_file.stem}"


PAIRS = [Pair(run_file, site_file) for run_file in RUN_FILES for site_file in SITE_FILES]


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


# ---------------------------------------------------------------------------------------------- jobs and supervisors


class Commands:
    """Slurm's commands, by the test's own programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def put(self, name: str, body: str) -> None:
        """body: lines of sh; $n is the number of the call, from 1."""
        calls = self.directory / f"{name}.calls"
        path = self.directory / name
        path.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nn=$(wc -l < {calls})\n{body}\n')
        path.chmod(0o755)

    def prints(self, name: str, text: str) -> None:
        (self.directory / f"{name}.txt").write_text(text)
        self.put(name, f"exec cat {self.directory / name}.txt")

    def calls(self, name: str) -> list[str]:
        """The words of each call."""
        path = self.directory / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


def part_of(role: str, *, here: bool = False, program: str = "python", count: int = 1) -> Part:
    return Part(role, (Share(role, count, 0),), here, (), 0, (program,), {}, {})


def job_part(
    layout: RunLayout, role: str, *parts: Part, placement: str = "jobs", others: tuple[str, ...] = (),
    continuation: str = "requeue", **limits: Any,
) -> JobPart:  # fmt: skip
    """A job of one role, which has one process."""
    limit = Limits(**{"meet_s": 60, "stall_s": 60, "max_retries": 2, **limits})
    parts = parts or (part_of(role),)
    return JobPart(layout, layout.job_plan, placement, role, False, parts, limit, continuation, others)


def job_of_id(job_id: int | str) -> ThisJob:
    return ThisJob.of({"SLURM_JOB_ID": str(job_id)})


def running_run(root: Path, *, is_begun: bool = True, **status: Any) -> RunLayout:
    """A run whose attempt was begun by job 7, and whose controller trains."""
    layout = RunLayout(root)
    layout.jobs.mkdir(parents=True)
    if is_begun:
        begun = {"attempt": 0, "resume_step": None, "job_id": 7, "restart": 0}
        layout.attempt.write_text(json.dumps(begun))
    write_status(layout, **status)
    return layout


def write_status(layout: RunLayout, ago_s: float = 0.0, *, roles: tuple[str, ...] = (), **status: Any) -> None:
    usual = {"phase": "training", "step": 7, "unix_time_s": time.time() - ago_s}
    layout.status.write_text(json.dumps(usual | {"roles": [{"name": name} for name in roles]} | status))


def worker_of(plan: JobPart, job: ThisJob | None = None, limit: Any = None) -> WorkerJobSupervisor:
    log = EventLog(plan.layout.job_events("8"), 0)
    return WorkerJobSupervisor(plan, job or ThisJob.without_slurm(), limit or NoTimeLimit(), log, Signals())


def controller_of(plan: JobPart, job: ThisJob | None = None, limit: Any = None, **more: Any) -> ControllerJobSupervisor:
    log = EventLog(plan.layout.job_events("7"), 0)
    signals = more.pop("signals", None) or Signals()
    return ControllerJobSupervisor(plan, job or ThisJob.without_slurm(), limit or NoTimeLimit(), log, signals, **more)


def last_event(layout: RunLayout, job: int) -> str:
    return str(json.loads(layout.job_events(str(job)).read_text().splitlines()[-1])["text"])
