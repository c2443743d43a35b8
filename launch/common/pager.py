"""Print more lines than fit on a screen, through the user's pager if stdout is a terminal.

Lines are passed on as they come: the first screen appears before the last line is ready, and leaving the pager early
ends the work.
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
    # As git does: less exits if everything fits on one screen.
    settings = {"LESS": "FRX", "LESSCHARSET": "utf-8", **environment}
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
    except KeyboardInterrupt:  # less continues with what it has
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
