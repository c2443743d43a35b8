"""Figures read from the files of one run directory, whether or not a process is alive in it.

Input: RunFiles.  Output: Figures.  A file that is missing, damaged or of another form counts as absent: nothing raises.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.commands.overview.find import RunFiles
from launch.common.paths import written_unix_s
from launch.run_files.events import lines_from_the_end, read_document
from launch.run_files.exit_records import read_failures
from launch.run_files.run_state import saved_step

_WRITTEN_BY_LIFE = ("status.json", "attempts.jsonl", "summary.json", "config.json", "launcher.json", "jobs")
_MOST_LOGS = 32
_FATAL = " rlhpc.lifecycle ERROR "  # in the log line of a role's fatal error (rlhpc/roles/common/lifecycle.py)


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
