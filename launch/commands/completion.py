"""`rlhpc completion SHELL`: a script that completes commands, options and paths.

Output: the script, for bash, zsh or fish, made by shtab from the parser of the command line.  It is static: a shell
that completes starts no Python, which would take a tenth of a second and more for every press of a key.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.common.optional_package import optional_module

_DIRECTORIES = ("RUN_DIR", "DIR", "DIRECTORY", "OUT", "MODEL|RUN_DIR", "RUN_DIR|DIR", "FIRST", "SECOND")  # metavars


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """shell: "bash", "zsh" or "fish".  Raises ConfigError: shtab is not installed."""
    shtab = optional_module("shtab", "completion")
    for action in _actions(parser):
        metavar = str(action.metavar or "")
        if metavar in _DIRECTORIES:
            action.complete = shtab.DIRECTORY
        elif action.type is Path or ".toml" in metavar or "FILE" in metavar:
            action.complete = shtab.FILE
    return str(shtab.complete(parser, shell=shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Actions of a parser and of all below it; those that take nothing are left out.  `complete` is shtab's own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        elif action.nargs != 0:
            yield action
