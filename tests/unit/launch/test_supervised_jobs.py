"""What supervisors of jobs wait for, give up and bring back, with programs on PATH in the place of Slurm."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.commands.submit import write_plan
from launch.run_files import run_state
from launch.run_files.plan_file import JobPart, Limits
from launch.run_files.records import JobRecord, read_job_records, write_job_record
from launch.run_files.run_state import Attempt, Cause, EventLog, Outcome, ReportedProgress, read_progress
from launch.slurm.commands import SlurmError
from launch.slurm.queue import NoTimeLimit, ThisJob, TimeLimit
from launch.supervisor import other_jobs
from launch.supervisor import other_jobs as resubmitter
from launch.supervisor.__main__ import owns_run
from launch.supervisor.controller_job import FINISH_GRACE_S, POLL_S
from launch.supervisor.other_jobs import STATUS_S, Resubmitter
from launch.supervisor.outcomes import RetryBudget
from launch.supervisor.processes import Signals
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S
from tests.ring.run_kit import ROOT
from tests.unit.launch.site_kit import (
    AWAY,
    controller_of,
    job_of_id,
    job_part,
    last_event,
    part_of,
    plan_of,
    running_run,
    worker_of,
    write_status,
)

# --------------------------- What supervisors of jobs wait for and give up, with programs on PATH in the place of Slurm

NEEDED_S = 30 + 1.5 * 300 + 2 * 1300
MEET_S = 60.0
ATTEMPT = Attempt(0, None, 7, 0)
# squeue --Format=State:20,PreemptTime:30
IN_GRACE = "RUNNING             2026-11-26T05:01:40           \n"
UNTROUBLED = "RUNNING             N/A                           \n"
REQUEUED = "COMPLETING          2026-11-26T05:00:22           \n"


class Process:
    """Lives until it is killed."""

    def __init__(self) -> None:
        self.is_killed = False
        self.waits: list[float] = []

    def status(self) -> int | None:
        return 137 if self.is_killed else None

    def ask_to_leave(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True

    def wait(self, patience_s: float) -> bool:
        self.waits.append(patience_s)
        return self.is_killed


class Life(NoTimeLimit):
    """A life of which so much is left."""

    def __init__(self, left_s: float, life_s: float = 3600.0) -> None:
        self._left_s, self._life_s = left_s, life_s

    @property
    def life_s(self) -> float:
        return self._life_s

    def left_s(self) -> float:
        return self._left_s


@pytest.fixture
def layout(tmp_path) -> RunLayout:
    """Of a run with long steps and longer saves."""
    return running_run(tmp_path / "run", step_s=300.0, save_s=1300.0)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Of the worker jobs."""
    clock = [1000.0]
    monkeypatch.setattr(other_jobs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def at_work(layout: RunLayout, role: str, meet_s: float = MEET_S):
    """A worker job whose process runs."""
    supervisor = worker_of(job_part(layout, role, meet_s=meet_s))
    supervisor._step, supervisor._attempt = SimpleNamespace(status=lambda: None), ATTEMPT
    return supervisor


def look_often(supervisor, clock: list[float], num_looks: int, pause_s: float) -> None:
    for _ in range(num_looks):
        assert supervisor._look() is None
        clock[0] += pause_s


# --------------------------------------------------------------------------- the time that steps and saves take


def test_a_controller_with_a_long_save_is_not_killed_before_it_can_have_saved(layout):
    supervisor, process = controller_of(job_part(layout, "controller")), Process()
    supervisor._processes = SimpleNamespace(controller=process)
    layout.stop_request.touch()
    supervisor._stop_if_asked(read_progress(layout))
    for passed_s, is_killed in ((NEEDED_S - 10, False), (20, True)):
        supervisor._asked_at -= passed_s
        supervisor._end_if_late()
        assert process.is_killed is is_killed


@pytest.mark.parametrize(
    ("roles", "attempt", "waits"),
    [((), 0, False), (("reward-0",), 0, False), (("trainer-0",), 0, True), (("trainer-0",), 3, False)],
)
def test_only_a_trainer_that_has_registered_is_waited_for_after_the_controller(layout, roles, attempt, waits):
    write_status(layout, phase="stopped", step=0, roles=roles, attempt=attempt)
    patience_s: list[float] = []
    supervisor = controller_of(job_part(layout, "controller"))
    supervisor._processes = SimpleNamespace(
        controller=SimpleNamespace(status=lambda: 0), ask_all_to_leave=list, end_trainer=patience_s.append
    )
    supervisor._cause = Cause.STOP
    supervisor._wind_up(ATTEMPT)
    assert patience_s == [FINISH_GRACE_S if waits else POLL_S], "others connect to nobody, and were told nothing"


@pytest.mark.parametrize(
    ("phase", "attempt", "roles", "waits"),
    [
        ("stopped", 3, (), False),
        ("stopped", 3, ("generator-0",), False),
        ("stopped", 3, ("trainer-0",), True),
        ("starting", 3, (), True),  # it may still connect, and be told
        ("stopped", 2, (), True),  # by the controller of an earlier attempt
    ],
)
def test_a_trainers_job_does_not_wait_for_a_trainer_whose_controller_has_ended_without_it(
    layout, phase, attempt, roles, waits
):
    write_status(layout, phase=phase, attempt=attempt, step=0, roles=roles)
    supervisor = worker_of(job_part(layout, "trainer"))
    process = supervisor._step = Process()
    supervisor._attempt = Attempt(3, None, 7, 0)
    supervisor._wait_for_end(0.5)
    assert bool(process.waits) is waits


def test_a_trainers_job_waits_for_a_long_save_when_the_run_is_stopped(layout, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(other_jobs, "Deadline", lambda s: waits.append(s) or SimpleNamespace(is_over=True))
    supervisor = worker_of(job_part(layout, "trainer"))
    supervisor._step = Process()
    layout.stop_request.touch()
    assert (supervisor._look().cause, waits) == (Cause.STOP, [NEEDED_S])


@pytest.mark.parametrize(("left_s", "waits_s"), [(600.0, 45.0), (59.0, 44.0), (45.0, 30.0), (3.0, 0.5)])
def test_generators_that_are_slow_to_leave_do_not_keep_their_job_from_being_requeued(layout, left_s, waits_s):
    supervisor = worker_of(job_part(layout, "generator"), limit=Life(left_s))
    process = supervisor._step = Process()
    supervisor._leave()
    assert (process.waits, process.is_killed) == ([waits_s], True)


@pytest.mark.starts
def test_a_process_that_cannot_be_started_is_a_failed_attempt_and_not_the_end_of_the_run(layout, monkeypatch):
    monkeypatch.setenv("PATH", str(layout.root))  # without srun, as where no process more can be made
    plan = job_part(layout, "trainer", part_of("controller", here=True), part_of("trainer"))
    supervisor = controller_of(plan, job_of_id(7), first=ATTEMPT)
    outcome = supervisor._attempt()
    assert (outcome.cause, "srun" in outcome.text) == (Cause.FAILED, True)
    assert not supervisor._processes.has_controller


@pytest.mark.starts
@pytest.mark.waits
def test_an_attempt_that_takes_longer_to_begin_than_its_job_may_last_is_a_failure_that_is_counted(layout):
    """As where a large checkpoint is read in a short job: it was requeued for ever."""
    program = layout.root / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    plan = job_part(layout, "controller", part_of("controller", here=True, program=str(program)))

    def life() -> Outcome:
        """Of which 16 s are left; Slurm's SIGTERM comes a little early."""
        signals, limit = Signals(), Life(0.0)
        began = time.monotonic()
        limit.left_s = lambda: 16.0 - (time.monotonic() - began)
        timer = threading.Timer(2.5, setattr, (signals, "end_requested", True))
        timer.start()
        try:
            return controller_of(plan, job_of_id(7), limit, signals=signals).run()
        finally:
            timer.cancel()

    lives = [life() for _ in range(3)]
    assert [each.cause for each in lives] == [Cause.TIME, Cause.TIME, Cause.GIVEN_UP], "max_retries is 2"
    assert "its `time` in the site file may be too short for a step" in lives[0].text
    assert lives[2].text.endswith("; not beyond step 0 in 3 attempts")


@pytest.mark.starts
@pytest.mark.parametrize(("left", "cause"), [("1:00:00", None), ("0:03", Cause.TIME)])
def test_an_attempt_begins_if_the_time_limit_has_been_extended_meanwhile(layout, commands, left, cause):
    commands.put("squeue", f"echo {left}")
    job = replace(job_of_id(7), began=time.monotonic() - 3600)
    limit = TimeLimit(job, {"SLURM_JOB_END_TIME": str(int(time.time()) + 3)})
    outcome = controller_of(job_part(layout, "controller"), job, limit)._asked_not_to_begin()
    assert (None if outcome is None else outcome.cause) is cause


@pytest.mark.starts
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
    commands, tmp_path, role, squeue, silent_s, cause
):
    """A life shorter than `cluster.meet_s` would end before the job may say that it is alone, again and again."""
    layout = running_run(tmp_path / "run", is_begun=False, ago_s=silent_s, attempt=0, step=5)
    for job_id, name in ((7, "controller"), (8, role)):
        record = JobRecord(job_id, name, "jobs", None, "p", "s", False, 0, 0, None, time.time() - 3600)
        write_job_record(layout, record)
    commands.put("squeue", squeue)
    outcome = worker_of(job_part(layout, role, meet_s=1800), job_of_id(8), Life(1.0, 600.0))._look()
    assert outcome is not None
    assert outcome.cause is cause


# ------------------------------------------------- in the grace time of a preemption Slurm signals every srun


@pytest.mark.starts
@pytest.mark.parametrize(
    ("said", "is_preempted", "is_to_go_on"),
    [
        (IN_GRACE, True, False),
        (UNTROUBLED + IN_GRACE, True, False),  # components of one job
        (UNTROUBLED + UNTROUBLED, False, True),
        (UNTROUBLED + REQUEUED, False, False),  # Slurm does it itself
        ("", False, False),
        (None, False, False),
    ],
)
def test_a_job_is_being_preempted_while_it_runs_and_slurm_has_said_when_it_must_go(
    commands, said, is_preempted, is_to_go_on
):
    """A signal to a batch step that Slurm lets go on is a person's."""
    commands.put("squeue", "exit 1") if said is None else commands.prints("squeue", said)
    job = job_of_id(8)
    assert (job.is_being_preempted(), job.is_to_go_on()) == (is_preempted, is_to_go_on)
    assert not ThisJob.without_slurm().is_being_preempted()


def test_a_signal_to_a_job_that_stands_by_stops_no_run_of_another_job(layout):
    plan, (owner, follower) = job_part(layout, "controller"), map(job_of_id, "78")
    assert owns_run(plan, owner)
    assert not owns_run(plan, follower)
    assert not owns_run(job_part(layout, "generator"), owner)
    layout.attempt.unlink()
    assert owns_run(plan, follower)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("said", "of_worker", "of_controller"),
    [(IN_GRACE, Cause.TIME, Cause.TIME), (UNTROUBLED, Cause.STOP, Cause.FAILED)],
)
def test_a_generator_that_leaves_in_the_grace_time_comes_back_and_one_that_is_retired_does_not(
    commands, layout, said, of_worker, of_controller
):
    """Slurm took its job for completed: generators added by `rlhpc scale` were gone with the first preemption.

    A job whose last generator left began another attempt on the nodes that it had to leave, and used up a retry.
    """
    commands.prints("squeue", said)
    supervisor = worker_of(job_part(layout, "generator"), job_of_id(8))
    supervisor._step, supervisor._attempt = SimpleNamespace(status=lambda: 0, asked=False), ATTEMPT
    assert supervisor._look().cause is of_worker
    supervisor = controller_of(job_part(layout, "controller"), job_of_id(8))
    step = SimpleNamespace(name="generation", role="generator", status=lambda: 0)
    supervisor._end_alone(step, "exit status 0", read_progress(layout))
    assert supervisor._cause is of_controller


