"""Print more lines than a screen holds, through the user's pager when somebody looks at a terminal.

Lines are handed on as they come: the first screen is there before the last line is made, and a pager that is left
early ends the work.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping


def print_paged(lines: Iterable[str], environment: Mapping[str, str] = os.environ) -> None:
    """Print through $PAGER (default: less, which prints what fits on one screen), or plainly if stdout is no terminal.

    Raises OSError only of the plain way.
    """
    command = shlex.split(environment.get("PAGER", "less"))
    if sys.stdout.isatty() and command and command != ["cat"]:
        pager = _started(command, environment)
        if pager is not None:
            _feed(pager, lines)
            return
    for line in lines:
        print(line)


def _started(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str] | None:
    """None: there is no such program."""
    settings = {"LESS": "FRX", "LESSCHARSET": "utf-8", **environment}  # git's: less ends where all fits on a screen
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, env=settings, text=True, encoding="utf-8", errors="replace"
        )
    except OSError:
        return None


def _feed(pager: subprocess.Popen[str], lines: Iterable[str]) -> None:
    assert pager.stdin is not None
    try:
        for line in lines:
            pager.stdin.write(f"{line}\n")
        pager.stdin.close()
    except BrokenPipeError:  # it was left before the end
        pass
    except KeyboardInterrupt:  # less goes on with what it has
        pass
    finally:
        _wait(pager)


def _wait(pager: subprocess.Popen[str]) -> None:
    while True:
        try:
            pager.communicate()
        except KeyboardInterrupt:  # meant for the pager, which takes it as "stop searching"
            continue
        except (BrokenPipeError, ValueError):  # closed already
            pager.wait()
        return
