"""What is asked to finish its step and save is given the time that the run's own steps and saves take."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.run_files.plan_file import JobPart, Limits, Part, Share
from launch.run_files.run_state import Attempt, Cause, EventLog, read_progress
from launch.slurm.queue import NoTimeLimit, ThisJob, TimeLimit
from launch.supervisor import other_jobs
from launch.supervisor.controller_job import FINISH_GRACE_S, POLL_S, ControllerJobSupervisor
from launch.supervisor.other_jobs import WorkerJobSupervisor
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout

NEEDED_S = 30 + 1.5 * 300 + 2 * 1300


class _Process:
    """Lives until it is killed."""

    def __init__(self) -> None:
        self.is_killed = False
        self.num_waits = 0

    def status(self) -> int | None:
        return 137 if self.is_killed else None

    def ask_to_leave(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, patience_s: float) -> bool:
        self.num_waits += 1
        return self.is_killed


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    layout.root.mkdir()
    status = {"phase": "training", "step": 7, "step_s": 300.0, "save_s": 1300.0, "roles": []}
    layout.status.write_text(json.dumps({**status, "unix_time_s": time.time()}))
    return layout


def plan_of(layout: RunLayout, role: str) -> JobPart:
    part = Part(role, (Share(role, 1),), False, (), 0, ("python",), {}, {})
    limits = Limits(meet_s=60, stall_s=60, max_retries=2)
    return JobPart(layout, layout.job_plan, "jobs", role, False, (part,), limits, "requeue", ())


def test_a_controller_with_a_long_save_is_not_killed_before_it_can_have_saved(layout: RunLayout) -> None:
    log = EventLog(layout.job_events("7"), 0)
    plan, job = plan_of(layout, "controller"), ThisJob.without_slurm()
    supervisor = ControllerJobSupervisor(plan, job, NoTimeLimit(), log, Signals())
    process = _Process()
    supervisor._processes = SimpleNamespace(controller=process)  # type: ignore[assignment]
    layout.stop_request.touch()
    supervisor._stop_if_asked(read_progress(layout))
    supervisor._asked_at -= NEEDED_S - 10
    supervisor._end_if_late()
    assert not process.is_killed
    supervisor._asked_at -= 20
    supervisor._end_if_late()
    assert process.is_killed


@pytest.mark.parametrize(
    ("roles", "attempt", "waits"),
    [([], 0, False), (["reward-0"], 0, False), (["trainer-0"], 0, True), (["trainer-0"], 3, False)],
)
def test_only_a_trainer_that_has_registered_is_waited_for_after_the_controller(
    layout: RunLayout, roles: list[str], attempt: int, waits: bool
) -> None:
    said = {"phase": "stopped", "step": 0, "roles": [{"name": name} for name in roles], "unix_time_s": time.time()}
    layout.status.write_text(json.dumps(said | {"attempt": attempt}))
    patience_s: list[float] = []
    plan, log = plan_of(layout, "controller"), EventLog(layout.job_events("7"), 0)
    supervisor = ControllerJobSupervisor(plan, ThisJob.without_slurm(), NoTimeLimit(), log, Signals())
    supervisor._processes = SimpleNamespace(  # type: ignore[assignment]
        controller=SimpleNamespace(status=lambda: 0), ask_all_to_leave=list, end_trainer=patience_s.append
    )
    supervisor._cause = Cause.STOP
    supervisor._wind_up(Attempt(0, None, 7, 0))
    assert patience_s == [FINISH_GRACE_S if waits else POLL_S], "others connect to nobody, and were told nothing"


@pytest.mark.parametrize(
    ("phase", "attempt", "roles", "waits"),
    [
        ("stopped", 3, [], False),
        ("stopped", 3, ["generator-0"], False),
        ("stopped", 3, ["trainer-0"], True),
        ("starting", 3, [], True),  # it may still connect, and be told
        ("stopped", 2, [], True),  # by the controller of an earlier attempt
    ],
)
def test_a_trainers_job_does_not_wait_for_a_trainer_whose_controller_has_ended_without_it(
    layout: RunLayout, phase: str, attempt: int, roles: list[str], waits: bool
) -> None:
    status = {"phase": phase, "attempt": attempt, "step": 0, "roles": [{"name": name} for name in roles]}
    layout.status.write_text(json.dumps({**status, "unix_time_s": time.time()}))
    plan, log = plan_of(layout, "trainer"), EventLog(layout.job_events("8"), 0)
    supervisor = WorkerJobSupervisor(plan, ThisJob.without_slurm(), NoTimeLimit(), log, Signals())  # type: ignore[arg-type]
    process = supervisor._step = _Process()  # type: ignore[assignment]
    supervisor._attempt = Attempt(3, None, 7, 0)
    supervisor._wait_for_end(0.5)
    assert (process.num_waits > 0) is waits


def test_a_trainers_job_waits_for_a_long_save_when_the_run_is_stopped(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def deadline(limit_s: float) -> SimpleNamespace:
        waits.append(limit_s)
        return SimpleNamespace(is_over=True)

    monkeypatch.setattr(other_jobs, "Deadline", deadline)
    log = EventLog(layout.job_events("8"), 0)
    plan, job = plan_of(layout, "trainer"), ThisJob.without_slurm()
    supervisor = WorkerJobSupervisor(plan, job, NoTimeLimit(), log, Signals())  # type: ignore[arg-type]
    supervisor._step = _Process()  # type: ignore[assignment]
    layout.stop_request.touch()
    outcome = supervisor._look()
    assert outcome is not None
    assert (outcome.cause, waits) == (Cause.STOP, [NEEDED_S])


class _Limit(NoTimeLimit):
    """An hour of which so much is left."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s

    @property
    def life_s(self) -> float:
        return 3600.0

    def left_s(self) -> float:
        return self._left_s


