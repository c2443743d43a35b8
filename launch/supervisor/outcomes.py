"""Determine the outcome of an attempt from exit statuses, exit records and the states of Slurm components.

Input: how the controller exited and why it was asked to.  Output: Outcome.  Starts and ends no process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

from launch.common.text import counted
from launch.run_files.plan_file import JobPart
from launch.run_files.records import ExitRecord, read_exit_record, read_exit_records
from launch.run_files.run_state import (
    Attempt,
    Cause,
    Outcome,
    certain_document,
    is_complete,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    saved_step,
    wants_abort,
    wants_stop,
)
from launch.slurm.commands import SlurmError
from launch.slurm.queue import NoTimeLimit, ThisJob, component_states
from launch.supervisor.processes import StartedProcesses
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_ALONE, EXIT_CONFIG

# ------------------------------------------------------------------------------------------------------------ giving up
#
# Reasons to give up: too many failures without a new checkpoint, or too long without a step.


FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
LONGEST_LOOK_S = 300.0  # of a supervisor's poll, which may include queries of Slurm
MIN_TIME_FOR_ANOTHER = 3.0  # times the time that stopping needs; with less, a new attempt is not worthwhile


def pause_after(failures: int) -> float:
    """Seconds before another try, by the number of failed ones."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 4.0 ** min(failures - 1, 10))  # more would overflow


class RetryBudget:
    """Counts failures since the last new checkpoint; a run that keeps failing at the same step ends.

    Kept in the run directory, so that it survives requeues.
    """

    def __init__(self, layout: RunLayout, max_retries: int) -> None:
        self._path, self._max_retries = layout.failures, max_retries
        document = patiently(lambda: certain_document(self._path), self._path)
        try:
            self.failures, self._step = int(document["failures"]), int(document["saved_step"])
        except (ValueError, KeyError, TypeError):
            self.failures, self._step = 0, -1

    def take(self, saved_step: int, why: str = "") -> float | None:
        """Use up one retry.  Returns the seconds to pause before it; None: none is left.

        saved_step: of the newest complete checkpoint.  why: the failure, for `rlhpc status`.  If the disk is full, the
        count is kept only in memory.
        """
        if saved_step > self._step:
            self.failures = 0
        self.failures, self._step = self.failures + 1, saved_step
        document = {
            "failures": self.failures, "saved_step": saved_step, "max_retries": self._max_retries, "why": why
        }  # fmt: skip
        with suppress(OSError):
            write_atomically(self._path, json.dumps(document).encode())
        return None if self.failures > self._max_retries else pause_after(self.failures)


def pause_before_another(
    outcome: Outcome, plan: JobPart, limit: NoTimeLimit, budget: RetryBudget, *, has_saved: bool, has_trained: bool
) -> float | None:
    """Seconds until the next attempt in this life; None: there is none.  May change the outcome's cause.

    has_saved, has_trained: whether the attempt that has ended wrote a checkpoint, and trained a step.
    """
    if outcome.cause is Cause.YIELD:
        return 0.0
    in_vain = outcome.cause is Cause.TIME and not has_saved  # the limit may be too short for a step: counts as failure
    if outcome.cause is not Cause.FAILED and not in_vain:
        return None
    if plan.limits.is_attended and not has_trained:
        return None
    saved = patiently(lambda: saved_step(plan.layout, is_certain=True), plan.layout.checkpoints)
    if in_vain:
        outcome.text += "; this job has saved nothing: its `time` in the site file may be too short for a step"
    pause_s = budget.take(saved, outcome.text)
    if pause_s is None:
        outcome.cause = Cause.GIVEN_UP
        outcome.text += f"; not beyond step {saved} in {counted(budget.failures, 'attempt')}"
        return None
    needed_s = needed_to_stop_s(read_progress(plan.layout), limit.life_s)
    if in_vain or limit.left_s() < pause_s + MIN_TIME_FOR_ANOTHER * needed_s:
        outcome.cause = Cause.TIME  # the next life tries
        return None
    return pause_s


