"""Ask Slurm about jobs, and cancel and requeue them.

In this file: control of jobs; the job that this process is in; a look at jobs: one call of squeue, and one of sacct for
those that squeue no longer lists; the values of both; states by the ids that Slurm shows.

Input of a look: job ids.  Output: JobRow.  It does not raise if Slurm is missing or does not answer: the result then
contains a sentence about it.  Bounded: squeue gives up after 9 s when slurmctld is down, a look after ANSWER_S.
"""

from __future__ import annotations

import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.slurm.commands import SlurmError, slurm
from launch.slurm.states import (
    OVER,
    JobStage,
    JobState,
    duration_s,
    is_unlimited,
    state_of,
    task_numbers,
    tasks_in_words,
)

# -------------------------------------------------------------------------------------------------------------- control
#
# Cancel and requeue jobs, and ask for the states of this user's own jobs.
#
# Input: ids as squeue writes them.  Output: states in Slurm's words.  Raises SlurmError.

PATIENCE_S = 60.0  # for a slurmctld that is down, if the caller waits for the answer
SOON_S = 12.0  # for an answer, if the caller asks again soon and has other work
MIN_JOB_AGE_S = 300.0  # Slurm's own default
_MIN_JOB_AGE = re.compile(r"^MinJobAge\s*=\s*(\d+)", re.MULTILINE)
_SHOWN = re.compile(r"(\d+)(?:_(\d+))?")  # 12, 12_3; 12+1 is a component of 12
_OF_A_COMPONENT = re.compile(r"\s*\d+(?:\+(\d+))? ([A-Z_]+)\s*")
_IS_PENDING = "Job is pending execution"
_IS_OVER = ("Invalid job id specified", "already completing or completed")
_OF_EACH = "scancel: error: "

TaskStates = dict["int | None", str]  # of one job; by task where it is an array


def cancel(jobs: Iterable[int | str], *options: str, patience_s: float = 0.0) -> None:
    """Run scancel if there is anything to cancel; jobs that have already ended are not an error."""
    listed = list(dict.fromkeys(map(str, jobs)))
    if not listed:
        return
    try:
        slurm("scancel", *options, *listed, patience_s=patience_s)
    except SlurmError as error:
        said = str(error).split(_OF_EACH)[1:] or [str(error)]  # one message per job, which may be over or not
        if not all(any(words in each for words in _IS_OVER) for each in said):
            raise


def requeue(job: str, patience_s: float) -> None:
    """Requeue a job, or by JOB_TASK a task of an array.  Raises SlurmError, also if the site forbids it.

    Call it only when no srun of the job is alive: Slurm 25.11 and later cancels instead of requeueing a job whose first
    component has a live step.
    """
    try:
        slurm("scontrol", "requeue", job, patience_s=patience_s)
    except SlurmError as error:
        if _IS_PENDING not in str(error):  # pending: the answer to an earlier try was lost
            raise


