"""What follows the life of a job: back into the queue, or the end of every job of the run."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

from launch.batch.event_log import EventLog
from launch.batch.plan_file import JobPart
from launch.batch.slurm_commands import SlurmError, clean_environment, slurm
from launch.batch.this_job import ThisJob
from launch.batch.verdict import Verdict
from rlhpc.files import write_atomically

FAREWELL_S = 60.0  # for other jobs of the run to end by themselves
REQUEUED_S = 120.0  # until Slurm has ended the batch step of a requeued job
PATIENCE_S = 300.0


def go_back_into_queue(plan: JobPart, job: ThisJob, log: EventLog) -> int:
    """Go on in another life of this job, or in its successor.  Returns the exit status of the batch step."""
    if plan.continuation == "successor":
        log.say("successor", "this job ends; its successor goes on")
        return 0
    log.say("requeue", "back into the queue")
    try:
        job.requeue()
    except SlurmError as error:
        log.say("requeue_refused", f"{error}; a successor is submitted instead")
        return 0 if submit_successor(plan, job, log) else 1
    time.sleep(REQUEUED_S)
    return 0


def submit_successor(plan: JobPart, job: ThisJob, log: EventLog) -> bool:
    """Submit the same script again, to start when this job has ended.  False: it could not be."""
    record = _record_of(plan, job)
    script = record.get("script") or str(plan.layout.scripts / f"{plan.name}.sbatch")
    words = ["sbatch", "--parsable", f"--dependency=afterany:{job.job_id}"]
    if job.array_task is not None:
        words.append(f"--array={job.array_task}")
    try:
        out = slurm(*words, script, patience_s=PATIENCE_S, environment=clean_environment())
    except SlurmError as error:
        log.say("successor_refused", f"no successor: {error}")
        return False
    successor = int(out.strip().partition(";")[0])
    document = {**record, "job_id": successor, "submitted_unix_s": time.time(), "follows": job.submitted_id}
    write_atomically(plan.layout.job_record(successor), json.dumps(document, indent=1).encode())
    log.say("successor", f"job {successor} goes on when this one has ended")
    return True


def end_other_jobs(plan: JobPart, job: ThisJob, log: EventLog) -> None:
    """Cancel every other job of the run: what is pending at once, what runs after it has had time to end by itself."""
    others = [number for number in _recorded_jobs(plan) if number != job.submitted_id]
    if not others:
        return
    try:
        states = _states(others)
        _cancel([number for number in others if states.get(number) == "PENDING"], log)
        deadline = time.monotonic() + FAREWELL_S
        while (alive := sorted(_states(others))) and time.monotonic() < deadline:
            time.sleep(1.0)
        _cancel(alive, log)
    except SlurmError as error:
        log.say("not_ended", f"jobs {', '.join(map(str, others))} may be left: {error}")


def write_result(plan: JobPart, job: ThisJob, verdict: Verdict) -> None:
    """Leave what `job.result()` of submitit returns: the summary of a finished run, or why there is none."""
    try:
        summary: dict[str, Any] = json.loads(plan.layout.summary.read_bytes())
    except (OSError, ValueError):
        summary = {}
    has_succeeded = verdict.cause.status == 0 and bool(summary)
    result = ("success", summary) if has_succeeded else ("error", verdict.text)
    directory = plan.layout.logs / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{job.name}_0_result.pkl", pickle.dumps(result))


def _record_of(plan: JobPart, job: ThisJob) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(plan.layout.job_record(job.submitted_id).read_bytes())
    except (OSError, ValueError):
        return {}
    return document


def _recorded_jobs(plan: JobPart) -> list[int]:
    return sorted(int(Path(name).stem) for name in os.listdir(plan.layout.jobs) if Path(name).stem.isdigit())  # noqa: PTH208  names are enough


def _states(jobs: list[int]) -> dict[int, str]:
    """Of those that are in the queue: PENDING if nothing of it runs.  Raises SlurmError."""
    out = slurm("squeue", "--noheader", "--me", "--format=%A|%F|%i|%T", patience_s=PATIENCE_S)
    states: dict[int, str] = {}
    for line in out.splitlines():
        own, array, shown, state = line.strip().split("|")
        number = int(shown.partition("+")[0]) if "+" in shown else int(array if array.isdigit() else own)
        if number in jobs and states.get(number) in (None, "PENDING"):
            states[number] = state
    return states


def _cancel(jobs: list[int], log: EventLog) -> None:
    if jobs:
        log.say("cancel", f"jobs of this run that are left: {', '.join(map(str, jobs))}")
        slurm("scancel", *map(str, jobs), patience_s=PATIENCE_S)