class AwakeTime:
    """Clock of the seconds in which this process ran, if called at every poll.

    Time in which Slurm has suspended the job does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted_s = self._called_s = clock()

    def __call__(self) -> float:
        """Seconds since an arbitrary moment; at most LONGEST_LOOK_S count between two calls."""
        now_s = self._clock()
        self._counted_s += min(now_s - self._called_s, LONGEST_LOOK_S)
        self._called_s = now_s
        return self._counted_s


class StallWatch:
    """Measures the time since the last step.

    Before training begins, roles may be waiting for each other, each with its own timeout (meet_s); the limit for the
    first step counts from the beginning of training, so that loading a large model does not use it up.
    """

    def __init__(self, stall_s: float, meet_s: float, now: float) -> None:
        self._stall_s, self._meet_s = stall_s, meet_s
        self._since = now  # when the current step, training, or the attempt began
        self._step, self._is_training = -1, False
        self.has_stepped = False  # a step was trained, or repeated from the journal
        self.has_moved = False  # a step was trained for the first time in the run

    def look(self, step: int, is_training: bool, now: float) -> float | None:
        """Record the current step; returns the limit in seconds if it is exceeded, else None.

        step: steps trained so far, -1 if unknown.
        """
        if step != self._step:
            self.has_stepped |= self._step >= 0
            self.has_moved |= self._step >= 0 and is_training
        if step != self._step or is_training != self._is_training:
            self._step, self._is_training, self._since = step, is_training, now
            return None
        limit_s = self._stall_s + (0.0 if is_training else 2 * self._meet_s)
        return limit_s if now - self._since > limit_s else None


# --------------------------------------------------------------------------------------------------- outcome classifier


_FINAL = {
    Cause.ABORT,
    Cause.INTERRUPTED,
    Cause.FENCED,
    Cause.STALLED,
    Cause.COMPONENT,
    Cause.GIVEN_UP,
    Cause.STOP,
    Cause.SETTINGS,
}  # with any status
_STOPS = (Cause.STOP, Cause.ABORT, Cause.INTERRUPTED)


def asked_to_end(layout: RunLayout) -> Outcome | None:
    """The outcome that users have requested with `rlhpc stop`, with or without --now; None: nothing requested."""
    if wants_abort(layout):
        return Outcome(Cause.ABORT, f"{layout.abort_request} exists")
    if wants_stop(layout):
        return Outcome(Cause.STOP, f"{layout.stop_request} exists")
    return None


class OutcomeClassifier:
    """Classifies the attempts of one job."""

    def __init__(self, plan: JobPart, job: ThisJob) -> None:
        self._plan, self._job, self._layout = plan, job, plan.layout

    def classify(self, status: int, attempt: Attempt, asked: Cause | None, why: str, end_requested: bool) -> Outcome:
        """Classify an attempt whose controller exited with `status`.

        asked, why: the reason why it had been asked to exit.  end_requested: Slurm has ended this job.
        Raises OSError.
        """
        if is_complete(self._layout, is_certain=True):
            unclean = self._unclean_ranks(attempt)
            return (
                Outcome(Cause.UNCLEAN, f"complete, but {unclean}") if unclean else Outcome(Cause.COMPLETE, "complete")
            )
        if asked in _FINAL:
            return Outcome(asked, why, status=status or None if asked in _STOPS else None)
        records = self._records(attempt)
        settings = [record for record in records if record.status == EXIT_CONFIG]
        if settings or status == EXIT_CONFIG:
            text = self._told(settings[0], attempt) if settings else "the controller refused the settings"
            return Outcome(Cause.SETTINGS, text)
        if status == EXIT_ALONE:
            text = "; ".join(self._told(r, attempt) for r in records if r.status == EXIT_ALONE)
            return Outcome(Cause.ALONE, text or Cause.ALONE.words)
        if asked is Cause.TIME or (status == 0 and asked is not None and asked is not Cause.FAILED):
            return Outcome(asked, why)
        return self._failure(status, records, attempt, asked, why, end_requested)

    def taken_over(self, attempt: Attempt) -> Outcome | None:
        """Outcome if another supervisor has begun an attempt since."""
        latest = read_attempt(self._layout)
        if latest is None or (latest.owner <= attempt.owner and latest.index <= attempt.index):
            return None
        if latest.owner > attempt.owner:
            return Outcome(Cause.FENCED, f"attempt {latest.index} has begun in job {latest.job_id}")
        # A stale supervisor has replaced the run's keys.
        return Outcome(Cause.FAILED, f"attempt {latest.index} was begun by job {latest.job_id}, which is over")

    def exit_summary(self, step: StartedProcesses) -> str:
        """End of a component, in words: the error of its first failed process.  Raises OSError."""
        for name in sorted(step.processes):
            record = read_exit_record(self._layout, name, step.attempt.index)
            if record is not None and record.status != 0:
                return self._told(record, step.attempt)
        return f"exit status {step.status()}, no error recorded"

    def _told(self, record: ExitRecord, attempt: Attempt) -> str:
        """End of a process, in words, with its log."""
        role, _, replica = record.name.rpartition("-")
        return f"{record.cause} (log: {self._layout.log(role, int(replica), attempt.index)})"

    def _untold(self, status: int, attempt: Attempt) -> str:
        """End of a controller without a recorded failure, in words."""
        if status:
            return f"the controller ended with status {status}"
        log = self._layout.log("controller", 0, attempt.index)
        return f"the controller ended before the run did, without a word: by os._exit in code of your own? (log: {log})"

    def _failure(
        self,
        status: int,
        records: list[ExitRecord],
        attempt: Attempt,
        asked: Cause | None,
        why: str,
        end_requested: bool,
    ) -> Outcome:
        failed = [record for record in records if record.status not in (0, EXIT_ALONE)]
        # The trainer first: its failure makes the controller fail, too.
        failed.sort(key=lambda record: not record.name.startswith("trainer"))
        text = self._told(failed[0], attempt) if failed else why or self._untold(status, attempt)
        if end_requested:  # before components are checked: Slurm may be requeueing all of them
            by = "a signal" if self._plan.is_local else "Slurm"
            return Outcome(Cause.SIGNAL, f"ended by {by}: {text}", status=status or None)
        if self._component_is_gone("trainer"):
            return Outcome(Cause.COMPONENT, f"Slurm has ended the trainer's component; {text}")
        if asked is Cause.FAILED and self._component_is_gone("generation"):
            return Outcome(Cause.COMPONENT, f"Slurm has ended the generators' component; {text}")
        return Outcome(Cause.FAILED, text, status=failed[0].status if failed else status or None)

    def _unclean_ranks(self, attempt: Attempt) -> str:
        """Trainer ranks of this job that have not exited cleanly: srun's exit status is not enough."""
        for part in self._plan.parts:
            if part.name == "trainer":
                records = read_exit_records(self._layout, "trainer", attempt.index)
                ranks = range(part.share_of("trainer").num_processes)
                missing = [str(rank) for rank in ranks if rank not in records or records[rank].status != 0]
                return f"trainer ranks {', '.join(missing)} did not exit cleanly" if missing else ""
        return ""

    def _records(self, attempt: Attempt) -> list[ExitRecord]:
        roles = ("controller", "trainer")
        return [r for role in roles for _, r in sorted(read_exit_records(self._layout, role, attempt.index).items())]

    def _component_is_gone(self, name: str) -> bool:
        """True if this component of the job has ended for good: it was cancelled, or reached its own time limit."""
        names = [part.name for part in self._plan.parts]
        if not self._job.is_heterogeneous or name not in names:
            return False
        try:
            states = component_states(self._job.job_id, patience_s=30.0)
        except SlurmError:
            return False
        return states.get(names.index(name), "RUNNING") in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "DEADLINE")