def test_a_generator_that_was_killed_with_its_task_has_not_been_asked_to_leave(layout):
    """As by OOMKillStep: Slurm kills every process of the step, also the one that writes exit records."""
    supervisor = worker_of(job_part(layout, "generator"), job_of_id(8))
    supervisor._step = SimpleNamespace(status=lambda: 137, asked=False)
    assert supervisor._outcome_of_exit(ATTEMPT) is None
    assert last_event(layout, 8) == "generator ended: exit status 137, no error recorded"


# --------------------------------- what the jobs of hundreds of generators ask the run directory for, twice a second


@pytest.mark.parametrize(
    ("role", "meet_s", "num_reads"),
    [
        ("trainer", MEET_S, 20),
        ("generator", MEET_S, 2),
        ("reward", MEET_S, 2),
        ("generator", 20 * other_jobs.POLL_S, 10),  # where a controller is soon given up
    ],
)
def test_the_status_is_read_once_a_look_or_every_five_seconds_and_requests_by_one_listing(
    layout, monkeypatch, clock, role, meet_s, num_reads
):
    asked: Counter[str] = Counter()

    def counted(function, name_of):
        return lambda path: asked.update([name_of(path)]) or function(path)

    monkeypatch.setattr(run_state, "read_document", counted(run_state.read_document, lambda path: path.name))
    monkeypatch.setattr(os, "listdir", counted(os.listdir, lambda path: "listing"))
    look_often(at_work(layout, role, meet_s), clock, round(2 * STATUS_S / other_jobs.POLL_S), other_jobs.POLL_S)
    assert asked == {"status.json": num_reads, "attempt.json": 20, "listing": 20}


