"""The wrapper around one process of a run: its exit status is that of the role, a signal included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_files.exit_records import read_records
from launch.run_files.plan_file import SCHEMA
from rlhpc.run_layout import RunLayout


def plan_with(role_program: Path, layout: RunLayout) -> Path:
    """A job of one trainer rank, whose Python is this program."""
    trainer = {
        "name": "trainer",
        "roles": [{"role": "trainer", "num_processes": 1, "first_replica": 0}],
        "runs_in_batch_step": False,
        "srun": [],
        "gpus_per_task": 0,
        "sees_own_gpus_alone": False,
        "python": [str(role_program)],
        "environment": {},
        "defaults": {},
    }
    document = {
        "schema": SCHEMA,
        "run_directory": str(layout.root),
        "placement": "jobs",
        "continuation": "requeue",
        "limits": {"meet_s": 10, "stall_s": 10, "max_retries": 1},
        "jobs": [{"name": "trainer", "array_size": None, "components": [trainer]}],
    }
    layout.job_plan.parent.mkdir(parents=True)
    layout.job_plan.write_text(json.dumps(document))
    return layout.job_plan


@pytest.mark.starts
@pytest.mark.parametrize(
    ("ends_by", "status", "words"),
    [
        ("exit 0", 0, "exit status 0: all done"),
        ("exit 5", 5, "exit status 5: all done"),
        ("kill -SEGV $$", 139, "signal SIGSEGV: all done"),
        ("kill -KILL $$", 137, "signal SIGKILL: all done"),
    ],
)
def test_a_task_exits_as_its_role_does_and_writes_down_how(
    tmp_path: Path, ends_by: str, status: int, words: str
) -> None:
    layout, role = RunLayout(tmp_path / "run"), tmp_path / "role"
    role.write_text(f"#!/bin/sh\necho all done\n{ends_by}\n")
    role.chmod(0o700)
    command = [sys.executable, "-m", "launch.supervisor.role_task", "--plan", str(plan_with(role, layout))]
    command += ["--job", "trainer", "--part", "trainer", "--role", "trainer", "--attempt", "3"]
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env={**os.environ, **job}, check=False)
    assert done.returncode == status
    record = read_records(layout, "trainer", 3)[0]
    assert record.status == status
    assert record.cause.endswith(f"ended with {words}")


@pytest.mark.starts
@pytest.mark.parametrize(("owner", "is_written"), [(11, False), (12, True)])
def test_what_ends_while_it_stands_by_writes_nothing_into_an_attempt_that_may_be_another_jobs(
    tmp_path: Path, owner: int, is_written: bool
) -> None:
    layout, role = RunLayout(tmp_path / "run"), tmp_path / "role"
    role.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    role.chmod(0o700)
    command = [sys.executable, "-m", "launch.supervisor.role_task", "--plan", str(plan_with(role, layout))]
    layout.attempt.write_text(json.dumps({"attempt": 3, "resume_step": None, "job_id": owner, "restart": 0}))
    command += ["--job", "trainer", "--part", "trainer", "--role", "trainer", "--attempt", "3", "--stand-by"]
    job = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "TMPDIR": str(tmp_path)}
    assert subprocess.run(command, env={**os.environ, **job}, check=False).returncode == 3
    assert bool(read_records(layout, "trainer", 3)) == is_written
    assert "--stand-by 12 0" in layout.log("trainer", 0, 3).read_text()
