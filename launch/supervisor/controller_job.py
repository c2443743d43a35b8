"""The supervisor of the job that hosts the controller, or of a run without Slurm: it owns the attempts of the run.

    begin attempt ─▶ start what is not running ─▶ watch ─▶ wind up ─▶ outcome
          ▲                                                              │
          └── failed, retries left ──────────────────────────────────────┤
                              time limit is near: save, requeue ◀────────┤
                       complete, stopped, given up: end all jobs ◀───────┘

Guarantees: an attempt begins only when no process of the previous one writes to the run any more; a job is requeued
only when no srun is alive; a completed run leaves no job behind; after an interrupt everything ends within ten seconds.
"""

from __future__ import annotations

import math
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from launch.common.text import quoted
from launch.run_files.plan_file import EVALUATOR, JobPart
from launch.run_files.run_state import (
    ENDED_BY_SLURM,
    Attempt,
    Cause,
    EventLog,
    Log,
    Outcome,
    ReportedProgress,
    certain_document,
    is_complete,
    needed_to_stop_s,
    read_progress,
    reason_to_save,
    save_requests,
    saved_step,
    wants_abort,
    wants_stop,
)
from launch.slurm.commands import SlurmError
from launch.slurm.queue import NoTimeLimit, ThisJob
from launch.supervisor.other_jobs import Resubmitter, submit_again
from launch.supervisor.outcomes import (
    AwakeTime,
    OutcomeClassifier,
    RetryBudget,
    StallWatch,
    asked_to_end,
    pause_before_another,
)
from launch.supervisor.processes import AttemptStarter, BeginError, Processes, Signals, StartedProcesses, Tether
from rlhpc.base.files import write_atomically
from rlhpc.base.patience import Deadline, patiently
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FENCED, RlhpcError

# --------------------------------------------------------------------------------------------------------------- ending
#
# The end of a job: requeue it, submit a successor, or write its result.


def go_back_into_queue(plan: JobPart, job: ThisJob, log: EventLog, successor: int | None = None) -> int:
    """Continue in another life of this job, or in its successor.  Returns the exit status of the batch step.

    successor: submitted before; None: none, or sbatch refused it when this job began, and may accept it now.
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
    """Write the result for submitit's `job.result()`: the summary of a finished run, or why there is none."""
    summary = certain_document(plan.layout.summary)
    has_succeeded = outcome.cause.status == 0 and bool(summary)
    result = ("success", summary) if has_succeeded else ("error", outcome.text)
    directory = plan.layout.logs / "slurm"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{job.name}_0_result.pkl", pickle.dumps(result))


# ------------------------------------------------------------------------------------------------------- controller job


Known = TypeVar("Known")

POLL_S = 0.3
FINISH_GRACE_S = 45.0  # for other roles after the controller has ended: the trainer has to close its process groups
SAVE_GRACE_S = 1800.0  # at least, for the current step and its checkpoint
ALONE_S = 10.0  # for a controller without generators and its trainer, if there is nothing to save
INTERRUPT_S = 7.0  # for everything to end after Ctrl-C: with the end of interpreters, inside the ten seconds promised
LAST_MOMENT_S = 15.0  # before the time limit: to end every srun and requeue
LIMIT_MARGIN_S = 5.0
_WANTED = (Cause.STOP, Cause.ABORT, Cause.INTERRUPTED, Cause.SIGNAL)  # requested ends
SOONER = "; Ctrl-C: end within seconds"  # appended to messages about saving
ROLE_WORDS = {"generator": "generator", "reward": "reward service", "service": "process of a service"}


