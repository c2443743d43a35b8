"""The jobs of a run under Slurm, in words: each one's part of the run, state, reason for waiting, and next events.

Input: the run directory and the answer of launch/slurm/queue.py.  Output: SlurmView, lines of text and a JSON document.
Missing files count as empty.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.common.text import aligned, quoted, span
from launch.run_files.records import JobRecord, service_of_job
from launch.run_files.run_state import Event, last_events, read_document, saved_step, stated_name
from launch.slurm.queue import ANSWER_S, JobRow, QueueLook, look_at_jobs
from launch.slurm.states import JobStage, is_stuck, reason_in_words
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout

EARLY_S = 60  # an end this long before the time limit has another cause: Slurm enforces the limit within seconds
NUM_EVENTS = 8  # shown, newest first; a run may have a hundred array tasks


@dataclass(frozen=True, slots=True)
class SlurmView:
    """All facts about a run's jobs at one moment."""

    layout: RunLayout
    jobs: tuple[JobRecord, ...]
    look: QueueLook
    attempt: dict[str, Any] | None  # attempt.json
    plan: dict[str, Any]  # job_plan.json; {} if there is none
    events: tuple[Event, ...]  # the last of all supervisors, newest first
    now: float
    retired: frozenset[str] = frozenset()  # tasks that `rlhpc scale` has retired: JOB_TASK

    @property
    def is_alive(self) -> bool:
        """True while a job of the run runs or may still run, or while Slurm does not answer."""
        return bool(self.look.trouble) or any(row.state.is_alive for row in self.look.rows)


def look_at_run(view: RunView, timeout_s: float | None = None) -> SlurmView:
    """Read the directory and query Slurm, once: milliseconds, or seconds if slurmctld is down.

    Raises RunDirectoryError for a damaged job record.
    """
    ids, layout = [job.job_id for job in view.jobs], view.layout
    look = look_at_jobs(ids, ANSWER_S if timeout_s is None else timeout_s, run_name=stated_name(view.settings))
    attempt, plan = read_document(layout.attempt), read_document(layout.job_plan)
    events, retired = (
        tuple(last_events(layout, NUM_EVENTS)),
        frozenset(each.stem for each in layout.jobs.glob("*.retired")),
    )
    return SlurmView(layout, tuple(view.jobs), look, attempt or None, plan, events, time.time(), retired)


def lines_of(view: SlurmView) -> list[str]:
    """Lines of `rlhpc status` about the jobs."""
    lines = [_attempt_line(view.attempt), ""]
    if view.look.trouble:
        lines += [view.look.trouble, f"jobs of this run: {', '.join(str(job.job_id) for job in view.jobs) or 'none'}"]
    else:
        lines += _table(view)
    lines += _section("WAITING", waits(view)) + _section("NEXT", upcoming(view))
    shown = view.events[:NUM_EVENTS]
    said = [f"{_clock(event.unix_time_s, view.now)}  job {event.name}: {event.text}" for event in shown]
    said += [f"earlier ones: {view.layout.jobs}/*.events.jsonl"] if len(shown) < len(view.events) else []
    return lines + _section("LAST EVENTS", said)


def document_of(view: SlurmView) -> dict[str, Any]:
    """The jobs as a JSON document."""
    return {
        "attempt": view.attempt,
        "is_alive": view.is_alive,
        "trouble": view.look.trouble,
        "unknown_jobs": list(view.look.unknown),
        "jobs": [_row_document(view, row) for row in view.look.rows],
        "waits": waits(view),
        "next": upcoming(view),
        "events": [
            {"job": event.name, "unix_time_s": event.unix_time_s, "event": event.event, "text": event.text}
            for event in view.events
        ],
    }


# --------------------------------------------------------------------------------------------------------------- table

_HEAD = ("JOB", "WHAT", "STATE", "RESTARTS", "FOR", "LEFT", "NODES", "WHY")


def _table(view: SlurmView) -> list[str]:
    rows: list[tuple[str, ...]] = [_HEAD]
    for index, row in enumerate(view.look.rows):
        *cells, reason = _cells(view, row)
        before = view.look.rows[index - 1] if index else None
        is_told = before is not None and before.job_id == row.job_id and reason == why(view, before)
        rows.append((*cells, "the same" if is_told else reason))
    rows += [(str(job), _record(view, job).name, "unknown", *"-----") for job in view.look.unknown]
    lines = aligned(rows)
    if view.look.unknown:
        lines.append("unknown: Slurm no longer knows the job, so it has ended")
    others = sorted({f"{row.job_id} is {row.name}" for row in view.look.others})
    return [*lines, *(f"of another run, perhaps of another cluster: here job {each}" for each in others)]


def _cells(view: SlurmView, row: JobRow) -> tuple[str, ...]:
    is_there = row.state.life in (JobStage.ON_NODES, JobStage.ENDING)
    return (
        row.label,
        what_it_is(view, row),
        row.state.name,
        "-" if row.restarts is None else str(row.restarts),
        span(row.used_s) if row.used_s else "-",
        span(row.left_s) if is_there and row.left_s is not None else "-",
        row.nodes or "-",
        why(view, row) or "-",
    )


