"""A run as an offline run of Weights & Biases: files that `wandb sync` uploads from a machine that may.

Input: a run and its table of metrics.  Output: DIR/wandb/offline-run-…, written by wandb's own package, which needs no
account for it.  The step is the optimiser step, the time of a point is when the run wrote it.
Guarantees: no network is used, whatever wandb's variables say; of one run there is one such directory below DIR: an
earlier one is removed when the new one is whole.

Why not from within, while the run trains: nothing that waits for a service may stand in the way of a run.  A run that
goes on is sent by a command beside it (wandb_follow.py).
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from launch.commands.metrics.exported import ExportedRun
from launch.commands.metrics.wandb_records import num_steps_in
from launch.common.optional_package import optional_module
from launch.common.paths import quoted
from rlhpc.errors import ConfigError

PROJECT = "rlhpc"  # `wandb sync --project` names another


def write_wandb(directory: Path, run: ExportedRun) -> str:
    """Write the run below a directory and say what comes next.

    Raises ConfigError: wandb is not installed, or it could not write all, in which case the earlier one is still there.
    """
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # reports of its own crashes go over the network
    wandb = optional_module("wandb", "wandb")
    directory.mkdir(parents=True, exist_ok=True)
    earlier = [*(directory / "wandb").glob(f"offline-run-*-{run.identity}")]
    with ExitStack() as undo:
        for path in earlier:  # names hold seconds: two exports in one are to have two
            path.rename(_aside(path))
            undo.callback(_aside(path).rename, path)
        try:
            written = _write(wandb, directory.resolve(), run)
        except (wandb.errors.Error, OSError) as error:
            raise ConfigError(f"--wandb {directory}: {error}") from error
        undo.pop_all()
    for path in earlier:
        shutil.rmtree(_aside(path))
    return f"{written}: {run.size}; `wandb sync {quoted(written)}` uploads it"


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def _write(wandb: ModuleType, directory: Path, exported: ExportedRun) -> Path:
    run = wandb.init(
        project=PROJECT,
        id=exported.identity,
        name=exported.name,
        dir=str(directory),
        config=exported.settings,
        settings=settings_for(wandb, "offline"),
    )
    began = exported.table.unix_times_s[0]
    for step, unix_time_s, points in exported.table.rows():
        run.log({**points, "_timestamp": unix_time_s, "_runtime": unix_time_s - float(began)}, step=step)
    run.finish()
    wandb.teardown()  # waits for the process that writes: it has not written all when finish() returns
    written, wanted = Path(run.settings.sync_dir), len(exported.table.steps)
    num_steps = num_steps_in(Path(run.settings.sync_file))
    if num_steps < wanted:
        shutil.rmtree(written)
        raise OSError(f"{num_steps} of {wanted} steps could be written: is the disk full?")
    return written


def settings_for(wandb: ModuleType, mode: str) -> Any:
    """Return settings with which wandb records nothing but what it is given."""
    return wandb.Settings(
        mode=mode,
        console="off",  # what this command prints is nothing of the run
        silent=True,
        x_disable_stats=True,  # of this machine, which need not be the run's
        x_disable_meta=True,
        x_disable_machine_info=True,
        disable_git=True,
        disable_code=True,
        disable_job_creation=True,
    )
