"""All runs below some directories and in the queue, with their states; Slurm is queried once for all.

In this file: finding run directories; the state of a run; what is alive; how it ended; where; evaluations; the survey.

Input: directories.  Output: Survey, sorted by the last sign of activity.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from launch.common.text import without_dots
from launch.run_files.records import JobRecord
from launch.run_files.run_state import Cause, last_outcome
from launch.slurm.queue import JobRow, MyQueue, look_at_my_jobs
from launch.slurm.states import EndedBy, JobStage, is_stuck, reason_in_words
from launch.view.run import RunView
from rlhpc.base.ownership import LIVES_ELSEWHERE_S
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import ConfigError, RunDirectoryError

# ----------------------------------------------------------------------------------------------------------------- find
#
# Find run directories below a directory, fast on a slow filesystem and safe in an unknown one.
#
# Input: a directory.  Output: one RunView for each run, with the names its directory lists.  Guarantees: no directory
# is read twice, whatever the symbolic links; run directories are not searched for other runs; depth and number are
# bounded, and what was skipped is reported.

DEPTH = 4  # levels below the given directory
MOST_DIRECTORIES = 50_000
_AT_ONCE = 16  # a directory on NFS takes a millisecond, most of it waiting
Identity = tuple[int, int]


@dataclass(slots=True)
class Found:
    """The runs found, and remarks on the search."""

    runs: list[RunView] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Listing:
    path: Path
    identity: Identity
    run: RunView | None = None
    below: tuple[Path, ...] = ()
    trouble: str = ""


def find_runs(tops: Iterable[Path], depth: int = DEPTH) -> Found:
    """Search directories and `depth` levels below them, a level at a time.

    Skips hidden directories.  Raises nothing: unreadable directories become remarks.
    """
    found, seen, num_looked_at = Found(), set[Identity](), 0
    unreadable: list[str] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        level = list(tops)
        for _ in range(depth + 1):
            if len(level) > MOST_DIRECTORIES - num_looked_at:
                level = level[: MOST_DIRECTORIES - num_looked_at]
                found.remarks.append(f"stopped after {MOST_DIRECTORIES} directories: give a directory further down")
            num_looked_at += len(level)
            following: list[Path] = []
            for listing in pool.map(_list, level):
                if listing.trouble:
                    unreadable.append(listing.trouble)
                elif listing.identity not in seen:
                    seen.add(listing.identity)
                    following += listing.below
                    found.runs += [listing.run] if listing.run else []
            level = following
    if unreadable:
        more = f", and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        found.remarks.append(f"not read: {unreadable[0]}{more}")
    return found


def directories_to_search(given: Sequence[Path]) -> list[Path]:
    """The given directories, or runs/ if it exists, or the current one.  Raises ConfigError: no such directory.

    Paths are absolute, so that they equal the directories' names in the queue.
    """
    for directory in given:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; `rlhpc list` shows the runs below runs/")
    default = Path("runs") if Path("runs").is_dir() else Path()
    return [without_dots(directory) for directory in given or [default]]


def _list(path: Path) -> _Listing:
    try:
        with os.scandir(path) as entries:
            listed = list(entries)
        run = RunView(RunLayout(path), frozenset(entry.name for entry in listed))
        identity = run.identity
    except OSError as error:
        return _Listing(path, (0, 0), trouble=f"{path}: {error.strerror}")
    if run.is_there:
        return _Listing(path, identity, run)
    return _Listing(path, identity, below=tuple(_directories(path, listed)))


def _directories(path: Path, entries: Iterable[os.DirEntry[str]]) -> Iterator[Path]:
    """Subdirectories, real ones before links: of two names of a run the real one is shown."""
    links = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        with suppress(OSError):  # a broken or circular link
            if not entry.is_dir():
                continue
            if entry.is_symlink():
                links.append(path / entry.name)
            else:
                yield path / entry.name
    yield from links


# ------------------------------------------------------------------------------------------------------------- standing
#
# The state of a run: which processes or jobs are alive, or how it ended.
#
# Input: RunView and the run's lines of the queue.  Output: Standing.  Pure except that it reads the directory.
# Slurm and the process table come first, then a status file that is still being updated; a run with status "training"
# of which nothing is alive is lost.

_CLOCK_SKEW_S = 60.0  # between a writing node and slurmctld
_STOPS = {Cause.STOP, Cause.ABORT, Cause.SIGNAL}
_GOES_ON = {Cause.TIME, Cause.YIELD, Cause.FENCED}  # another attempt was planned


class State(StrEnum):
    """The state of a run."""

    QUEUED = "queued"  # its controller waits for nodes
    STARTING = "starting"  # a part of the run is alive, and no step has begun
    RUNNING = "running"
    STOPPED = "stopped"  # on request, or cancelled; can be resumed
    FAILED = "failed"
    COMPLETE = "complete"
    LOST = "lost"  # running by its status, but nothing is alive
    NEW = "new"  # never started
    UNKNOWN = "unknown"  # a Slurm run, and Slurm does not answer
    DAMAGED = "damaged"

    @property
    def is_alive(self) -> bool:
        """True while a part of the run runs or waits to run, or this is unknown."""
        return self in (State.QUEUED, State.STARTING, State.RUNNING, State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Standing:
    """The facts in a line about a run."""

    view: RunView
    state: State
    rows: tuple[JobRow, ...] = ()
    where: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """This user's jobs in Slurm, seen from one run."""

    of_run: tuple[JobRow, ...] = ()  # name this run in their log's path
    others: Mapping[int, Sequence[JobRow]] = field(default_factory=dict)  # name no run, by id
    trouble: str = ""  # why Slurm did not answer


