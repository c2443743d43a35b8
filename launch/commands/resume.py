"""Resume a run from its directory alone, which holds settings and site file.

Input: a run directory.  Submits its jobs again (submit.py), to continue from the last complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.commands.last_words import command_to_continue
from launch.commands.submit import Tell, submit_run
from launch.run_directory.checkpoint_choice import NEWEST, ResumePoint
from rlhpc.config import with_values
from rlhpc.config_file import override, read_resolved
from rlhpc.errors import ConfigError
from rlhpc.run_layout import RunLayout


def resume_run(
    layout: RunLayout, words: Sequence[str], *, after: str | None, tell: Tell, resume_from: ResumePoint = NEWEST
) -> RunLayout:
    """Submit the jobs of a run again.

    words: overrides key=value, and at most one site file, which replaces the old one.  Raises RunDirectoryError: not a
    run, complete, or still running; ConfigError and SlurmError as submit_run does.
    """
    layout.require_run()
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r}: legal: at most one site file, and overrides (key=value)")
    site_file = Path(files[0]) if files else layout.site
    if not files and not site_file.exists():
        raise ConfigError(
            f"{site_file}: missing, because this run was never submitted; `rlhpc resume RUN_DIR SITE.toml` continues "
            f"it under Slurm, {command_to_continue(layout)} on this machine"
        )
    old, _ = read_resolved(layout)
    config = override(with_values(old, {"run.directory": layout.root}), [word for word in words if "=" in word])
    if config.run_directory != layout.root:
        raise ConfigError(f"run.directory={str(config.run_directory)!r}: a resume cannot leave {layout.root}")
    return submit_run(config, site_file, resume=True, fresh=False, after=after, tell=tell, resume_from=resume_from)
