"""Processes that a reward function has forked and left behind: found after each completion, and ended.

Only copies of this process (os.fork, multiprocessing) count: a program that a function starts and keeps, such as the
sandbox's server, is another program.  Linux only; elsewhere none is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_TASKS = Path("/proc/self/task")


def children() -> frozenset[int]:
    """Process ids of all children of this process, those that have ended and were not waited for included."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                found.update(map(int, (thread / "children").read_text().split()))
    return frozenset(found)


def end_forks(before: frozenset[int]) -> int:
    """End copies of this process that were not there before, wait for them, and return their number."""
    ended = 0
    for pid in children() - before:
        if _is_copy(pid):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ended += 1
    return ended


def _is_copy(pid: int) -> bool:
    """Whether it runs this very command line, or has ended (what it was is not known any more).

    One that is about to be another program has no command line for a moment.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        has_ended = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
        return has_ended or words == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