@pytest.mark.parametrize(
    ("name", "cause"), [("summary.json", Cause.COMPLETE), ("ABORT", Cause.ABORT), ("STOP", Cause.STOP)]
)
def test_a_request_is_seen_at_the_next_look(layout, name, cause):
    supervisor = at_work(layout, "generator")
    assert supervisor._look() is None
    supervisor._step = None
    (layout.root / name).write_text("{}")
    assert supervisor._look().cause is cause


@pytest.mark.parametrize("behind_s", [0.0, 2 * MEET_S, -2 * MEET_S])
def test_a_controller_is_alive_while_its_status_changes_whatever_the_clock_of_its_node_says(layout, clock, behind_s):
    supervisor = at_work(layout, "trainer")
    for _ in range(3 * round(MEET_S)):
        write_status(layout, behind_s)
        look_often(supervisor, clock, 1, 1.0)
    for _ in range(3 * round(MEET_S)):
        if (outcome := supervisor._look()) is not None:
            break
        clock[0] += 1
    assert outcome is not None
    assert outcome.cause is Cause.ALONE


@pytest.mark.parametrize("role", ["trainer", "generator"])
def test_jobs_of_a_run_that_were_suspended_together_wait_for_the_controllers_to_be_continued(layout, clock, role):
    """The first one that Slurm continued found an old status, and ended for good."""
    supervisor = at_work(layout, role, meet_s=1800.0)
    look_often(supervisor, clock, 10, 1.0)
    clock[0] += 7200.0
    look_often(supervisor, clock, 60, 1.0)
    write_status(layout)
    look_often(supervisor, clock, 60, 1.0)


