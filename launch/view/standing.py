"""All runs below some directories and in the queue, with their states; Slurm is queried once for all.

Input: directories.  Output: Survey, sorted by the last sign of activity.
"""

from __future__ import annotations

import json
import math
import os
import re
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

from launch.common.text import without_dots, written_unix_s
from launch.run_directory.owner import launcher_of
from launch.run_directory.prepare import LIVES_ELSEWHERE_S
from launch.run_files.records import JobRecord, read_failures, read_job_records
from launch.run_files.run_state import Cause, last_outcome, lines_from_the_end, read_document, run_name, saved_step
from launch.slurm.queue import JobRow, MyQueue, look_at_my_jobs
from launch.slurm.states import EndedBy, JobStage, is_stuck, reason_in_words
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.evaluations import SUMMARY
from rlhpc.protocol.errors import ConfigError, RunDirectoryError
from rlhpc.training.checkpoint_directory import AttemptTimeline

# ----------------------------------------------------------------------------------------------------------------- find
#
# Find run directories below a directory, fast on a slow filesystem and safe in an unknown one.
#
# Input: a directory.  Output: one RunFiles for each run, with the names its directory lists.  Guarantees: no directory
# is read twice, whatever the symbolic links; run directories are not searched for other runs; depth and number are
# bounded, and what was skipped is reported.


DEPTH = 4  # levels below the directory that is given
MOST_DIRECTORIES = 50_000
_AT_ONCE = 16  # a directory on NFS takes a millisecond, most of it waiting
# Entries that a run directory has, with config.json beside them.  One alone proves nothing: a model has config.json,
# another program checkpoints.
_MARKS = frozenset(("attempts.jsonl", "checkpoints", "jobs", "job_plan.json", "launcher.json", "rendezvous",
                    "rollouts", "status.json"))  # fmt: skip
_LOST_ITS_CONFIG = 3  # this many of them mark a run directory without config.json
Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run directory, as it was listed."""

    root: Path
    identity: Identity  # device and inode
    owner: int  # uid
    names: frozenset[str]
    config: dict[str, Any]  # of config.json, {} if it is damaged
    damage: str = ""

    @property
    def layout(self) -> RunLayout:
        """The run's paths."""
        return RunLayout(self.root)

    @property
    def name(self) -> str:
        """The run's."""
        return run_name(self.config, self.root)


@dataclass(slots=True)
class Found:
    """The runs found, and remarks on the search."""

    runs: list[RunFiles] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Listing:
    path: Path
    identity: Identity
    run: RunFiles | None = None
    below: tuple[Path, ...] = ()
    trouble: str = ""


