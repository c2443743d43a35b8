"""What has ended is brought back task by task; what lives, may live, or was cancelled is not.

Programs on PATH stand for squeue and sbatch; what squeue prints was recorded from Slurm 22.05.8.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from launch.run_files.plan_file import JobPart, Limits
from launch.run_files.records import JobRecord, read_job_records, write_job_record
from launch.run_files.run_state import Cause, EventLog, Outcome, Progress
from launch.slurm.commands import SlurmError
from launch.slurm.queue import ThisJob
from launch.supervisor import other_jobs
from launch.supervisor import other_jobs as resubmitter
from launch.supervisor.other_jobs import Resubmitter
from launch.supervisor.outcomes import RetryBudget
from rlhpc.base.run_directory import RunLayout
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

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
        return self.resubmitter.look(Progress(0, "training", step, 1.0, 0.0, 0.1, there))

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
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    clock = [time.monotonic()]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(resubmitter.time, "monotonic", lambda: clock[0])
    return Site(tmp_path, clock)


def test_one_lost_task_of_an_array_is_submitted_again_alone(site: Site) -> None:
    site.queue(PREEMPTED)
    assert site.look("trainer-0", "generator-0", "generator-2", "generator-3") is None
    assert site.submitted == ["--array=1"]
    assert site.events[-1] == ("submit", "job 5310226_1 (generation) has ended (preempted): resubmitted as job 6001")
    record = read_job_records(site.layout)[-1]
    assert (record.job_id, record.follows, record.tasks, record.array_size) == (6001, GENERATION, [1], 4)


def test_what_takes_its_place_is_waited_for_and_replaced_in_its_turn(site: Site) -> None:
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


def test_two_lost_tasks_are_one_job(site: Site) -> None:
    site.queue([*ALIVE[:2], "5310226_0|NODE_FAIL", "5310226_1|RUNNING", "5310226_2|RUNNING", "5310226_3|NODE_FAIL"])
    site.look("trainer-0", "generator-1", "generator-2")
    assert site.submitted == ["--array=0,3"]


def test_a_generator_that_is_lost_again_and_again_does_not_end_a_run_that_has_others(site: Site) -> None:
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


def test_the_last_generator_is_worth_the_runs_own_budget(site: Site) -> None:
    for attempt in range(3):
        over = [f"5310226_{task}|PREEMPTED" for task in range(4)]
        over += [f"{6001 + k}_{task}|PREEMPTED" for k in range(attempt) for task in range(4)]
        site.queue([*ALIVE[:2], *over])
        outcome = site.look("trainer-0", after_s=1000.0)
    assert outcome is not None
    assert outcome.cause is Cause.GIVEN_UP
    assert "has ended too often: PREEMPTED" in outcome.text
    assert site.submitted == ["--array=0,1,2,3"] * 2


def test_what_was_cancelled_stays_away_also_after_slurm_has_forgotten_it(site: Site) -> None:
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


def test_an_array_that_was_cancelled_as_a_whole_before_it_began_stays_away_too(site: Site) -> None:
    """squeue has one line for it, without tasks."""
    site.queue([*ALIVE[:2], "5310226|CANCELLED"])
    site.look("trainer-0", "generator-9")
    assert site.submitted == []
    assert [text for event, text in site.events if event == "left_away"] == [
        f"job 5310226_{task} (generation) was cancelled: it is not resubmitted" for task in range(4)
    ]


def test_a_trainer_that_was_cancelled_ends_the_run(site: Site) -> None:
    site.queue([ALIVE[0], "5310225|CANCELLED", *ALIVE[2:]])
    outcome = site.look("generator-0")
    assert outcome is not None
    assert outcome.cause is Cause.COMPONENT


def test_an_answer_without_the_job_that_asks_says_nothing_of_others(site: Site) -> None:
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


def test_while_the_file_server_does_not_answer_nothing_is_resubmitted_and_nothing_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    listdir = os.listdir

    def refuse(path: Any = ".") -> Any:
        if Path(path) == site.layout.jobs:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listdir(path)

    site.queue(PREEMPTED)
    monkeypatch.setattr(os, "listdir", refuse)
    assert site.look("trainer-0", "generator-0", "generator-2", "generator-3") is None
    assert [event for event, _ in site.events] == ["not_submitted"]


def test_a_job_that_is_younger_than_slurms_memory_is_not_forgotten(site: Site) -> None:
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


def test_a_slurm_that_is_away_is_asked_again_and_less_often_in_a_deep_queue(site: Site) -> None:
    site.queue(["slurm_load_jobs error: Unable to contact slurm controller (connect failure)"], status=1)
    assert site.look("trainer-0") is None
    site.queue([*ALIVE[:2], "5310226_0|PENDING", "5310226_1|PENDING", "5310226_2|PENDING", "5310226_3|PENDING"])
    calls = site.calls("squeue")
    for _ in range(30):
        site.look("trainer-0", after_s=10.0)
    assert site.calls("squeue") - calls <= 8
    assert site.submitted == []


def test_nobody_is_asked_while_everybody_is_there(site: Site) -> None:
    site.look(*ALL_ROLES)
    assert site.calls("squeue") == 0


def test_a_job_that_is_submitted_while_slurm_answers_is_not_submitted_twice(site: Site) -> None:
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
