"""A job that nobody has recorded ends by itself and touches nothing; one whose record comes late begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.commands.submit import write_plan
from launch.run_files.records import JobRecord, write_job_record
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S
from tests.ring.run_kit import ROOT
from tests.unit.launch.site_kit import plan_of

pytestmark = pytest.mark.starts

SUPERVISOR = (
    "import sys; from launch.supervisor import __main__ as supervisor\n"
    "supervisor.RECORDED_S = float(sys.argv.pop(1)); sys.exit(supervisor.main())\n"
)


def _submitted(directory: Path) -> RunLayout:
    plan = plan_of(f"run.directory={directory / 'run'}", cluster={"shared_directory": str(directory)})
    plan.layout.root.mkdir()
    write_plan(plan)
    return plan.layout


def _start(layout: RunLayout, recorded_s: float, **more: str) -> subprocess.Popen[str]:
    """Job 7 without Slurm's commands: whatever it would ask of Slurm fails."""
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600), "PATH": "/nowhere"}
    words = [sys.executable, "-c", SUPERVISOR, str(recorded_s), "--run-dir", str(layout.root)]
    words += ["--plan", str(layout.job_plan), "--job", "hetjob"]
    environment |= {"HOME": os.environ.get("HOME", "/"), **more}
    return subprocess.Popen(words, env=environment, cwd=ROOT, text=True)


def _events(layout: RunLayout) -> list[str]:
    return [json.loads(line)["text"] for line in layout.job_events("7").read_text().splitlines()]


def test_an_unrecorded_job_ends_by_itself_and_says_so(tmp_path: Path) -> None:
    layout = _submitted(tmp_path)
    layout.stop_request.touch()  # the controller's job, asked to stop, ends all jobs: not this one
    write_job_record(layout, JobRecord(6, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0))
    assert _start(layout, 0.5).wait(PATIENCE_S) == 1
    assert _events(layout)[-1].startswith(f"unrecorded: job 7 has no record in {layout.jobs}")
    assert len(_events(layout)) == 2
    assert not layout.attempts.exists()


def test_a_job_may_begin_before_its_record_is_there(tmp_path: Path) -> None:
    layout = _submitted(tmp_path)
    layout.stop_request.touch()
    process = _start(layout, 30.0)
    time.sleep(1.5)
    assert process.poll() is None
    write_job_record(layout, JobRecord(7, "hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0))
    assert process.wait(PATIENCE_S) == 0
    assert any(text.startswith("stop: ") for text in _events(layout))


def test_a_locale_without_the_letters_of_a_message_ends_no_supervisor(tmp_path: Path) -> None:
    """Such as those of a user's own exception, the last words of a role."""
    layout = _submitted(tmp_path)
    assert _start(layout, 0.5, PYTHONIOENCODING="latin-1", SLURM_JOB_NODELIST="n→1").wait(PATIENCE_S) == 1
    assert _events(layout)[-1].startswith("unrecorded: ")