class ControllerJobSupervisor:
    """Supervises one life of the job: from its start to its end or requeue."""

    def __init__(
        self,
        plan: JobPart,
        job: ThisJob,
        limit: NoTimeLimit,
        log: Log,
        signals: Signals,
        *,
        first: Attempt | None = None,
        tether: Tether | None = None,
        begins: Callable[[str], None] = lambda _: None,
    ) -> None:
        """first: an attempt that has already begun.  tether: ties processes to this one, if no Slurm job ends them.

        begins: called with the owner of each attempt that begins, and before that with "", while the owner changes.
        """
        self._plan, self._job, self._limit, self._log, self._signals = plan, job, limit, log, signals
        self._first, self._begins = first, begins
        self._starter = AttemptStarter(plan, job, log.say, signals, tether)
        self._layout, self._owner = plan.layout, ""  # owner of the last attempt
        self._budget = RetryBudget(plan.layout, plan.limits.max_retries)
        self._classifier = OutcomeClassifier(plan, job)
        self._has_trained, self._awake = False, AwakeTime()  # has_trained: a step in the last attempt
        self._processes = Processes(plan, job, log, signals, tether)
        self._resubmitter = Resubmitter(plan, job, log, self._budget)
        self._cause: Cause | None = None  # why the controller was asked to exit
        self._why, self._asked_at, self._patience_s = "", 0.0, SAVE_GRACE_S  # why: the cause in words
        self._is_job_ended = False  # Slurm ends another job of the run, by the request of this attempt

    def run(self) -> Outcome:
        """Run attempts until there is an outcome that this life of the job cannot change."""
        try:
            while True:
                saved_before = self._saved_step()
                outcome = self._attempt()
                if outcome.cause is Cause.FAILED or (outcome.cause is Cause.YIELD and self._is_job_ended):
                    outcome = self._resubmitter.cancelled_trainer(self._signals.sleep, self._is_not_to_begin) or outcome
                has = {"has_saved": self._saved_step() > saved_before, "has_trained": self._has_trained}
                pause_s = pause_before_another(outcome, self._plan, self._limit, self._budget, **has)
                if pause_s is None:
                    if outcome.cause is Cause.COMPLETE:
                        self._await_evaluation()
                    return outcome
                self._log.say("retry", f"{outcome.text}; another attempt in {pause_s:.0f} s")
                self._pause(pause_s)
        finally:
            self._interrupt_if_asked()  # between two attempts
            self._processes.end_all(self._grace_s(), is_wanted=self._cause in _WANTED)

    @property
    def controller_status(self) -> int | None:
        """Exit status of the last controller; None: none was started, or it runs."""
        return None if self._controller is None else self._controller.status()

    @property
    def controller_summary(self) -> str:
        """End of the last controller, in words."""
        controller = self._controller
        return "" if controller is None else self._certain(lambda: self._classifier.exit_summary(controller))

    def _certain(self, read: Callable[[], Known]) -> Known:
        """Return read(), repeated while the file system refuses, until Ctrl-C: for facts that decisions need."""
        signals = self._signals
        return patiently(read, self._layout.root, sleep=signals.sleep, is_over=lambda: signals.interrupts > 0)

    def _saved_step(self) -> int:
        return self._certain(lambda: saved_step(self._layout, is_certain=True))

    def _is_complete(self) -> bool:
        return self._certain(lambda: is_complete(self._layout, is_certain=True))

    def _progress(self) -> ReportedProgress | None:
        return self._certain(lambda: read_progress(self._layout, is_certain=True))

    # ------------------------------------------------------------------------------------------------- one attempt

    def _pause(self, pause_s: float) -> None:
        """Wait before another attempt, unless a stop is requested."""
        Deadline(pause_s).wait_for(self._is_not_to_begin, POLL_S, self._signals.sleep)

    def _is_not_to_begin(self) -> bool:
        return self._asked_not_to_begin() is not None

    def _asked_not_to_begin(self) -> Outcome | None:
        if self._signals.interrupts:
            return Outcome(Cause.INTERRUPTED, Cause.INTERRUPTED.words)
        if self._signals.end_requested:
            return Outcome(Cause.SIGNAL, f"ended by {self._signals.sender} before an attempt could begin")
        if lost_to := self._signals.lost_to():
            return Outcome(Cause.FENCED, lost_to)
        if self._limit.left_s() < self._last_moment_s:  # a short life may be spent reading a checkpoint
            self._limit.ask()  # the limit may have been extended
            if self._limit.left_s() < self._last_moment_s:
                return Outcome(Cause.TIME, "the time limit of this job comes before an attempt could begin")
        return asked_to_end(self._layout)

    def _begin(self) -> Attempt | Outcome:
        """Begin an attempt, or return why not."""
        if (asked := self._asked_not_to_begin()) is not None:
            return asked
        for request in save_requests(self._layout):
            self._certain(partial(request.unlink, missing_ok=True))
        attempt, self._first = self._first, None
        try:
            if attempt is None:
                self._begins("")
                follows = self._owner if self._plan.is_local else ""
                attempt = self._starter.begin(self._is_not_to_begin, follows)
        except BeginError as error:
            if (asked := self._asked_not_to_begin()) is not None:  # the request has ended the command
                return asked
            if self._is_complete():  # completed by a controller that was taken for dead
                return Outcome(Cause.COMPLETE, str(error))
            causes = {EXIT_CONFIG: Cause.SETTINGS, EXIT_FENCED: Cause.FENCED}
            return Outcome(causes.get(error.status, Cause.FAILED), str(error))
        self._owner = attempt.fence
        self._begins(attempt.fence)
        return self._asked_not_to_begin() or attempt

    def _attempt(self) -> Outcome:
        attempt = self._begin()
        if isinstance(attempt, Outcome):
            return attempt
        self._cause, self._why, self._patience_s, self._log.attempt = None, "", SAVE_GRACE_S, attempt.index
        self._is_job_ended = False
        resumed = f"from step {attempt.resume_step}" if attempt.resume_step is not None else "from the beginning"
        self._log.say("attempt", f"attempt {attempt.index} begins {resumed}")
        self._has_trained = False
        try:
            self._processes.start(attempt)
        except OSError as error:  # no more processes for this user at the moment
            self._kill_attempt(Cause.FAILED, f"a process could not be started: {error}")
            self._processes.end_trainer(0.0)
            return Outcome(Cause.FAILED, self._why)
        stall = StallWatch(self._plan.limits.stall_s, self._plan.limits.meet_s, self._awake())
        while self._processes.has_controller:
            self._signals.sleep(POLL_S)
            patiently(lambda: self._look(attempt, stall), self._layout.root, sleep=self._signals.sleep)
        self._has_trained = stall.has_stepped
        return self._wind_up(attempt)

    @property
    def _controller(self) -> StartedProcesses | None:
        return self._processes.controller

    @property
    def _last_moment_s(self) -> float:
        return min(LAST_MOMENT_S, self._limit.life_s / 8)

    @property
    def _is_urgent(self) -> bool:
        """True if everything is to end within seconds."""
        return self._cause in (Cause.ABORT, Cause.INTERRUPTED)

    # -------------------------------------------------------------------------------------------------------- watching

    def _look(self, attempt: Attempt, stall: StallWatch) -> None:
        """React to events since the last poll."""
        self._interrupt_if_asked()
        if self._cause is not None:
            self._end_if_late()
            return
        lost = self._lost(attempt)
        if lost is not None:
            self._kill_attempt(lost.cause, lost.text)
            return
        progress = read_progress(self._layout)
        missing = self._resubmitter.look(progress)
        if missing is not None:
            self._kill_attempt(missing.cause, missing.text)
        # SIGTERM would kill a controller whose loop has already ended, and the run would count as unclean.
        is_ending = progress is not None and progress.is_ending and self._limit.left_s() > LAST_MOMENT_S
        if self._cause is None and not is_ending:
            self._stop_if_asked(progress)
        if self._cause is None:
            self._stop_if_stuck(progress, stall)
        for step in self._processes.ended():
            self._part_ended(step)

    def _lost(self, attempt: Attempt) -> Outcome | None:
        """Outcome if another supervisor has taken the run over, or replaced its keys."""
        if lost_to := self._signals.lost_to():
            return Outcome(Cause.FENCED, lost_to)
        return self._classifier.taken_over(attempt)

    def _stop_if_asked(self, progress: ReportedProgress | None) -> None:
        """Let the controller finish its step and save, for the first reason that applies."""
        needed_s = needed_to_stop_s(progress, self._limit.life_s)
        if self._signals.end_requested:
            self._ask_controller(Cause.SIGNAL, f"{self._signals.sender} asks the run to stop", progress)
        elif wants_stop(self._layout):
            self._ask_controller(Cause.STOP, f"{self._layout.stop_request} exists", progress)
        elif save_requests(self._layout):
            reasons = {path.stem: reason_to_save(path) for path in save_requests(self._layout)}
            self._is_job_ended = ENDED_BY_SLURM in reasons.values()
            said = "; ".join(f"job {name} {reason}" for name, reason in reasons.items())
            self._ask_controller(Cause.YIELD, said, progress)
        elif self._limit.left_s() < needed_s:
            self._limit.ask()  # the limit may have been extended
            if (left_s := self._limit.left_s()) < needed_s:
                why = f"{left_s:.0f} s are left, and stopping needs {needed_s:.0f} s"
                self._ask_controller(Cause.TIME, why, progress)
        elif self._signals.warned and self._limit.end is None:
            why = "Slurm's warning before the time limit; the limit itself is not known"
            self._ask_controller(Cause.TIME, why, progress)

    def _ask_controller(self, cause: Cause, why: str, progress: ReportedProgress | None) -> None:
        self._cause, self._why, self._asked_at = cause, why, time.monotonic()
        self._patience_s = max(SAVE_GRACE_S, needed_to_stop_s(progress, self._limit.life_s))
        step_s = _step_s(progress)
        step = f"its step, about {math.ceil(step_s)} s," if step_s else "its step"
        self._log.say("stop", f"{why}: the controller finishes {step} and saves{SOONER * self._plan.is_local}")
        if self._controller is not None:
            self._controller.ask_to_leave()

    def _interrupt_if_asked(self) -> None:
        """Have the controller write its state within seconds, overriding earlier requests."""
        if not self._signals.interrupts and not wants_abort(self._layout):
            return
        if self._is_urgent:
            if self._signals.interrupts > 1:
                self._patience_s = 0.0
            return
        self._cause = Cause.INTERRUPTED if self._signals.interrupts else Cause.ABORT
        self._why = self._cause.words if self._signals.interrupts else f"{self._layout.abort_request} exists"
        self._asked_at, self._patience_s = time.monotonic(), INTERRUPT_S
        self._log.say("stop", f"{self._why}: {self._what_an_interrupt_does()}")
        if self._controller is not None:
            self._controller.ask_to_leave(signal.SIGINT)

    def _what_an_interrupt_does(self) -> str:
        """Message about the present end, and the effect of a second Ctrl-C."""
        step_s = _step_s(read_progress(self._layout))
        again = "; Ctrl-C again: kill now" if self._cause is Cause.INTERRUPTED else ""
        end = f"everything ends within {INTERRUPT_S:.0f} s{again}"
        if not step_s:
            return end
        if step_s <= INTERRUPT_S / 2:
            return f"finishing the step, about {math.ceil(step_s)} s, and saving; {end}"
        return f"a step takes about {step_s:.0f} s: this one is not finished, and trained again by a resume; {end}"

    def _end_if_late(self) -> None:
        """Kill a controller that was asked to exit, if it takes too long or there is no time left."""
        waited_s = time.monotonic() - self._asked_at
        if self._controller is None or (waited_s < self._patience_s and self._limit.left_s() > self._last_moment_s):
            return
        event = "stop" if self._cause in _WANTED else "kill"
        self._log.say(event, f"the controller is killed: it did not exit within {waited_s:.0f} s of being asked to")
        self._controller.kill()

    def _stop_if_stuck(self, progress: ReportedProgress | None, stall: StallWatch) -> None:
        """End an attempt without progress.  Another one is begun only if this one had made some before."""
        step = progress.step if progress is not None else -1
        stall_s = stall.look(step, progress is not None and progress.is_training, self._awake())
        if stall_s is not None:
            waits = progress.waits() if progress is not None else "the controller has written no status"
            cause = Cause.FAILED if stall.has_moved else Cause.STALLED
            self._kill_attempt(cause, f"no step for {stall_s:.0f} s: {waits}")

    def _kill_attempt(self, cause: Cause, why: str) -> None:
        """End controller and trainer now; roles that survive attempts keep running."""
        self._cause, self._why, self._asked_at = cause, why, time.monotonic()
        self._log.say("kill", why)
        if self._controller is not None:
            self._controller.kill()

    def _part_ended(self, step: StartedProcesses) -> None:
        """Handle a component that has ended unasked."""
        if step.role == EVALUATOR:
            self._evaluator_ended(step)
            return
        summary, progress = self._certain(lambda: self._classifier.exit_summary(step)), self._progress()
        is_told = progress is not None and progress.is_ending  # the controller is about to end, and tells roles to exit
        if step.role == "service":  # a run goes on without one, unless it could not even start
            is_missed = not is_told and not self._processes.has_service(step) and self._could_not_start(step, progress)
        else:
            is_missed = not is_told and (step.role == "trainer" or not self._processes.others_serve(step.role))
        event = "part_missed" if is_missed else "part_left" if is_told else "part_end"
        self._log.say(event, f"{step.name} has ended: {summary}")
        controller = self._controller
        if not is_missed or controller is None or controller.status() is not None or self._cause is not None:
            return
        if step.role == "trainer":
            # The step that the controller waits for will not be finished: it writes its state and exits at once.
            self._why = f"{step.name} has ended: {summary}"  # used if no process reports more
            controller.ask_to_leave(signal.SIGINT)
        else:
            self._end_alone(step, summary, progress)

    def _could_not_start(self, step: StartedProcesses, progress: ReportedProgress | None) -> bool:
        """True if a service refuses its settings, or has failed at its start while a user waits for its message."""
        has_served = progress is not None and bool(step.processes & set(progress.names(step.role)))
        return step.status() == EXIT_CONFIG or (self._plan.limits.is_attended and not has_served)

    def _evaluator_ended(self, step: StartedProcesses) -> None:
        """Handle an evaluator that has ended: the run goes on; one that has asked the run to stop has ended well."""
        if step.status() != 0:
            summary = self._certain(lambda: self._classifier.exit_summary(step))
            self._log.say("part_end", f"[evaluation] has failed, and the run continues without it: {summary}")

    def _end_alone(self, step: StartedProcesses, summary: str, progress: ReportedProgress | None) -> None:
        """Save the trained state when a role has no process left, without waiting for roles that cannot come back."""
        has_news = progress is not None and progress.step > self._saved_step()
        cause = Cause.SETTINGS if step.status() == EXIT_CONFIG else Cause.FAILED
        if self._job.is_being_preempted():
            cause, summary = Cause.TIME, "Slurm takes its nodes for another job"
        self._ask_controller(cause, f"no {ROLE_WORDS[step.role]} is left: {summary}", progress)
        self._patience_s = needed_to_stop_s(progress, self._limit.life_s) if has_news else ALONE_S
        if not has_news and self._controller is not None:
            self._controller.ask_to_leave(signal.SIGINT)

    # ---------------------------------------------------------------------------------------------------- winding up

    def _wind_up(self, attempt: Attempt) -> Outcome:
        """End the other roles of an attempt whose controller has ended, and return the outcome."""
        status = 1 if self.controller_status is None else self.controller_status
        progress = self._progress()
        if self._cause is not None and self._cause.follows in ("end", "requeue", "leave"):
            self._processes.ask_all_to_leave()  # at once: there may be little time
        # A trainer may not have been told: it had not connected yet, or its controller ended by os._exit(0).
        is_told = status == 0 and progress is not None and progress.attempt == attempt.index and progress.is_ending
        is_told = is_told and progress is not None and bool(progress.names("trainer"))
        self._processes.end_trainer(min(self._patience_s, self._grace_s()) if is_told else POLL_S)
        how = status, attempt, self._cause, self._why, self._signals.end_requested
        outcome = self._certain(lambda: self._classifier.classify(*how))
        trained = progress.step if progress is not None else 0
        steps = f"step {trained} trained, step {self._saved_step()} saved"
        self._log.say("attempt_end", f"attempt {attempt.index}, {steps}: {outcome.text}")
        return outcome

    def _await_evaluation(self) -> None:
        """Wait for the evaluation of a complete run's last model, unless an end is requested."""
        if not self._processes.has(EVALUATOR):
            return
        self._processes.end_all(self._grace_s(), is_wanted=False, spared=EVALUATOR)
        log = f"`rlhpc logs {quoted(self._layout.root)} evaluator`"
        self._log.say("evaluation", f"the run is complete; its last model is evaluated now ({log})")
        while self._processes.has(EVALUATOR):
            if self._asked_not_to_begin() is not None:
                self._log.say("evaluation", f"`rlhpc evaluate {quoted(self._layout.root)}` continues the evaluation")
                return
            self._signals.sleep(POLL_S)
        for step in self._processes.ended():
            if step.role == EVALUATOR:
                self._evaluator_ended(step)

    def _grace_s(self) -> float:
        """Seconds that the other roles may take to end: leaves enough time to requeue this job."""
        if self._signals.interrupts > 1:
            return 0.0
        if self._is_urgent:
            return max(1.0, self._asked_at + INTERRUPT_S - time.monotonic())
        return min(FINISH_GRACE_S, max(2.0, self._limit.left_s() - LIMIT_MARGIN_S))


def _step_s(progress: ReportedProgress | None) -> float:
    """Seconds that a step takes; 0 if none is being trained, or if it is not known."""
    return progress.step_s if progress is not None and progress.is_training else 0.0
