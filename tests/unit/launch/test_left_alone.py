"""A job that waits for a controller whose own job has ended does not requeue itself for ever.

A life shorter than `cluster.meet_s` would otherwise end before the job may say that it is alone, again and again.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.records import JobRecord, write_job_record
from launch.run_files.run_state import Cause, EventLog
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor.other_jobs import WorkerJobSupervisor
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout
from tests.unit.launch.test_slurm_answers import AWAY, Commands, commands

__all__ = ["commands"]

pytestmark = pytest.mark.starts

HOUR_AGO = time.time() - 3600


class AtItsEnd(NoTimeLimit):
    """A life of ten minutes of which nothing is left."""

    @property
    def life_s(self) -> float:
        return 600.0

    def left_s(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("squeue", "silent_s", "cause"),
    [
        ("echo '7|CANCELLED'; echo '8|RUNNING'", 500, Cause.ALONE),
        ("echo '8|RUNNING'", 500, Cause.ALONE),  # Slurm has forgotten it
        ("echo '7|PENDING'; echo '8|RUNNING'", 500, Cause.TIME),
        ("echo '7|CANCELLED'; echo '8|RUNNING'", 1, Cause.TIME),  # the controller is still ending
        ("echo '7|CANCELLED'", 500, Cause.TIME),  # not a whole answer: this job is not in it
        (AWAY, 500, Cause.TIME),
    ],
)
@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_a_job_near_its_limit_is_requeued_only_if_a_controller_may_come(
    commands: Commands, tmp_path: Path, role: str, squeue: str, silent_s: float, cause: Cause
) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.jobs.mkdir(parents=True)
    for job_id, name in ((7, "controller"), (8, role)):
        write_job_record(layout, JobRecord(job_id, name, "jobs", None, "p", "s", False, 0, 0, None, HOUR_AGO))
    status = {"phase": "training", "attempt": 0, "step": 5, "roles": [], "unix_time_s": time.time() - silent_s}
    layout.status.write_text(json.dumps(status))
    commands.put("squeue", squeue)
    part = Part(role, (Share(role, 1),), False, (), 0, ("python",), {}, {})
    plan = JobPart(layout, layout.job_plan, "jobs", role, False, (part,), Limits(1800, 60, 2), "requeue", ())
    log, job = EventLog(layout.job_events("8"), 0), ThisJob.of({"SLURM_JOB_ID": "8"})
    outcome = WorkerJobSupervisor(plan, job, AtItsEnd(), log, Signals())._look()  # type: ignore[arg-type]
    assert outcome is not None
    assert outcome.cause is cause
