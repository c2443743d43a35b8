"""When a successor may start, what it waits for, and to whom a run is left.

Programs on PATH stand for squeue; what they print was recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launch.plan.report import describe_jobs, plan_document
from launch.plan.site_file import load_site
from launch.run_files.events import EventLog
from launch.run_files.outcome import Cause
from launch.run_files.plan_file import JobPart, Limits, Part, Share, plan_text
from launch.run_files.run_state import Attempt
from launch.slurm.this_job import NoTimeLimit, ThisJob
from launch.supervisor.begin import AttemptStarter
from launch.supervisor.ending import dependency_of_successor, release
from launch.supervisor.processes import Processes
from launch.supervisor.signals import Signals
from launch.supervisor.stand_by import ASK_SLURM_S, Heirs, StandBy
from rlhpc.errors import ConfigError
from rlhpc.run_layout import RunLayout
from tests.unit.launch.site_kit import plan_of

OLD, NEW = 5310224, 5310230


@pytest.mark.parametrize(
    ("life_s", "overlap_s", "early"),
    [
        (86400, 600, "after:7+1430?"),
        (86399.2, 600, "after:7+1430?"),  # its supervisor began a little after it
        (3600, 90, "after:7+58?"),  # whole minutes: rather early than late
        (3600, 3000, "after:7+30?"),  # at most half of its life
        (118.7, 600, "after:7+1?"),
        (60, 600, ""),  # too short for a minute and an overlap
        (86400, 0, ""),
        (math.inf, 600, ""),  # no limit: nobody knows when it ends
    ],
)
def test_a_successor_may_start_before_its_job_ends_and_does_when_it_has_ended(
    life_s: float, overlap_s: float, early: str
) -> None:
    assert dependency_of_successor("7", life_s, overlap_s) == f"--dependency={early}afterany:7"


@pytest.mark.parametrize(
    ("cluster", "overlap_s"),
    [
        ({"continuation": "successor"}, 600),
        ({"continuation": "successor", "overlap_s": 0}, 0),
        ({"continuation": "successor", "placement": "jobs"}, 0),
        ({}, 0),
    ],
)
def test_jobs_overlap_where_one_job_is_the_whole_run(cluster: dict[str, object], overlap_s: int) -> None:
    plan = plan_of(cluster=cluster)
    assert json.loads(plan_document(plan))["overlap_s"] == overlap_s
    said = "next job: begins up to 10 min before this one ends, loads, and takes the run over at once"
    assert (said in describe_jobs(plan)) == bool(overlap_s)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("overlap_s = 300", r"cluster\.overlap_s=300: has no effect without continuation='successor'; legal: 0"),
        (
            'overlap_s = 300\ncontinuation = "successor"\nplacement = "jobs"',
            r"cluster\.overlap_s=300: has no effect without placement='hetjob'; legal: 0",
        ),
        ("overlap_s = -1", r"cluster\.overlap_s=-1"),
        ('overlap_s = "5 min"', r"cluster\.overlap_s='5 min'"),
    ],
)
def test_an_overlap_that_would_do_nothing_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'[cluster]\nshared_directory = "/shared"\n{lines}\n[trainer]\n[generation]\n')
    with pytest.raises(ConfigError, match=said):
        load_site(site)


class Two:
    """The job that owns a run and its successor, without processes, and a squeue of the test's own."""

    def __init__(self, root: Path) -> None:
        self.layout, self.bin = RunLayout(root / "run"), root / "bin"
        for directory in (self.layout.root, self.layout.jobs, self.bin):
            directory.mkdir(parents=True)
        self._program("squeue", f"cat {self.bin}/queue")
        self.clock = 1000.0
        limits = Limits(meet_s=1800, stall_s=3600, max_retries=2)
        share, python = Share("controller", 1), (str(self._program("python", "exec sleep 600")),)
        part = Part("controller", (share,), True, (), 0, python, {}, {})
        self.plan = JobPart(
            self.layout,
            self.layout.job_plan,
            "hetjob",
            "hetjob",
            False,
            (part,),
            limits,
            "successor",
            (),
            overlap_s=600,
        )
        self.old, self.new = (ThisJob.of({"SLURM_JOB_ID": str(number)}) for number in (OLD, NEW))
        self.signals = Signals()
        self.queue("RUNNING", "RUNNING")
        self.owned_by(OLD)

    def write_plan(self) -> None:
        """What the tasks of its processes read, which end at once without it."""
        component = {"name": "controller", "runs_in_batch_step": True, "gpus_per_task": 0, "srun": []}
        component |= {"roles": [{"role": "controller", "num_processes": 1}], "environment": {}, "defaults": {}}
        component["python"] = [str(self.bin / "python")]
        job = {"name": "hetjob", "array_size": None, "components": [component]}
        limits = {"meet_s": 1800, "stall_s": 3600, "max_retries": 2}
        self.layout.job_plan.write_text(
            plan_text(self.layout.root, "hetjob", [job], "successor", Limits(**limits), overlap_s=600)
        )

    def _program(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def queue(self, old: str, new: str) -> None:
        shown = {OLD: old, NEW: new}
        (self.bin / "queue").write_text("".join(f"{job}+0|{state}\n" for job, state in shown.items() if state))

    def owned_by(self, job: int, index: int = 0) -> None:
        document = {"attempt": index, "resume_step": None, "job_id": job, "restart": 0, "fence": f"{index}-x"}
        self.layout.attempt.write_text(json.dumps(document))

    def stand_by(self, when_it_waits: Callable[[], object]) -> StandBy:
        """The successor; what is called while it waits takes care that it does not wait for ever."""
        calls = iter(range(50))

        def sleep(seconds: float) -> None:
            next(calls)
            when_it_waits()
            self.clock += ASK_SLURM_S

        self.signals.sleep = sleep  # type: ignore[method-assign]
        log = EventLog(self.layout.job_events(str(NEW)), 0)
        processes = Processes(self.plan, self.new, log, self.signals, None)
        starter = AttemptStarter(self.plan, self.new, log.say, self.signals, None)
        return StandBy(self.plan, self.new, NoTimeLimit(), log, self.signals, processes, starter)

    @property
    def events(self) -> list[str]:
        lines = self.layout.job_events(str(NEW)).read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    found = Two(tmp_path)
    monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
    monkeypatch.setattr("launch.supervisor.stand_by.time.monotonic", lambda: found.clock)
    return found


pytestmark = pytest.mark.starts


def test_a_successor_begins_when_the_run_is_released(two: Two) -> None:
    assert two.stand_by(lambda: release(two.plan, two.old)).until_turn() is None
    assert f"job {OLD} leaves the run" in two.events[-1]
    assert not two.layout.hand_over_request(NEW).exists()


@pytest.mark.parametrize("state", ["", "FAILED", "CANCELLED", "NODE_FAIL", "PENDING"])
def test_a_successor_begins_when_slurm_says_that_the_owner_has_ended(two: Two, state: str) -> None:
    assert two.stand_by(lambda: two.queue(state, "RUNNING")).until_turn() is None
    assert f"job {OLD} has ended" in two.events[-1]


def test_everything_is_loaded_again_for_another_attempt_of_the_owner(two: Two) -> None:
    attempts = iter([1, 1, 2])

    def go_on() -> None:
        if (index := next(attempts, None)) is None:
            release(two.plan, two.old)
        else:
            two.owned_by(OLD, index)

    assert two.stand_by(go_on).until_turn() is None
    runs = [text.partition(";")[0] for text in two.events if "loading" in text]
    assert runs == [f"job {OLD} runs attempt {index}" for index in (0, 1, 2)]


def test_a_job_that_is_being_ended_has_a_minute_to_save(two: Two) -> None:
    two.queue("COMPLETING", "RUNNING")
    began = two.clock
    assert two.stand_by(lambda: None).until_turn() is None
    assert two.clock - began > 60


def test_no_answer_and_an_incomplete_one_do_not_say_that_the_owner_has_ended(two: Two) -> None:
    two.queue("", "")
    waits = iter([None] * 5)
    assert two.stand_by(lambda: next(waits, two.owned_by(NEW, 1))).until_turn() is None
    assert "no other job owns the run" in two.events[-1]


def test_a_successor_of_a_run_that_is_over_leaves_and_does_not_begin(two: Two) -> None:
    outcome = two.stand_by(two.layout.summary.touch).until_turn()
    assert outcome is not None
    assert outcome.cause is Cause.NOT_NEEDED
    two.queue("", "RUNNING")
    outcome = two.stand_by(lambda: pytest.fail("it waits")).until_turn()
    assert outcome is not None
    assert outcome.cause is Cause.NOT_NEEDED, "also if Slurm has forgotten the job that completed it"
    two.queue("RUNNING", "RUNNING")
    two.layout.summary.unlink()
    outcome = two.stand_by(two.layout.stop_request.touch).until_turn()
    assert outcome is not None
    assert outcome.cause is Cause.NOT_NEEDED


def test_a_successor_that_slurm_ends_leaves(two: Two) -> None:
    two.signals.end_requested = True
    outcome = two.stand_by(lambda: None).until_turn()
    assert outcome is not None
    assert outcome.cause is Cause.SIGNAL


def test_the_first_job_of_a_run_stands_by_for_nobody(two: Two) -> None:
    two.layout.attempt.unlink()
    assert two.stand_by(lambda: pytest.fail("it waits")).until_turn() is None


def test_a_run_is_left_to_a_later_job_that_asks_and_runs(two: Two) -> None:
    heirs = Heirs(two.plan, two.old)
    assert heirs.first() is None
    two.layout.hand_over_request(NEW).touch()
    assert heirs.first() == NEW
    assert Heirs(two.plan, two.new).first() is None, "not to itself"
    two.queue("RUNNING", "FAILED")
    assert Heirs(two.plan, two.old).first() is None, "not to one that has died since"
    assert Attempt(0, None, OLD, 0).has_begun


def test_a_successor_whose_node_lacks_a_program_waits_for_its_turn_and_leaves_the_owner_alone(two: Two) -> None:
    """An error here would be this job's verdict, with which it ends the run's other jobs: the owner's, that trains."""
    (two.bin / "python").unlink()
    waits = iter([None] * 3)
    assert two.stand_by(lambda: next(waits, release(two.plan, two.old))).until_turn() is None
    assert [event for event in two.events if "cannot load" in event], two.events
    assert "not everything is loaded" in two.events[-1]


def note_loaded(two: Two) -> None:
    """As the successor's controller does once it has loaded everything."""
    mark = two.layout.loaded_mark("controller", 0, 1, NEW)
    mark.parent.mkdir(parents=True)
    mark.touch()


def wait_for_turn(two: Two, go_on: Callable[[], None]) -> None:
    """The successor's turn comes; its processes are ended."""
    stands_by = two.stand_by(go_on)
    try:
        assert stands_by.until_turn() is None
    finally:
        stands_by._processes.kill_all()


def test_a_successor_that_cannot_write_its_request_tries_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.write_plan()
    monkeypatch.setenv("SLURM_JOB_ID", str(NEW))
    two.layout.hand_over_request(NEW).symlink_to(two.layout.root / "gone" / "file")  # as on a full disk
    note_loaded(two)
    asked = []

    def go_on() -> None:
        asked.append(two.layout.hand_over_request(NEW).is_file())
        if len(asked) == 2:
            two.layout.hand_over_request(NEW).unlink()
        if asked[-1]:
            release(two.plan, two.old)

    wait_for_turn(two, go_on)
    assert asked == [False, False, True]
    assert len([event for event in two.events if "cannot load" in event]) == 1, "said once"


def test_a_successor_that_cannot_start_everything_does_not_ask_for_the_run(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been started may be loaded; a run that is asked for ends its attempt for a job that cannot go on."""
    two.write_plan()
    monkeypatch.setenv("SLURM_JOB_ID", str(NEW))
    monkeypatch.setenv("PATH", str(two.bin))  # there is no srun
    two._program("python", "exec /bin/sleep 600")
    controller = two.plan.parts[0]
    generation = replace(controller, name="generation", shares=(Share("generator", 1),), runs_in_batch_step=False)
    two.plan = replace(two.plan, parts=(controller, generation))
    note_loaded(two)
    asked = []

    def go_on() -> None:
        asked.append(two.layout.hand_over_request(NEW).is_file())
        if len(asked) == 3:
            release(two.plan, two.old)

    wait_for_turn(two, go_on)
    assert asked == [False, False, False]
    assert [event for event in two.events if "cannot load" in event], two.events
    assert "not everything is loaded" in two.events[-1]
