"""`rlhpc submit` of several runs at once: what it does and prints.  Input: the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from launch.commands.family.members import members_of
from launch.commands.family.submit import How, describe_family, submit_family
from launch.commands.submit import dependency
from rlhpc.errors import ConfigError


def submit_family_of(options: argparse.Namespace, tell: Callable[[str], None]) -> int:
    """Submit, or with --dry-run print; returns exit status 0.  Raises as submit_family does."""
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