# ------------------------------------------------------- a job that nobody has recorded ends by itself; a late record

SUPERVISOR = (
    "import sys; from launch.supervisor import __main__ as supervisor\n"
    "supervisor.RECORDED_S = float(sys.argv.pop(1)); sys.exit(supervisor.main())\n"
)
RECORDED = ("hetjob", "hetjob", None, "p", "s", False, 0, 2, "gpu", 100.0)


@pytest.fixture
def submitted(tmp_path) -> RunLayout:
    plan = plan_of(f"run.directory={tmp_path / 'run'}", cluster={"shared_directory": str(tmp_path)})
    plan.layout.root.mkdir()
    write_plan(plan)
    return plan.layout


def start(layout: RunLayout, recorded_s: float, **more: str) -> subprocess.Popen[str]:
    """Job 7 without Slurm's commands: whatever it would ask of Slurm fails."""
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600), "PATH": "/nowhere"}
    words = [sys.executable, "-c", SUPERVISOR, str(recorded_s), "--run-dir", str(layout.root)]
    words += ["--plan", str(layout.job_plan), "--job", "hetjob"]
    environment |= {"HOME": os.environ.get("HOME", "/"), **more}
    return subprocess.Popen(words, env=environment, cwd=ROOT, text=True)


@pytest.mark.starts
@pytest.mark.parametrize("environment", [{}, {"PYTHONIOENCODING": "latin-1", "SLURM_JOB_NODELIST": "n→1"}])
def test_an_unrecorded_job_ends_by_itself_and_says_so(submitted, environment):
    """Also in a locale without the letters of a message, as those of a user's own exception, a role's last words."""
    submitted.stop_request.touch()  # the controller's job, asked to stop, ends all jobs: not this one
    write_job_record(submitted, JobRecord(6, *RECORDED))
    assert start(submitted, 0.5, **environment).wait(PATIENCE_S) == 1
    assert last_event(submitted, 7).startswith(f"unrecorded: job 7 has no record in {submitted.jobs}")
    assert len(submitted.job_events("7").read_text().splitlines()) == 2
    assert not submitted.attempts.exists()