def find_runs(tops: Iterable[Path], depth: int = DEPTH) -> Found:
    """Look at directories and `depth` levels below them, a level at a time.

    Passes over hidden directories.  Raises nothing: what cannot be read is a remark.
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
    """Those that are given, or runs/ if it exists, or the current one.  Raises ConfigError: no such directory.

    Absolute, so that it equals the queue's name of the directory.
    """
    for directory in given:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; `rlhpc list` shows the runs below runs/")
    default = Path("runs") if Path("runs").is_dir() else Path()
    return [without_dots(directory) for directory in given or [default]]


def run_at(root: Path) -> RunFiles | None:
    """The run in this very directory; None if there is none."""
    return _list(root).run


def _list(path: Path) -> _Listing:
    try:
        stat = path.stat()
        identity = (stat.st_dev, stat.st_ino)
        with os.scandir(path) as entries:
            listed = list(entries)
    except OSError as error:
        return _Listing(path, (0, 0), trouble=f"{path}: {error.strerror}")
    names = frozenset(entry.name for entry in listed)
    read = _config_of(path, names)
    if read is not None:
        return _Listing(path, identity, RunFiles(path, identity, stat.st_uid, names, *read))
    return _Listing(path, identity, below=tuple(_directories(path, listed)))


def _directories(path: Path, entries: Iterable[os.DirEntry[str]]) -> Iterator[Path]:
    """Real ones before links: of two names of a run the real one is shown."""
    links = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        with suppress(OSError):  # a link that leads nowhere, or in a circle
            if not entry.is_dir():
                continue
            if entry.is_symlink():
                links.append(path / entry.name)
            else:
                yield path / entry.name
    yield from links


def _config_of(path: Path, names: frozenset[str]) -> tuple[dict[str, Any], str] | None:
    """Settings and damage of a run directory; None: it is none."""
    num_marks = len(names & _MARKS)
    if "config.json" not in names:
        return ({}, "config.json is missing") if num_marks >= _LOST_ITS_CONFIG else None
    if not num_marks:
        return None
    trouble = "config.json is not that of a run"
    try:
        document = json.loads((path / "config.json").read_bytes())
    except OSError as error:
        document, trouble = None, f"config.json: {error.strerror}"
    except ValueError:
        document, trouble = None, "config.json is damaged"
    if isinstance(document, dict) and isinstance(document.get("config"), dict) and "hash" in document:
        return document["config"], ""
    return ({}, trouble) if num_marks >= _LOST_ITS_CONFIG else None


# -------------------------------------------------------------------------------------------------------------- figures
#
# Figures read from the files of one run directory, whether or not a process is alive in it.
#
# Input: RunFiles.  Output: Figures.  A file that is missing, damaged or of another form counts as absent: nothing
# raises.


_WRITTEN_BY_LIFE = ("status.json", "attempts.jsonl", "summary.json", "config.json", "launcher.json", "jobs")
_MOST_LOGS = 32
_FATAL = " rlhpc.lifecycle ERROR "  # in the log line of a role's fatal error (rlhpc/roles/lifecycle.py)


@dataclass(frozen=True, slots=True)
class Figures:
    """How far a run has come."""

    name: str
    phase: str  # of status.json; "" if there is none
    step: int | None
    num_steps: int | None
    reward: float | None  # None before the first step
    status_unix_s: float  # when the controller last wrote; 0: it has not
    launcher_unix_s: float  # when a launcher of `rlhpc run` last wrote: it does every other second
    began_unix_s: float | None  # when the first attempt began
    last_sign_unix_s: float
    attempt: int | None  # the newest; None: none has begun
    attempt_unix_s: float  # when it began; 0: none has
    is_in_a_job: bool  # the newest attempt is a Slurm job's
    host: str  # of the newest attempt


def read_figures(files: RunFiles) -> Figures:
    """Read status, attempts and times of one directory."""
    layout, names = files.layout, files.names
    status = read_document(layout.status) if "status.json" in names else {}
    first, last = _attempts(layout.attempts) if "attempts.jsonl" in names else ({}, {})
    settings = files.config.get("run")
    settings = settings if isinstance(settings, dict) else {}
    written = {name: written_unix_s(files.root / name) for name in _WRITTEN_BY_LIFE if name in names}
    step = _integer(status.get("step"))
    if step is None and "summary.json" in names:
        step = _integer(read_document(layout.summary).get("steps"))
    elif step is None and "checkpoints" in names:
        step = saved_step(layout)
    return Figures(
        name=files.name,
        phase=str(status.get("phase", "")),
        step=step,
        num_steps=_integer(settings.get("num_steps")),
        reward=_number(status.get("reward")) if step else None,
        status_unix_s=written["status.json"] if status else 0.0,
        launcher_unix_s=written.get("launcher.json", 0.0),
        began_unix_s=_number(first.get("unix_time_s")),
        last_sign_unix_s=max(written.values(), default=0.0),
        attempt=_integer(last.get("index")),
        attempt_unix_s=_number(last.get("unix_time_s")) or 0.0,
        is_in_a_job=bool(last.get("job_id")),  # 0: an attempt of `rlhpc run`, on one machine
        host=str(last.get("host", "")),
    )


def recorded_failure(files: RunFiles, attempt: int | None) -> str:
    """The cause of the first failure that the launcher recorded; "" if there is none, or the launcher died as well."""
    if attempt is None or "logs" not in files.names:
        return ""
    failures = read_failures(files.layout, attempt)
    return failures[0].cause if failures else ""


def fatal_error(files: RunFiles, attempt: int | None) -> str:
    """The fatal error that a role of an attempt logged first, "trainer-0: …"; "" if there is none."""
    if attempt is None or "logs" not in files.names:
        return ""
    logs = sorted(files.layout.logs.glob(f"*/attempt_{attempt}.log"))[:_MOST_LOGS]
    said = [line for log in logs if (line := _last_fatal(log))]
    if not said:
        return ""
    _, _, role, words = min(said).split(" ", 3)  # each begins with its date and time
    return f"{role}: {words.partition(_FATAL.lstrip())[2]}"


def _last_fatal(log: Path) -> str:
    lines = (line.decode(errors="replace") for line in lines_from_the_end(log))
    return next((line for line in lines if _FATAL in line and line.count(" ") > 4), "")


def _attempts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first line and the last whole one."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}, {}
    whole = [line for line in map(_object, [*lines[:1], *lines[-2:]]) if line]
    return (whole[0], whole[-1]) if whole else ({}, {})


def _object(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


# ------------------------------------------------------------------------------------------------------------- standing
#
# The state of a run: which processes or jobs are alive, or how it ended.
#
# Input: RunFiles and the run's lines of the queue.  Output: Standing.  Pure except that it reads the directory.
# Slurm and the process table are trusted first, then a status file that is still being updated; a run that says
# "training" while nothing is alive is lost.


_CLOCK_SKEW_S = 60.0  # between a node that writes and slurmctld
_STOPS = {Cause.STOP, Cause.ABORT, Cause.SIGNAL}
_GOES_ON = {Cause.TIME, Cause.YIELD, Cause.FENCED}  # another attempt was to follow


class State(StrEnum):
    """The state of a run."""

    QUEUED = "queued"  # its controller waits for nodes
    STARTING = "starting"  # a part of it is alive, and no step has begun
    RUNNING = "running"
    STOPPED = "stopped"  # on request, or cancelled; a resume goes on
    FAILED = "failed"
    COMPLETE = "complete"
    LOST = "lost"  # its status says that it is running, but nothing is alive
    NEW = "new"  # never started
    UNKNOWN = "unknown"  # a Slurm run, and Slurm does not answer
    DAMAGED = "damaged"

    @property
    def is_alive(self) -> bool:
        """True while a part of it runs or waits to run, or that is not known."""
        return self in (State.QUEUED, State.STARTING, State.RUNNING, State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Standing:
    """Everything that a line says about a run."""

    files: RunFiles
    figures: Figures
    state: State
    rows: tuple[JobRow, ...] = ()
    where: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Queue:
    """What Slurm says of this user's jobs."""

    of_run: tuple[JobRow, ...] = ()  # that name this run themselves
    others: Mapping[int, Sequence[JobRow]] = field(default_factory=dict)  # that name no run, by id
    trouble: str = ""  # why Slurm did not answer


