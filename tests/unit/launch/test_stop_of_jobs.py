"""`rlhpc stop` of a run that another shell resumes meanwhile.  Programs on PATH print what Slurm would."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.commands import stop
from launch.run_files.records import JobRecord, write_job_record
from launch.slurm.commands import SlurmError
from rlhpc.base.run_directory import RunLayout
from tests.unit.launch.test_slurm_answers import AWAY, Commands, commands

__all__ = ["commands"]

pytestmark = pytest.mark.starts


def row(job_id: int, state: str) -> str:
    return f"{job_id}+0|{state}|0|None|cpu|1:13|58:47|1:00:00|2026-03-01T14:05:00|c0|hetjob|"


@pytest.mark.parametrize("now", [False, True])
def test_a_stop_leaves_alone_what_another_shell_resumes_once_all_has_ended(
    commands: Commands, tmp_path: Path, now: bool
) -> None:
    layout = RunLayout(tmp_path / "run")
    layout.jobs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    for job_id in (12, 13):  # 13 is submitted by the resume, which has deleted the request before
        write_job_record(
            layout, JobRecord(job_id, "hetjob", "hetjob", None, "p", "s", False, 0, 0, None, float(job_id))
        )
    request = layout.abort_request if now else layout.stop_request
    commands.put(
        "squeue",
        f"if [ $n -le 2 ]; then echo '{row(12, 'COMPLETING')}'\n"
        f"elif [ $n -le 4 ]; then rm -f {request}; echo '{row(13, 'PENDING')}'; fi",
    )
    commands.put("scancel", "exit 0")
    said: list[str] = []
    assert stop.stop_run(layout, now=now, tell=said.append) == 0
    assert commands.calls("scancel") == []
    assert said[-1] == f"{layout.root}: stopped, and resumed since, by another command; left alone: job 13"


def of_two_jobs(layout: RunLayout) -> None:
    layout.jobs.mkdir(parents=True)
    layout.config.write_text('{"config": {}, "hash": ""}')
    for job_id, name in ((12, "controller"), (13, "trainer")):
        write_job_record(layout, JobRecord(job_id, name, "jobs", None, "p", "s", False, 0, 0, None, float(job_id)))


def test_where_the_controllers_job_has_ended_before_the_rest_is_cancelled_at_once(
    commands: Commands, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path / "run")
    of_two_jobs(layout)
    done = tmp_path / "done"
    commands.put("squeue", f"echo '{row(12, 'FAILED')}'; [ -e {done} ] || echo '{row(13, 'RUNNING')}'")
    commands.put("scancel", f"touch {done}")
    said: list[str] = []
    stop.stop_run(layout, now=False, tell=said.append)
    assert commands.calls("scancel") == ["13"]
    assert "the controller's job has ended before" in said[0]


def test_of_a_suspended_job_a_stop_says_what_lets_it_end(commands: Commands, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    of_two_jobs(layout)
    commands.put("squeue", f"[ $n -gt 2 ] || echo '{row(12, 'SUSPENDED')}'")
    said: list[str] = []
    stop.stop_run(layout, now=False, tell=said.append)
    assert "12+0 suspended" in said[0]
    assert "`scontrol resume 12`" in said[0]


@pytest.mark.waits
def test_running_jobs_are_asked_to_stop_though_slurm_does_not_answer(commands: Commands, tmp_path: Path) -> None:
    """They look for the file themselves, and slurmctld may be away for hours."""
    layout = RunLayout(tmp_path / "run")
    of_two_jobs(layout)
    shown = tmp_path / "shown"
    running = f"[ -e {shown} ] || echo '{row(12, 'RUNNING')}'; touch {shown}"
    commands.put("squeue", f"[ -e {layout.stop_request} ] || {{ {AWAY}; }}\n{running}")
    commands.put("scancel", "exit 0")
    said: list[str] = []
    stop.stop_run(layout, now=False, tell=said.append)
    assert "asked        by the file STOP, which running jobs see: Slurm did not answer" in said[0]
    assert layout.stop_request.exists()


@pytest.mark.waits
def test_a_run_that_had_ended_when_slurm_answers_again_is_left_as_it_was(commands: Commands, tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    of_two_jobs(layout)
    commands.put("squeue", f"[ -e {layout.stop_request} ] || {{ {AWAY}; }}")
    said: list[str] = []
    assert stop.stop_run(layout, now=False, tell=said.append) == 0
    assert said[-1] == f"{layout.root}: this run is not running"
    assert not layout.stop_request.exists()


@pytest.mark.waits
def test_where_slurm_stays_away_the_error_says_what_the_request_does(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "PATIENCE_S", 0.2)
    layout = RunLayout(tmp_path / "run")
    of_two_jobs(layout)
    commands.put("squeue", AWAY)
    with pytest.raises(SlurmError, match=r"the request STOP is in .*running jobs see it"):
        stop.stop_run(layout, now=False, tell=print)
    assert layout.stop_request.exists()