@pytest.mark.starts
def test_a_job_may_begin_before_its_record_is_there(submitted):
    submitted.stop_request.touch()
    process = start(submitted, 30.0)
    time.sleep(1.5)
    assert process.poll() is None
    write_job_record(submitted, JobRecord(7, *RECORDED))
    assert process.wait(PATIENCE_S) == 0
    texts = [json.loads(line)["text"] for line in submitted.job_events("7").read_text().splitlines()]
    assert any(text.startswith("stop: ") for text in texts)


# --------------------------- What has ended is brought back task by task; what lives, may live, or was cancelled is not

LONG_AGO, NOW = 100.0, 4e9
# squeue --me --all --array --states=all --format="%i|%T": the controller, the trainer, an array of four generators.
ALIVE = ["5310224|RUNNING", "5310225|RUNNING", *(f"5310226_{task}|RUNNING" for task in range(4))]
PREEMPTED = [*ALIVE[:3], "5310226_1|PREEMPTED", *ALIVE[4:]]
ALL_ROLES = ("trainer-0", "generator-0", "generator-1", "generator-2", "generator-3")
CONTROLLER, TRAINER, GENERATION = 5310224, 5310225, 5310226


class Site:
    """A run directory with its jobs, and a squeue and an sbatch of the test's own."""

    def __init__(self, root: Path, clock: list[float]) -> None:
        self.layout, self.bin, self._clock = RunLayout(root / "run"), root / "bin", clock
        for directory in (self.layout.root, self.layout.jobs, self.layout.checkpoints, self.bin):
            directory.mkdir(parents=True)
        script = self.bin / "job.sh"
        script.write_text("#!/bin/sh\ntrue\n")
        names = ((CONTROLLER, "controller", None), (TRAINER, "trainer", None), (GENERATION, "generation", 4))
        for job_id, name, size in names:
            record = JobRecord(job_id, name, "jobs", size, "p", str(script), False, 0, 1, None, LONG_AGO)
            write_job_record(self.layout, record)
        self._program("squeue", f"cat {self.bin}/queue; exit $(cat {self.bin}/status)")
        self._program("sbatch", f'echo "$@" >> {self.bin}/submitted; echo $((6000 + $(wc -l < {self.bin}/submitted)))')
        self._program("scontrol", "echo 'MinJobAge               = 300 sec'")
        self.queue(ALIVE)
        self.start()

    def start(self) -> None:
        """A life of the controller's job."""
        limits = Limits(meet_s=1800, stall_s=3600, max_retries=2)
        names = ("trainer", "generation")
        plan = JobPart(self.layout, self.layout.job_plan, "jobs", "controller", False, (), limits, "requeue", names)
        job = ThisJob.of({"SLURM_JOB_ID": str(CONTROLLER)})
        self.plan, self.job = plan, job
        log = EventLog(self.layout.job_events(job.name), 0)
        self.resubmitter = Resubmitter(plan, job, log, RetryBudget(self.layout, limits.max_retries))

    def queue(self, lines: Iterable[str], status: int = 0) -> None:
        (self.bin / "queue").write_text("".join(f"{line}\n" for line in lines))
        (self.bin / "status").write_text(str(status))

    def look(self, *roles: str, after_s: float = 400.0, step: int = 0) -> Outcome | None:
        """One look, so long after the one before, at a run with these roles."""
        self._clock[0] += after_s
        there = tuple({"name": role} for role in roles)
        return self.resubmitter.look(ReportedProgress(0, "training", step, 1.0, 0.0, 0.1, there))

    @property
    def submitted(self) -> list[str]:
        """Options of sbatch, a line for each job, without what every job has."""
        path = self.bin / "submitted"
        lines = path.read_text().splitlines() if path.exists() else []
        return [" ".join(word for word in line.split() if word.startswith(("--array", "--dep"))) for line in lines]

    @property
    def events(self) -> list[tuple[str, str]]:
        path = self.layout.job_events(self.job.name)
        lines = path.read_text().splitlines() if path.exists() else []
        return [(event["event"], event["text"]) for event in map(json.loads, lines)]

    def _program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {self.bin}/{name}.calls\n{body}\n')
        path.chmod(0o755)

    def calls(self, name: str) -> int:
        path = self.bin / f"{name}.calls"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def site(tmp_path, monkeypatch) -> Site:
    clock = [time.monotonic()]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(resubmitter.time, "monotonic", lambda: clock[0])
    return Site(tmp_path, clock)


