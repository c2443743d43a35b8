"""Arguments shared by commands of `rlhpc`: what `rlhpc COMMAND --help` lists.

Input: an argument parser.  Output: the same parser with arguments added.  Imports nothing heavy, because every command
loads this module.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.family import commands as family
from launch.resume_options import takes_resume_point


def takes_submission(parser: argparse.ArgumentParser) -> None:
    """A run and a site file, and how to submit."""
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("site_file", type=Path, metavar="SITE.toml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--dry-run", action="store_true", help="print what `rlhpc plan` prints; submit nothing")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="go on from the newest sound checkpoint")
    again.add_argument("--fresh", action="store_true", help="delete the run directory and start anew")
    takes_resume_point(parser)
    family.add_options(parser)
    takes_waiting(parser)


def takes_waiting(parser: argparse.ArgumentParser) -> None:
    """Whether to stay, and for what to wait."""
    parser.add_argument("--wait", action="store_true", help="watch the run to its end; Ctrl-C leaves the jobs alone")
    parser.add_argument("--after", metavar="JOB", help="begin after that job has succeeded; or afterany:JOB, …")


def takes_scale(parser: argparse.ArgumentParser) -> None:
    """A run and how many generators more or fewer."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("words", nargs="*", metavar="SITE.toml", help="default: as submitted")
    parser.add_argument("--generators", required=True, metavar="+N|-N", help="add N, or retire the N youngest added")
    parser.add_argument("--partition", metavar="P", help="instead of the site file's; preemptible ones are welcome")
    parser.add_argument("--time", metavar="T", help="time limit, instead of the site file's")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")


def takes_cluster_commands(parser: argparse.ArgumentParser) -> None:
    """up, status and down of a private Slurm."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for action, text in (
        ("up", "Start a cluster, or what has died of one; print how to use it."),
        ("status", "Show every daemon by pid, and the nodes."),
        ("down", "End every job and every daemon."),
    ):
        sub = actions.add_parser(action, help=text, description=text)
        sub.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="default: one per user in /tmp")
        if action == "down":
            sub.add_argument("--delete", action="store_true", help="delete the directory too")
        if action == "up":
            for name, of in (("train", "nodes"), ("gen", "nodes"), ("cpu", "nodes"), ("gpus", "fake GPUs of a node")):
                sub.add_argument(f"--{name}", type=int, metavar="N", help=of)
            sub.add_argument("--accounting", action="store_true", help="with slurmdbd: sacct, accounts, QOS")
            sub.add_argument("--networks", action="store_true", help="nodes with networks of their own; takes root")
            sub.add_argument("--private", action="store_true", help="unpacked packages even where Slurm is installed")
            sub.add_argument(
                "--release", metavar="SUITE", help="Slurm of Debian bookworm, trixie or sid (22.05 to 26.05)"
            )
            sub.add_argument("--wait-s", type=float, default=30.0, metavar="S", help="until all nodes are idle (30)")


def takes_run_file(parser: argparse.ArgumentParser) -> None:
    """A run file and overrides."""
    parser.add_argument("run_file", type=Path, metavar="RUN.toml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.learning_rate=2e-6")
