"""Stand by while the job before this one still owns the run: load everything meanwhile, then take the run over.

    load ─▶ all loaded: ask for the run ─▶ it is released, or the other job has ended ─▶ begin an attempt
      ▲                                                                              │
      └── the other job has begun another attempt ◀──────────────────────────────────┤
                                          the run is complete, or is stopped: leave ◀┘

Guarantees: nothing is written to the run before an attempt of this job begins, and the fence alone decides on that
(begin_attempt.py): a wrong guess here costs the other job its attempt, not the run.
"""

from __future__ import annotations

import time
from contextlib import suppress

from launch.run_files.events import Log
from launch.run_files.outcome import Cause, Outcome
from launch.run_files.plan_file import JobPart
from launch.run_files.run_state import Attempt, hand_over_requests, has_released, is_complete, read_attempt
from launch.slurm.commands import SlurmError
from launch.slurm.control import SOON_S, most_active, own_jobs
from launch.slurm.states import OVER
from launch.slurm.this_job import NoTimeLimit, ThisJob
from launch.supervisor.begin import AttemptStarter
from launch.supervisor.outcome_classifier import asked_to_end
from launch.supervisor.processes import Processes
from launch.supervisor.signals import Signals
from rlhpc.errors import RlhpcError

POLL_S = 0.2
ASK_SLURM_S = 10.0  # between questions whether the other job lives
ENDING_S = 60.0  # for a job whose processes are being ended, and which may still save
LEAST_LEFT_S = 15.0  # of this job's own time


class StandBy:
    """What the supervisor of a successor does before its first attempt."""

    def __init__(
        self,
        plan: JobPart,
        job: ThisJob,
        limit: NoTimeLimit,
        log: Log,
        signals: Signals,
        processes: Processes,
        starter: AttemptStarter,
    ) -> None:
        self._plan, self._job, self._limit, self._log, self._signals = plan, job, limit, log, signals
        self._layout, self._processes, self._starter = plan.layout, processes, starter
        self._request = plan.layout.hand_over_request(job.job_id)
        self._asked_slurm_at = float("-inf")
        self._ending_since: float | None = None
        self._awaited = -1  # number of the attempt that everything is loaded for
        self._has_asked = False
        self._said = ""  # why it could not load or ask, as last reported

    def until_turn(self) -> Outcome | None:
        """Return None when this job is to begin an attempt; an outcome if there is nothing to do for it."""
        if not self._plan.overlap_s:
            return None
        began = time.monotonic()
        try:
            while True:
                outcome = self._outcome()  # first: a job that has completed the run has ended, too
                if outcome is not None:
                    self._processes.kill_all()
                    return outcome
                why = self._why_now()
                if why is not None:
                    break
                self._load_as_far_as_possible()
                self._signals.sleep(POLL_S)
        finally:
            with suppress(OSError):  # a request of a job that is not running is ignored
                self._request.unlink(missing_ok=True)
        if self._awaited >= 0:
            loaded = "everything is loaded" if self._processes.are_loaded else "not everything is loaded"
            self._log.say("take_over", f"{why}; stood by for {time.monotonic() - began:.1f} s, {loaded}")
        return None

    def _why_now(self) -> str | None:
        """The reason why this job may take the run; None: it may not."""
        attempt = read_attempt(self._layout)
        if attempt is None or attempt.owner >= (self._job.job_id, self._job.restart):
            return "no other job owns the run"  # or a later one, which begin_attempt will find
        if has_released(self._layout, attempt.job_id):
            return f"job {attempt.job_id} leaves the run"
        return f"job {attempt.job_id} has ended" if self._is_over(attempt.job_id) else None

    def _is_over(self, job_id: int) -> bool:
        """Whether Slurm reports that a job has ended; no answer, or an incomplete one, counts as no."""
        now = time.monotonic()
        if now - self._asked_slurm_at < ASK_SLURM_S:
            return False
        self._asked_slurm_at = now
        try:
            states = own_jobs(0.0, SOON_S)
        except SlurmError:
            return False
        if self._job.submitted_id not in states:
            return False
        state = most_active(states.get(job_id, {}).values())
        if state != "COMPLETING":
            self._ending_since = None
            return state in ("", "PENDING") or state in OVER  # one that was requeued is fenced when it comes back
        self._ending_since = self._ending_since or now
        return now - self._ending_since > ENDING_S

    def _outcome(self) -> Outcome | None:
        over = "the run is complete" if is_complete(self._layout) else ""
        if not over and (asked := asked_to_end(self._layout)) is not None:
            over = asked.text
        if over:
            return Outcome(Cause.NOT_NEEDED, over)
        if self._signals.end_requested or self._signals.interrupts:
            return Outcome(Cause.SIGNAL, f"ended by {self._signals.sender} while standing by")
        if self._limit.left_s() < LEAST_LEFT_S:
            return Outcome(Cause.TIME, "its time limit is near, and the job before it still owns the run")
        return None

    def _load_as_far_as_possible(self) -> None:
        """Nothing that fails here is a reason to end: the owner's job, which trains, would be ended too."""
        try:
            self._load()
            for step in self._processes.ended():
                self._log.say("part_end", f"{step.name} ended while standing by: it is restarted later")
            self._ask_if_loaded()
        except (RlhpcError, OSError) as error:  # a full disk, a program that this node lacks
            if str(error) != self._said:
                self._log.say("not_loaded", f"cannot load or ask for the run yet, and waits all the same: {error}")
            self._said = str(error)

    def _load(self) -> None:
        """Start everything, again if the other job has begun another attempt: processes are bound to a number."""
        attempt = read_attempt(self._layout)
        if attempt is None or attempt.index + 1 == self._awaited:
            return
        is_first = self._awaited < 0
        self._awaited = attempt.index + 1
        self._log.say("stand_by", f"job {attempt.job_id} runs attempt {attempt.index}; loading for the next meanwhile")
        self._processes.stand_by(Attempt(self._awaited, None, self._job.job_id, self._job.restart, has_begun=False))
        if is_first:
            self._starter.load()

    def _ask_if_loaded(self) -> None:
        if not self._has_asked and self._processes.are_loaded:
            self._request.touch()
            self._has_asked = True
            self._log.say("loaded", "everything is loaded: asking for the run")


class Heirs:
    """Successors that ask the job that owns the run to leave it to them."""

    def __init__(self, plan: JobPart, job: ThisJob) -> None:
        self._plan, self._job = plan, job
        self._next_look = float("-inf")

    def first(self) -> int | None:
        """The job to hand the run over to; None: none asks, or the one that asked is no longer running."""
        if not self._plan.overlap_s:
            return None
        asking = [job for job in hand_over_requests(self._plan.layout) if job > self._job.job_id]
        if not asking or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + ASK_SLURM_S
        try:
            states = own_jobs(0.0, SOON_S)
        except SlurmError:
            return None
        return next((job for job in asking if "RUNNING" in states.get(job, {}).values()), None)
