"""The other jobs of a run, identified by the ids recorded when they were submitted, never by name.

Input: jobs/ID.json and the output of squeue.  Guarantees: a job counts as gone only if squeue shows it in a final
state, or, in an answer that includes this job itself, lacks it although it is old enough to have been purged.
Every function but may_have_controller raises SlurmError if Slurm refuses or does not answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launch.run_files.plan_file import JobPart
from launch.run_files.records import (
    JobRecord,
    read_exit_records,
    read_job_records,
    service_of_job,
    write_job_record,
)
from launch.run_files.run_state import (
    ENDED_BY_SLURM,
    NEAR_ITS_LIMIT,
    Attempt,
    Cause,
    EventLog,
    Log,
    Outcome,
    ReportedProgress,
    is_complete,
    needed_to_stop_s,
    read_attempt,
    read_progress,
    saved_step,
    wants_abort,
)
from launch.slurm.commands import SlurmError
from launch.slurm.queue import (
    MIN_JOB_AGE_S,
    SOON_S,
    TaskStates,
    ThisJob,
    TimeLimit,
    cancel,
    min_job_age_s,
    most_active,
    own_jobs,
)
from launch.slurm.sbatch import submit_script
from launch.slurm.states import OVER
from launch.supervisor.outcomes import AwakeTime, RetryBudget, pause_after
from launch.supervisor.processes import SlurmSignals, StartedProcesses, start_part
from rlhpc.base.files import is_absent, leave_deleted_directory, names_in, write_atomically
from rlhpc.base.patience import Deadline, patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import EXIT_ALONE, EXIT_CONFIG, RlhpcError

# ----------------------------------------------------------------------------------------------------------- other jobs


FAREWELL_S = 60.0  # for other jobs of the run to end on their own
PATIENCE_S = 300.0
SKEW_S = 30.0  # between the clocks of the submitting host and this node

_States = dict[int, TaskStates]


@dataclass(frozen=True)
class OtherJob:
    """A submitted job, and the most active state of its tasks or components; "": Slurm no longer knows it."""

    job_id: int
    name: str
    state: str

    @property
    def is_alive(self) -> bool:
        """True if any part of it is pending or running."""
        return bool(self.state) and self.state not in OVER


@dataclass(frozen=True)
class Gone:
    """A planned job, or a task of a planned array, that has ended."""

    record: JobRecord  # of its newest submission
    task: int | None
    state: str  # "": Slurm no longer knows it

    @property
    def label(self) -> str:
        """The name as squeue writes it: JOB, or JOB_TASK."""
        return self.record.label(self.task)

    @property
    def roles(self) -> list[str]:
        """The roles whose registration shows that it is alive."""
        return self.record.roles_of(self.task)


def other_jobs(layout: RunLayout, job: ThisJob) -> list[OtherJob]:
    """Every recorded job except this one, oldest first."""
    records = [record for record in read_job_records(layout) if record.job_id != job.submitted_id]
    if not records:
        return []
    states = _ask_queue(job, PATIENCE_S)
    most = {number: most_active(tasks.values()) for number, tasks in states.items()}
    return [OtherJob(record.job_id, record.name, most.get(record.job_id, "")) for record in records]


def end_other_jobs(layout: RunLayout, job: ThisJob, log: EventLog) -> None:
    """Cancel every other job: pending ones at once, running ones after they have had time to end on their own."""
    _cancel([other for other in other_jobs(layout, job) if other.state == "PENDING"], log)
    deadline = Deadline(FAREWELL_S)
    while (alive := [other for other in other_jobs(layout, job) if other.is_alive]) and not deadline.is_over:
        time.sleep(1.0)
    _cancel(alive, log)


def may_have_controller(layout: RunLayout, job: ThisJob, patience_s: float) -> bool:
    """False if Slurm shows that no job with the controller is queued or running.  Does not raise: no answer is True."""
    hosts = [record for record in read_job_records(layout) if record.hosts_controller]
    try:
        states = _ask_queue(job, patience_s, patience_s)
    except SlurmError:
        return True
    if hosts != [record for record in read_job_records(layout) if record.hosts_controller]:  # as in gone_jobs
        return True
    forgotten_before = time.time() - MIN_JOB_AGE_S - SKEW_S
    return any(_gone([record], None, states, forgotten_before) is None for record in hosts)


def gone_jobs(plan: JobPart, job: ThisJob, min_job_age_s: float = MIN_JOB_AGE_S) -> list[Gone]:
    """Planned jobs, and tasks of planned arrays, that have ended, in the order of the plan.

    COMPLETING counts as alive: it may be a requeue.  min_job_age_s: how long Slurm remembers every job.
    """
    planned = planned_tasks(plan)
    states = _ask_queue(job, 0.0, SOON_S)
    if planned_tasks(plan) != planned:  # one was submitted while Slurm answered: the answer may lack it
        return []
    forgotten_before = time.time() - min_job_age_s - SKEW_S
    found = [_gone(records, task, states, forgotten_before) for records, task in planned]
    return [gone for gone in found if gone is not None]


def planned_tasks(plan: JobPart) -> list[tuple[list[JobRecord], int | None]]:
    """Every other planned job (of arrays, every task) that was submitted, with its submissions, oldest first."""
    records, found = read_job_records(plan.layout), []
    for name in plan.other_jobs:
        own = [record for record in records if record.name == name]
        size = own[-1].array_size if own else None
        tasks: list[int | None] = [None] if size is None else list(range(size))
        for task in tasks:
            applicable = [record for record in own if record.is_for(task)]
            found += [(applicable, task)] if applicable else []
    return found


def submit_again(
    layout: RunLayout,
    job_id: int,
    *options: str,
    tasks: Sequence[int] | None = None,
    patience_s: float = PATIENCE_S,
    hear: Callable[[str], object] = lambda remarks: None,
) -> int:
    """Submit the script of a recorded job again and record it.  Returns the new id.

    tasks: only these tasks of its array.  hear: as for submit_script.  Raises SlurmError, also if the job was never
    recorded; MayBeQueued: a job may have been submitted; it then ends by itself, being unrecorded.
    """
    record = next((record for record in read_job_records(layout) if record.job_id == job_id), None)
    if record is None:
        raise SlurmError(f"job {job_id} is not recorded in {layout.jobs}: its script is unknown")
    leave_deleted_directory(layout.root)  # in which sbatch does not work
    old, only = record, None if tasks is None else sorted(tasks)
    words = [*options, *([] if only is None else [f"--array={','.join(map(str, only))}"])]

    def note(number: int) -> None:
        new = replace(old, job_id=number, submitted_unix_s=time.time(), follows=job_id, tasks=only or old.tasks)
        write_job_record(layout, new)

    return submit_script(Path(record.script), words, record=note, patience_s=patience_s, hear=hear)


def _gone(records: Sequence[JobRecord], task: int | None, states: _States, forgotten_before: float) -> Gone | None:
    """The end of a task or job with these submissions; None: it is alive, or may be."""
    over = ""
    for record in records:
        shown = states.get(record.job_id, {})
        # A cancelled array whose tasks were never listed separately is one line.
        state = shown.get(task) or shown.get(None, "") if task is not None else most_active(shown.values())
        if state:
            over = state
        if (state and state not in OVER) or (not state and record.submitted_unix_s > forgotten_before):
            return None
    return Gone(records[-1], task, over)


def _ask_queue(job: ThisJob, patience_s: float, timeout_s: float = 60.0) -> _States:
    """States of this user's jobs.

    Raises SlurmError, also if this job itself is not listed: then the answer is not complete.
    """
    states = own_jobs(patience_s, timeout_s)
    if job.submitted_id not in states:
        raise SlurmError(f"squeue does not list this job, {job.name}: its answer is not complete")
    return states


def _cancel(jobs: list[OtherJob], log: EventLog) -> None:
    if jobs:
        log.say("cancel", f"cancelling the run's other jobs: {', '.join(str(job.job_id) for job in jobs)}")
        cancel((job.job_id for job in jobs), patience_s=PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------- resubmitter
#
# Resubmit planned jobs of a run that have ended although their roles are still needed.
#
# Input: the roles that the controller lists, and job states from Slurm (arrays per task).  Guarantees: a job that was
# cancelled by hand is not resubmitted, not even after a requeue of this job, unless it is the last of a service;
# neither is a job that is or may be alive.


LOOK_EVERY_S = 10.0  # while a role is missing
LOOK_AT_LEAST_EVERY_S = 60.0  # while it stays missing, as in a long queue
COMPLETING_S = 45.0  # for Slurm to complete a job whose processes have ended: KillWait, and an epilog
SUBMIT_PATIENCE_S = 10.0  # for a slurmctld that is down: the next poll tries again

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

    def look(self, progress: ReportedProgress | None) -> Outcome | None:
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

    def _look(self, progress: ReportedProgress | None) -> Outcome | None:
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
        cancelled = [each for each in gone if each.state == "CANCELLED" and not self._is_last(each, present)]
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

    def cancelled_trainer(self, sleep: Callable[[float], object], is_over: Callable[[], bool]) -> Outcome | None:
        """Outcome if the trainer's job was cancelled; waits until Slurm has completed it, COMPLETING_S at most.

        An attempt that another follows has ended: a trainer that does not come back should not be waited for.
        None also if Slurm does not answer.  is_over: ends the wait.
        """
        if "trainer" not in self._plan.other_jobs:
            return None
        deadline = Deadline(COMPLETING_S)
        with suppress(RlhpcError, OSError):
            own = [record for record in read_job_records(self._plan.layout) if record.name == "trainer"]
            while own and not deadline.is_over and not is_over():
                state = most_active(_ask_queue(self._job, 0.0, SOON_S).get(own[-1].job_id, {}).values())
                if state == "CANCELLED":
                    return Outcome(Cause.COMPONENT, f"job {own[-1].job_id}, the trainer's, was cancelled")
                if state != "COMPLETING":
                    return None
                sleep(1.0)
        return None

    def _is_last(self, gone: Gone, present: set[str]) -> bool:
        """True if no other process of its service is registered: the run waits for this one."""
        service = service_of_job(gone.record.name)
        if not service:
            return False
        kin = [record for record in read_job_records(self._plan.layout) if service_of_job(record.name) == service]
        names = {name for record in kin for task in range(record.array_size or 1) for name in record.roles_of(task)}
        return not (names - set(gone.roles)) & present

    def _expected(self, away: Sequence[str]) -> set[str]:
        """Names of roles that the planned jobs would start; one each for trainers and reward services."""
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

    def _bring_back(self, gone: Sequence[Gone], progress: ReportedProgress | None) -> Outcome | None:
        """Resubmit one job, or these tasks of an array."""
        name = gone[0].record.name
        is_expendable = bool(service_of_job(name))
        if name.startswith("generation") and progress is None:
            return None  # it is not known yet whether other generators are running
        lost = {role for each in gone for role in each.roles}
        if name.startswith("generation") and progress is not None:
            is_expendable = bool(set(progress.names("generator")) - lost)
        if is_expendable:
            gone = [each for each in gone if self._may_try(each)]  # the run continues without them meanwhile
            if not gone:
                return None
        else:
            state = gone[0].state or "state unknown"
            why = f"job {gone[0].label} ({name}) has ended: {state}"
            pause_s = self._budget.take(saved_step(self._plan.layout, is_certain=True), why)
            if pause_s is None:
                return Outcome(Cause.GIVEN_UP, f"job {gone[0].label} ({name}) has ended too often: {state}")
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
        """True if a dispensable generator or service is to be resubmitted now; it has a budget of its own."""
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
    """Resubmissions of each task since the last new checkpoint, with growing pauses."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count: dict[_Key, int] = {}
        self._not_before: dict[_Key, float] = {}
        self._step = -1

    def refill(self, saved_step: int) -> None:
        """Reset all counts after a newer checkpoint."""
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


