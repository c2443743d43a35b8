"""What a run is doing, read from its directory: for the progress line and `rlhpc status`.

Input: status.json, which the controller replaces about once a second, and, for a run under Slurm, the job view of
launch/commands/job_status.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

from launch.commands.job_status import document_of, is_slurm_run, lines_of, look_at_run
from launch.commands.status_notes import read_notes
from launch.run_directory.owner import launcher_of
from rlhpc.errors import RunDirectoryError
from rlhpc.rewards.failures import FAILURES, FORKED, JUDGED
from rlhpc.run_layout import RunLayout


def read_status(layout: RunLayout) -> dict[str, Any] | None:
    """Return the last status written, or None if there is none yet."""
    try:
        document: dict[str, Any] = json.loads(layout.status.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return document


def render_status(layout: RunLayout, as_json: bool = False) -> str:
    """Return a table of every role, and of every job under Slurm.  as_json: the same for programs.

    Raises RunDirectoryError if this is no run directory.
    """
    if not layout.is_run:
        raise RunDirectoryError(f"{layout.root}: not a run directory")
    status, view = read_status(layout), look_at_run(layout) if is_slurm_run(layout) else None
    notes = read_notes(layout)
    if as_json:
        document = {"status": status, "slurm": None if view is None else document_of(view), **notes.as_document()}
        return json.dumps(document, indent=1)
    if view is None:
        pid = launcher_of(layout)
        if status is None:
            return f"{layout.root}: " + (
                f"starting (launcher pid {pid})" if pid else "ended before its controller started"
            )
        lines = _run_lines(status, f"launcher pid {pid}" if pid else "not running on this machine")
        return "\n".join([*lines, *notes.lines()])
    life = "under Slurm" if view.is_alive else "none of its jobs is alive"
    if status is None:
        head = [f"{layout.root}: {life}, no controller yet"]
    else:
        head = _run_lines(status, life)[: None if view.is_alive else 2]  # the last states of roles are out of date
    return "\n".join([*head, *notes.lines(), "", *lines_of(view)])


def _run_lines(status: dict[str, Any], life: str) -> list[str]:
    age = time.time() - status["unix_time_s"]
    return [
        f"{status['name']}: {status['phase']}, step {status['step']}/{status['num_steps']}, policy version "
        f"{status['version']}, {life}, as of {age:.0f} s ago",
        f"reward {status['reward']:.3f}   generators {status['generator_tokens_per_s']:.0f} tokens/s   trainer "
        f"{status['trainer_tokens_per_s']:.0f} tokens/s   staleness {status['staleness_max']} of at most "
        f"{status['staleness_bound']}",
        "queue   " + "   ".join(f"{name} {count}" for name, count in status["queue"].items()),
        *verifier_lines(status.get("verifiers", {})),
        "",
        f"{'ROLE':<14}{'STATE':<12}{'VERSION':>8}  {'HOLDS':>6}  {'SILENT':>7}  WAITS FOR",
        *(_row(role) for role in status["roles"]),
    ]


def verifier_lines(verifiers: dict[str, dict[str, float]]) -> list[str]:
    """What has failed in which way, a line for each task of which anything has."""
    lines = []
    for task, figures in sorted(verifiers.items()):
        failed = [f"{name.replace('_', ' ')} {figures[name]:.0f}" for name in (*FAILURES, FORKED) if figures.get(name)]
        if failed:
            lines.append(
                f"verifier {task}   judged {figures.get(JUDGED, 0):.0f}, without a verdict: {', '.join(failed)}"
            )
    return lines


def _row(role: dict[str, Any]) -> str:
    metrics = role["metrics"]
    holds = int(metrics.get("running", 0) + metrics.get("waiting", 0) + metrics.get("queued", 0))
    version = role["version"] if role["version"] >= 0 else "-"
    return (
        f"{role['name']:<14}{role['state']:<12}{version:>8}  {holds:>6}  {role['silent_s']:>6.1f}s  "
        f"{role['waits_for'] or '-'}"
    )
