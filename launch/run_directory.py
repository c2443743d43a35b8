"""The life of a run directory: made once, resumed on request, never taken over from a run that lives.

Eats Config, makes the directory with settings, keys and a line per attempt.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from launch.plan import RunPlan
from rlhpc.config import Config
from rlhpc.config_file import config_hash, read_resolved, write_resolved
from rlhpc.errors import RunDirectoryError
from rlhpc.files import write_atomically
from rlhpc.run_layout import RunLayout
from rlhpc.training.checkpoint_directory import latest_complete
from rlhpc.transport.keys import mint_run_keys

# What a checkpoint is of: prompt order, weights, and a ledger whose groups were admitted under these bounds.
FIXED_BY_THE_FIRST_START = ("run.name:", "run.seed:", "model.", "data.", "admission.group_size:",
    "admission.groups_per_step:", "admission.max_staleness:", "admission.window_groups:")  # fmt: skip


LIVES_ELSEWHERE_S = 60.0  # a run whose status is younger is taken for alive where its pid cannot be seen


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run."""

    index: int
    resume_step: int | None  # None: from the beginning
    changed: tuple[str, ...] = ()  # settings that differ from the attempt before: "key: old → new"


def claim(config: Config, layout: RunLayout, *, resume: bool, fresh: bool) -> Attempt:
    """Make the directory of a new run, or take up an old one.

    A resume may change settings besides FIXED_BY_THE_FIRST_START; the new ones are written down, old and new.
    Raises RunDirectoryError: it exists and neither --resume nor --fresh was given; it does not exist and --resume was;
    a run lives in it; a setting differs that cannot change.
    """
    exists = layout.root.exists() and any(layout.root.iterdir())
    if exists:
        _refuse_if_alive(layout)
        if not layout.config.exists() and not resume:
            raise RunDirectoryError(f"{layout.root} exists and is not a run directory; choose another run.directory")
    if exists and not resume and not fresh:
        raise RunDirectoryError(
            f"{layout.root} exists already; give --resume to go on, --fresh to delete it and start anew, "
            "or choose another run.name"
        )
    if resume:
        return _take_up(config, layout)
    if exists:
        shutil.rmtree(layout.root)
    layout.root.mkdir(parents=True, exist_ok=True, mode=0o755)
    write_resolved(config, layout, _commit())  # first of all: it is what makes this a run directory
    _make(layout)
    return _note(layout, Attempt(0, None))


def mint_keys(plan: RunPlan) -> None:
    """Make new keys for every process of this attempt; those of an earlier one are worthless from now on."""
    shutil.rmtree(plan.layout.secrets, ignore_errors=True)
    mint_run_keys(plan.layout.secrets, [process.name for process in plan.processes])


def launcher_of(layout: RunLayout) -> int | None:
    """Return the pid of the launcher that lives in this directory on this machine, or None."""
    try:
        record = json.loads(layout.launcher.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if record["host"] != socket.gethostname():
        return None
    try:
        process = psutil.Process(record["pid"])
        is_it = abs(process.create_time() - record["created"]) < 1.0
        # One that has ended keeps its pid until whoever started it asks for its status, which may be never.
        return record["pid"] if is_it and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def register_launcher(layout: RunLayout) -> None:
    """Note that this process runs the run."""
    record = {"pid": os.getpid(), "host": socket.gethostname(), "created": psutil.Process().create_time()}
    write_atomically(layout.launcher, json.dumps(record).encode())


def _refuse_if_alive(layout: RunLayout) -> None:
    pid = launcher_of(layout)
    if pid is not None:
        raise RunDirectoryError(
            f"{layout.root}: a run lives here (launcher pid {pid}); `rlhpc stop {layout.root}` ends it"
        )
    host, silent_s = _other_host(layout)
    if host and silent_s < LIVES_ELSEWHERE_S:
        raise RunDirectoryError(
            f"{layout.root}: a run on {host} wrote its status {silent_s:.0f} s ago; stop it there, or wait "
            f"{LIVES_ELSEWHERE_S:.0f} s after its end"
        )


def _other_host(layout: RunLayout) -> tuple[str, float]:
    """Return the host of a launcher on another machine ("" if none), and the age of the run's status in seconds."""
    try:
        host = str(json.loads(layout.launcher.read_bytes())["host"])
        return "" if host == socket.gethostname() else host, time.time() - layout.status.stat().st_mtime
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return "", 0.0


def _take_up(config: Config, layout: RunLayout) -> Attempt:
    if not layout.config.exists():
        raise RunDirectoryError(f"{layout.root}: nothing to resume; start the run without --resume")
    old, old_hash = read_resolved(layout)
    changed = _difference(old, config) if config_hash(config) != old_hash else ()
    fixed = [change for change in changed if change.startswith(FIXED_BY_THE_FIRST_START)]
    if fixed:
        raise RunDirectoryError(f"{layout.root}: these settings cannot change on resume: {'; '.join(fixed)}")
    if changed:
        write_resolved(config, layout, _commit())
    for directory in (layout.rendezvous, layout.weights):
        shutil.rmtree(directory, ignore_errors=True)
    for stale in (layout.status, layout.summary):
        stale.unlink(missing_ok=True)
    _make(layout)
    found = latest_complete(layout.checkpoints)
    if found and found[0] > config.run.num_steps:
        raise RunDirectoryError(
            f"run.num_steps={config.run.num_steps}: {layout.root} has come to step {found[0]} already"
        )
    index = len(layout.attempts.read_text().splitlines())
    return _note(layout, Attempt(index, found[0] if found else None, tuple(changed)))


def _make(layout: RunLayout) -> None:
    layout.root.mkdir(parents=True, exist_ok=True, mode=0o755)
    for directory in (layout.rollouts, layout.checkpoints, layout.tensorboard, layout.logs):
        directory.mkdir(exist_ok=True)
    for directory in (layout.rendezvous, layout.weights):
        directory.mkdir(exist_ok=True, mode=0o700)


def _note(layout: RunLayout, attempt: Attempt) -> Attempt:
    line = json.dumps(asdict(attempt) | {"host": socket.gethostname(), "unix_time_s": time.time()})
    with layout.attempts.open("a") as file:
        file.write(line + "\n")
    return attempt


def _difference(old: Config, new: Config) -> tuple[str, ...]:
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    return tuple(f"{key}: {before.get(key)!r} → {value!r}" for key, value in after.items() if before.get(key) != value)


def _flatten(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _commit() -> str:
    """Commit of the code that runs, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
