"""What a job does at its end: requeue itself, submit a successor, or write its result."""

from __future__ import annotations

import math
import pickle
from contextlib import suppress

from launch.run_files.events import EventLog, certain_document
from launch.run_files.outcome import Outcome
from launch.run_files.overlap import successor_after_min
from launch.run_files.plan_file import JobPart
from launch.slurm.commands import SlurmError
from launch.slurm.this_job import ThisJob
from launch.supervisor.other_jobs import submit_again
from rlhpc.errors import RlhpcError
from rlhpc.files import write_atomically


def go_back_into_queue(plan: JobPart, job: ThisJob, log: EventLog, successor: int | None = None) -> int:
    """Continue in another life of this job, or in its successor.  Returns the exit status of the batch step.

    successor: submitted before; None: none, or sbatch refused it when this job began, and may take it now.
    """
    if plan.continuation == "successor":
        release(plan, job)
        if successor is None and submit_successor(plan, job, log) is None:
            return 1
        log.say("successor", "this job ends; its successor continues the run")
        return 0
    log.say("requeue", "requeueing this job")
    try:
        job.requeue_and_end()
    except SlurmError as error:
        log.say("requeue_refused", f"{error}; submitting a successor instead")
        return 1 if submit_successor(plan, job, log) is None else 0
    return 0


def release(plan: JobPart, job: ThisJob) -> None:
    """Tell a successor that stands by that this job has saved and will begin no further attempt."""
    if plan.overlap_s:
        with suppress(OSError):  # it sees the end of this job, too
            plan.layout.released(job.job_id).touch()


def dependency_of_successor(job: str, life_s: float, overlap_s: float) -> str:
    """When a successor may start, as an sbatch option; if this job ends earlier, it may start then."""
    after_min = successor_after_min(life_s, overlap_s)
    early = "" if after_min is None else f"after:{job}+{after_min}?"
    return f"--dependency={early}afterany:{job}"


def submit_successor(plan: JobPart, job: ThisJob, log: EventLog, life_s: float = math.inf) -> int | None:
    """Submit the same script again, to start when this job has ended or is about to end (dependency_of_successor).

    life_s: from the beginning of this job to its time limit.  Returns the id; None: it was not possible.
    """
    tasks = None if job.array_task is None else [job.array_task]
    options = (dependency_of_successor(job.name, life_s, plan.overlap_s if plan.hosts_controller else 0),)
    try:
        successor = submit_again(
            plan.layout,
            job.submitted_id,
            *options,
            tasks=tasks,
            hear=lambda said: log.say("sbatch", f"sbatch says: {said}"),
        )
    except RlhpcError as error:
        log.say("successor_refused", f"no successor: {error}")
        return None
    when = "begins before this one ends, loads, and takes the run over" if "+" in options[0] else "follows this one"
    log.say("successor", f"job {successor} {when}")
    return successor


def write_result(plan: JobPart, job: ThisJob, outcome: Outcome) -> None:
    """Write what `job.result()` of submitit returns: the summary of a finished run, or why there is none."""
    summary = certain_document(plan.layout.summary)
    has_succeeded = outcome.cause.status == 0 and bool(summary)
    result = ("success", summary) if has_succeeded else ("error", outcome.text)
    directory = plan.layout.logs / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{job.name}_0_result.pkl", pickle.dumps(result))
