"""`rlhpc.submit`: what `rlhpc submit` does, from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launch.commands.submit import submit_run
from launch.door.run_job import RunJob
from rlhpc.config import Config
from rlhpc.config_file import load_config


def submit(
    config: str | Path | Config,
    site: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    after: str | int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> RunJob:
    """Check a run, submit its jobs, and return them as one job of submitit.

    config: a run file, or the result of `rlhpc.config_file.load_config`.  site: a site file.
    overrides: "section.key=value" for the run file.  after: a job id, or a dependency in sbatch's syntax.
    tell: called with the lines that `rlhpc submit` prints.
    Raises ConfigError, RunDirectoryError: refused, nothing was written; SlurmError: sbatch failed.
    """
    known = config if isinstance(config, Config) else load_config(Path(config), list(overrides), "overrides")
    depends = None if after is None else str(after)
    return RunJob(submit_run(known, Path(site), resume=resume, fresh=fresh, after=depends, tell=tell).root)
