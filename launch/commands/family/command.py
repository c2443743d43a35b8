"""`rlhpc submit` of several runs at once: its options, and what it prints.

Input: the command line.  Imports little, because every command builds these options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from rlhpc.errors import ConfigError


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that make several runs of one run file."""
    parser.add_argument("--seeds", metavar="N|S,S", help="N runs with different run.seed, or one for each seed S")
    sweep = "submit a run for each value; repeated for several keys: for every combination"
    parser.add_argument("--sweep", action="append", default=[], metavar="key=v,v", help=sweep)
    parser.add_argument("--chain", action="store_true", help="run them one after the other instead of in parallel")


def is_family(options: argparse.Namespace) -> bool:
    """True if several runs are asked for.  Raises ConfigError: an option that only makes sense then."""
    if options.seeds is None and not options.sweep:
        if options.chain:
            raise ConfigError("--chain: the order of several runs; give --seeds or --sweep as well")
        return False
    return True


def submit_family_of(options: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Submit, or with --dry-run print; returns exit status 0.  Raises as submit_family does."""
    from launch.commands.family.members import members_of
    from launch.commands.family.submit import How, describe_family, submit_family
    from launch.commands.submit import dependency

    if options.wait:
        raise ConfigError("--wait: only for a single run; `rlhpc list` shows several")
    members = members_of(options.run_file, options.overrides, options.seeds, options.sweep)
    if options.dry_run:
        dependency(options.after)
        tell(describe_family(members, options.site_file, options.chain))
        return 0
    how = How(options.resume, options.fresh, options.chain, options.after)
    roots = submit_family(members, options.site_file, how, tell)
    tell(f"next        rlhpc list {roots[0].parent}\n            rlhpc stop {roots[0]}")
    return 0
