"""`rlhpc.submit`: what `rlhpc submit` does, from Python."""

from __future__ import annotations

from pathlib import Path

from launch.commands.submit import submit_run
from launch.door.arguments import (
    Overrides,
    Tell,
    import_path_exported,
    refuse_both,
    say_nothing,
    settings_of,
    speaks_python,
)
from launch.door.run_job import RunJob
from rlhpc.config import Config


@speaks_python
def submit(
    config: str | Path | Config,
    site: str | Path,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    fresh: bool = False,
    after: str | int | None = None,
    tell: Tell | None = None,
) -> RunJob:
    """Check a run, submit its jobs, and return them as one job of submitit.

    config: a run file, or the result of `rlhpc.config_file.load_config`.  site: a site file.
    overrides: ["section.key=value"] or {"section.key": value}.  after: a job id, or a dependency in sbatch's syntax.
    tell: called with the lines that `rlhpc submit` prints.
    Raises ConfigError, RunDirectoryError: refused, nothing was written; SlurmError: sbatch failed.
    """
    refuse_both(resume=resume, fresh=fresh)
    known, depends = settings_of(config, overrides), None if after is None else str(after)
    with import_path_exported():
        layout = submit_run(known, Path(site), resume=resume, fresh=fresh, after=depends, tell=tell or say_nothing)
    return RunJob(layout.root)