def standing_of(files: RunFiles, queue: Queue, now: float) -> Standing:
    """Judge one run.  Raises nothing that a file in the directory can cause."""
    found = Standing(files, read_figures(files), State.LOST, queue.of_run, where=_nodes(queue.of_run))
    if files.damage:
        return replace(found, state=State.DAMAGED, remark=files.damage)
    if "summary.json" in files.names:
        remark = "its jobs end" if _living(queue.of_run) else ""
        return replace(found, state=State.COMPLETE, where=found.figures.host, remark=remark)
    try:
        records = _records(files)
    except (RunDirectoryError, OSError, TypeError) as error:  # a record whose numbers are words cannot be sorted
        return replace(found, state=State.DAMAGED, remark=f"job records: {error}")
    found = replace(found, rows=(*queue.of_run, *_recorded(found.figures.name, records, queue.others)))
    return _alive_here(found, records) or _not_here(found, records, queue.trouble, now)


def _records(files: RunFiles) -> tuple[JobRecord, ...]:
    records = tuple(read_job_records(files.layout)) if "jobs" in files.names else ()
    for record in records:
        if not isinstance(record.job_id, int) or not isinstance(record.submitted_unix_s, int | float):
            raise RunDirectoryError(f"{record.job_id!r} is not a job id, or {record.submitted_unix_s!r} not a time")
    return records


def _recorded(name: str, records: Sequence[JobRecord], others: Mapping[int, Sequence[JobRow]]) -> Iterator[JobRow]:
    """Jobs that only the run's records name.  If a site resets its job counter, an id may be another job's."""
    for record in records:
        yield from (
            row for row in others.get(record.job_id, ()) if row.name.partition(".")[0] == name.partition(".")[0]
        )


def _living(rows: Sequence[JobRow]) -> tuple[JobRow, ...]:
    return tuple(row for row in rows if row.state.is_alive)


# ------------------------------------------------------------------------------------------------------- what is alive


def _alive_here(found: Standing, records: Sequence[JobRecord]) -> Standing | None:
    """Alive by Slurm, or by this machine's processes; None: neither knows of anything alive."""
    controller_jobs, living = {record.job_id for record in records if record.hosts_controller}, _living(found.rows)
    controller_rows = [
        row for row in living if not row.component and (row.job_id in controller_jobs or not controller_jobs)
    ]
    if controller_rows and not (
        all(row.state.life is JobStage.ENDING for row in controller_rows) and _told(found, records)
    ):
        return _in_slurm(found, living, controller_rows)
    if (pid := launcher_of(found.files.layout)) is not None:
        return replace(found, state=_phase(found.figures), where=socket.gethostname(), remark=f"launcher pid {pid}")
    return None


