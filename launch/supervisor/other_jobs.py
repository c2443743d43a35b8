"""The other jobs of a run, identified by the ids recorded when they were submitted, never by name.

Input: jobs/ID.json and the output of squeue.  Guarantees: a job counts as gone only if squeue shows it in a final
state, or does not show it although it is old enough to have been purged, in an answer that does show this job itself.
Every function but may_have_controller raises SlurmError if Slurm refuses or does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.run_files.events import EventLog
from launch.run_files.job_records import JobRecord, read_records, write_record
from launch.run_files.plan_file import JobPart
from launch.slurm.commands import SlurmError
from launch.slurm.control import MIN_JOB_AGE_S, SOON_S, TaskStates, cancel, most_active, own_jobs
from launch.slurm.sbatch import submit_script
from launch.slurm.states import OVER
from launch.slurm.this_job import ThisJob
from rlhpc.deadline import Deadline
from rlhpc.files import leave_deleted_directory
from rlhpc.run_layout import RunLayout

FAREWELL_S = 60.0  # for other jobs of the run to end on their own
PATIENCE_S = 300.0
SKEW_S = 30.0  # between the clocks of the submitting host and this node

_States = dict[int, TaskStates]


@dataclass(frozen=True)
class OtherJob:
    """A submitted job, and the most active state of its tasks or components; "": Slurm no longer knows it."""

    job_id: int
    name: str
    state: str

    @property
    def is_alive(self) -> bool:
        """True if any part of it is pending or running."""
        return bool(self.state) and self.state not in OVER


@dataclass(frozen=True)
class Gone:
    """A planned job, or a task of a planned array, that has ended."""

    record: JobRecord  # of its newest submission
    task: int | None
    state: str  # "": Slurm no longer knows it

    @property
    def label(self) -> str:
        """As squeue writes it: JOB, or JOB_TASK."""
        return self.record.label(self.task)

    @property
    def roles(self) -> list[str]:
        """The roles whose registration shows that it is alive."""
        return self.record.roles_of(self.task)


def other_jobs(layout: RunLayout, job: ThisJob) -> list[OtherJob]:
    """Every recorded job except this one, oldest first."""
    records = [record for record in read_records(layout) if record.job_id != job.submitted_id]
    if not records:
        return []
    states = _ask_queue(job, PATIENCE_S)
    most = {number: most_active(tasks.values()) for number, tasks in states.items()}
    return [OtherJob(record.job_id, record.name, most.get(record.job_id, "")) for record in records]


def end_other_jobs(layout: RunLayout, job: ThisJob, log: EventLog) -> None:
    """Cancel every other job: pending ones at once, running ones after they have had time to end on their own."""
    _cancel([other for other in other_jobs(layout, job) if other.state == "PENDING"], log)
    deadline = Deadline(FAREWELL_S)
    while (alive := [other for other in other_jobs(layout, job) if other.is_alive]) and not deadline.is_over:
        time.sleep(1.0)
    _cancel(alive, log)


def may_have_controller(layout: RunLayout, job: ThisJob, patience_s: float) -> bool:
    """False if Slurm shows that no job with the controller is queued or running.  Does not raise: no answer is True."""
    hosts = [record for record in read_records(layout) if record.hosts_controller]
    try:
        states = _ask_queue(job, patience_s, patience_s)
    except SlurmError:
        return True
    if hosts != [record for record in read_records(layout) if record.hosts_controller]:  # as in gone_jobs
        return True
    forgotten_before = time.time() - MIN_JOB_AGE_S - SKEW_S
    return any(_gone([record], None, states, forgotten_before) is None for record in hosts)


def gone_jobs(plan: JobPart, job: ThisJob, min_job_age_s: float = MIN_JOB_AGE_S) -> list[Gone]:
    """Planned jobs, and tasks of planned arrays, that have ended, in the order of the plan.

    COMPLETING counts as alive: it may be a requeue.  min_job_age_s: how long Slurm remembers every job.
    """
    planned = planned_tasks(plan)
    states = _ask_queue(job, 0.0, SOON_S)
    if planned_tasks(plan) != planned:  # submitted while Slurm answered: its answer may lack it
        return []
    forgotten_before = time.time() - min_job_age_s - SKEW_S
    found = [_gone(records, task, states, forgotten_before) for records, task in planned]
    return [gone for gone in found if gone is not None]


def planned_tasks(plan: JobPart) -> list[tuple[list[JobRecord], int | None]]:
    """Every other planned job (of arrays, every task) that was submitted, with its submissions, oldest first."""
    records, found = read_records(plan.layout), []
    for name in plan.other_jobs:
        own = [record for record in records if record.name == name]
        size = own[-1].array_size if own else None
        tasks: list[int | None] = [None] if size is None else list(range(size))
        for task in tasks:
            applicable = [record for record in own if record.is_for(task)]
            found += [(applicable, task)] if applicable else []
    return found


def submit_again(
    layout: RunLayout,
    job_id: int,
    *options: str,
    tasks: Sequence[int] | None = None,
    patience_s: float = PATIENCE_S,
    hear: Callable[[str], object] = lambda remarks: None,
) -> int:
    """Submit the script of a recorded job again and record it.  Returns the new id.

    tasks: only these tasks of its array.  hear: as for submit_script.  Raises SlurmError, also if the job was never
    recorded; MayBeQueued: it is not known whether a job was submitted; if so it ends by itself, being unrecorded.
    """
    record = next((record for record in read_records(layout) if record.job_id == job_id), None)
    if record is None:
        raise SlurmError(f"job {job_id} is not recorded in {layout.jobs}: its script is unknown")
    leave_deleted_directory(layout.root)  # where no sbatch works
    old, only = record, None if tasks is None else sorted(tasks)
    words = [*options, *([] if only is None else [f"--array={','.join(map(str, only))}"])]

    def note(number: int) -> None:
        new = replace(old, job_id=number, submitted_unix_s=time.time(), follows=job_id, tasks=only or old.tasks)
        write_record(layout, new)

    return submit_script(Path(record.script), words, record=note, patience_s=patience_s, hear=hear)


def _gone(records: Sequence[JobRecord], task: int | None, states: _States, forgotten_before: float) -> Gone | None:
    """The end of one task, or one job, with these submissions; None: it is alive, or may be."""
    over = ""
    for record in records:
        shown = states.get(record.job_id, {})
        # An array of which no task has ever been apart is one line, when it has been cancelled.
        state = shown.get(task) or shown.get(None, "") if task is not None else most_active(shown.values())
        if state:
            over = state
        if (state and state not in OVER) or (not state and record.submitted_unix_s > forgotten_before):
            return None
    return Gone(records[-1], task, over)


def _ask_queue(job: ThisJob, patience_s: float, timeout_s: float = 60.0) -> _States:
    """States of this user's jobs.

    Raises SlurmError, also if this job itself is not listed: then the answer is not complete.
    """
    states = own_jobs(patience_s, timeout_s)
    if job.submitted_id not in states:
        raise SlurmError(f"squeue does not list this job, {job.name}: its answer is not complete")
    return states


def _cancel(jobs: list[OtherJob], log: EventLog) -> None:
    if jobs:
        log.say("cancel", f"cancelling the run's other jobs: {', '.join(str(job.job_id) for job in jobs)}")
        cancel((job.job_id for job in jobs), patience_s=PATIENCE_S)