def standing_of(view: RunView, queue: Queue, now: float) -> Standing:
    """Determine the state of a run.  Damaged files in the directory raise no exception."""
    found = _judged(view, queue, now)
    # It may have ended after its files were read and before its processes were looked for: they are final now.
    return _judged(RunView(view.layout), queue, now) if found.state is State.LOST else found


def _judged(view: RunView, queue: Queue, now: float) -> Standing:
    found = Standing(view, State.LOST, queue.of_run, where=_nodes(queue.of_run))
    if view.damage:
        return replace(found, state=State.DAMAGED, remark=view.damage)
    if "summary.json" in view.names:
        remark = "its jobs end" if _living(queue.of_run) else ""
        return replace(found, state=State.COMPLETE, where=_host(view), remark=remark)
    try:
        records = _records(view)
    except (RunDirectoryError, OSError, TypeError) as error:  # records with words for numbers cannot be sorted
        return replace(found, state=State.DAMAGED, remark=f"job records: {error}")
    found = replace(found, rows=(*queue.of_run, *_recorded(view.name, records, queue.others)))
    return _alive_here(found, records) or _not_here(found, records, queue.trouble, now)


def _host(view: RunView) -> str:
    return view.attempt.host if view.attempt is not None else ""


def _records(view: RunView) -> Sequence[JobRecord]:
    records = view.jobs if "jobs" in view.names else []
    for record in records:
        if not isinstance(record.job_id, int) or not isinstance(record.submitted_unix_s, int | float):
            raise RunDirectoryError(f"{record.job_id!r} is not a job id, or {record.submitted_unix_s!r} not a time")
    return records


def _recorded(name: str, records: Sequence[JobRecord], others: Mapping[int, Sequence[JobRow]]) -> Iterator[JobRow]:
    """Jobs known from the run's records only.  If a site resets its job counter, an id may be another job's."""
    for record in records:
        yield from (
            row for row in others.get(record.job_id, ()) if row.name.partition(".")[0] == name.partition(".")[0]
        )


def _living(rows: Sequence[JobRow]) -> tuple[JobRow, ...]:
    return tuple(row for row in rows if row.state.is_alive)


# ------------------------------------------------------------------------------------------------------- what is alive


def _alive_here(found: Standing, records: Sequence[JobRecord]) -> Standing | None:
    """State by live jobs of Slurm or live processes of this machine; None: there are none."""
    controller_jobs, living = {record.job_id for record in records if record.hosts_controller}, _living(found.rows)
    controller_rows = [
        row for row in living if not row.component and (row.job_id in controller_jobs or not controller_jobs)
    ]
    if controller_rows and not (
        all(row.state.life is JobStage.ENDING for row in controller_rows) and _told(found, records)
    ):
        return _in_slurm(found, living, controller_rows)
    if (pid := found.view.launcher_pid) is not None:
        return replace(found, state=_phase(found.view), where=socket.gethostname(), remark=f"launcher pid {pid}")
    return None


