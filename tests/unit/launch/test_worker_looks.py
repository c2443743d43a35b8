"""What the jobs of hundreds of generators ask the run directory for, twice a second each."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.run_files import run_state
from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import Attempt, Cause, EventLog
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor import other_jobs
from launch.supervisor.other_jobs import POLL_S, STATUS_S, WorkerJobSupervisor
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout

MEET_S = 60.0


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    layout.attempt.write_text(json.dumps({"attempt": 0, "resume_step": None, "job_id": 7, "restart": 0}))
    write_status(layout)
    return layout


def write_status(layout: RunLayout, ago_s: float = 0.0) -> None:
    status: dict[str, Any] = {"phase": "training", "step": 7, "save_s": 9.0, "roles": []}
    status["unix_time_s"] = time.time() - ago_s
    layout.status.write_text(json.dumps(status))


def running(layout: RunLayout, role: str, meet_s: float = MEET_S) -> WorkerJobSupervisor:
    part = Part(role, (Share(role, 1),), False, (), 0, ("python",), {}, {})
    limits = Limits(meet_s=meet_s, stall_s=60, max_retries=2)
    plan = JobPart(layout, layout.job_plan, "jobs", role, False, (part,), limits, "requeue", ())
    log = EventLog(layout.job_events("8"), 0)
    supervisor = WorkerJobSupervisor(plan, ThisJob.without_slurm(), NoTimeLimit(), log, Signals())  # type: ignore[arg-type]
    supervisor._step = SimpleNamespace(status=lambda: None)  # type: ignore[assignment]
    supervisor._attempt = Attempt(0, None, 7, 0)
    return supervisor


@pytest.mark.parametrize(("role", "num_reads"), [("trainer", 20), ("generator", 2), ("reward", 2)])
def test_the_status_is_read_once_a_look_or_every_five_seconds_and_requests_by_one_listing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, role: str, num_reads: int
) -> None:
    asked: Counter[str] = Counter()
    clock = [1000.0]
    read, listing = run_state.read_document, os.listdir

    def counted(path: Path) -> dict[str, Any]:
        asked[path.name] += 1
        return read(path)

    def listed(path: Path) -> list[str]:
        asked["listing"] += 1
        return listing(path)

    monkeypatch.setattr(run_state, "read_document", counted)
    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(other_jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    supervisor = running(layout, role)
    for _ in range(round(2 * STATUS_S / POLL_S)):
        assert supervisor._look() is None
        clock[0] += POLL_S
    assert asked == {"status.json": num_reads, "attempt.json": 20, "listing": 20}


def test_where_a_controller_is_soon_given_up_the_status_is_read_more_often(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, reads = [1000.0], [0]
    read = run_state.read_document

    def counted(path: Path) -> dict[str, Any]:
        reads[0] += path.name == "status.json"
        return read(path)

    monkeypatch.setattr(run_state, "read_document", counted)
    monkeypatch.setattr(other_jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    supervisor = running(layout, "generator", meet_s=10 * 2 * POLL_S)
    for _ in range(20):
        assert supervisor._look() is None
        clock[0] += POLL_S
    assert reads == [10]


@pytest.mark.parametrize(
    ("name", "cause"), [("summary.json", Cause.COMPLETE), ("ABORT", Cause.ABORT), ("STOP", Cause.STOP)]
)
def test_a_request_is_seen_at_the_next_look(layout: RunLayout, name: str, cause: Cause) -> None:
    supervisor = running(layout, "generator")
    assert supervisor._look() is None
    supervisor._step = None
    (layout.root / name).write_text("{}")
    outcome = supervisor._look()
    assert outcome is not None
    assert outcome.cause is cause


@pytest.mark.parametrize("behind_s", [0.0, 2 * MEET_S, -2 * MEET_S])
def test_a_controller_is_alive_while_its_status_changes_whatever_the_clock_of_its_node_says(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, behind_s: float
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(other_jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    supervisor = running(layout, "trainer")
    for _ in range(3 * round(MEET_S)):
        write_status(layout, behind_s)
        assert supervisor._look() is None
        clock[0] += 1
    for _ in range(3 * round(MEET_S)):
        if (outcome := supervisor._look()) is not None:
            break
        clock[0] += 1
    assert outcome is not None
    assert outcome.cause is Cause.ALONE


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_jobs_of_a_run_that_were_suspended_together_wait_for_the_controllers_to_be_continued(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The first one that Slurm continued found an old status, and ended for good."""
    clock = [1000.0]
    monkeypatch.setattr(other_jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    supervisor = running(layout, role, meet_s=1800.0)
    for _ in range(10):
        assert supervisor._look() is None
        clock[0] += 1
    clock[0] += 7200.0
    for _ in range(60):
        assert supervisor._look() is None
        clock[0] += 1
    write_status(layout)
    for _ in range(60):
        assert supervisor._look() is None
        clock[0] += 1