def _not_here(found: Standing, records: Sequence[JobRecord], trouble: str, now: float) -> Standing:
    """Ended, or alive where it cannot be seen from here."""
    figures, is_submitted = found.figures, _is_submitted(found.figures, records)
    told = _told(found, records) if is_submitted else None
    silent_s = now - max(figures.status_unix_s, 0.0 if is_submitted else figures.launcher_unix_s)
    if told is None and silent_s < LIVES_ELSEWHERE_S and figures.phase != "stopped":
        if is_submitted:
            remark = "" if trouble else f"none of its jobs is in this queue; its status is {silent_s:.0f} s old"
            return replace(found, state=_phase(figures), where=figures.host, remark=remark)
        if figures.host != socket.gethostname():
            return replace(found, state=_phase(figures), where=figures.host)
    if told is None and is_submitted and trouble:
        return replace(found, state=State.UNKNOWN, where=figures.host, remark="Slurm has not said")
    state, remark = told or _silent_end(found, is_submitted)
    if living := _living(found.rows):  # jobs other than the controller's
        remark = "; ".join(filter(None, (remark, f"still there: {', '.join(row.label for row in living)}")))
    return replace(found, state=state, where=figures.host, remark=remark)


def _is_submitted(figures: Figures, records: Sequence[JobRecord]) -> bool:
    """True if the newest start of the run was as jobs."""
    return bool(records) and (figures.is_in_a_job or records[-1].submitted_unix_s > figures.attempt_unix_s)


def _in_slurm(found: Standing, living: tuple[JobRow, ...], controller_rows: Sequence[JobRow]) -> Standing:
    """The state by the job with the controller; a successor waits while the one before it runs."""
    there = [row for row in controller_rows if row.state.life not in (JobStage.WAITING, JobStage.HELD)]
    controller_row, names = (there or controller_rows)[0], found.files.names
    state, remark = State.QUEUED, ""
    if there:
        is_of_this_life = found.figures.status_unix_s > (controller_row.start_unix_s or 0.0) - _CLOCK_SKEW_S
        state = _phase(found.figures) if is_of_this_life else State.STARTING
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


def _phase(figures: Figures) -> State:
    return State.RUNNING if figures.phase in ("replaying", "training", "complete", "stopped") else State.STARTING


# -------------------------------------------------------------------------------------------------------- how it ended


def _told(found: Standing, records: Sequence[JobRecord]) -> tuple[State, str] | None:
    """What the job with the controller said of its end, or else what Slurm still knows of it."""
    controller_job = next((record for record in reversed(records) if record.hosts_controller), None)
    if controller_job is None:
        return None
    cause, _, text = last_outcome(found.files.layout, str(controller_job.job_id)).partition(": ")
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
    """Nothing is alive and no job has said why: the state by what the roles have written."""
    files, figures = found.files, found.figures
    is_asked = bool({"STOP", "ABORT"} & files.names)
    # Whoever was slow to leave then was ended by a signal, also before there was a controller.
    if is_asked and (figures.phase in ("stopped", "") or "ABORT" in files.names):
        return State.STOPPED, ""
    if not is_submitted and (error := recorded_failure(files, figures.attempt)):
        return State.FAILED, error
    if figures.phase == "stopped" or is_asked:
        return State.STOPPED, ""
    if not is_submitted and (error := fatal_error(files, figures.attempt)):
        return State.FAILED, error
    if figures.attempt is None and not is_submitted:
        is_on = files.root.with_name(f".{files.root.name}.submitting").exists()
        return State.NEW, "is being submitted" if is_on else "never started"
    if figures.attempt is None:
        return State.LOST, "its jobs have left the queue, and none had started"
    return State.LOST, "" if figures.phase else "ended before its controller started"


# --------------------------------------------------------------------------------------------------------------- where


def _nodes(living: Sequence[JobRow], controller_row: JobRow | None = None) -> str:
    """The controller's node, and the partitions of all: "c0 (cpu, gen, train)"."""
    partitions = ", ".join(sorted({row.partition for row in living if row.partition}))
    return " ".join(
        filter(None, (controller_row.nodes if controller_row else "", f"({partitions})" if partitions else ""))
    )


def is_mine(files: RunFiles) -> bool:
    """False for another user's run, whose jobs are not queried."""
    return files.owner == os.geteuid()


