"""A successor that sbatch refused when its job began is submitted when the job ends, or the job says there is none.

A program on PATH stands for sbatch; what it prints was recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.run_files.plan_file import JobPart, Limits
from launch.run_files.records import JobRecord, read_job_records, write_job_record
from launch.run_files.run_state import Cause, EventLog, Outcome
from launch.slurm import commands, queue
from launch.slurm.queue import ThisJob
from launch.supervisor.__main__ import _follow_up
from rlhpc.base.run_directory import RunLayout

pytestmark = pytest.mark.starts

REFUSED = (
    "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; echo 'sbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy (job submit limit, user'\"'\"'s size and/or time limits)' >&2; exit 1"
)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.jobs.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    write_job_record(layout, JobRecord(7, "hetjob", "hetjob", None, "p", str(script), False, 0, 1, None, 100.0))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return layout


def at_its_time_limit(layout: RunLayout, sbatch: str, successor: int | None, continuation: str = "successor") -> int:
    """The exit status of the batch step."""
    program = layout.root.parent / "bin" / "sbatch"
    program.write_text(f"#!/bin/sh\n{sbatch}\n")
    program.chmod(0o755)
    limits = Limits(meet_s=60, stall_s=60, max_retries=2)
    plan = JobPart(layout, layout.job_plan, "hetjob", "hetjob", False, (), limits, continuation, ())
    log = EventLog(layout.job_events("7"), 0)
    return _follow_up(plan, ThisJob.of({"SLURM_JOB_ID": "7"}), log, Outcome(Cause.TIME, ""), successor)


def last_event(layout: RunLayout) -> str:
    return str(json.loads(layout.job_events("7").read_text().splitlines()[-1])["text"])


def test_sbatch_is_asked_again_at_the_end(layout: RunLayout) -> None:
    """The run stood still: its event said that the successor continues it."""
    assert at_its_time_limit(layout, "echo 8", None) == 0
    assert [record.job_id for record in read_job_records(layout)] == [7, 8]
    assert last_event(layout) == "this job ends; its successor continues the run"


def test_without_a_successor_the_job_does_not_say_that_there_is_one(layout: RunLayout) -> None:
    assert at_its_time_limit(layout, REFUSED, None) == 1
    assert last_event(layout).startswith("no successor: sbatch: sbatch: error: QOSMaxSubmitJobPerUserLimit")


def test_a_successor_that_is_queued_is_not_submitted_a_second_time(layout: RunLayout) -> None:
    assert at_its_time_limit(layout, "echo 9", 8) == 0
    assert [record.job_id for record in read_job_records(layout)] == [7]


def test_a_job_whose_requeue_was_heard_and_not_answered_submits_no_successor_beside_itself(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PAUSE_S", 0.05)
    monkeypatch.setattr(queue, "REQUEUED_S", 0.0)
    seen = layout.root.parent / "seen"
    scontrol = layout.root.parent / "bin" / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\n[ -e {seen} ] && {{ echo 'Job is pending execution for job 7' >&2; exit 1; }}\n"
        f"touch {seen}; echo 'slurm_requeue error: Socket timed out on send/recv operation' >&2; exit 1\n"
    )
    scontrol.chmod(0o755)
    assert at_its_time_limit(layout, "echo 8", None, "requeue") == 0
    assert [record.job_id for record in read_job_records(layout)] == [7]
