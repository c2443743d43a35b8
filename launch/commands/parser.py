"""The commands of `rlhpc`, each with its arguments and a line of help.  Imports nothing heavy.

Output: a parser whose result has the command's name as `command`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path

from launch.commands.arguments import (
    Version,
    decimal,
    number,
    takes_charts,
    takes_data,
    takes_evaluation,
    takes_export,
    takes_list,
    takes_local_run,
    takes_logs,
    takes_metrics,
    takes_overrides,
    takes_records,
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
    """Run file, site file, and what a prediction starts from."""
    takes_run_file(parser)
    takes_site_file(parser)
    takes_overrides(parser)
    text = "instead of jobs and scripts, predict speed, bottleneck and cost of this split and others"
    parser.add_argument("--predict", action="store_true", help=text)
    text = "take rates and lengths from this run (--predict)"
    parser.add_argument("--from", dest="from_run", type=Path, metavar="RUN_DIR", help=text)
    text = "mean tokens of a completion; default: 0.4 of generation.max_completion_tokens (--predict)"
    parser.add_argument("--mean-tokens", type=decimal, metavar="N", help=text)
    text = "share of zero-variance groups; default: 0.2 (--predict)"
    parser.add_argument("--dropped-share", type=decimal, metavar="X", help=text)
    parser.add_argument("--json", action="store_true", help="JSON output for programs (--predict)")


def _takes_status(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


def _takes_stop(parser: argparse.ArgumentParser) -> None:
    takes_run_directory(parser)
    text = "end at once: the step is saved only if it ends within seconds"
    parser.add_argument("--now", action="store_true", help=text)


def _takes_kind_of_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("run", "site"), help="kind of file")


def _takes_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def _takes_cluster_commands(parser: argparse.ArgumentParser) -> None:
    """The actions up, status and down of a private Slurm."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for action, text in (
        ("up", "Start a cluster, or restart its dead daemons; print how to use it."),
        ("status", "Show every daemon with its pid, and the nodes."),
        ("down", "End every job and every daemon."),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        sub.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="default: one for each user in /tmp")
        if action == "down":
            sub.add_argument("--delete", action="store_true", help="delete the directory too")
        if action == "up":
            for name in ("train", "gen", "cpu"):
                sub.add_argument(f"--{name}", type=number, metavar="N", help=f"number of {name} nodes")
            sub.add_argument("--gpus", type=number, metavar="N", help="number of fake GPUs on each GPU node")
            sub.add_argument("--accounting", action="store_true", help="with slurmdbd: sacct, accounts, QOS")
            sub.add_argument("--networks", action="store_true", help="give every node its own network; needs root")
            sub.add_argument("--private", action="store_true", help="use unpacked packages even if Slurm is installed")
            sub.add_argument(
                "--release", metavar="SUITE", help="Slurm of Debian bookworm, trixie or sid (22.05 to 26.05)"
            )
            text = "timeout until all nodes are idle (default 30)"
            sub.add_argument("--wait-s", type=decimal, default=30.0, metavar="S", help=text)


