"""The state of a run: which processes or jobs are alive, or how it ended.

Input: RunFiles and the run's lines of the queue.  Output: Standing.  Pure except that it reads the directory.
Slurm and the process table are trusted first, then a status file that is still being updated; a run that says
"training" while nothing is alive is lost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from launch.commands.overview.figures import Figures, fatal_error, read_figures, recorded_failure
from launch.commands.overview.find import RunFiles
from launch.run_directory.owner import launcher_of
from launch.run_directory.prepare import LIVES_ELSEWHERE_S
from launch.run_files.events import last_outcome
from launch.run_files.job_records import JobRecord, read_records
from launch.run_files.outcome import Cause
from launch.slurm.queue import JobRow
from launch.slurm.reasons import is_stuck, reason_in_words
from launch.slurm.states import EndedBy, Life
from rlhpc.errors import RunDirectoryError

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
    records = tuple(read_records(files.layout)) if "jobs" in files.names else ()
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
        all(row.state.life is Life.ENDING for row in controller_rows) and _told(found, records)
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
    there = [row for row in controller_rows if row.state.life not in (Life.WAITING, Life.HELD)]
    controller_row, names = (there or controller_rows)[0], found.files.names
    state, remark = State.QUEUED, ""
    if there:
        is_of_this_life = found.figures.status_unix_s > (controller_row.start_unix_s or 0.0) - _CLOCK_SKEW_S
        state = _phase(found.figures) if is_of_this_life else State.STARTING
    elif controller_row.state.life is Life.HELD or is_stuck(controller_row.reason):
        remark = f"stays in the queue: {reason_in_words(controller_row.reason) or controller_row.state.sentence}"
    elif controller_row.reason:
        remark = reason_in_words(controller_row.reason)
    if {"STOP", "ABORT"} & names:
        remark = "is being stopped"
    waiting = {part for row in living if row.state.life is Life.WAITING and (part := row.partition)}
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
