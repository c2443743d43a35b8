"""The commands of `rlhpc`, each with what it takes and a line of help.  Imports nothing heavy.

Output: a parser whose result has the command's name as `command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from launch.commands.arguments import (
    Version,
    takes_cluster_commands,
    takes_demo,
    takes_doctor,
    takes_evaluation,
    takes_evaluations,
    takes_export,
    takes_list,
    takes_local_run,
    takes_logs,
    takes_overrides,
    takes_recipe,
    takes_report,
    takes_resume,
    takes_rollouts,
    takes_run_directory,
    takes_run_file,
    takes_scale,
    takes_site_file,
    takes_submission,
)


def command_parser() -> argparse.ArgumentParser:
    """Of all commands."""
    parser = argparse.ArgumentParser(prog="rlhpc", description="Asynchronous RL post-training of language models.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, takes, text in _COMMANDS:
        takes(commands.add_parser(name, help=text, description=text))
    return parser


def _takes_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path, metavar="RUN.toml|RUN_DIR", help="run file, or directory of a run")
    takes_overrides(parser)
    parser.add_argument("--json", action="store_true", help="JSON output for programs (RUN_DIR only)")
    parser.add_argument("--site", type=Path, metavar="SITE.toml", help="site file: refuse what does not fit its GPUs")


def _takes_audit(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    parser.add_argument("--quick", action="store_true", help="read neither tokens nor checksums: seconds on long runs")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def _takes_plan(parser: argparse.ArgumentParser) -> None:
    takes_run_file(parser)
    takes_site_file(parser)
    takes_overrides(parser)


def _takes_status(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def _takes_stop(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    text = "do not finish the step; work since the last checkpoint is lost"
    parser.add_argument("--now", action="store_true", help=text)


def _takes_kind_of_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("run", "site"), help="of which files")


_COMMANDS: tuple[tuple[str, Callable[[argparse.ArgumentParser], None], str], ...] = (
    ("run", takes_local_run, "Start a run as processes on this machine and watch it."),
    (
        "check",
        _takes_check,
        "Validate a run file, its model and its data; or verify all that a run has written.",
    ),
    ("audit", _takes_audit, "Prove from a run's files that every prompt is in exactly one place."),
    ("plan", _takes_plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing."),
    ("submit", takes_submission, "Check a run, and submit its Slurm jobs."),
    ("resume", takes_resume, "Submit the jobs of a run again, to continue from its last checkpoint."),
    ("status", _takes_status, "Show a run: its jobs and roles, their work in progress, what they wait for."),
    ("list", takes_list, "Show your runs below a directory and in the queue, one line each."),
    ("stop", _takes_stop, "Finish the step, save, and end every process and job of a run."),
    ("scale", takes_scale, "Add generators to a submitted run, or remove added ones."),
    ("logs", takes_logs, "Show the logs of a run's processes."),
    ("report", takes_report, "Say what a run did: who waited for whom, faults, GPU-hours, advice."),
    ("rollouts", takes_rollouts, "Read what a run has sampled: prompts, completions, rewards."),
    ("doctor", takes_doctor, "Look for what would prevent runs on a site, and print remedies."),
    ("export", takes_export, "Write the trained model as an HF checkpoint."),
    ("evaluate", takes_evaluation, "Sample a dataset with a model; print pass@k, with intervals."),
    ("compare", takes_evaluations, "Say whether one of two evaluated models is better, and how surely."),
    ("demo", takes_demo, "Warm-start a tiny model and teach it arithmetic by RL, in minutes, on CPU."),
    ("schema", _takes_kind_of_file, "Print the JSON schema of run or site files, for editors."),
    ("recipes", takes_recipe, "List run files that reproduce published runs; copy one."),
    (
        "cluster",
        takes_cluster_commands,
        "Start, show or end a private Slurm in one directory, without root.",
    ),
)