def _not_here(found: Standing, records: Sequence[JobRecord], trouble: str, now: float) -> Standing:
    """State without known live processes: ended, or alive on another machine."""
    view, host = found.view, _host(found.view)
    is_submitted = _is_submitted(view, records)
    told = _told(found, records) if is_submitted else None
    silent_s = now - max(view.status_unix_s, 0.0 if is_submitted else view.launcher_unix_s)
    if told is None and silent_s < LIVES_ELSEWHERE_S and view.phase != "stopped":
        if is_submitted:
            remark = "" if trouble else f"none of its jobs is in this queue; its status is {silent_s:.0f} s old"
            return replace(found, state=_phase(view), where=host, remark=remark)
        if host != socket.gethostname():
            return replace(found, state=_phase(view), where=host)
    if told is None and is_submitted and trouble:
        return replace(found, state=State.UNKNOWN, where=host, remark="Slurm has not said")
    state, remark = told or _silent_end(found, is_submitted)
    if living := _living(found.rows):  # jobs other than the controller's
        remark = "; ".join(filter(None, (remark, f"still there: {', '.join(row.label for row in living)}")))
    return replace(found, state=state, where=host, remark=remark)


def _is_submitted(view: RunView, records: Sequence[JobRecord]) -> bool:
    """True if the newest start of the run was as jobs."""
    newest = view.attempt
    return bool(records) and (newest is None or newest.is_in_a_job or records[-1].submitted_unix_s > newest.unix_time_s)


def _in_slurm(found: Standing, living: tuple[JobRow, ...], controller_rows: Sequence[JobRow]) -> Standing:
    """State by the job with the controller; its successor waits while the job runs."""
    there = [row for row in controller_rows if row.state.life not in (JobStage.WAITING, JobStage.HELD)]
    controller_row, names = (there or controller_rows)[0], found.view.names
    state, remark = State.QUEUED, ""
    if there:
        is_of_this_life = found.view.status_unix_s > (controller_row.start_unix_s or 0.0) - _CLOCK_SKEW_S
        state = _phase(found.view) if is_of_this_life else State.STARTING
    elif controller_row.state.life is JobStage.HELD or is_stuck(controller_row.reason):
        remark = f"stays in the queue: {reason_in_words(controller_row.reason) or controller_row.state.sentence}"
    elif controller_row.reason:
        remark = reason_in_words(controller_row.reason)
    if {"STOP", "ABORT"} & names:
        remark = "is being stopped"
    waiting = {part for row in living if row.state.life is JobStage.WAITING and (part := row.partition)}
    if there and waiting and state is State.STARTING and not remark:
        remark = f"waits for jobs in {', '.join(sorted(waiting))}"
    return replace(
        found,
        state=state,
        where=_nodes(living, controller_row),
        remark=remark.replace("JOB", str(controller_row.job_id)),
    )


def _phase(view: RunView) -> State:
    return State.RUNNING if view.phase in ("replaying", "training", "complete", "stopped") else State.STARTING


# -------------------------------------------------------------------------------------------------------- how it ended


def _told(found: Standing, records: Sequence[JobRecord]) -> tuple[State, str] | None:
    """Recorded end of the job with the controller, or else its end by Slurm; None: neither is known."""
    controller_job = next((record for record in reversed(records) if record.hosts_controller), None)
    if controller_job is None:
        return None
    cause, _, text = last_outcome(found.view.layout, str(controller_job.job_id)).partition(": ")
    known = Cause.__members__.get(cause.upper())
    if known in _STOPS:
        return State.STOPPED, "" if known is Cause.STOP else known.words
    if known is not None and known not in _GOES_ON:
        return State.FAILED, text
    row = next((row for row in found.rows if row.job_id == controller_job.job_id and not row.component), None)
    if row is None or row.state.ended_by in (EndedBy.NOBODY, EndedBy.SUCCESS):
        return None
    state = State.STOPPED if row.state.ended_by is EndedBy.PERSON else State.FAILED
    return state, f"job {row.label} {row.state.name}"


def _silent_end(found: Standing, is_submitted: bool) -> tuple[State, str]:
    """State by files of the roles, if nothing is alive and no job has recorded an end."""
    view = found.view
    is_asked = bool({"STOP", "ABORT"} & view.names)
    # Processes that were slow to exit were then ended by a signal, also before there was a controller.
    if is_asked and (view.phase in ("stopped", "") or "ABORT" in view.names):
        return State.STOPPED, ""
    if not is_submitted and (error := view.recorded_failure):
        return State.FAILED, error
    if view.phase == "stopped" or is_asked:
        return State.STOPPED, ""
    if not is_submitted and (error := view.fatal_error):
        return State.FAILED, error
    if view.attempt is None and not is_submitted:
        is_on = view.root.with_name(f".{view.root.name}.submitting").exists()
        return State.NEW, "is being submitted" if is_on else "never started"
    if view.attempt is None:
        return State.LOST, "its jobs have left the queue, and none had started"
    return State.LOST, "" if view.phase else "ended before its controller started"