@pytest.mark.starts
def test_one_lost_task_of_an_array_is_submitted_again_alone(site):
    site.queue(PREEMPTED)
    assert site.look("trainer-0", "generator-0", "generator-2", "generator-3") is None
    assert site.submitted == ["--array=1"]
    assert site.events[-1] == ("submit", "job 5310226_1 (generation) has ended (preempted): resubmitted as job 6001")
    record = read_job_records(site.layout)[-1]
    assert (record.job_id, record.follows, record.tasks, record.array_size) == (6001, GENERATION, [1], 4)


@pytest.mark.starts
def test_what_takes_its_place_is_waited_for_and_replaced_in_its_turn(site):
    there = ("trainer-0", "generator-0", "generator-2", "generator-3")
    site.queue(PREEMPTED)
    site.look(*there)
    site.queue([*PREEMPTED, "6001_1|PENDING"])
    site.look(*there)
    site.look(*there)
    assert len(site.submitted) == 1
    site.queue([*PREEMPTED, "6001_1|NODE_FAIL"])
    site.look(*there)
    assert site.submitted == ["--array=1", "--array=1"]


@pytest.mark.starts
def test_two_lost_tasks_are_one_job(site):
    site.queue([*ALIVE[:2], "5310226_0|NODE_FAIL", "5310226_1|RUNNING", "5310226_2|RUNNING", "5310226_3|NODE_FAIL"])
    site.look("trainer-0", "generator-1", "generator-2")
    assert site.submitted == ["--array=0,3"]


