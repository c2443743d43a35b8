"""What a run is doing, read from its directory: for the progress line and `rlhpc status`.

Input: status.json, which the controller replaces about once a second, and, for a run under Slurm, the job view of
launch/commands/job_status.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from launch.commands.disk_troubles import disk_troubles
from launch.commands.evaluation_job import lines_about_evaluation_job
from launch.commands.job_status import SlurmView, document_of, is_slurm_run, lines_of, look_at_run
from launch.commands.overview.find import find_runs
from launch.commands.overview.standing import Queue, State, standing_of
from launch.commands.status_notes import Notes, read_notes
from launch.common.json_text import json_text
from launch.common.text_table import escaped, printable, shortened
from launch.plan.processes import process_names
from launch.run_directory.owner import launcher_of
from rlhpc.config_file import read_resolved
from rlhpc.errors import ConfigError
from rlhpc.rewards.failures import BATCH_FAILED, FAILURES, FORKED, JUDGED
from rlhpc.run_layout import RunLayout

NUM_FIGURES = 2  # lines of them at the head of a status
WIDTH = 80  # columns, of counts
MOST_NAMES = 4  # of processes, in one line
_OVER = ("admitted", "released", "dropped")  # counts since the start of the run


def read_status(layout: RunLayout) -> dict[str, Any] | None:
    """Return the last status written, or None if there is none yet, or none that can be read."""
    try:
        document = json.loads(layout.status.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def render_status(layout: RunLayout, as_json: bool = False) -> str:
    """Return a table of every role, and of every job under Slurm.  as_json: the same for programs.

    Raises RunDirectoryError if this is no run directory.
    """
    layout.require_run()
    status, view = read_status(layout), look_at_run(layout) if is_slurm_run(layout) else None
    if status is not None:
        status["disk_troubles"] = disk_troubles(layout, status)
    notes = read_notes(layout)
    if as_json:
        document = {"status": status, "slurm": None if view is None else document_of(view), **notes.as_document()}
        return json_text(document, indent=1)
    return escaped("\n".join(_lines(layout, status, view, notes)))


def _lines(layout: RunLayout, status: dict[str, Any] | None, view: SlurmView | None, notes: Notes) -> list[str]:
    if view is None:
        pid = launcher_of(layout)
        expected = _expected(layout) if pid else ()
        if status is None:
            is_asked = layout.stop_request.exists() or layout.abort_request.exists()
            ended = f"{'stopped' if is_asked else 'ended'} before its controller started"
            said = f"starting (launcher pid {pid})" if pid else ended
            return [f"{layout.root}: {said}"]
        if pid:
            return [*_run_lines(status, f"launcher pid {pid}", expected), *notes.lines()]
        status, why = _as_it_ended(layout, status)
        lines = _without_roles(status, _run_lines(status, "not running on this machine"))
        return [*lines, *why, *notes.lines()]
    life = "under Slurm" if view.is_alive else "none of its jobs is alive"
    if status is None:
        head = [f"{layout.root}: {life}, no controller yet"]
    else:
        lines = _run_lines(status, life)
        head = lines if view.is_alive else _without_roles(status, lines)
    evaluating = lines_about_evaluation_job(layout) if view.is_alive else []
    return [*head, *notes.lines(), *evaluating, "", *lines_of(view)]


def _as_it_ended(layout: RunLayout, status: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The status of a run that nothing runs any more, with what `rlhpc list` says of its end.

    A controller that was killed leaves "training" behind.
    """
    found = find_runs([layout.root], depth=0).runs
    standing = standing_of(found[0], Queue(), time.time()) if found else None
    if standing is None or standing.state not in (State.FAILED, State.LOST):
        return status, []
    why = [f"{standing.state}: {printable(standing.remark)}"] if standing.remark else []
    phase = status["phase"]  # "stopped": its controller has closed the books, which is no time to fail at
    return {**status, "phase": standing.state if phase == "stopped" else f"{standing.state} while {phase}"}, why


def waiting_for(status: dict[str, Any], expected: Sequence[str]) -> str:
    """The processes that have not said hello yet, for people; "": all have."""
    missing = _missing(status, expected)
    more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
    return ", ".join(missing[:MOST_NAMES]) + more


def _missing(status: dict[str, Any], expected: Sequence[str]) -> list[str]:
    there = {role["name"] for role in status["roles"]}
    return [name for name in expected if name not in there and not name.startswith("controller")]


def _expected(layout: RunLayout) -> Sequence[str]:
    try:
        return process_names(read_resolved(layout)[0])
    except ConfigError:
        return ()