def component_states(job_id: int | str, patience_s: float) -> dict[int, str]:
    """Slurm's state of every component of a heterogeneous job; other jobs have only component 0."""
    words = ("squeue", "--all", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%i %T")
    rows = map(_OF_A_COMPONENT.fullmatch, slurm(*words, patience_s=patience_s).splitlines())
    return {int(row[1] or 0): row[2] for row in rows if row}  # other lines are the site's messages to users


def own_jobs(patience_s: float, timeout_s: float = 60.0) -> dict[int, TaskStates]:
    """States of this user's jobs; of a heterogeneous job the most active state of its components.

    timeout_s: of each try.
    """
    # --all: otherwise jobs on hidden partitions are not listed.
    words = ("squeue", "--me", "--all", "--array", "--noheader", "--states=all", "--format=%i|%T")
    states: dict[int, TaskStates] = {}
    for line in slurm(*words, timeout_s=timeout_s, patience_s=patience_s).splitlines():
        shown, _, state = line.strip().partition("|")
        found = _SHOWN.match(shown)
        if found is None or not state:
            continue
        tasks, task = states.setdefault(int(found[1]), {}), None if found[2] is None else int(found[2])
        tasks[task] = most_active((tasks.get(task, ""), state))
    return states


def most_active(states: Iterable[str]) -> str:
    """The most active state: one that may still run, else a waiting one, else a final one; "" if there is none."""
    return max(states, key=lambda each: (bool(each), bool(each) and each not in OVER, each != "PENDING"), default="")


def min_job_age_s() -> float:
    """Least time in seconds that Slurm keeps a job after its end (MinJobAge); its default if not known."""
    found = _MIN_JOB_AGE.search(slurm("scontrol", "show", "config", timeout_s=SOON_S))
    return float(found[1]) if found is not None and int(found[1]) else MIN_JOB_AGE_S  # 0: jobs are never purged


# ------------------------------------------------------------------------------------------------------------- this job
#
# The Slurm job whose batch step this process is: its identity, its end time, and how to requeue it.
#
# Input: the environment variables that Slurm sets.  Independent of other jobs.

REQUEUE_PATIENCE_S = 300.0  # for a slurmctld that is down: it comes back, or the time limit ends the job
REQUEUED_S = 120.0  # for Slurm to end the batch step of a requeued job
ASK_AGAIN_S = 60.0  # while the end time is not known


@dataclass(frozen=True)
class ThisJob:
    """Identity of one life of a job: from its start to its end or requeue."""

    job_id: int  # of the leader in a heterogeneous job, of the task itself in an array
    array_id: int | None  # of the whole array
    array_task: int | None
    restart: int  # how often Slurm has requeued it
    is_heterogeneous: bool
    began: float  # when this life began, s on this machine's monotonic clock

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ThisJob:
        """Read the identity from the environment.  Raises SlurmError outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise SlurmError("SLURM_JOB_ID is not set: not in a Slurm job; start runs with `rlhpc submit`")
        task = environment.get("SLURM_ARRAY_TASK_ID")
        return cls(
            job_id=int(environment["SLURM_JOB_ID"]),
            array_id=int(environment["SLURM_ARRAY_JOB_ID"]) if task is not None else None,
            array_task=int(task) if task is not None else None,
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            is_heterogeneous="SLURM_HET_SIZE" in environment,
            began=time.monotonic(),
        )

    @classmethod
    def without_slurm(cls) -> ThisJob:
        """Stand-in for a job, for processes on this machine without Slurm."""
        return cls(job_id=0, array_id=None, array_task=None, restart=0, is_heterogeneous=False, began=time.monotonic())

    @property
    def submitted_id(self) -> int:
        """The id that sbatch returned: the array's, or the job's."""
        return self.job_id if self.array_id is None else self.array_id

    @property
    def name(self) -> str:
        """The name as squeue writes it: JOB, or JOB_TASK."""
        return str(self.job_id) if self.array_task is None else f"{self.array_id}_{self.array_task}"

    def incarnation(self, start: int) -> str:
        """Incarnation of a process started now; increases with every life of this job."""
        return f"{self.job_id}.{self.restart}.{start}"

    def requeue(self) -> None:
        """Put this job back into the queue; Slurm ends its batch step in a moment.  Raises SlurmError."""
        # By JOB_TASK: the id of an array's last task equals that of the whole array, and would requeue all of it.
        requeue(self.name, REQUEUE_PATIENCE_S)

    def requeue_and_end(self) -> None:
        """Put this job back into the queue and wait until its batch step has ended.  Raises SlurmError."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Slurm ends this step now, and need not wait for its KillWait
        self.requeue()
        time.sleep(REQUEUED_S)

    def is_being_preempted(self) -> bool:
        """True in the grace time (GraceTime) of a preemption; False also if Slurm does not answer.

        In that time Slurm has signalled every srun, but not the batch step, and does not requeue a job that ends.
        """
        return any(state == "RUNNING" and is_preempted for state, is_preempted in self._components())

    def is_to_go_on(self) -> bool:
        """True if Slurm has not ended this job, so that a person has signalled its batch step, by scancel.

        False also if Slurm does not answer.
        """
        components = self._components()
        return bool(components) and all(state == "RUNNING" and not preempted for state, preempted in components)

    def _components(self) -> list[tuple[str, bool]]:
        """State of each component, and whether Slurm has set its preemption time; none if Slurm does not answer."""
        if not self.job_id:
            return []
        words = ("squeue", "--all", "--noheader", f"--jobs={self.name}", "--Format=State:20,PreemptTime:30")
        try:
            rows = [line.split() for line in slurm(*words, timeout_s=30.0).splitlines()]
        except SlurmError:
            return []
        return [(row[0], row[-1][:1].isdigit()) for row in rows if row]  # N/A: no preemption


class NoTimeLimit:
    """TimeLimit of a life without a limit."""

    began = 0.0  # s, monotonic

    @property
    def end(self) -> float | None:
        """The end in s on this machine's monotonic clock; None: no limit, or not known yet."""
        return None

    @property
    def life_s(self) -> float:
        """Seconds from the beginning of this life to its limit; infinite in the same cases."""
        end = self.end
        return float("inf") if end is None else end - self.began

    def left_s(self) -> float:
        """Seconds from now; infinite in the same cases."""
        end = self.end
        return float("inf") if end is None else end - time.monotonic()

    def ask(self) -> None:
        """Do nothing: there is no limit to query."""


class TimeLimit(NoTimeLimit):
    """The time limit of this life.

    Slurm is asked every minute until it has answered, and again before any action on it, because limits can be
    changed.  Until then the end in the environment is used, which is by slurmctld's clock: this node's may differ.
    """

    def __init__(self, job: ThisJob, environment: Mapping[str, str]) -> None:
        self._job, self.began = job, job.began
        self._end = _end_as_said(job, environment)
        self.is_known, self._has_answered = self._end is not None, False
        self._asked_at = time.monotonic()
        if not self.is_known:
            self.ask()

    @property
    def end(self) -> float | None:
        """The end in s on this machine's monotonic clock; None: no limit, or not known yet."""
        if not self._has_answered and time.monotonic() - self._asked_at >= ASK_AGAIN_S:
            self.ask()
        return self._end

    def ask(self) -> None:
        """Ask Slurm how much time is left.  If it does not answer, the last known end stays."""
        try:
            out = slurm("squeue", "--all", "--noheader", f"--jobs={self._job.name}", "--format=%L", timeout_s=SOON_S)
        except SlurmError:
            out = ""
        self._asked_at = time.monotonic()
        said = [line.strip() for line in out.splitlines() if line.strip()]
        left = [seconds for seconds in map(duration_s, said) if seconds is not None]
        if left:
            self._end, self.is_known, self._has_answered = time.monotonic() + min(left), True, True
        elif any(map(is_unlimited, said)):
            self._end, self.is_known, self._has_answered = None, True, True

    def in_words(self) -> str:
        """Time that this job may run, in words."""
        if not self.is_known:
            return "until a time limit that is not known yet"
        return "without a time limit" if self._end is None else f"for {self.left_s():.0f} s"


def _end_as_said(job: ThisJob, environment: Mapping[str, str]) -> float | None:
    """The end in Slurm's variables, since 23.02; None: not set."""
    start, end = (environment.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    if not end.isdigit():
        return None
    said = time.monotonic() + float(end) - time.time()
    # With a slow clock the end would come minutes too late.
    return min(said, job.began + float(end) - float(start)) if start.isdigit() else said


# ---------------------------------------------------------------------------------------------------------------- queue

ANSWER_S = 12.0
BLINK_S = 2.0  # squeue is repeated after an immediate failure, not after a slow one

# Fields of squeue with their widths: -O has the number of restarts, which -o lacks.  The name comes last because only
# it may contain the separator.
_FIELDS = {
    "JobArrayID": 80, "State": 20, "RestartCnt": 9, "Reason": 200, "Partition": 100, "TimeUsed": 20,
    "TimeLeft": 20, "TimeLimit": 20, "StartTime": 24, "NodeList": 400, "Name": 300,  # longer than any directory's
}  # fmt: skip
_SQUEUE_FORMAT = ",".join(f"{name}:{width}|" for name, width in _FIELDS.items())
# --array: else squeue shows waiting tasks as a list, which it cuts after some thirty characters.
_SQUEUE = ("squeue", "--all", "--array", "--noheader", "--states=all")
_LOG_FIELD = "StdOut:1024|"
# As in launch/plan/script.py.  Includes the job's name: other programs may use logs/slurm, too.
_JOBS_OF_A_RUN = r"hetjob|controller|trainer|generation(?:-\d+)?|service-[\w.-]+|rewards"
_LOG_OF_A_RUN = re.compile(rf"(/.+)/logs/slurm/(?:{_JOBS_OF_A_RUN})-[\w%]+\.log")
# Fields of sacct, by squeue's names.
_SACCT_FIELDS = {
    "JobArrayID": "JobID", "State": "State", "Partition": "Partition", "TimeUsed": "Elapsed", "TimeLimit": "Timelimit",
    "StartTime": "Start", "NodeList": "NodeList", "Name": "JobName",
}  # fmt: skip
_NOTHING = ("None", "(null)", "N/A", "None assigned")  # of a reason, or of nodes
_START = re.compile(r"prolog|launch|batch job|job env", re.IGNORECASE)  # in the reason of a drained node
_ID = re.compile(r"(?P<job>\d+)(?:\+(?P<component>\d+)|_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]))?")


@dataclass(frozen=True)
class JobRow:
    """One line of the queue: a job, a component of a heterogeneous job, an array task, or several pending tasks."""

    job_id: int  # as submitted: of the array, of the first component
    name: str
    state: JobState
    reason: str  # as in squeue; "" if there is none
    partition: str
    nodes: str  # as Slurm writes them, "g[0-1]"; "" if none
    component: int | None = None  # offset in the heterogeneous job
    array_task: int | None = None
    waiting_tasks: str = ""  # "2-5", of an array
    used_s: int | None = None
    left_s: int | None = None
    limit_s: int | None = None  # None: no limit, or not known
    start_unix_s: float | None = None  # start of a pending job, as Slurm estimates it
    restarts: int | None = None  # None: not known, from sacct

    @property
    def label(self) -> str:
        """The id as squeue writes it: 12, 12+1, 12_3, 12_[2-5]."""
        if self.component is not None:
            return f"{self.job_id}+{self.component}"
        if self.array_task is not None:
            return f"{self.job_id}_{self.array_task}"
        return f"{self.job_id}_[{self.waiting_tasks}]" if self.waiting_tasks else str(self.job_id)

    @property
    def tasks(self) -> list[int]:
        """Tasks of an array that this line stands for."""
        return task_numbers(self.waiting_tasks) if self.array_task is None else [self.array_task]


@dataclass(frozen=True)
class QueueLook:
    """An answer about the jobs asked for."""

    rows: tuple[JobRow, ...]
    unknown: tuple[int, ...] = ()  # jobs that Slurm does not know (any more), by its answer
    trouble: str = ""  # why there is no answer; "" if there is one
    others: tuple[JobRow, ...] = ()  # of another run: a directory copied from another cluster has ids of other jobs
    drained: tuple[str, ...] = ()  # nodes drained because a job could not be started: "g0: Prolog error"


@dataclass(frozen=True)
class MyJob:
    """A line of the queue, with its run."""

    row: JobRow
    run_directory: Path | None  # None: not a job of rlhpc


@dataclass(frozen=True)
class MyQueue:
    """Every job of this user, in the order of ids."""

    jobs: tuple[MyJob, ...]
    trouble: str = ""  # why there is no answer; "" if there is one

    @property
    def is_there(self) -> bool:
        """False on a machine without Slurm's commands."""
        return "no such command" not in self.trouble


def look_at_my_jobs(timeout_s: float = ANSWER_S) -> MyQueue:
    """Query squeue once for all jobs of this user, including those that ended in the last minutes.  Raises nothing.

    The run is identified by the log of the batch step, RUN_DIR/logs/slurm/NAME-ID.log: a job's comment may be set by
    the site and its script may be a link, but this directive is always ours.
    """
    words = (*_SQUEUE, "--me", f"--Format={_LOG_FIELD},{_SQUEUE_FORMAT}")
    try:
        answer = slurm(*words, timeout_s=timeout_s, patience_s=min(BLINK_S, timeout_s))
    except SlurmError as error:
        return MyQueue((), f"Slurm did not answer: {error}")
    rows, directories = [], {}
    for line in answer.splitlines():
        log, _, rest = line.partition("|")
        row = _row(rest, _FIELDS)
        if row is not None:
            rows.append(row)
            found = _LOG_OF_A_RUN.fullmatch(log.strip())
            directories[row.job_id] = Path(found[1]) if found else None
    rows = _waiting_together(rows)
    rows.sort(key=lambda row: (row.job_id, row.component or 0, row.array_task is None))
    return MyQueue(tuple(MyJob(row, directories[row.job_id]) for row in rows))


def look_at_jobs(
    job_ids: Iterable[int], timeout_s: float = ANSWER_S, patience_s: float = BLINK_S, *, run_name: str = ""
) -> QueueLook:
    """Ask Slurm about jobs.  Raises nothing.

    run_name: of the jobs' run, "" if not known: jobs not named after it are `others`.  timeout_s: of each command.
    patience_s: with a slurmctld that is down; PATIENCE_S for questions that are asked only once.
    """
    wanted = list(dict.fromkeys(job_ids))
    if not wanted:
        return QueueLook(())
    try:
        rows = _of_squeue(wanted, timeout_s, patience_s)
    except SlurmError as error:
        return QueueLook((), trouble=f"Slurm did not answer: {error}")
    missing = [job for job in wanted if job not in {row.job_id for row in rows}]
    if missing:
        rows += _of_sacct(missing, timeout_s)
    named = {row.job_id for row in rows if not run_name or row.name.partition(".")[0] == run_name.partition(".")[0]}
    others = tuple(row for row in rows if row.job_id not in named)
    rows = [row for row in rows if row.job_id in named]
    known = {row.job_id for row in rows}
    place = {job: index for index, job in enumerate(wanted)}
    rows.sort(key=lambda row: (place[row.job_id], row.component or 0, row.array_task is None, row.array_task or 0))
    could_not_start = any("launch failed" in row.reason or row.reason == "JobLaunchFailure" for row in rows)
    drained = _drained(timeout_s) if could_not_start else ()
    return QueueLook(tuple(rows), tuple(job for job in wanted if job not in known), "", others, drained)


def _drained(timeout_s: float) -> tuple[str, ...]:
    """Nodes drained because a job could not be started on them; none if the site hides them."""
    try:
        answer = slurm("sinfo", "--all", "--noheader", "--list-reasons", "--format=%N|%E|%H", timeout_s=timeout_s)
    except SlurmError:
        return ()
    rows = [cells for line in answer.splitlines() if len(cells := line.strip().rsplit("|", 2)) == 3]
    return tuple(f"{nodes}: {why}, since {since}" for nodes, why, since in rows if _START.search(why))


# -------------------------------------------------------------------------------------------------------------- squeue


def _of_squeue(jobs: Sequence[int], timeout_s: float, patience_s: float) -> list[JobRow]:
    # For a single unknown id squeue fails with "Invalid job id specified"; for two ids it prints nothing.
    listed = ",".join(map(str, [*jobs, jobs[0]]))
    words = (*_SQUEUE, f"--jobs={listed}", f"--Format={_SQUEUE_FORMAT}")
    answer = slurm(*words, timeout_s=timeout_s, patience_s=max(patience_s, min(BLINK_S, timeout_s)))
    return _rows(answer, _FIELDS, jobs)


# --------------------------------------------------------------------------------------------------------------- sacct


def _of_sacct(jobs: Sequence[int], timeout_s: float) -> list[JobRow]:
    """Rows of jobs that have left the queue; none without accounting, or without a record of their end."""
    listed = ",".join(map(str, jobs))
    shown = ",".join(_SACCT_FIELDS.values())
    words = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={listed}", f"--format={shown}")
    try:
        answer = slurm(*words, timeout_s=timeout_s)
    except SlurmError:
        return []
    # Jobs that squeue does not list have ended, even if slurmdbd was not informed: "runaway jobs".
    return [row for row in _rows(answer, _SACCT_FIELDS, jobs) if not row.state.is_alive]


# -------------------------------------------------------------------------------------------------------------- values


def _rows(answer: str, fields: Collection[str], jobs: Sequence[int]) -> list[JobRow]:
    rows = [_row(line, fields) for line in answer.splitlines() if line.strip()]
    return _waiting_together(row for row in rows if row is not None and row.job_id in jobs)


def _waiting_together(rows: Iterable[JobRow]) -> list[JobRow]:
    """Merge tasks of an array with the same reason for waiting into one row."""
    together: dict[JobRow, list[int]] = {}
    for row in rows:
        waits = row.array_task is not None and row.state.life is JobStage.WAITING
        together.setdefault(replace(row, array_task=None) if waits else row, []).extend(row.tasks if waits else ())
    found = []
    for row, tasks in together.items():
        alone = replace(row, array_task=tasks[0]) if len(tasks) == 1 else row
        found.append(replace(row, waiting_tasks=tasks_in_words(tasks)) if len(tasks) > 1 else alone)
    return found


def _row(line: str, fields: Collection[str]) -> JobRow | None:
    """Parse a row; fields: squeue's names of its columns."""
    cells = [cell.strip() for cell in line.split("|", len(fields) - 1)]
    found = _ID.match(cells[0])
    if len(cells) != len(fields) or found is None:
        return None  # not the requested format: better no row than a wrong one
    said = defaultdict(str, zip(fields, cells))
    return JobRow(
        job_id=int(found["job"]),
        name=said["Name"].rstrip("| "),
        state=state_of(said["State"]),
        reason="" if said["Reason"] in _NOTHING else said["Reason"],
        partition=said["Partition"],
        nodes="" if said["NodeList"] in _NOTHING else said["NodeList"],
        component=_number(found["component"]),
        array_task=_number(found["task"]),
        waiting_tasks=(found["tasks"] or "").partition("%")[0],
        used_s=duration_s(said["TimeUsed"]),
        left_s=duration_s(said["TimeLeft"]),
        limit_s=duration_s(said["TimeLimit"]),
        start_unix_s=moment_unix_s(said["StartTime"]),
        restarts=_number(said["RestartCnt"]),
    )


def moment_unix_s(text: str) -> float | None:
    """Unix time of Slurm's 2026-03-01T14:05:00, which is this machine's local time; None for N/A and Unknown."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


# ---------------------------------------------------------------------------------------------------------- part states
#
# States of jobs, of their components and of their array tasks, by the ids that Slurm shows.
#
# Input: job ids.  Output: a state for J, J+1 and J_1.  A job that neither squeue nor sacct knows has ended: without
# accounting there is no other sign of it.

GONE = "GONE"  # neither squeue nor sacct knows the job
FINAL = OVER | {"LAUNCH_FAILED", GONE}


def ask_states(bases: set[str]) -> dict[str, dict[str, str]] | None:
    """State and nodes by shown id, and per job, for any number of jobs; None: Slurm does not answer."""
    look = look_at_jobs(map(int, bases), timeout_s=60.0)
    if look.trouble:
        return None
    return {**{str(job): {"State": GONE} for job in look.unknown}, **by_shown_id(look.rows)}


def base_id(job_id: str) -> str:
    """J of J, J+1 and J_1."""
    return job_id.split("+")[0].split("_")[0]


def by_shown_id(rows: Iterable[JobRow]) -> dict[str, dict[str, str]]:
    """State and nodes per shown id, and per job: of its first component, or the combined state of its array tasks."""
    found: dict[str, dict[str, str]] = {}
    states_of: dict[str, list[str]] = {}
    for row in rows:
        for shown in [f"{row.job_id}_{task}" for task in row.tasks] or [row.label]:
            found[shown] = {"JobID": shown, "State": row.state.name, "NodeList": row.nodes}
        states_of.setdefault(str(row.job_id), []).append(row.state.name)
    for base, states in states_of.items():
        whole = {"JobID": base, "State": _of_all(states), "NodeList": ""}
        found[base] = found.get(f"{base}+0") or found.get(base) or whole
    return found


def _of_all(states: list[str]) -> str:
    """State of an array: that of a live task, else that of a failed one, else COMPLETED."""
    going_on = sorted(set(states) - FINAL, key=lambda state: state != "RUNNING")
    return next(iter([*going_on, *(state for state in states if state != "COMPLETED")]), "COMPLETED")