@pytest.mark.parametrize(("left_s", "waits_s"), [(600.0, 45.0), (59.0, 44.0), (45.0, 30.0), (3.0, 0.5)])
def test_generators_that_are_slow_to_leave_do_not_keep_their_job_from_being_requeued(
    layout: RunLayout, left_s: float, waits_s: float
) -> None:
    log = EventLog(layout.job_events("8"), 0)
    limit, job = _Limit(left_s), ThisJob.without_slurm()
    supervisor = WorkerJobSupervisor(plan_of(layout, "generator"), job, limit, log, Signals())  # type: ignore[arg-type]
    process = supervisor._step = _Process()  # type: ignore[assignment]
    waited_s: list[float] = []
    process.wait = waited_s.append  # type: ignore[assignment]
    supervisor._leave()
    assert (waited_s, process.is_killed) == ([waits_s], True)


@pytest.mark.starts
def test_a_process_that_cannot_be_started_is_a_failed_attempt_and_not_the_end_of_the_run(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(layout.root))  # without srun, as where no process more can be made
    plan = plan_of(layout, "trainer")
    here = Part("controller", (Share("controller", 1),), True, (), 0, ("python",), {}, {})
    plan = replace(plan, parts=(here, *plan.parts))
    log, job = EventLog(layout.job_events("7"), 0), ThisJob.of({"SLURM_JOB_ID": "7"})
    supervisor = ControllerJobSupervisor(plan, job, NoTimeLimit(), log, Signals(), first=Attempt(0, None, 7, 0))
    outcome = supervisor._attempt()
    assert (outcome.cause, "srun" in outcome.text) == (Cause.FAILED, True)
    assert not supervisor._processes.has_controller


@pytest.mark.starts
@pytest.mark.waits
def test_an_attempt_that_takes_longer_to_begin_than_its_job_may_last_is_a_failure_that_is_counted(
    layout: RunLayout,
) -> None:
    """As where a large checkpoint is read in a short job: it was requeued for ever."""
    layout.failures.parent.mkdir(exist_ok=True)
    program = layout.root / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    part = Part("controller", (Share("controller", 1),), True, (), 0, (str(program),), {}, {})
    plan = replace(plan_of(layout, "controller"), parts=(part,))

    def life() -> Cause:
        """Of which 16 s are left; Slurm's SIGTERM comes a little early."""
        signals, limit = Signals(), _Limit(0.0)
        began = time.monotonic()
        limit.left_s = lambda: 16.0 - (time.monotonic() - began)  # type: ignore[method-assign]
        timer = threading.Timer(2.5, setattr, (signals, "end_requested", True))
        timer.start()
        log, job = EventLog(layout.job_events("7"), 0), ThisJob.of({"SLURM_JOB_ID": "7"})
        try:
            return ControllerJobSupervisor(plan, job, limit, log, signals).run().cause
        finally:
            timer.cancel()

    assert [life() for _ in range(3)] == [Cause.TIME, Cause.TIME, Cause.GIVEN_UP], "max_retries is 2"


@pytest.mark.starts
@pytest.mark.parametrize(("left", "cause"), [("1:00:00", None), ("0:03", Cause.TIME)])
def test_an_attempt_begins_if_the_time_limit_has_been_extended_meanwhile(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, left: str, cause: Cause | None
) -> None:
    squeue = layout.root / "squeue"
    squeue.write_text(f"#!/bin/sh\necho {left}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{layout.root}:{os.environ['PATH']}")
    job = replace(ThisJob.of({"SLURM_JOB_ID": "7"}), began=time.monotonic() - 3600)
    limit = TimeLimit(job, {"SLURM_JOB_END_TIME": str(int(time.time()) + 3)})
    log = EventLog(layout.job_events("7"), 0)
    supervisor = ControllerJobSupervisor(plan_of(layout, "controller"), job, limit, log, Signals())
    outcome = supervisor._asked_not_to_begin()
    assert (None if outcome is None else outcome.cause) is cause
