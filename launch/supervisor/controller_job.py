"""The supervisor of the job that hosts the controller: it owns the attempts of the run.

    begin attempt ─▶ start what is not running ─▶ watch ─▶ wind up ─▶ outcome
          ▲                                                              │
          └── failed, retries left ──────────────────────────────────────┤
                              time limit is near: save, requeue ◀────────┤
                       complete, stopped, given up: end all jobs ◀───────┘

Guarantees: an attempt begins only when no process of the previous one writes to the run any more; a job is requeued
only when no srun is alive; a completed run leaves no job behind.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from launch.run_files.events import EventLog
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart, Part
from launch.run_files.run_state import (
    Attempt,
    Progress,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    save_requests,
    saved_step,
    wants_abort,
    wants_stop,
)
from launch.slurm.this_job import ThisJob, TimeLimit
from launch.supervisor.begin import BeginError, begin_attempt
from launch.supervisor.giving_up import RetryBudget, StallWatch
from launch.supervisor.outcome_classifier import OutcomeClassifier, asked_to_end
from launch.supervisor.resubmitter import Resubmitter
from launch.supervisor.signals import SlurmSignals
from launch.supervisor.steps import Step, start_in_batch_step, start_part
from rlhpc.exit_status import EXIT_CONFIG, EXIT_FENCED

POLL_S = 0.3
FINISH_GRACE_S = 45.0  # for other roles after the controller has ended: the trainer has to close its process groups
SAVE_GRACE_S = 1800.0  # for the current step and its checkpoint
ALONE_S = 10.0  # for a controller without generators and its trainer, if there is nothing to save
LAST_MOMENT_S = 15.0  # before the time limit: to end every srun and requeue
LIMIT_MARGIN_S = 5.0
MIN_TIME_FOR_ANOTHER = 3.0  # times the time that stopping needs; with less, a new attempt is not worthwhile


class ControllerJobSupervisor:
    """Supervises one life of the job: from its start to its end or requeue."""

    def __init__(self, plan: JobPart, job: ThisJob, limit: TimeLimit, log: EventLog, signals: SlurmSignals) -> None:
        self._plan, self._job, self._limit, self._log, self._signals = plan, job, limit, log, signals
        self._layout = plan.layout
        self._budget = RetryBudget(plan.layout, plan.limits.max_retries)
        self._classifier = OutcomeClassifier(plan, job)
        self._controller: Step | None = None
        self._steps: dict[str, Step] = {}  # everything else, by name
        self._starts: dict[str, int] = {}  # number of starts of each, in this life
        self._resubmitter = Resubmitter(plan, job, log, self._budget)
        self._cause: Cause | None = None  # why the controller was asked to exit
        self._why = ""  # the same, in words
        self._asked_at, self._patience_s = 0.0, SAVE_GRACE_S

    def run(self) -> Outcome:
        """Run attempts until there is an outcome that this life of the job cannot change."""
        try:
            while True:
                saved_before = saved_step(self._layout)
                outcome = self._attempt()
                pause_s = self._pause_before_another(outcome, has_saved=saved_step(self._layout) > saved_before)
                if pause_s is None:
                    return outcome
                self._log.say("retry", f"{outcome.text}; another attempt in {pause_s:.0f} s")
                self._pause(pause_s)
        finally:
            self._end_everything()

    # ------------------------------------------------------------------------------------------------- one attempt

    def _pause(self, pause_s: float) -> None:
        """Wait before another attempt, unless a stop is requested."""
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline and self._asked_not_to_begin() is None:
            self._signals.sleep(POLL_S)

    def _asked_not_to_begin(self) -> Outcome | None:
        if self._signals.end_requested:
            return Outcome(Cause.SIGNAL, "Slurm ended this job before an attempt could begin")
        return asked_to_end(self._layout)

    def _begin(self) -> Attempt | Outcome:
        """Begin an attempt, or say why not."""
        asked = self._asked_not_to_begin()
        if asked is not None:
            return asked
        for request in save_requests(self._layout):
            request.unlink(missing_ok=True)
        try:
            attempt = begin_attempt(self._plan, self._job, self._log.say)
        except BeginError as error:
            if self._signals.end_requested:  # the signal ended that command too
                return Outcome(Cause.SIGNAL, str(error))
            causes = {EXIT_CONFIG: Cause.SETTINGS, EXIT_FENCED: Cause.FENCED}
            return Outcome(causes.get(error.status, Cause.FAILED), str(error))
        return self._asked_not_to_begin() or attempt

    def _attempt(self) -> Outcome:
        attempt = self._begin()
        if isinstance(attempt, Outcome):
            return attempt
        self._cause, self._patience_s, self._log.attempt = None, SAVE_GRACE_S, attempt.index
        resumed = f"from step {attempt.resume_step}" if attempt.resume_step is not None else "from the beginning"
        self._log.say("attempt", f"attempt {attempt.index} begins {resumed}")
        self._start_all(attempt)
        began = time.monotonic()
        watch = _Watch(StallWatch(self._plan.limits.stall_s, self._plan.limits.meet_s, began))
        while self._controller is not None and self._controller.status() is None:
            self._signals.sleep(POLL_S)
            self._look(attempt, watch)
        return self._wind_up(attempt)

    def _start_all(self, attempt: Attempt) -> None:
        """Start the controller, and every component that is not still running from the previous attempt."""
        for group, part in enumerate(self._plan.parts):
            if not part.runs_in_batch_step:
                self._start_part(part, group, attempt)
                continue
            for share in part.shares:
                for index in range(share.num_processes):
                    self._start_here(part, share.role, index, attempt)

    def _start_here(self, part: Part, role: str, index: int, attempt: Attempt) -> None:
        name = f"{role}-{part.share_of(role).first_replica + index}"
        if name in self._steps and self._steps[name].status() is None:
            return
        step = start_in_batch_step(self._plan, part, role, index, attempt, self._count(name))
        if role == "controller":
            self._controller = step
        else:
            self._steps[name] = step

    def _start_part(self, part: Part, group: int, attempt: Attempt) -> None:
        if part.name in self._steps and self._steps[part.name].status() is None:
            return
        het_group = group if self._job.is_heterogeneous else None
        start = self._count(part.name)
        self._steps[part.name] = start_part(self._plan, part, het_group, attempt, start)

    def _count(self, name: str) -> int:
        self._starts[name] = self._starts.get(name, -1) + 1
        return self._starts[name]

    # -------------------------------------------------------------------------------------------------------- watching

    def _look(self, attempt: Attempt, watch: _Watch) -> None:
        """React to what has happened since the last poll."""
        if wants_abort(self._layout):
            self._kill_attempt(Cause.ABORT, f"{self._layout.abort_request} exists")
            return
        if self._cause is not None:
            self._end_if_late()
            return
        latest = read_attempt(self._layout)
        if latest is not None and latest.owner > attempt.owner:
            self._kill_attempt(Cause.FENCED, f"attempt {latest.index} has begun in job {latest.job_id}")
            return
        if latest is not None and latest.index > attempt.index:  # a stale supervisor has replaced the run's keys
            self._kill_attempt(Cause.FAILED, f"attempt {latest.index} was begun by job {latest.job_id}, which is over")
            return
        progress = read_progress(self._layout)
        missing = self._resubmitter.look(progress)
        if missing is not None:
            self._kill_attempt(missing.cause, missing.text)
        if self._cause is None:
            self._stop_if_asked(progress)
        if self._cause is None:
            self._stop_if_stuck(progress, watch)
        for name, step in list(self._steps.items()):
            if step.status() is not None and not step.asked and name not in watch.reported:
                watch.reported.add(name)
                self._part_ended(name, step, attempt)

    def _stop_if_asked(self, progress: Progress | None) -> None:
        """Let the controller finish its step and save, for the first reason that applies."""
        needed_s = needed_to_stop_s(progress, self._limit.life_s)
        if self._signals.end_requested:
            self._ask_controller(Cause.SIGNAL, "Slurm is ending this job")
        elif wants_stop(self._layout):
            self._ask_controller(Cause.STOP, f"{self._layout.stop_request} exists")
        elif save_requests(self._layout):
            names = ", ".join(path.stem for path in save_requests(self._layout))
            self._ask_controller(Cause.YIELD, f"job {names} is close to its time limit")
        elif self._limit.left_s() < needed_s:
            self._limit.ask()  # the limit may have been extended
            if self._limit.left_s() < needed_s:
                left_s = self._limit.left_s()
                self._ask_controller(Cause.TIME, f"{left_s:.0f} s are left, and stopping needs {needed_s:.0f} s")
        elif self._signals.warned and self._limit.end is None:
            self._ask_controller(Cause.TIME, "Slurm's warning before the time limit; the limit itself is not known")

    def _ask_controller(self, cause: Cause, why: str) -> None:
        self._cause, self._why, self._asked_at = cause, why, time.monotonic()
        self._patience_s = SAVE_GRACE_S
        self._log.say("stop", f"{why}: the controller finishes its step and saves")
        if self._controller is not None:
            self._controller.ask_to_leave()

    def _end_if_late(self) -> None:
        """The controller was asked to exit: kill it if it takes too long, or if there is no time left to wait."""
        waited_s = time.monotonic() - self._asked_at
        last_moment_s = min(LAST_MOMENT_S, self._limit.life_s / 8)
        if self._controller is None or (waited_s < self._patience_s and self._limit.left_s() > last_moment_s):
            return
        self._log.say("kill", f"the controller is killed: it has not exited {waited_s:.0f} s after it was asked to")
        self._controller.kill()

    def _stop_if_stuck(self, progress: Progress | None, watch: _Watch) -> None:
        """End an attempt that makes no progress.  Another is begun only if this one had made some."""
        step = progress.step if progress is not None else -1
        stall_s = watch.stall.look(step, progress is not None and progress.phase == "training", time.monotonic())
        if stall_s is not None:
            waits = progress.waits() if progress is not None else "the controller has written no status"
            cause = Cause.FAILED if watch.stall.has_moved else Cause.STALLED
            self._kill_attempt(cause, f"no step for {stall_s:.0f} s: {waits}")

    def _kill_attempt(self, cause: Cause, why: str) -> None:
        """End controller and trainer now; roles that survive attempts keep running."""
        self._cause, self._why, self._asked_at = cause, why, time.monotonic()
        self._log.say("kill", why)
        if self._controller is not None:
            self._controller.kill()

    def _part_ended(self, name: str, step: Step, attempt: Attempt) -> None:
        """A component has ended without having been asked to."""
        self._log.say("part_end", f"{name} has ended: {self._classifier.exit_summary(name, attempt, step.status())}")
        if self._controller is None or self._controller.status() is not None or self._cause is not None:
            return
        if name == "trainer":
            # The step that the controller waits for will not be finished: it writes its state and exits at once.
            self._controller.ask_to_leave(signal.SIGINT)
        elif name == "generation" and not self._others_generate(name):
            self._end_alone()

    def _end_alone(self) -> None:
        """No generator is left: save what has been trained, without waiting for roles that cannot come back."""
        progress = read_progress(self._layout)
        has_news = progress is not None and progress.step > saved_step(self._layout)
        self._ask_controller(Cause.FAILED, "no generator is left")
        self._patience_s = needed_to_stop_s(progress, self._limit.life_s) if has_news else ALONE_S
        if not has_news and self._controller is not None:
            self._controller.ask_to_leave(signal.SIGINT)

    def _others_generate(self, name: str) -> bool:
        """True if generators of other jobs are registered."""
        progress = read_progress(self._layout)
        part = next(part for part in self._plan.parts if part.name == name)
        own = {f"generator-{part.share_of('generator').first_replica + k}" for k in range(part.shares[0].num_processes)}
        return progress is not None and any(generator not in own for generator in progress.generators())

    # ---------------------------------------------------------------------------------------------------- winding up

    def _wind_up(self, attempt: Attempt) -> Outcome:
        """The controller has ended: end the other roles of its attempt, and return the outcome."""
        status = self._controller.status() if self._controller is not None else 1
        if self._cause is not None and self._cause.follows in ("end", "requeue", "leave"):
            self._ask_all_to_leave()  # at once: there may be little time
        trainer = self._steps.get("trainer")
        if trainer is not None:
            trainer.asked = True
            # A trainer that has not connected to the controller yet was not told to exit.
            if not trainer.wait(min(self._patience_s, self._grace_s()) if status == 0 else POLL_S):
                trainer.kill()
        end_requested = self._signals.end_requested
        outcome = self._classifier.classify(
            1 if status is None else status, attempt, self._cause, self._why, end_requested
        )
        progress = read_progress(self._layout)
        trained = progress.step if progress is not None else 0
        steps = f"step {trained} trained, step {saved_step(self._layout)} saved"
        self._log.say("attempt_end", f"attempt {attempt.index}, {steps}: {outcome.text}")
        return outcome

    # -------------------------------------------------------------------------------------------------- what comes next

    def _pause_before_another(self, outcome: Outcome, has_saved: bool) -> float | None:
        """Seconds until the next attempt in this life; None: there is none.  May change the outcome's cause."""
        if outcome.cause is Cause.YIELD:
            return 0.0
        in_vain = outcome.cause is Cause.TIME and not has_saved  # a time limit too short for a step: count as failure
        if outcome.cause is not Cause.FAILED and not in_vain:
            return None
        pause_s = self._budget.take(saved_step(self._layout))
        if pause_s is None:
            outcome.cause = Cause.GIVEN_UP
            outcome.text += f"; {self._budget.failures} attempts have not come beyond step {saved_step(self._layout)}"
            return None
        needed_s = needed_to_stop_s(read_progress(self._layout), self._limit.life_s)
        if in_vain or self._limit.left_s() < pause_s + MIN_TIME_FOR_ANOTHER * needed_s:
            outcome.cause = Cause.TIME  # the next life tries
            return None
        return pause_s

    def _end_everything(self) -> None:
        """End every process of this job; generators hand back their leases."""
        if self._controller is not None:
            self._controller.kill()
        left = self._ask_all_to_leave()
        deadline = time.monotonic() + self._grace_s()
        for step in left:
            if not step.wait(max(0.0, deadline - time.monotonic())):
                self._log.say("kill", f"{step.name} is killed: it has not exited in time")
                step.kill()

    def _ask_all_to_leave(self) -> list[Step]:
        """Ask every running component to exit; returns them."""
        left = [step for step in self._steps.values() if step.status() is None]
        for step in left:
            if not step.asked:
                step.ask_to_leave()
        return left

    def _grace_s(self) -> float:
        """Seconds that the other roles may take to end: leaves enough time to requeue this job."""
        return min(FINISH_GRACE_S, max(2.0, self._limit.left_s() - LIMIT_MARGIN_S))


@dataclass
class _Watch:
    """What was observed of an attempt."""

    stall: StallWatch
    reported: set[str] = field(default_factory=set)  # components whose end was logged
