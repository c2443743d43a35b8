"""The other jobs of a run, by the ids that were recorded when they were submitted.  Never by name.

Eats jobs/ID.json and what squeue says.  Every function raises SlurmError where Slurm refuses or does not answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from launch.batch.event_log import EventLog
from launch.batch.job_records import read_records, write_record
from launch.batch.plan_file import JobPart
from launch.batch.sbatch import submit_script
from launch.batch.slurm_commands import SlurmError, slurm
from launch.batch.this_job import ThisJob
from rlhpc.run_layout import RunLayout

FAREWELL_S = 60.0  # for other jobs of the run to end by themselves
PATIENCE_S = 300.0
# Every other state may live, also one that a later Slurm invents: a job that lives must not be submitted a second time.
OVER = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE",
        "OUT_OF_MEMORY", "REVOKED"}  # fmt: skip


@dataclass(frozen=True)
class OtherJob:
    """A job that was submitted, and the most alive state of its tasks or components; "" where Slurm knows no more."""

    job_id: int
    name: str
    state: str

    @property
    def is_alive(self) -> bool:
        """True if something of it is in the queue or runs."""
        return bool(self.state) and self.state not in OVER


def other_jobs(layout: RunLayout, job: ThisJob) -> list[OtherJob]:
    """Every recorded job but this one, the oldest first."""
    records = [record for record in read_records(layout) if record.job_id != job.submitted_id]
    if not records:
        return []
    states = _states([record.job_id for record in records])
    return [OtherJob(record.job_id, record.name, states.get(record.job_id, "")) for record in records]


def end_other_jobs(layout: RunLayout, job: ThisJob, log: EventLog) -> None:
    """Cancel every other job: what is pending at once, what runs after it has had time to end by itself."""
    _cancel([other for other in other_jobs(layout, job) if other.state == "PENDING"], log)
    deadline = time.monotonic() + FAREWELL_S
    while (alive := [other for other in other_jobs(layout, job) if other.is_alive]) and time.monotonic() < deadline:
        time.sleep(1.0)
    _cancel(alive, log)


def gone_jobs(plan: JobPart, job: ThisJob) -> list[OtherJob]:
    """Planned jobs that were submitted and have come to an end.  COMPLETING counts as alive: it may be a requeue."""
    newest = {other.name: other for other in other_jobs(plan.layout, job)}
    return [newest[name] for name in plan.other_jobs if name in newest and not newest[name].is_alive]


def submit_again(layout: RunLayout, job_id: int, *options: str) -> int:
    """Submit the script of a recorded job once more and record it.  Returns the new id.

    Raises SlurmError, also if the job was never recorded; MayBeQueued: it is not known whether a job was submitted,
    which then ends by itself, since nobody has recorded it.
    """
    record = next((record for record in read_records(layout) if record.job_id == job_id), None)
    if record is None:
        raise SlurmError(f"job {job_id} is not recorded in {layout.jobs}: nobody knows its script")
    old = record

    def note(number: int) -> None:
        write_record(layout, replace(old, job_id=number, submitted_unix_s=time.time(), follows=job_id))

    return submit_script(Path(record.script), options, record=note, patience_s=PATIENCE_S)


def _states(numbers: list[int]) -> dict[int, str]:
    """The most alive state of each: one task that runs makes an array run."""
    out = slurm("squeue", "--noheader", "--me", "--states=all", "--format=%i|%F|%T", patience_s=PATIENCE_S)
    states: dict[int, str] = {}
    for line in out.splitlines():
        shown, array, state = line.strip().split("|")
        leader = shown.partition("+")[0].partition("_")[0]
        for text in {leader, array}:
            number = int(text) if text.isdigit() else -1
            if number in numbers and _rank(state) > _rank(states.get(number, "")):
                states[number] = state
    return states


def _rank(state: str) -> int:
    return 0 if not state else 1 if state in OVER else 2 if state == "PENDING" else 3


def _cancel(jobs: list[OtherJob], log: EventLog) -> None:
    if jobs:
        log.say("cancel", f"jobs of this run that are left: {', '.join(str(job.job_id) for job in jobs)}")
        slurm("scancel", *(str(job.job_id) for job in jobs), patience_s=PATIENCE_S)