# ----------------------------------------------------------------------------------------------------------- worker job
#
# The supervisor of a job without the controller: a trainer, generators or services in a job of their own.
#
# It waits for an attempt and starts its component.  A trainer is restarted for every attempt; generators and reward
# services keep running across attempts.  Before the job's time limit it asks the controller to save (trainer) or lets
# its generators hand back their leases, and the job is requeued.


POLL_S = 0.5
STATUS_S = 5.0  # between two reads of the status by one of hundreds of generator jobs, which hardly need it
LEAVE_S = 45.0  # at most, for generators to hand back their leases, and for engines to close
STOP_S = 900.0  # at least, for the controller to finish its step and save
SILENT_S = 60.0  # a controller without a status for so long may have ended for good
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
        self._step: StartedProcesses | None = None
        self._attempt: Attempt | None = None  # for which the component was started
        self._starts, self._fruitless, self._seen_step = 0, 0, -1
        self._awake = AwakeTime(lambda: time.monotonic())
        self._alone_since = self._awake()
        self._progress: ReportedProgress | None = None  # as last read
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

    def _look_at_status(self) -> ReportedProgress | None:
        """The controller's status; for a job that does not depend on it, up to STATUS_S or meet_s / 10 old."""
        now, known = self._awake(), self._progress
        keeps_s = 0.0 if self._follows_attempts else min(STATUS_S, self._plan.limits.meet_s / 10)
        if known is not None and now - self._read_at < keeps_s:
            return replace(known, age_s=known.age_s + now - self._read_at)
        read = read_progress(self._layout)
        if read is not None and known is not None:  # from here on clocks of two nodes are not compared
            is_new = read.written_unix_s != known.written_unix_s
            read = replace(read, age_s=0.0 if is_new else known.age_s + now - self._read_at)
        self._progress, self._read_at = read, now
        return read

    def _has_controller(self, attempt: Attempt, progress: ReportedProgress | None) -> bool:
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

    def _is_time_over(self, progress: ReportedProgress | None) -> bool:
        needed_s = needed_to_stop_s(progress, self._limit.life_s)
        if not self._follows_attempts:
            needed_s = min(LEAVE_S + LAST_MOMENT_S, self._limit.life_s / 5)
        if self._limit.left_s() >= needed_s:
            return self._signals.warned and self._limit.end is None
        self._limit.ask()  # the limit may have been extended
        return self._limit.left_s() < needed_s

    # ------------------------------------------------------------------------------------------------------ starting

    def _start_unless_ended(self, attempt: Attempt, progress: ReportedProgress | None) -> Outcome | None:
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
        """Outcome of a component that exited while the run continues; None: restart it."""
        records = [
            r for r in read_exit_records(self._layout, self._role, attempt.index).values() if r.job == self._job.name
        ]
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

    def _give_way(self, progress: ReportedProgress | None) -> Outcome:
        """Let the controller save if it depends on this job; then requeue this job, if there will be a controller.

        If a life is shorter than meet_s, no life would ever report that it is alone.
        """
        is_silent = progress is None or progress.age_s > SILENT_S
        if is_silent and not patiently(lambda: may_have_controller(self._layout, self._job, ASK_S), self._layout.jobs):
            return Outcome(Cause.ALONE, "the controller's job has ended, and none is queued")
        if self._follows_attempts and self._step is not None and self._step.status() is None:
            self._ask_to_save(f"{self._limit.left_s():.0f} s are left", NEAR_ITS_LIMIT)
            self._wait_for_end(self._before_the_last_moment_s())
        return Outcome(Cause.TIME, Cause.TIME.words)

    def _make_use_of_grace(self) -> Outcome:
        """Ask the controller to save within KillWait, after which Slurm ends this job."""
        if self._follows_attempts:
            self._ask_to_save("Slurm is ending this job", ENDED_BY_SLURM)
            self._wait_for_end(LEAVE_S)
        return Outcome(Cause.SIGNAL, Cause.SIGNAL.words)

    def _ask_to_save(self, why: str, reason: str) -> None:
        """why: for this job's log.  reason: for the controller's, in words that follow "job N"."""
        self._log.say("yield", f"{why}: the controller is asked to save")
        request = self._save_request
        with suppress(OSError):
            write = partial(write_atomically, request, reason.encode())
            patiently(write, request, limit_s=ASK_S, sleep=self._signals.sleep)

    def _await_end(self, cause: Cause) -> Outcome:
        """Wait for the end of a run: the controller tells a trainer to exit, this supervisor tells the other roles."""
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
        """Seconds left to wait before this job must be requeued."""
        return max(POLL_S, self._limit.left_s() - min(LAST_MOMENT_S, self._limit.life_s / 10))
