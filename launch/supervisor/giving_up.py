"""When to give up: too many failures without a new checkpoint, or too long without a step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

from launch.common.counted import counted
from launch.run_files.events import certain_document
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import needed_to_stop_s, read_progress, saved_step
from launch.slurm.this_job import NoTimeLimit
from rlhpc.files import write_atomically
from rlhpc.patience import patiently
from rlhpc.run_layout import RunLayout

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
LONGEST_LOOK_S = 300.0  # of a supervisor, which asks Slurm meanwhile
MIN_TIME_FOR_ANOTHER = 3.0  # times the time that stopping needs; with less, a new attempt is not worthwhile


def pause_after(failures: int) -> float:
    """Seconds before another try, by the number of those that failed."""
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

    def take(self, saved_step: int) -> float | None:
        """Use up one retry.  Returns the seconds to pause before it; None: none is left.

        saved_step: of the newest complete checkpoint.  If the disk is full, the count is kept only in memory.
        """
        if saved_step > self._step:
            self.failures = 0
        self.failures, self._step = self.failures + 1, saved_step
        document = {"failures": self.failures, "saved_step": saved_step}
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
    in_vain = outcome.cause is Cause.TIME and not has_saved  # a time limit too short for a step: count as failure
    if outcome.cause is not Cause.FAILED and not in_vain:
        return None
    if plan.limits.is_attended and not has_trained:
        return None
    saved = patiently(lambda: saved_step(plan.layout, is_certain=True), plan.layout.checkpoints)
    pause_s = budget.take(saved)
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
    """Seconds in which this process ran, if it is called at every look.

    A job that Slurm has suspended is no slower than one that was not: its time does not count when it continues.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted_s = self._called_s = clock()

    def __call__(self) -> float:
        """Since an arbitrary moment; of the time between two calls, LONGEST_LOOK_S at most."""
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
        self.has_stepped = False  # a step was trained, or trained again from the journal
        self.has_moved = False  # a step was trained that no attempt before had trained

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
