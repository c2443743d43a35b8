"""The options of `run`, `submit` and `resume` that choose the checkpoint to resume from."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rlhpc.errors import ConfigError

if TYPE_CHECKING:
    from launch.run_directory.checkpoint_choice import ResumePoint


def takes_resume_point(parser: argparse.ArgumentParser) -> None:
    """Add --from-start and --step."""
    where = parser.add_mutually_exclusive_group()
    text = "resume at step 0: set all checkpoints and rollouts aside"
    where.add_argument("--from-start", action="store_true", help=text)
    where.add_argument("--step", type=int, metavar="N", help="resume from this checkpoint; set newer ones aside")


def resume_point(options: argparse.Namespace) -> ResumePoint:
    """The options' value.  Raises ConfigError if they are given without a resume."""
    from launch.run_directory.checkpoint_choice import (
        ResumePoint,  # imports what reads checkpoints; --help need not wait for it
    )

    is_resume = getattr(options, "resume", True)
    if (options.from_start or options.step is not None) and not is_resume:
        option = "--from-start" if options.from_start else "--step"
        raise ConfigError(f"{option} chooses where a resume begins: use it with --resume")
    return ResumePoint(options.from_start, options.step)


def refuse_resume_point(options: argparse.Namespace) -> None:
    """For several runs at once.  Raises ConfigError if one of the options is given."""
    if options.from_start or options.step is not None:
        raise ConfigError("--step and --from-start apply to one run; use `rlhpc resume RUN_DIR` for each")
