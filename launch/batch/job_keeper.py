"""Keep the other planned jobs of a run alive: one that has ended while its role is missing is submitted again.

Eats what the controller says of its roles and what Slurm says of jobs.  What somebody has cancelled stays away.
"""

from __future__ import annotations

import time

from launch.batch.event_log import EventLog
from launch.batch.other_jobs import OtherJob, gone_jobs, submit_again
from launch.batch.plan_file import JobPart
from launch.batch.retry_budget import RetryBudget
from launch.batch.run_state import Progress, saved_step
from launch.batch.this_job import ThisJob
from launch.batch.verdict import Cause, Verdict
from rlhpc.errors import RlhpcError

LOOK_EVERY_S = 10.0  # where a role is missing


class JobKeeper:
    """Looks after the jobs of one plan, with the retry budget of its run."""

    def __init__(self, plan: JobPart, job: ThisJob, log: EventLog, budget: RetryBudget) -> None:
        self._plan, self._job, self._log, self._budget = plan, job, log, budget
        self._next_look = time.monotonic() + LOOK_EVERY_S

    def look(self, progress: Progress | None) -> Verdict | None:
        """Bring back what is gone and missed.  Returns a verdict where that cannot or must not be."""
        if not self._plan.other_jobs or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY_S
        if progress is not None and self._everybody_is_there(progress):
            return None
        try:
            verdicts = [self._bring_back(other) for other in gone_jobs(self._plan, self._job)]
        except RlhpcError as error:
            self._log.say("not_submitted", f"jobs that are gone are not brought back: {error}")
            return None
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def _everybody_is_there(self, progress: Progress) -> bool:
        has_rewards = progress.has_rewards or "rewards" not in self._plan.other_jobs
        return progress.has_trainer and has_rewards and bool(progress.generators())

    def _bring_back(self, other: OtherJob) -> Verdict | None:
        if other.state == "CANCELLED":
            text = f"job {other.job_id}, the trainer's, was cancelled"
            return Verdict(Cause.COMPONENT, text) if other.name == "trainer" else None
        pause_s = self._budget.take(saved_step(self._plan.layout))
        if pause_s is None:
            return Verdict(Cause.GIVEN_UP, f"job {other.job_id} ({other.name}) has ended too often: {other.state}")
        number = submit_again(self._plan.layout, other.job_id)
        was = f"job {other.job_id} ({other.name}) is gone ({other.state.lower() or 'forgotten'})"
        self._log.say("submit", f"{was}: job {number} takes its place")
        self._next_look = time.monotonic() + max(LOOK_EVERY_S, pause_s)
        return None
