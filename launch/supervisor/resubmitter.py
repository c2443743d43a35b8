"""Resubmit planned jobs of a run that have ended although their roles are still needed.

Input: the roles that the controller lists, and job states from Slurm (arrays per task).  Guarantees: a job that was
cancelled by hand is not resubmitted, not even after this job was requeued; neither is a job that is, or may be, alive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from launch.run_files.events import Log
from launch.run_files.job_records import JobRecord
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import Progress, saved_step
from launch.slurm.commands import SlurmError
from launch.slurm.control import MIN_JOB_AGE_S, min_job_age_s
from launch.slurm.this_job import ThisJob
from launch.supervisor.giving_up import RetryBudget, pause_after
from launch.supervisor.other_jobs import Gone, gone_jobs, planned_tasks, submit_again
from rlhpc.errors import RlhpcError
from rlhpc.files import is_absent, write_atomically

LOOK_EVERY_S = 10.0  # while a role is missing
LOOK_AT_LEAST_EVERY_S = 60.0  # while it stays missing, as in a long queue
SUBMIT_PATIENCE_S = 10.0  # for a slurmctld that is away: the next poll tries again

_Key = tuple[str, "int | None"]  # name of a job, and task of its array


class Resubmitter:
    """Resubmits the jobs of one plan, within the retry budget of its run."""

    def __init__(self, plan: JobPart, job: ThisJob, log: Log, budget: RetryBudget) -> None:
        self._plan, self._job, self._log, self._budget = plan, job, log, budget
        self._pause_s = LOOK_EVERY_S
        self._next_look = time.monotonic() + self._pause_s
        self._missing: set[str] = set()  # roles, at the last poll
        self._min_job_age_s: float | None = None  # not asked yet
        self._tries = _Tries(plan.limits.max_retries)
        self._left_away = plan.layout.jobs / "left_away.json"  # jobs that were cancelled by hand; Slurm ids
        self._said = ""  # the last reported reason why nothing could be submitted

    def look(self, progress: Progress | None) -> Outcome | None:
        """Resubmit jobs that have ended and are needed.  Returns an outcome if that is impossible or not allowed."""
        if not self._plan.other_jobs or time.monotonic() < self._next_look:
            return None
        try:
            return self._look(progress)
        except (RlhpcError, OSError) as error:
            if str(error) != self._said:
                self._log.say("not_submitted", f"jobs that have ended cannot be resubmitted: {error}")
            self._said = str(error)
            return None
        finally:
            self._next_look = max(self._next_look, time.monotonic() + self._pause_s)

    def _look(self, progress: Progress | None) -> Outcome | None:
        self._tries.refill(saved_step(self._plan.layout, is_certain=True))
        present = {role["name"] for role in progress.roles} if progress is not None else set()
        away = self._read_left_away()
        missing = self._expected(away) - present
        self._pause_s = LOOK_EVERY_S if missing != self._missing else min(2 * self._pause_s, LOOK_AT_LEAST_EVERY_S)
        self._missing = missing
        if not missing:
            return None
        gone = [
            each
            for each in gone_jobs(self._plan, self._job, self._memory_s())
            # A job that Slurm no longer shows is alive if its role is registered.
            if not self._is_given_up(each.record, each.task, away) and (each.state or not present & set(each.roles))
        ]
        cancelled = [each for each in gone if each.state == "CANCELLED"]
        for each in cancelled:
            if each.record.name == "trainer":
                return Outcome(Cause.COMPONENT, f"job {each.label}, the trainer's, was cancelled")
            self._leave_away(each)
        lost = [each for each in gone if each not in cancelled]
        for name in dict.fromkeys(each.record.name for each in lost):
            outcome = self._bring_back([each for each in lost if each.record.name == name], progress)
            if outcome is not None:
                return outcome
        return None

    def _expected(self, away: Sequence[str]) -> set[str]:
        """Names of the roles that the planned jobs would start; one each for trainers and reward services."""
        newest = [(records[-1], task) for records, task in planned_tasks(self._plan)]
        return {
            role
            for record, task in newest
            if not self._is_given_up(record, task, away)
            for role in record.roles_of(task)
        }

    def _is_given_up(self, record: JobRecord, task: int | None, away: Sequence[str]) -> bool:
        return record.label(task) in away or self._tries.is_exhausted((record.name, task))

    def _memory_s(self) -> float:
        if self._min_job_age_s is None:
            try:
                self._min_job_age_s = min_job_age_s()
            except SlurmError:
                return MIN_JOB_AGE_S
        return self._min_job_age_s

    # ------------------------------------------------------------------------------------------------- bringing back

    def _bring_back(self, gone: Sequence[Gone], progress: Progress | None) -> Outcome | None:
        """Resubmit one job, or these tasks of an array."""
        name = gone[0].record.name
        if name.startswith("generation") and progress is None:
            return None  # it is not known yet whether other generators are running
        lost = {role for each in gone for role in each.roles}
        if name.startswith("generation") and progress is not None and set(progress.names("generator")) - lost:
            gone = [each for each in gone if self._may_try(each)]  # the run continues without them meanwhile
            if not gone:
                return None
        else:
            pause_s = self._budget.take(saved_step(self._plan.layout, is_certain=True))
            if pause_s is None:
                text = f"job {gone[0].label} ({name}) has ended too often: {gone[0].state or 'state unknown'}"
                return Outcome(Cause.GIVEN_UP, text)
            self._next_look = time.monotonic() + max(LOOK_EVERY_S, pause_s)
        tasks = [each.task for each in gone if each.task is not None]
        number = submit_again(
            self._plan.layout,
            gone[0].record.job_id,
            tasks=tasks or None,
            patience_s=SUBMIT_PATIENCE_S,
            hear=lambda remarks: self._log.say("sbatch", f"sbatch says: {remarks}"),
        )
        was = ", ".join(f"{each.label} ({name}) has ended ({each.state.lower() or 'state unknown'})" for each in gone)
        self._log.say("submit", f"job {was}: resubmitted as job {number}")
        self._said, self._pause_s = "", LOOK_EVERY_S
        return None

    def _may_try(self, gone: Gone) -> bool:
        """True if a generator that the run can do without is to be resubmitted now; it has a budget of its own."""
        key = gone.record.name, gone.task
        may = self._tries.take(key)
        if self._tries.is_exhausted(key):
            state = gone.state.lower() or "state unknown"
            text = f"job {gone.label} ({gone.record.name}) has ended too often ({state})"
            self._log.say("left_away", f"{text}: the run continues without it until another step is saved")
        return may

    def _leave_away(self, gone: Gone) -> None:
        """Do not resubmit a job that was cancelled by hand: recorded in a file, because Slurm forgets the job."""
        with suppress(OSError):
            write_atomically(self._left_away, json.dumps([*self._read_left_away(), gone.label]).encode())
        self._log.say("left_away", f"job {gone.label} ({gone.record.name}) was cancelled: it is not resubmitted")

    def _read_left_away(self) -> list[str]:
        """Names of jobs and tasks, as squeue writes them.  Raises OSError."""
        try:
            labels = [] if is_absent(self._left_away) else json.loads(self._left_away.read_bytes())
        except ValueError:
            return []
        return labels if isinstance(labels, list) else []


class _Tries:
    """How often each task was resubmitted since the last new checkpoint, with growing pauses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count: dict[_Key, int] = {}
        self._not_before: dict[_Key, float] = {}
        self._step = -1

    def refill(self, saved_step: int) -> None:
        """A newer checkpoint resets all counts."""
        if saved_step > self._step:
            self._step = saved_step
            self._count.clear()

    def is_exhausted(self, key: _Key) -> bool:
        """True if it is not resubmitted any more."""
        return self._count.get(key, 0) > self._most

    def take(self, key: _Key) -> bool:
        """Use up one try; False: too early for another one, or none is left."""
        now = time.monotonic()
        if now < self._not_before.get(key, 0.0):
            return False
        count = self._count[key] = self._count.get(key, 0) + 1
        self._not_before[key] = now + pause_after(count)
        return count <= self._most
