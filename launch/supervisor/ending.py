"""What a job does at its end: requeue itself, submit a successor, or write its result."""

from __future__ import annotations

import pickle

from launch.run_files.events import EventLog, certain_document
from launch.run_files.outcome import Outcome
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


def submit_successor(plan: JobPart, job: ThisJob, log: EventLog) -> int | None:
    """Submit the same script again, to start when this job has ended.  Returns the id; None: it was not possible."""
    tasks = None if job.array_task is None else [job.array_task]
    try:
        successor = submit_again(
            plan.layout,
            job.submitted_id,
            f"--dependency=afterany:{job.name}",
            tasks=tasks,
            hear=lambda said: log.say("sbatch", f"sbatch says: {said}"),
        )
    except RlhpcError as error:
        log.say("successor_refused", f"no successor: {error}")
        return None
    log.say("successor", f"job {successor} follows this one")
    return successor


def write_result(plan: JobPart, job: ThisJob, outcome: Outcome) -> None:
    """Write what `job.result()` of submitit returns: the summary of a finished run, or why there is none."""
    summary = certain_document(plan.layout.summary)
    has_succeeded = outcome.cause.status == 0 and bool(summary)
    result = ("success", summary) if has_succeeded else ("error", outcome.text)
    directory = plan.layout.logs / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{job.name}_0_result.pkl", pickle.dumps(result))