def _takes_recipe(parser: argparse.ArgumentParser) -> None:
    """Nothing, or the action copy with a name and a directory."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action")
    text = "Copy a recipe into a directory."
    copy = actions.add_parser("copy", help=text, description=text)
    copy.add_argument("name", metavar="NAME", help="a recipe listed by `rlhpc recipes`")
    copy.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIRECTORY", help="default: the current one"
    )


def _takes_demo(parser: argparse.ArgumentParser) -> None:
    """Another run file, or a private Slurm."""
    parser.add_argument("--run-file", type=Path, metavar="FILE", help="another run file; configs/demo_tool.toml: tools")
    parser.add_argument(
        "--slurm", action="store_true", help="as one heterogeneous job on a private Slurm on this machine"
    )
    parser.add_argument(
        "--time", default="0:30:00", metavar="T", help="time limit of the job of --slurm (default 0:30:00)"
    )
    text = "write only a tiny model of random weights, to try a run file of yours with: model.path=DIR"
    parser.add_argument("--model-only", type=Path, metavar="DIR", help=text)
    text = "with --model-only: of this checkpoint's architecture, with its tokenizer (its weights are not needed)"
    parser.add_argument("--like", type=Path, metavar="MODEL", help=text)
    takes_overrides(parser)


def _takes_doctor(parser: argparse.ArgumentParser) -> None:
    """A site, and how thoroughly to check it."""
    takes_site_file(parser)
    which = "the run to check for, with overrides; default: a minimal one"
    parser.add_argument("words", nargs="*", default=[], metavar="RUN.toml|key=value", help=which)
    parser.add_argument("--quick", action="store_true", help="check from this machine only, without jobs")
    text = "time limit for the test jobs, in seconds (default 300)"
    parser.add_argument("--timeout-s", type=decimal, default=300.0, metavar="S", help=text)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write everything, without secrets, to a file")


def _takes_evaluations(parser: argparse.ArgumentParser) -> None:
    """Directories of two evaluations."""
    parser.add_argument("first", type=Path, metavar="FIRST", help="directory of an evaluation")
    parser.add_argument("second", type=Path, metavar="SECOND", help="another evaluation, on the same data")
    parser.add_argument("--json", action="store_true", help="JSON output for programs")


_COMMANDS: tuple[tuple[str, Callable[[argparse.ArgumentParser], None], str], ...] = (
    ("run", takes_local_run, "Start a run as processes on this machine and watch it."),
    ("check", _takes_check, "Validate a run file, its model and its data; or verify the files of a run."),
    ("audit", _takes_audit, "Prove from a run's files that no prompt was lost or trained twice."),
    ("plan", _takes_plan, "Print the Slurm jobs of a run and their exact scripts; submit nothing."),
    ("submit", takes_submission, "Check a run, and submit its Slurm jobs."),
    ("resume", takes_resume, "Submit the jobs of a run again, to continue from its last checkpoint."),
    ("status", _takes_status, "Show a run: its jobs and roles, their work in progress, what they wait for."),
    ("list", takes_list, "Show your runs below a directory and in the queue, one line each."),
    ("stop", _takes_stop, "Finish the step, save, and end every process and job of a run."),
    ("scale", takes_scale, "Add generators to a submitted run, or remove added ones."),
    ("logs", takes_logs, "Show the logs of a run's processes."),
    ("report", takes_report, "Summarise a run: busy and idle times, faults, GPU-hours, advice."),
    ("rollouts", takes_rollouts, "Show rollouts of a run: prompts, completions, rewards."),
    ("metrics", takes_metrics, "Print or write a run's metrics as a table, or as files of W&B."),
    ("tensorboard", takes_charts, "Show runs in TensorBoard under their names."),
    ("doctor", _takes_doctor, "Check a cluster for problems that would stop runs, and print remedies."),
    ("data", takes_data, "Show a dataset's prompts or statistics, or convert it to another format."),
    ("reward", takes_records, "Score the completions in a JSONL file with a reward function."),
    ("export", takes_export, "Write the trained model as an HF checkpoint."),
    ("evaluate", takes_evaluation, "Sample a dataset with a model; print pass@k with confidence intervals."),
    ("compare", _takes_evaluations, "Compare two evaluated models: which is better, with a confidence interval."),
    ("demo", _takes_demo, "Warm-start a tiny model and train it on arithmetic with RL, in minutes, on CPU."),
    ("schema", _takes_kind_of_file, "Print the JSON schema of run or site files, for editors."),
    ("completion", _takes_shell, "Print a shell completion script for commands, options and paths."),
    ("recipes", _takes_recipe, "List run files for published runs, or copy one."),
    ("cluster", _takes_cluster_commands, "Start, show or end a private Slurm in one directory, without root."),
)


# What other programs call our commands.
_ELSEWHERE = {
    "train": "run", "start": "run", "launch": "run", "validate": "check", "lint": "check", "verify": "check",
    "kill": "stop", "cancel": "stop", "tail": "logs", "log": "logs", "ps": "list", "ls": "list", "runs": "list",
    "show": "status", "watch": "status", "sbatch": "submit", "queue": "submit", "continue": "resume",
    "score": "reward", "datasets": "data", "init": "recipes", "save": "export", "convert": "export",
    "version": "--version", "help": "--help",
}  # fmt: skip


def similar_command(word: str) -> str:
    """The command that a mistyped word, or one of other programs, may mean; "" for a command, an option, or neither."""
    names = [name for name, _, _ in _COMMANDS]
    if word in names or word.startswith("-"):
        return ""
    return _ELSEWHERE.get(word) or next(iter(difflib.get_close_matches(word, names, n=1)), "")