def _run_lines(status: dict[str, Any], life: str, expected: Sequence[str] = ()) -> list[str]:
    reward = f"{status['reward']:.3f}" if status["step"] else "-"
    in_flight, so_far = _counts_of_groups(status["queue"])
    age = max(time.time() - status["unix_time_s"], 0.0)  # the clock of its node may be ahead of this one
    return [
        f"{status['name']}: {status['phase']}, step {status['step']}/{status['num_steps']}, policy version "
        f"{status['version']}, {life}, as of {age:.0f} s ago",
        f"reward {reward}   generators {status['generator_tokens_per_s']:.0f} tokens/s   trainer "
        f"{status['trainer_tokens_per_s']:.0f} tokens/s   staleness {status['staleness_max']} of at most "
        f"{status['staleness_bound']}",
        *verifier_lines(status.get("verifiers", {})),
        *error_lines(status.get("errors", {})),
        *(f"disk    {trouble}" for trouble in status.get("disk_troubles", ())),
        *in_flight,
        *so_far,
        "",
        f"{'ROLE':<14}{'STATE':<12}{'VERSION':>8}  {'HOLDS':>6}  {'SILENT':>7}  WAITS FOR",
        *(_row(role) for role in status["roles"]),
        *(f"{name:<14}starting" for name in _missing(status, expected)),
    ]


def _without_roles(status: dict[str, Any], lines: list[str]) -> list[str]:
    """What holds for a run that is over: the last states of its queue and roles are out of date."""
    num_errors = len(verifier_lines(status.get("verifiers", {}))) + len(error_lines(status.get("errors", {})))
    return [*lines[: NUM_FIGURES + num_errors], *_counts_of_groups(status["queue"])[1]]


def _counts_of_groups(queue: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Lines about groups in flight and before, and about those that are over; of reasons, those that came up."""
    over = {name: count for name, count in queue.items() if name in _OVER or name.startswith("dropped_")}
    now = {name: count for name, count in queue.items() if name not in over}
    shown = {name: count for name, count in over.items() if count or not name.startswith("dropped_")}
    return _counted("queue", now), _counted("so far", shown) if shown else []


def _counted(title: str, counts: Mapping[str, Any]) -> list[str]:
    """In as many lines of 80 columns as it takes; a count stays with its name."""
    lines = [f"{title:<8}"]
    for name, count in counts.items():
        part = f"{name} {count}"
        if len(lines[-1]) + len(part) > WIDTH:
            lines.append(" " * 8)
        lines[-1] += f"{part}   "
    return [line.rstrip() for line in lines]


def verifier_lines(verifiers: dict[str, dict[str, float]]) -> list[str]:
    """What has failed in which way, a line for each task of which anything has."""
    lines = []
    for task, figures in sorted(verifiers.items()):
        failed = [
            f"{name.replace('_', ' ')} {figures[name]:.0f}"
            for name in (*FAILURES, BATCH_FAILED, FORKED)
            if figures.get(name)
        ]
        if failed:
            lines.append(
                f"verifier {task}   judged {figures.get(JUDGED, 0):.0f}, without a verdict: {', '.join(failed)}"
            )
    return lines


def error_lines(errors: Mapping[str, Any]) -> list[str]:
    """Return what had no verdict in this attempt, by cause, and the last of it."""
    causes = [f"{cause.replace('_', ' ')} {number}" for cause, number in errors.get("causes", {}).items()]
    if not causes:
        return []
    paused = [f"nothing but errors on {', '.join(names)}"] if (names := errors.get("paused")) else []
    notes = [f"the last: {shortened(errors['latest'])}", *paused, *_waiting_for_verdicts(errors)]
    return [f"errors   {', '.join(causes)}; {'; '.join(notes)}"]


def _waiting_for_verdicts(errors: Mapping[str, Any]) -> list[str]:
    """Return how long a run has waited for verifiers that fail, and how long it will, if it waits."""
    if "waited_s" not in errors:
        return []
    return [f"waiting for verdicts since {errors['waited_s']:.0f} s, at most {errors['patience_s']:.0f} s"]


def _row(role: dict[str, Any]) -> str:
    metrics = role["metrics"]
    holds = int(metrics.get("running", 0) + metrics.get("waiting", 0) + metrics.get("queued", 0))
    version = role["version"] if role["version"] >= 0 else "-"
    return (
        f"{role['name']:<14}{role['state']:<12}{version:>8}  {holds:>6}  {role['silent_s']:>6.1f}s  "
        f"{role['waits_for'] or '-'}"
    )