@pytest.mark.starts
def test_a_generator_that_is_lost_again_and_again_does_not_end_a_run_that_has_others(site):
    for attempt in range(4):
        site.queue([*PREEMPTED, *(f"{6001 + k}_1|PREEMPTED" for k in range(attempt))])
        assert site.look("trainer-0", "generator-0", after_s=1000.0) is None
    assert len(site.submitted) == 2, "max_retries"
    assert site.events[-1][0] == "left_away"
    calls = site.calls("squeue")
    site.look("trainer-0", "generator-0", "generator-2", "generator-3")
    assert site.calls("squeue") == calls, "nobody else is missed"
    saved = site.layout.checkpoint(7)
    saved.mkdir()
    (saved / "COMPLETE").touch()
    site.look("trainer-0", "generator-0")
    assert len(site.submitted) == 3, "a checkpoint makes the tries new"


@pytest.mark.starts
def test_the_last_generator_is_worth_the_runs_own_budget(site):
    for attempt in range(3):
        over = [f"5310226_{task}|PREEMPTED" for task in range(4)]
        over += [f"{6001 + k}_{task}|PREEMPTED" for k in range(attempt) for task in range(4)]
        site.queue([*ALIVE[:2], *over])
        outcome = site.look("trainer-0", after_s=1000.0)
    assert outcome is not None
    assert outcome.cause is Cause.GIVEN_UP
    assert "has ended too often: PREEMPTED" in outcome.text
    assert site.submitted == ["--array=0,1,2,3"] * 2


@pytest.mark.starts
def test_what_was_cancelled_stays_away_also_after_slurm_has_forgotten_it(site):
    there = ("trainer-0", "generator-0", "generator-2", "generator-3")
    site.queue([*ALIVE[:3], "5310226_1|CANCELLED", *ALIVE[4:]])
    assert site.look(*there) is None
    assert site.events[-1] == ("left_away", "job 5310226_1 (generation) was cancelled: it is not resubmitted")
    site.queue([*ALIVE[:3], *ALIVE[4:]])
    site.look(*there)
    site.start()
    site.look(*there)
    assert site.submitted == []
    assert len(site.events) == 1


@pytest.mark.starts
def test_an_array_that_was_cancelled_as_a_whole_before_it_began_stays_away_too(site):
    """squeue has one line for it, without tasks."""
    site.queue([*ALIVE[:2], "5310226|CANCELLED"])
    site.look("trainer-0", "generator-9")
    assert site.submitted == []
    assert [text for event, text in site.events if event == "left_away"] == [
        f"job 5310226_{task} (generation) was cancelled: it is not resubmitted" for task in range(4)
    ]


@pytest.mark.starts
@pytest.mark.parametrize(
    ("states", "num_asked", "is_cancelled"),
    [
        (["COMPLETING", "COMPLETING", "CANCELLED"], 3, True),
        (["COMPLETING", "PENDING"], 2, False),  # preempted, and requeued
        (["NODE_FAIL"], 1, False),  # the next attempt brings it back
        ([], 1, False),  # Slurm does not answer
    ],
)
def test_after_an_attempt_slurm_is_asked_whether_the_trainer_was_cancelled(site, states, num_asked, is_cancelled):
    left = list(states)

    def answer(_s: float = 0.0) -> None:
        state = left.pop(0) if left else ""
        site.queue([ALIVE[0], f"5310225|{state}", *ALIVE[2:]] if state else [], status=0 if state else 1)

    answer()
    outcome = site.resubmitter.cancelled_trainer(answer, lambda: False)
    assert len(states) - len(left) == num_asked or not states
    assert (outcome is not None) is is_cancelled
    if outcome is not None:
        assert outcome == Outcome(Cause.COMPONENT, "job 5310225, the trainer's, was cancelled")


