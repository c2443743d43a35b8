"""Ask Slurm about given jobs: one call of squeue, and one of sacct for those that squeue no longer lists.

Input: job ids.  Output: JobRow.  Nothing here raises if Slurm is missing or does not answer: the result then contains
a sentence that says so.  Bounded: squeue gives up after 9 s when slurmctld is away, and this module after ANSWER_S.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.slurm.commands import SlurmError, slurm
from launch.slurm.states import JobState, Life, state_of
from launch.slurm.values import duration_s, task_numbers, tasks_in_words

ANSWER_S = 12.0
BLINK_S = 2.0  # squeue is repeated after an immediate failure, not after a slow one

# Fields of squeue with their widths: -O has the number of restarts, which -o lacks.  The name comes last because only
# it may contain the separator.
_FIELDS = {
    "JobArrayID": 80, "State": 20, "RestartCnt": 9, "Reason": 200, "Partition": 100, "TimeUsed": 20,
    "TimeLeft": 20, "TimeLimit": 20, "StartTime": 24, "NodeList": 400, "Name": 300,  # longer than any directory's
}  # fmt: skip
_SQUEUE_FORMAT = ",".join(f"{name}:{width}|" for name, width in _FIELDS.items())
# --array: of tasks that wait squeue shows a list, which it cuts off after some thirty characters.
_SQUEUE = ("squeue", "--all", "--array", "--noheader", "--states=all")
_LOG_FIELD = "StdOut:1024|"
# As launch/plan/script.py writes it.  The name of the job is part of it: other programs may use logs/slurm, too.
_LOG_OF_A_RUN = re.compile(r"(/.+)/logs/slurm/(?:hetjob|controller|trainer|generation(?:-\d+)?|rewards)-[\w%]+\.log")
# Those of sacct, by what squeue calls them.
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
        """Of an array, those of this line."""
        return task_numbers(self.waiting_tasks) if self.array_task is None else [self.array_task]


@dataclass(frozen=True)
class QueueLook:
    """An answer about the jobs asked for."""

    rows: tuple[JobRow, ...]
    unknown: tuple[int, ...] = ()  # Slurm answered, and does not know these jobs (any more)
    trouble: str = ""  # why there is no answer; "" if there is one
    others: tuple[JobRow, ...] = ()  # of another run: a directory copied from another cluster knows ids that are theirs
    drained: tuple[str, ...] = ()  # nodes drained because a job could not be started: "g0: Prolog error"


@dataclass(frozen=True)
class MyJob:
    """A line of the queue, and the run that it was submitted for."""

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
    """Ask squeue once for all jobs of this user, including those that ended in the last minutes.  Raises nothing.

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
            directories[row.job_id] = _run_directory(log.strip())
    rows = _waiting_together(rows)
    rows.sort(key=lambda row: (row.job_id, row.component or 0, row.array_task is None))
    return MyQueue(tuple(MyJob(row, directories[row.job_id]) for row in rows))


def look_at_jobs(
    job_ids: Iterable[int], timeout_s: float = ANSWER_S, patience_s: float = BLINK_S, *, run_name: str = ""
) -> QueueLook:
    """Ask Slurm about jobs.  Raises nothing.

    run_name: of the run whose jobs they are, "" if it is not known: jobs that are not named after it are others.
    timeout_s: of each command.  patience_s: with a slurmctld that is away; PATIENCE_S of control.py for what can be
    asked only once.
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
    """Nodes that were drained because a job could not be started on them; none if the site hides them."""
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


def _run_directory(log: str) -> Path | None:
    found = _LOG_OF_A_RUN.fullmatch(log)
    return Path(found[1]) if found else None


# --------------------------------------------------------------------------------------------------------------- sacct


def _of_sacct(jobs: Sequence[int], timeout_s: float) -> list[JobRow]:
    """Rows of jobs that have left the queue; none if the site has no accounting, or none of their end."""
    listed = ",".join(map(str, jobs))
    shown = ",".join(_SACCT_FIELDS.values())
    words = ("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={listed}", f"--format={shown}")
    try:
        answer = slurm(*words, timeout_s=timeout_s)
    except SlurmError:
        return []
    # Those that squeue does not list have ended, whatever slurmdbd has not been told of: "runaway jobs".
    return [row for row in _rows(answer, _SACCT_FIELDS, jobs) if not row.state.is_alive]


# -------------------------------------------------------------------------------------------------------------- values


def _rows(answer: str, fields: Collection[str], jobs: Sequence[int]) -> list[JobRow]:
    rows = [_row(line, fields) for line in answer.splitlines() if line.strip()]
    return _waiting_together(row for row in rows if row is not None and row.job_id in jobs)


def _waiting_together(rows: Iterable[JobRow]) -> list[JobRow]:
    """Put tasks of an array that wait for the same into one row."""
    together: dict[JobRow, list[int]] = {}
    for row in rows:
        waits = row.array_task is not None and row.state.life is Life.WAITING
        together.setdefault(replace(row, array_task=None) if waits else row, []).extend(row.tasks if waits else ())
    found = []
    for row, tasks in together.items():
        alone = replace(row, array_task=tasks[0]) if len(tasks) == 1 else row
        found.append(replace(row, waiting_tasks=tasks_in_words(tasks)) if len(tasks) > 1 else alone)
    return found


def _row(line: str, fields: Collection[str]) -> JobRow | None:
    """fields: what its columns are, in squeue's words."""
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