def why(view: SlurmView, row: JobRow) -> str:
    """Reason for a job's state, with the remedy; "" if the job runs or is completed."""
    state = row.state
    if row.tasks and all(f"{row.job_id}_{task}" in view.retired for task in row.tasks):
        return f"{'is being retired' if state.is_alive else 'retired'} by `rlhpc scale`"
    if state.name in ("RUNNING", "COMPLETED"):
        return ""
    words = reason_in_words(row.reason)
    if not state.is_alive:
        words = "; ".join(filter(None, (_how_it_ended(row), _what_follows(view, row))))
    elif state.name != "PENDING":
        words = f"{state.sentence} ({words})" if words else state.sentence
    elif row.start_unix_s and row.start_unix_s > view.now:
        words = "; ".join(part for part in (words, f"starts about {_clock(row.start_unix_s, view.now)}") if part)
    return words.replace("JOB", str(row.job_id)).replace("RUN_DIR", str(view.layout.root))


def _how_it_ended(row: JobRow) -> str:
    early_s = (row.limit_s or 0) - (row.used_s or 0)
    if row.state.name == "TIMEOUT" and row.limit_s and row.used_s is not None and early_s > EARLY_S:
        return f"was ended {span(early_s)} before its time limit, as after the grace time of a preemption"
    return row.state.what


def _what_follows(view: SlurmView, row: JobRow) -> str:
    """Remedy for a job that has ended, or the run's own reaction (a resume is refused while the run is alive)."""
    job, remedy = _record(view, row.job_id), row.state.remedy
    if not view.is_alive or "rlhpc resume" not in remedy:
        return remedy
    successors = [other for other in view.jobs if other.follows == row.job_id and other.is_for(row.array_task)]
    if successors:
        return f"replaced by job {successors[-1].job_id}"
    if job.is_elastic:
        of_service = service_of_job(job.name)
        what = f"--service {of_service} +1" if of_service else "--generators +1"
        return f"`rlhpc scale RUN_DIR {what}` adds another"
    runs = any(other.state.life is JobStage.ON_NODES and _is_controller(view, other) for other in view.look.rows)
    if job.placement != "jobs" or job.hosts_controller or not runs:
        return ""
    if row.state.name == "CANCELLED":
        return "resubmitted if it is the last of its service" if service_of_job(job.name) else "not resubmitted"
    return "will be resubmitted by the controller's job"


def what_it_is(view: SlurmView, row: JobRow) -> str:
    """A job's part of the run: "trainer", "generator-0…3", "service-2 (judge)"; "(elastic)": by `rlhpc scale`."""
    job, name = _record(view, row.job_id), part_of(view, row)
    if job.numbered_role and row.component is None:
        service = service_of_job(job.name)
        name = _replicas(job, row) + (f" ({service})" if service else "")
    return f"{name} (elastic)" if job.is_elastic else name


def part_of(view: SlurmView, row: JobRow) -> str:
    """A job's component: controller, trainer, generation, service-NAME, rewards."""
    job = _record(view, row.job_id)
    if row.component is None:
        return job.name
    components: list[dict[str, Any]] = next(
        (each["components"] for each in view.plan.get("jobs", []) if each["name"] == job.name), []
    )
    return str(components[row.component]["name"]) if row.component < len(components) else f"component {row.component}"


def _replicas(job: JobRecord, row: JobRow) -> str:
    whole = f"0-{job.array_size - 1}" if job.array_size else "0"  # an array that never started is one row
    tasks = row.waiting_tasks or (whole if row.array_task is None else str(row.array_task))
    head, _, tail = tasks.partition("-")
    if not head.isdecimal() or (tail and not tail.isdecimal()):
        return job.name  # several ranges, "2,5-7", are in the id
    low = job.first_replica + int(head) * job.replicas_per_task
    high = job.first_replica + (int(tail or head) + 1) * job.replicas_per_task - 1
    return f"{job.numbered_role}-{low}" if high <= low else f"{job.numbered_role}-{low}…{high}"


# --------------------------------------------------------------------------------------------------- waiting, and next


def waits(view: SlurmView) -> list[str]:
    """Parts of the run that wait for others because of Slurm: parts on nodes wait for pending ones."""
    standing: dict[str, list[JobRow]] = {}
    for row in view.look.rows:
        if not _record(view, row.job_id).is_elastic:
            standing.setdefault(part_of(view, row), []).append(row)
    there = [part for part, rows in standing.items() if any(row.state.life is JobStage.ON_NODES for row in rows)]
    if not there or view.layout.summary.exists():
        return []
    *first, last = there
    subject = f"{', '.join(first)} and {last} wait" if first else f"{last} waits"
    return [
        f"{subject} for {part}: job {rows[-1].label} {rows[-1].state.name}{_until(view, rows[-1])}"
        for part, rows in standing.items()
        if part not in there
    ]


