"""The program that a batch script starts: ``python3 -m launch.supervisor --run-dir R --plan FILE --job NAME``.

Supervises one job from its start to an outcome, and then requeues, ends or gives up accordingly.  Python 3.9 and the
standard library; the parts are the other files of this room.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from launch.common.text import counted
from launch.run_files.plan_file import JobPart, read_plan
from launch.run_files.run_state import Cause, EventLog, Outcome, is_complete, read_attempt
from launch.slurm.queue import ThisJob, TimeLimit, cancel
from launch.supervisor.controller_job import ControllerJobSupervisor, go_back_into_queue, submit_successor, write_result
from launch.supervisor.other_jobs import PATIENCE_S, WorkerJobSupervisor, end_other_jobs
from launch.supervisor.outcomes import asked_to_end
from launch.supervisor.processes import SlurmSignals
from launch.supervisor.role_task import base_directory, leave_node
from rlhpc.base.files import is_absent, keep_others_from_writing
from rlhpc.base.patience import Deadline, patiently
from rlhpc.base.processes import name_nameless_user
from rlhpc.protocol.errors import RlhpcError

RESULT_S = 60.0  # for a failing disk to accept the result of a job that has ended
RECORDED_S, RECORD_POLL_S = 60.0, 0.5
LIMIT_S = 5.0  # a SIGTERM this close to the time limit is caused by the time limit


def main() -> int:
    """Supervise one life of this job.  Returns the exit status of the batch step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--job", required=True)
    options = parser.parse_args()
    name_nameless_user()
    keep_others_from_writing()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a role's error may have letters that the locale lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        plan, job = patiently(lambda: read_plan(options.plan, options.job), options.plan), ThisJob.of(os.environ)
    except RlhpcError as error:
        sys.stderr.write(f"rlhpc supervisor: {error}\n")
        return 2
    log = EventLog(plan.layout.job_events(job.name), job.restart)
    signals, limit = SlurmSignals(), TimeLimit(job, os.environ)
    log.say("life", _opening(plan, job, limit))
    if not _is_recorded(plan, job, signals):
        text = f"job {job.submitted_id} has no record in {plan.layout.jobs}: its submission was abandoned"
        return _follow_up(plan, job, log, Outcome(Cause.UNRECORDED, text))
    is_complete_before = patiently(lambda: is_complete(plan.layout, is_certain=True), plan.layout.root)
    over = Outcome(Cause.COMPLETE, "the run is complete") if is_complete_before else asked_to_end(plan.layout)
    if over is not None:
        return _follow_up(plan, job, log, over)
    successor = submit_successor(plan, job, log) if plan.continuation == "successor" else None
    outcome = _one_life(plan, job, limit, log, signals)
    with suppress(RlhpcError):  # requeued, the job may come back on another node
        leave_node(base_directory(job.job_id))
    return _follow_up(plan, job, log, outcome, successor)


def _one_life(plan: JobPart, job: ThisJob, limit: TimeLimit, log: EventLog, signals: SlurmSignals) -> Outcome:
    kind = ControllerJobSupervisor if plan.hosts_controller else WorkerJobSupervisor

    def supervise() -> Outcome:
        supervisor: ControllerJobSupervisor | WorkerJobSupervisor = kind(plan, job, limit, log, signals)
        return supervisor.run()

    try:
        # All processes have ended when it raises: another life begins another attempt.
        outcome = patiently(supervise, plan.layout.root, sleep=signals.sleep, is_over=lambda: signals.end_requested)
    except RlhpcError as error:
        outcome = Outcome(Cause.SETTINGS, str(error))
    except OSError as error:
        outcome = Outcome(Cause.GIVEN_UP, f"the run directory cannot be used: {error}")
    if outcome.cause is Cause.SIGNAL and limit.left_s() < LIMIT_S:
        outcome.cause = Cause.TIME  # saving took longer than ever before
    elif outcome.cause is Cause.TIME and signals.end_requested and limit.left_s() > LIMIT_S:
        outcome.cause = Cause.SIGNAL  # it was cancelled meanwhile, or Slurm requeues it itself
    if outcome.cause is Cause.SIGNAL and not outcome.status and owns_run(plan, job) and job.is_to_go_on():
        outcome.cause = Cause.STOP
        with suppress(OSError):  # as `rlhpc stop` does
            plan.layout.stop_request.touch()
    return outcome


def owns_run(plan: JobPart, job: ThisJob) -> bool:
    """True if the run ends with this job: no later job has taken it over."""
    attempt = read_attempt(plan.layout)
    return plan.hosts_controller and (attempt is None or attempt.owner == (job.job_id, job.restart))


def _is_recorded(plan: JobPart, job: ThisJob, signals: SlurmSignals) -> bool:
    """Wait for the record of this job: the submitting process may not have written it yet.

    A job whose submission was not confirmed must not join a run that may have been submitted a second time.
    """
    record = plan.layout.job_record(job.submitted_id)
    for _ in Deadline(RECORDED_S).polls(RECORD_POLL_S, signals.sleep):
        if not patiently(lambda: is_absent(record), record, sleep=signals.sleep, is_over=lambda: signals.end_requested):
            return True
        if signals.end_requested:
            break
    return False


def _follow_up(plan: JobPart, job: ThisJob, log: EventLog, outcome: Outcome, successor: int | None = None) -> int:
    """Do what follows from the outcome; successor: the job that begins when this one ends."""
    log.say("verdict", f"{outcome.cause.name.lower()}: {outcome.text}")
    if outcome.cause.follows == "requeue":
        return go_back_into_queue(plan, job, log, successor)
    is_end = outcome.cause.follows == "end"
    try:
        if is_end and plan.hosts_controller:
            patiently(lambda: end_other_jobs(plan.layout, job, log), plan.layout.jobs)
        elif successor is not None and is_end:  # the successor would end in the same way
            cancel([successor], patience_s=PATIENCE_S)
    except (RlhpcError, OSError) as error:
        log.say("not_ended", f"other jobs of the run may still be queued or running: {error}")
    with suppress(OSError):
        patiently(lambda: write_result(plan, job, outcome), plan.layout.logs, limit_s=RESULT_S)
    return outcome.cause.status


def _opening(plan: JobPart, job: ThisJob, limit: TimeLimit) -> str:
    where = os.environ.get("SLURM_JOB_NODELIST", "this host")
    life = f", requeued {counted(job.restart, 'time')}" if job.restart else ""
    return f"job {job.name} ({plan.name}){life} runs {limit.in_words()} on {where}"


if __name__ == "__main__":
    sys.exit(main())