@pytest.mark.starts
def test_a_trainer_that_was_cancelled_ends_the_run(site):
    site.queue([ALIVE[0], "5310225|CANCELLED", *ALIVE[2:]])
    outcome = site.look("generator-0")
    assert outcome is not None
    assert outcome.cause is Cause.COMPONENT


@pytest.mark.starts
def test_an_answer_without_the_job_that_asks_says_nothing_of_others(site):
    """A squeue that somebody has told to show one partition alone."""
    site.queue(ALIVE[2:])
    assert site.look("generator-0") is None
    site.queue([])
    assert site.look("generator-0") is None
    assert site.submitted == []
    assert [event for event, _ in site.events] == ["not_submitted"], "said once"
    assert "squeue does not list this job, 5310224" in site.events[0][1]
    with pytest.raises(SlurmError, match="not complete"):
        other_jobs.other_jobs(site.layout, site.job)


@pytest.mark.starts
def test_while_the_file_server_does_not_answer_nothing_is_resubmitted_and_nothing_ends(site, monkeypatch):
    listdir = os.listdir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == site.layout.jobs:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listdir(path)

    site.queue(PREEMPTED)
    monkeypatch.setattr(os, "listdir", refuse)
    assert site.look("trainer-0", "generator-0", "generator-2", "generator-3") is None
    assert [event for event, _ in site.events] == ["not_submitted"]


@pytest.mark.starts
def test_a_job_that_is_younger_than_slurms_memory_is_not_forgotten(site):
    for record in read_job_records(site.layout):
        write_job_record(
            site.layout, JobRecord(**{**vars(record), "submitted_unix_s": time.time() - 300.0 + PATIENCE_S})
        )
    site.queue(ALIVE[:1])
    site.look("generator-0", "generator-1", "generator-2", "generator-3")
    assert site.submitted == []
    for record in read_job_records(site.layout):
        write_job_record(site.layout, JobRecord(**{**vars(record), "submitted_unix_s": time.time() - 331.0}))
    site.look("generator-0", "generator-1", "generator-2", "generator-3")
    assert site.submitted == [""], "the trainer; the generators speak, whatever squeue shows"


@pytest.mark.starts
def test_a_slurm_that_is_away_is_asked_again_and_less_often_in_a_deep_queue(site):
    site.queue(["slurm_load_jobs error: Unable to contact slurm controller (connect failure)"], status=1)
    assert site.look("trainer-0") is None
    site.queue([*ALIVE[:2], "5310226_0|PENDING", "5310226_1|PENDING", "5310226_2|PENDING", "5310226_3|PENDING"])
    calls = site.calls("squeue")
    for _ in range(30):
        site.look("trainer-0", after_s=10.0)
    assert site.calls("squeue") - calls <= 8
    assert site.submitted == []


@pytest.mark.starts
def test_nobody_is_asked_while_everybody_is_there(site):
    site.look(*ALL_ROLES)
    assert site.calls("squeue") == 0


@pytest.mark.starts
def test_a_job_that_is_submitted_while_slurm_answers_is_not_submitted_twice(site):
    """By a node whose clock is behind, so that its age says nothing; Slurm's answer is older than the record."""
    at = {"job_id": 5310227, "submitted_unix_s": time.time() - 600.0, "tasks": [1]}
    gone = {**vars(read_job_records(site.layout)[-1]), **at}
    late = site.layout.job_record(5310227)
    write_job_record(site.layout, JobRecord(**gone))
    hidden = late.rename(late.with_suffix(".later"))
    site._program("squeue", f"cat {site.bin}/queue; mv {hidden} {late} 2>&-; true")
    site.queue(PREEMPTED)
    there = ("trainer-0", "generator-0", "generator-2", "generator-3")
    site.look(*there)
    assert site.submitted == []
    site._program("squeue", f"cat {site.bin}/queue")
    site.queue([*PREEMPTED, "5310227_1|PENDING"])
    site.look(*there)
    assert site.submitted == []