def upcoming(view: SlurmView) -> list[str]:
    """Next events without the user, and actions for the user."""
    layout = view.layout
    if layout.summary.exists():
        return ["the run is complete" + ("; its jobs end" if view.is_alive and not view.look.trouble else "")]
    if layout.abort_request.exists():
        said = "ABORT: all jobs end now; the step is saved only if it ends within seconds"
        return [said if view.is_alive else _resume(view)]
    if layout.stop_request.exists():
        return ["STOP: the step is finished and saved, then all jobs end" if view.is_alive else _resume(view)]
    if view.look.trouble or not view.jobs:
        return []
    if not view.is_alive:
        return [_resume(view)]
    lines = [line for row in view.look.rows if _is_controller(view, row) and (line := _limit_line(view, row))]
    held = {row.job_id: row for row in reversed(view.look.rows) if _is_held(row)}
    lines += [f"job {job} stays in the queue: {why(view, held[job])}" for job in sorted(held)]
    if view.look.drained:
        lines.append(f"drained nodes: {'; '.join(view.look.drained)}: tell the site's administrators")
    waiting = {row.job_id for row in view.look.rows if row.state.life is JobStage.WAITING}
    alive = {row.job_id for row in view.look.rows if row.state.is_alive}
    return lines + [
        f"job {job.job_id} continues the run when job {job.follows} has ended"
        for job in view.jobs
        if job.job_id in waiting and job.follows in alive
    ]


def _limit_line(view: SlurmView, row: JobRow) -> str:
    """Event of the controller's job at its time limit or start, in words."""
    if _is_held(row):
        return ""
    if row.state.life is JobStage.WAITING:
        return f"when job {row.label} starts, the run {_goes_on(view)}"
    if row.state.life is not JobStage.ON_NODES or row.left_s is None:
        return ""
    followed = any(job.follows == row.job_id for job in view.jobs) or view.plan.get("continuation") == "successor"
    # Only then it turns out whether the site allows a job to requeue itself; if not, the job submits a successor.
    then = "ends, and its successor continues" if followed else "is requeued or submits a successor, and continues"
    return f"before {_clock(view.now + row.left_s, view.now)}, its time limit, job {row.label} saves, {then}"


def _resume(view: SlurmView) -> str:
    dead = [
        row for row in view.look.rows if not row.state.is_alive and row.state.name not in ("COMPLETED", "CANCELLED")
    ]
    how = (
        f"first see why: `rlhpc logs {quoted(view.layout.root)} slurm`; then "
        if any(not row.state.is_worth_resuming for row in dead)
        else ""
    )
    return f"no job of this run is alive; {how}`rlhpc resume {quoted(view.layout.root)}` {_goes_on(view)}"


def _goes_on(view: SlurmView) -> str:
    step = saved_step(view.layout)
    return f"continues from step {step}" if step else "begins at step 0"


def _is_held(row: JobRow) -> bool:
    return row.state.life is JobStage.HELD or (row.state.life is JobStage.WAITING and is_stuck(row.reason))


def _is_controller(view: SlurmView, row: JobRow) -> bool:
    return part_of(view, row) == "controller"


def _until(view: SlurmView, row: JobRow) -> str:
    """Slurm's word for the reason, explained in the table, and its estimate of the start."""
    is_estimated = row.start_unix_s and row.start_unix_s > view.now
    starts = f", starts about {_clock(row.start_unix_s or 0.0, view.now)}" if is_estimated else ""
    return f"{f' ({row.reason})' if row.reason else ''}{starts}"


# --------------------------------------------------------------------------------------------------------------- words


def _attempt_line(attempt: dict[str, Any] | None) -> str:
    if attempt is None:
        return "no attempt has begun yet"
    step, host = attempt.get("resume_step"), attempt.get("host")
    return (
        f"attempt {attempt.get('attempt')} {f'from step {step}' if step else 'from the beginning'}, job "
        f"{attempt.get('job_id')}, restart {attempt.get('restart')}" + (f", controller on {host}" if host else "")
    )


def _row_document(view: SlurmView, row: JobRow) -> dict[str, Any]:
    numbers = {key: getattr(row, key) for key in ("used_s", "left_s", "limit_s", "start_unix_s", "restarts")}
    return {
        "id": row.label,
        "job_id": row.job_id,
        "part": part_of(view, row),
        "what": what_it_is(view, row),
        "state": row.state.name,
        "life": row.state.life.value,
        "reason": row.reason,
        "why": why(view, row),
        "partition": row.partition,
        "nodes": row.nodes,
        **numbers,
    }


def _record(view: SlurmView, job_id: int) -> JobRecord:
    return next(job for job in view.jobs if job.job_id == job_id)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", *(f"{title if k == 0 else '':<13}{line}" for k, line in enumerate(lines))] if lines else []


def _clock(moment: float, now: float) -> str:
    """Local time of day; with the date if it is more than 12 hours away."""
    is_near = abs(moment - now) < 12 * 3600
    return time.strftime("%H:%M" if is_near else "%d %b %H:%M", time.localtime(moment))
