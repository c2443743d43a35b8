"""Begin an attempt of a run whose jobs are running: `python -m launch.run_directory.begin_attempt`.

Runs in the roles' Python environment, called by the supervisor of the controller's job while no role of an earlier
attempt is alive.  Clears the rendezvous directories, makes new keys, finds the checkpoint to resume from, and writes
attempt.json last: once that file exists, so does everything else.  Prints its content as its last line.
A damaged checkpoint is set aside and the previous one is used, since there is no user to ask; the run ends if none
is sound.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from launch.run_directory.inputs import read_inputs, refuse_other_inputs, write_inputs
from launch.run_directory.prepare import (
    NEWEST,
    AttemptStart,
    UnreadableCheckpoint,
    choose,
    clear_rendezvous,
    mint_keys,
    note_attempt,
    num_attempts,
    put_aside,
)
from launch.run_files.records import replica_numbers
from launch.run_files.run_state import is_complete, longest_save_before_s, read_attempt, read_progress
from rlhpc.base.files import is_absent, write_atomically
from rlhpc.base.ownership import Fence
from rlhpc.base.patience import passes, patiently
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import read_resolved
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_FENCED, OwnershipLost, RlhpcError, RunDirectoryError

Known = TypeVar("Known")


class FencedError(RlhpcError):
    """A later supervisor has taken the run over: the caller is stale."""


def begin_attempt(layout: RunLayout, *, job_id: int, restart: int, follows: str = "") -> dict[str, Any]:
    """Begin the next attempt; returns attempt.json.

    follows: owner of the previous attempt, without Slurm; "" with Slurm, whose ids order supervisors.

    Raises RunDirectoryError: no run directory, the run is complete, no usable checkpoint, model or dataset differ
    from those of the first start; UnreadableCheckpoint: a retry may help; ConfigError: config.json was altered;
    FencedError: a later job, a later life of this job, or another start owns the run.
    """

    def patient(step: Callable[[], Known]) -> Known:
        """Each step may be repeated."""
        return patiently(step, layout.root)

    patient(lambda: _require_run(layout))
    patient(lambda: _refuse_complete(layout))
    patient(lambda: _refuse_stale(layout, (job_id, restart), follows))
    config, _ = patient(lambda: read_resolved(layout))
    inputs = patient(lambda: refuse_other_inputs(config, layout, may_lack_weights=True))
    if config.demonstrations and not inputs.model:
        raise RunDirectoryError(
            f"model.path={str(config.model.path)!r}: not there; the supervised fine-tuning that was to make it has not "
            "ended well: `rlhpc status` of its directory says how; then `rlhpc submit RUN.toml SITE.toml --resume`"
        )
    index = patient(lambda: num_attempts(layout))
    owner = patient(lambda: _take_over(layout, index, job_id, restart))
    patient(lambda: write_inputs(layout, inputs) if not _knows_model(layout) else None)
    patient(lambda: _refuse_complete(layout))  # completed meanwhile by a controller that was taken for dead
    choice = patient(lambda: choose(layout, NEWEST, _unheard))
    aside = patient(lambda: put_aside(choice, _unheard))
    attempt = AttemptStart(index, choice.step, owner)
    progress, save_s = read_progress(layout), longest_save_before_s(layout)
    patient(lambda: clear_rendezvous(layout, keeps_services=True))
    numbers = {role: patient(partial(replica_numbers, layout, role)) for role in ("generator", "service")}
    patient(lambda: mint_keys(config, layout, [f"{role}-{each}" for role in numbers for each in numbers[role]]))
    patient(lambda: note_attempt(layout, attempt, job_id=job_id, restart=restart, set_aside=aside))
    document = {
        "attempt": attempt.index,
        "resume_step": attempt.resume_step,
        "fence": attempt.owner,
        "job_id": job_id,
        "restart": restart,
        "host": socket.gethostname(),
        "unix_time_s": time.time(),
        "set_aside": aside,
        "save_s": save_s if progress is None else progress.save_s or save_s,
    }
    patient(lambda: write_atomically(layout.attempt, json.dumps(document).encode()))
    return document


def _require_run(layout: RunLayout) -> None:
    """Raise RunDirectoryError if it is no run directory; OSError if that cannot be determined at the moment."""
    try:
        layout.require_run()
    except RunDirectoryError:
        if not is_absent(layout.config):
            layout.config.read_bytes()
        raise


def _refuse_complete(layout: RunLayout) -> None:
    """Raise RunDirectoryError if the run is complete: another attempt would set its results aside."""
    if is_complete(layout, is_certain=True):
        raise RunDirectoryError(f"{layout.root}: the run is complete")


def _refuse_stale(layout: RunLayout, life: tuple[int, int], follows: str) -> None:
    """Raises FencedError if another supervisor owns the run; life: job id and restart of this one."""
    known = read_attempt(layout)
    if known is not None and known.owner > life:
        raise FencedError(
            f"{layout.attempt}: attempt {known.index} belongs to job {known.job_id}, restart {known.restart}, which is "
            "later than this one"
        )
    if follows and (owner := Fence.holder(layout)) != follows:
        raise FencedError(f"{layout.root}: was taken over by {owner}; this run was {follows}")


def _knows_model(layout: RunLayout) -> bool:
    """False where the model was not there yet when the run was submitted."""
    noted = read_inputs(layout)
    return noted is None or bool(noted.model)


def _take_over(layout: RunLayout, index: int, job_id: int, restart: int) -> str:
    """Take the run over; returns the owner.  Raises FencedError if another attempt began first; its jobs go on."""
    try:
        return Fence.take(layout, index, job_id=job_id, restart=restart).owner
    except RunDirectoryError as error:
        if isinstance(error.__cause__, OwnershipLost):
            raise FencedError(str(error)) from error
        raise


def _unheard(line: str) -> None:
    """Ignore the message: attempt.json lists what was set aside, and the supervisor reports it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Begin an attempt.  Exit status 2: a retry would not help; 3: it might; 4: a later supervisor owns the run."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.run_directory.begin_attempt", description="Begin an attempt of a run."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--job-id", type=int, required=True, help="Slurm's id of this job")
    parser.add_argument("--restart", type=int, default=0, help="how often Slurm has requeued it")
    parser.add_argument("--follows", default="", help="owner of the previous attempt; for runs without Slurm")
    options = parser.parse_args(arguments)
    how = {"job_id": options.job_id, "restart": options.restart, "follows": options.follows}
    try:
        document = begin_attempt(RunLayout(options.run_dir), **how)
    except (RlhpcError, OSError) as error:
        sys.stderr.write(f"rlhpc: {error}\n")
        if isinstance(error, OSError | UnreadableCheckpoint) or passes(error, is_there=False):
            return EXIT_FAULT
        return EXIT_FENCED if isinstance(error, FencedError) else EXIT_CONFIG
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
