"""In the grace time of a preemption (GraceTime) Slurm signals every srun, but not the batch step.

A job that ends meanwhile is over to Slurm, and not requeued.  A program on PATH stands for squeue; what it prints was
recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import Attempt, Cause, EventLog, read_progress
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor.__main__ import owns_run
from launch.supervisor.controller_job import ControllerJobSupervisor
from launch.supervisor.other_jobs import WorkerJobSupervisor
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout

pytestmark = pytest.mark.starts

# squeue --Format=State:20,PreemptTime:30
IN_GRACE = "RUNNING             2026-11-26T05:01:40           "
UNTROUBLED = "RUNNING             N/A                           "
REQUEUED = "COMPLETING          2026-11-26T05:00:22           "


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What squeue prints; without the file it fails."""
    program, said = tmp_path / "bin" / "squeue", tmp_path / "said"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec cat {said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return said


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    layout.attempt.write_text(json.dumps({"attempt": 0, "resume_step": None, "job_id": 7, "restart": 0}))
    layout.status.write_text(json.dumps({"phase": "training", "step": 7, "roles": [], "unix_time_s": time.time()}))
    return layout


def plan_of(layout: RunLayout, role: str) -> JobPart:
    part = Part(role, (Share(role, 1),), False, (), 0, ("python",), {}, {})
    return JobPart(layout, layout.job_plan, "jobs", role, False, (part,), Limits(60, 60, 2), "requeue", ())


@pytest.mark.parametrize(
    ("said", "is_preempted"),
    [
        (IN_GRACE, True),
        (f"{UNTROUBLED}\n{IN_GRACE}", True),  # components of one job
        (UNTROUBLED, False),
        (REQUEUED, False),  # Slurm does it itself
        ("", False),
        (None, False),
    ],
)
def test_a_job_is_being_preempted_while_it_runs_and_slurm_has_said_when_it_must_go(
    squeue: Path, said: str | None, is_preempted: bool
) -> None:
    if said is not None:
        squeue.write_text(f"{said}\n")
    assert ThisJob.of({"SLURM_JOB_ID": "8"}).is_being_preempted() is is_preempted
    assert not ThisJob.without_slurm().is_being_preempted()


@pytest.mark.parametrize(
    ("said", "is_to_go_on"),
    [
        (f"{UNTROUBLED}\n{UNTROUBLED}", True),  # components of one job
        (f"{UNTROUBLED}\n{IN_GRACE}", False),
        (f"{UNTROUBLED}\n{REQUEUED}", False),
        ("", False),
        (None, False),
    ],
)
def test_a_signal_to_a_batch_step_that_slurm_lets_go_on_is_a_persons(
    squeue: Path, said: str | None, is_to_go_on: bool
) -> None:
    if said is not None:
        squeue.write_text(f"{said}\n")
    assert ThisJob.of({"SLURM_JOB_ID": "8"}).is_to_go_on() is is_to_go_on


def test_a_signal_to_a_job_that_stands_by_stops_no_run_of_another_job(layout: RunLayout) -> None:
    plan, (owner, follower) = plan_of(layout, "controller"), (ThisJob.of({"SLURM_JOB_ID": n}) for n in "78")
    assert owns_run(plan, owner)
    assert not owns_run(plan, follower)
    assert not owns_run(plan_of(layout, "generator"), owner)
    layout.attempt.unlink()
    assert owns_run(plan, follower)


@pytest.mark.parametrize(("said", "cause"), [(IN_GRACE, Cause.TIME), (UNTROUBLED, Cause.STOP)])
def test_a_generator_that_leaves_in_the_grace_time_comes_back_and_one_that_is_retired_does_not(
    squeue: Path, layout: RunLayout, said: str, cause: Cause
) -> None:
    """Slurm took its job for completed: generators added by `rlhpc scale` were gone with the first preemption."""
    squeue.write_text(f"{said}\n")
    job, log = ThisJob.of({"SLURM_JOB_ID": "8"}), EventLog(layout.job_events("8"), 0)
    supervisor = WorkerJobSupervisor(plan_of(layout, "generator"), job, NoTimeLimit(), log, Signals())  # type: ignore[arg-type]
    supervisor._step = SimpleNamespace(status=lambda: 0, asked=False)  # type: ignore[assignment]
    supervisor._attempt = Attempt(0, None, 7, 0)
    outcome = supervisor._look()
    assert outcome is not None
    assert outcome.cause is cause


@pytest.mark.parametrize(("said", "cause"), [(IN_GRACE, Cause.TIME), (UNTROUBLED, Cause.FAILED)])
def test_a_job_whose_last_generator_leaves_in_the_grace_time_goes_back_into_the_queue(
    squeue: Path, layout: RunLayout, said: str, cause: Cause
) -> None:
    """It began another attempt on the nodes that it had to leave, and used up a retry."""
    squeue.write_text(f"{said}\n")
    job, log = ThisJob.of({"SLURM_JOB_ID": "8"}), EventLog(layout.job_events("8"), 0)
    supervisor = ControllerJobSupervisor(plan_of(layout, "controller"), job, NoTimeLimit(), log, Signals())
    step = SimpleNamespace(name="generation", role="generator", status=lambda: 0)
    supervisor._end_alone(step, "exit status 0", read_progress(layout))  # type: ignore[arg-type]
    assert supervisor._cause is cause


def test_a_generator_that_was_killed_with_its_task_has_not_been_asked_to_leave(layout: RunLayout) -> None:
    """As by OOMKillStep: Slurm kills every process of the step, also the one that writes exit records."""
    job, log = ThisJob.of({"SLURM_JOB_ID": "8"}), EventLog(layout.job_events("8"), 0)
    supervisor = WorkerJobSupervisor(plan_of(layout, "generator"), job, NoTimeLimit(), log, Signals())  # type: ignore[arg-type]
    supervisor._step = SimpleNamespace(status=lambda: 137, asked=False)  # type: ignore[assignment]
    assert supervisor._outcome_of_exit(Attempt(0, None, 7, 0)) is None
    event = json.loads(layout.job_events("8").read_text().splitlines()[-1])
    assert event["text"] == "generator ended: exit status 137, no error recorded"