# ---------------------------------------------------------------------------------------------------------- evaluations
#
# The evaluations of a run that are done, from their directories.
#
# Input: a run directory.  Output: DoneEvaluation.  One whose step a later attempt has undone is marked: its model is
# not the run's any more.


_DIRECTORY = re.compile(r".*-step_(\d{6,})-(.+)")  # RunLayout.checkpoint's digits: "step_2" may be in a name


@dataclass(frozen=True, slots=True)
class DoneEvaluation:
    """One dataset, at one step."""

    name: str  # of the dataset
    step: int
    figures: dict[str, Any]  # each with value, low, high
    is_undone: bool


def done_evaluations(layout: RunLayout) -> Iterator[DoneEvaluation]:
    """In no order; what is damaged, or begun anew, is left out.  Raises OSError: attempts.jsonl cannot be read."""
    timeline = AttemptTimeline.read(layout.attempts)
    for path in layout.evaluations.glob(f"*/{SUMMARY}"):
        if match := _DIRECTORY.fullmatch(path.parent.name):
            try:
                document, step = json.loads(path.read_bytes()), int(match[1])
                figures = {name: worth for name, worth in document["figures"].items() if _has_interval(worth)}
                is_undone = timeline.undone_by(step, document.get("attempt")) is not None
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            yield DoneEvaluation(match[2], step, figures, is_undone)


def _has_interval(worth: object) -> bool:
    return isinstance(worth, dict) and all(isinstance(worth.get(key), int | float) for key in ("value", "low", "high"))


# ----------------------------------------------------------------------------------------------------------------- past
#
# Results of a run's evaluations so far, from their directories.
#
# Input: a run directory.  Output: figures by dataset and step; lines for people.  Steps that a later attempt has undone
# are left out: their models are not the run's any more.


def past_evaluations(layout: RunLayout) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by name of the dataset and step, ascending, of evaluations that are done."""
    found: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for each in done_evaluations(layout):
        if not each.is_undone:
            found[each.name][each.step] = each.figures
    return {name: dict(sorted(steps.items())) for name, steps in sorted(found.items())}


def past_values(layout: RunLayout, name: str, figure: str) -> dict[int, float]:
    """One figure of one dataset by step."""
    steps = past_evaluations(layout).get(name, {})
    return {step: float(figures[figure]["value"]) for step, figures in steps.items() if figure in figures}


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
    runs = {files.identity: files for files in found.runs}
    remarks = [*found.remarks, *_elsewhere(asked, runs)]
    by_run, others = _jobs_by_run(asked, runs.values())
    now = time.time()

    def judge(files: RunFiles) -> Standing:
        trouble = asked.trouble if is_mine(files) else _NOT_ASKED
        return standing_of(files, Queue(tuple(by_run.get(files.identity, ())), others, trouble), now)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        judged = sorted(pool.map(judge, runs.values()), key=lambda each: -each.figures.last_sign_unix_s)
    # Without a Slurm here nothing is said about it, unless a run needs it.
    if asked.trouble and (asked.is_there or any(run.state is State.UNKNOWN for run in judged)):
        remarks.append(asked.trouble)
    return Survey(tuple(judged), tuple(remarks), now)


def _elsewhere(queue: MyQueue, runs: dict[Identity, RunFiles]) -> list[str]:
    """Add runs that are in the queue but in no directory that was searched; returns problems with them."""
    remarks, known = [], {files.root for files in runs.values()}
    waiting = {job.run_directory: job.row for job in queue.jobs if job.run_directory and job.row.state.is_alive}
    for root in waiting.keys() - known:
        files = run_at(root)
        if files is None:
            remarks.append(f"job {waiting[root].label}: its run directory {root} does not exist; `scancel` ends it")
        elif files.identity not in runs:
            runs[files.identity] = files
    return sorted(remarks)


def _jobs_by_run(
    queue: MyQueue, runs: Iterable[RunFiles]
) -> tuple[dict[Identity, list[JobRow]], dict[int, list[JobRow]]]:
    """Rows by the directory that their log names, and by id those whose log names none."""
    names = {files.root: files.identity for files in runs}
    by_run: dict[Identity, list[JobRow]] = defaultdict(list)
    others: dict[int, list[JobRow]] = defaultdict(list)
    for job in queue.jobs:
        root = job.run_directory
        if root is None:
            others[job.row.job_id].append(job.row)
        elif identity := names.get(root) or _identity(root):
            by_run[identity].append(job.row)
    return by_run, others


def _identity(root: Path) -> Identity | None:
    try:
        stat = root.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