def standing_now(view: RunView) -> Standing:
    """Determine the state of one run; Slurm is asked only where the run's files do not tell.  Raises OSError."""
    found = standing_of(view, Queue(trouble="not asked"), time.time())
    if found.state is not State.UNKNOWN:
        return found
    asked = look_at_my_jobs() if view.is_mine else MyQueue((), _NOT_ASKED)
    by_run, others = _jobs_by_run(asked, [view])
    return standing_of(view, Queue(tuple(by_run.get(view.identity, ())), others, asked.trouble), time.time())


# --------------------------------------------------------------------------------------------------------------- where


def _nodes(living: Sequence[JobRow], controller_row: JobRow | None = None) -> str:
    """The controller's node, and the partitions of all jobs: "c0 (cpu, gen, train)"."""
    partitions = ", ".join(sorted({row.partition for row in living if row.partition}))
    return " ".join(
        filter(None, (controller_row.nodes if controller_row else "", f"({partitions})" if partitions else ""))
    )


# ---------------------------------------------------------------------------------------------------------- evaluations


def lines_about(past: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """A line for each dataset: the newest figure, and the best one."""
    return [f"evaluation  {name}: {_newest(steps)}" for name, steps in past.items() if any(steps.values())]


def _newest(steps: dict[int, dict[str, Any]]) -> str:
    step, figures = [(step, figures) for step, figures in steps.items() if figures][-1]
    figure, newest = next(iter(figures.items()))
    values = {at: each[figure]["value"] for at, each in steps.items() if figure in each}
    best = max(values, key=lambda at: values[at])
    said = f"{figure} {newest['value']:.3f} [{newest['low']:.3f}, {newest['high']:.3f}] at step {step}"
    return said if best == step else f"{said}; the best was {values[best]:.3f} at step {best}"


# --------------------------------------------------------------------------------------------------------------- survey

_NOT_ASKED = "another user's jobs are not queried"


@dataclass(frozen=True, slots=True)
class Survey:
    """All runs, the latest sign of life first."""

    runs: tuple[Standing, ...]
    remarks: tuple[str, ...]
    now: float


def survey(tops: Sequence[Path], depth: int = DEPTH, queue: MyQueue | None = None) -> Survey:
    """Find the runs and their states.  queue: used instead of asking Slurm.  Raises nothing."""
    found = find_runs(tops, depth)
    asked = look_at_my_jobs() if queue is None else queue
    runs = {view.identity: view for view in found.runs}
    remarks = [*found.remarks, *_elsewhere(asked, runs)]
    by_run, others = _jobs_by_run(asked, runs.values())
    now = time.time()

    def judge(view: RunView) -> Standing:
        view.read_ahead()
        trouble = asked.trouble if view.is_mine else _NOT_ASKED
        return standing_of(view, Queue(tuple(by_run.get(view.identity, ())), others, trouble), now)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        judged = sorted(pool.map(judge, runs.values()), key=lambda each: -each.view.last_sign_unix_s)
    # A machine without Slurm gets no remark, unless a run needs Slurm.
    if asked.trouble and (asked.is_there or any(run.state is State.UNKNOWN for run in judged)):
        remarks.append(asked.trouble)
    return Survey(tuple(judged), tuple(remarks), now)


def _elsewhere(queue: MyQueue, runs: dict[Identity, RunView]) -> list[str]:
    """Add runs that are in the queue but not in the searched directories; returns problems with these."""
    remarks, known = [], {view.root for view in runs.values()}
    waiting = {job.run_directory: job.row for job in queue.jobs if job.run_directory and job.row.state.is_alive}
    for root in waiting.keys() - known:
        view = _list(root).run
        if view is None:
            remarks.append(f"job {waiting[root].label}: its run directory {root} does not exist; `scancel` ends it")
        elif view.identity not in runs:
            runs[view.identity] = view
    return sorted(remarks)


def _jobs_by_run(
    queue: MyQueue, runs: Iterable[RunView]
) -> tuple[dict[Identity, list[JobRow]], dict[int, list[JobRow]]]:
    """Rows by the run directory in their log's path, and rows without one by id."""
    names = {view.root: view.identity for view in runs}
    by_run: dict[Identity, list[JobRow]] = defaultdict(list)
    others: dict[int, list[JobRow]] = defaultdict(list)
    for job in queue.jobs:
        root = job.run_directory
        if root is None:
            others[job.row.job_id].append(job.row)
            continue
        with suppress(OSError):  # the directory was deleted
            by_run[names.get(root) or RunView(RunLayout(root)).identity].append(job.row)
    return by_run, others
