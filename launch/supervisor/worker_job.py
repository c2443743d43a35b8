"""The supervisor of a job without the controller: a trainer, generators or reward services in a job of their own.

It waits for an attempt and starts its component.  A trainer is restarted for every attempt; generators and reward
services keep running across attempts.  Before the job's time limit it asks the controller to save (trainer) or lets its
generators hand back their leases, and the job is requeued.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from launch.run_files.events import EventLog
from launch.run_files.exit_records import read_records
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import (
    Attempt,
    Progress,
    is_complete,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    wants_abort,
)
from launch.slurm.this_job import ThisJob, TimeLimit
from launch.supervisor.giving_up import AwakeTime
from launch.supervisor.other_jobs import may_have_controller
from launch.supervisor.signals import SlurmSignals
from launch.supervisor.steps import Step, start_part
from rlhpc.deadline import Deadline
from rlhpc.exit_status import EXIT_ALONE, EXIT_CONFIG
from rlhpc.files import names_in
from rlhpc.patience import patiently

POLL_S = 0.5
STATUS_S = 5.0  # between two reads of the status by one of hundreds of generators' jobs, which hardly need it
LEAVE_S = 45.0  # at most, for generators to hand back their leases, and for engines to close
STOP_S = 900.0  # at least, for the controller to finish its step and save
SILENT_S = 60.0  # a controller that has written no status for so long may have ended for good
LAST_MOMENT_S = 15.0  # before the time limit: to end the srun and requeue
ASK_S = 3.0  # for Slurm to answer: the time limit is near
MAX_STARTS = 6  # of a component in one life, without a step in between


class WorkerJobSupervisor:
    """Supervises one life of the job: from its start to its end or requeue."""

    def __init__(self, plan: JobPart, job: ThisJob, limit: TimeLimit, log: EventLog, signals: SlurmSignals) -> None:
        self._plan, self._job, self._limit, self._log, self._signals = plan, job, limit, log, signals
        self._layout, self._part = plan.layout, plan.parts[0]
        self._role = self._part.shares[0].role
        self._follows_attempts = self._role == "trainer"
        self._step: Step | None = None
        self._attempt: Attempt | None = None  # for which the component was started
        self._starts, self._fruitless, self._seen_step = 0, 0, -1
        self._awake = AwakeTime(lambda: time.monotonic())
        self._alone_since = self._awake()
        self._progress: Progress | None = None  # as last read
        self._read_at = 0.0
        self._save_request = plan.layout.save_request(job.name)

    def run(self) -> Outcome:
        """Follow attempts until there is an outcome that this life of the job cannot change."""
        try:
            while True:
                outcome = patiently(self._look, self._layout.root, sleep=self._signals.sleep)
                if outcome is not None:
                    self._log.say("end", outcome.text)
                    return outcome
                self._signals.sleep(POLL_S)
        finally:
            self._leave()
            with suppress(OSError):  # the outcome counts
                self._save_request.unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------------------------- looking

    def _look(self) -> Outcome | None:
        """Check everything once.  Returns an outcome when this life is over."""
        is_running = self._step is not None and self._step.status() is None
        names = names_in(self._layout.root)
        if self._layout.summary.name in names:
            return self._await_end(Cause.COMPLETE)
        if self._layout.abort_request.name in names:
            self._end_step()
            return Outcome(Cause.ABORT, Cause.ABORT.words)
        if self._signals.end_requested:
            return self._make_use_of_grace() if is_running else Outcome(Cause.SIGNAL, Cause.SIGNAL.words)
        if self._layout.stop_request.name in names:
            return self._await_end(Cause.STOP)
        progress = self._look_at_status()
        if self._is_time_over(progress):
            return self._give_way(progress)
        attempt = read_attempt(self._layout)
        if attempt is None or not self._has_controller(attempt, progress):
            return self._wait_alone()
        self._alone_since = self._awake()
        if is_running and self._follows_attempts and self._attempt is not None and self._attempt != attempt:
            self._log.say(
                "follow", f"attempt {attempt.index} has begun: ending {self._role}s of attempt {self._attempt.index}"
            )
            self._end_step()
            is_running = False
        return None if is_running else self._start_unless_ended(attempt, progress)

    def _look_at_status(self) -> Progress | None:
        """The controller's status; for a job that does not depend on it, up to STATUS_S or meet_s / 10 old."""
        now, known = self._awake(), self._progress
        keeps_s = 0.0 if self._follows_attempts else min(STATUS_S, self._plan.limits.meet_s / 10)
        if known is not None and now - self._read_at < keeps_s:
            return replace(known, age_s=known.age_s + now - self._read_at)
        read = read_progress(self._layout)
        if read is not None and known is not None:  # from here on no clocks of two nodes are compared
            is_new = read.written_unix_s != known.written_unix_s
            read = replace(read, age_s=0.0 if is_new else known.age_s + now - self._read_at)
        self._progress, self._read_at = read, now
        return read

    def _has_controller(self, attempt: Attempt, progress: Progress | None) -> bool:
        """True if the controller of this attempt has written its status recently, or has had no time to."""
        if progress is not None:
            return progress.age_s < self._plan.limits.meet_s
        return self._attempt is None or attempt != self._attempt or self._step is not None

    def _wait_alone(self) -> Outcome | None:
        waited_s = self._awake() - self._alone_since
        if waited_s < self._plan.limits.meet_s:
            return None
        text = f"no controller for {waited_s:.0f} s: the one in {self._layout.attempt} is not alive"
        return Outcome(Cause.ALONE, text)

    def _is_time_over(self, progress: Progress | None) -> bool:
        needed_s = needed_to_stop_s(progress, self._limit.life_s)
        if not self._follows_attempts:
            needed_s = min(LEAVE_S + LAST_MOMENT_S, self._limit.life_s / 5)
        if self._limit.left_s() >= needed_s:
            return self._signals.warned and self._limit.end is None
        self._limit.ask()  # the limit may have been extended
        return self._limit.left_s() < needed_s

    # ------------------------------------------------------------------------------------------------------ starting

    def _start_unless_ended(self, attempt: Attempt, progress: Progress | None) -> Outcome | None:
        """Start the component for this attempt, unless its last exit shows that this would not help."""
        if self._step is not None and self._attempt is not None:
            outcome = self._outcome_of_exit(self._attempt)
            if outcome is not None or (self._follows_attempts and self._attempt == attempt):
                return outcome  # a trainer waits for the next attempt, which the controller begins
        step = progress.step if progress is not None else -1
        self._fruitless = 1 if step > self._seen_step else self._fruitless + 1
        self._seen_step = max(step, self._seen_step)
        if self._fruitless > MAX_STARTS:
            return Outcome(Cause.GIVEN_UP, f"{self._fruitless - 1} starts without a step in between")
        self._log.attempt = attempt.index
        self._log.say("start", f"{self._part.name} starts for attempt {attempt.index}")
        self._step = start_part(self._plan, self._part, None, attempt, self._starts)
        self._attempt, self._starts = attempt, self._starts + 1
        return None

    def _outcome_of_exit(self, attempt: Attempt) -> Outcome | None:
        """The component exited while the run continues: returns an outcome if it must not be restarted."""
        records = [r for r in read_records(self._layout, self._role, attempt.index).values() if r.job == self._job.name]
        for record in records:
            if record.status == EXIT_CONFIG:
                return Outcome(Cause.SETTINGS, record.cause)
            if record.status == EXIT_ALONE and not self._follows_attempts:
                return Outcome(Cause.ALONE, record.cause)
        if self._step is not None and not self._step.asked:
            self._step.asked = True
            said = [r.cause for r in records if r.status != 0]
            status = self._step.status()
            how = f"exit status {status}, no error recorded" if status else "as the controller asked"
            self._log.say("part_end", f"{self._part.name} ended: {'; '.join(said) or how}")
            if not self._follows_attempts and not said and status == 0:
                if self._job.is_being_preempted():
                    return Outcome(Cause.TIME, "Slurm takes its nodes for another job")
                return Outcome(Cause.STOP, "the controller asked it to exit")
        return None

    # -------------------------------------------------------------------------------------------------------- leaving

    def _give_way(self, progress: Progress | None) -> Outcome:
        """Let the controller save if it depends on this job; then this job is requeued, if there will be a controller.

        Where a life is shorter than meet_s, no life would come to the point of saying that it is alone.
        """
        is_silent = progress is None or progress.age_s > SILENT_S
        if is_silent and not patiently(lambda: may_have_controller(self._layout, self._job, ASK_S), self._layout.jobs):
            return Outcome(Cause.ALONE, "the controller's job has ended, and none is queued")
        if self._follows_attempts and self._step is not None and self._step.status() is None:
            self._ask_to_save(f"{self._limit.left_s():.0f} s are left")
            self._wait_for_end(self._before_the_last_moment_s())
        return Outcome(Cause.TIME, Cause.TIME.words)

    def _make_use_of_grace(self) -> Outcome:
        """Slurm ends this job after KillWait: the controller may be quick enough to save."""
        if self._follows_attempts:
            self._ask_to_save("Slurm is ending this job")
            self._wait_for_end(LEAVE_S)
        return Outcome(Cause.SIGNAL, Cause.SIGNAL.words)

    def _ask_to_save(self, why: str) -> None:
        self._log.say("yield", f"{why}: the controller is asked to save")
        with suppress(OSError):
            patiently(self._save_request.touch, self._save_request, limit_s=ASK_S, sleep=self._signals.sleep)

    def _await_end(self, cause: Cause) -> Outcome:
        """The run is ending: the controller tells a trainer to exit, this supervisor tells the other roles."""
        if self._step is not None and self._step.status() is None:
            if not self._follows_attempts:
                self._step.ask_to_leave()
            self._step.asked = True
            patience_s = LEAVE_S
            if self._follows_attempts and cause is Cause.STOP:
                patience_s = max(STOP_S, needed_to_stop_s(read_progress(self._layout), self._limit.life_s))
            self._wait_for_end(patience_s)
        if patiently(lambda: is_complete(self._layout, is_certain=True), self._layout.root, sleep=self._signals.sleep):
            return Outcome(Cause.COMPLETE, "the run is complete")
        return Outcome(cause, cause.words)

    def _wait_for_end(self, patience_s: float) -> None:
        deadline = Deadline(patience_s)
        while not deadline.is_over and not wants_abort(self._layout) and not self._was_never_met():
            if self._step is None or self._step.wait(0.3):
                return

    def _was_never_met(self) -> bool:
        """True if the controller has ended without this trainer, which would look for it until meet_s has passed."""
        progress = read_progress(self._layout) if self._follows_attempts else None
        if progress is None or self._attempt is None or progress.attempt != self._attempt.index:
            return False
        return progress.is_ending and not progress.names("trainer")

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.asked = True
            self._step.kill()

    def _leave(self) -> None:
        """End what is still running; generators hand back their leases."""
        if self._step is None or self._step.status() is not None:
            return
        self._step.ask_to_leave()
        if not self._step.wait(POLL_S if self._follows_attempts else min(LEAVE_S, self._before_the_last_moment_s())):
            self._step.kill()

    def _before_the_last_moment_s(self) -> float:
        """Seconds that may be waited so that this job can still be requeued."""
        return max(POLL_S, self._limit.left_s() - min(LAST_MOMENT_S, self._limit.life_s / 10))
