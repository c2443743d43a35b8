"""Processes that a reward function has forked and left behind: found after the completion, and ended.

Only copies of this process (os.fork, multiprocessing) count: a program that a function starts and keeps, such as the
sandbox's server, is another program.  Costs nothing where nothing is forked.  Linux only; elsewhere none is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_TASKS = Path("/proc/self/task")


class ForkWatch:
    """Watches one process, for as long as it lives."""

    def __init__(self) -> None:
        self._own_pid, self._has_forked = os.getpid(), False
        os.register_at_fork(after_in_parent=self._note)

    @property
    def is_copy(self) -> bool:
        """Whether this is a copy of the process that is watched."""
        return os.getpid() != self._own_pid

    def end_copies(self) -> int:
        """End copies that were made since the last call and are still there, wait for them, return their number."""
        if not self._has_forked:
            return 0
        self._has_forked, ended = False, 0
        for pid in _children():
            if _is_copy(pid):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                ended += 1
        return ended

    def _note(self) -> None:
        self._has_forked = True


def _children() -> frozenset[int]:
    """Process ids of all children of this process, those that have ended and were not waited for included."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in _TASKS.iterdir():
            with contextlib.suppress(OSError):
                found.update(map(int, (thread / "children").read_text().split()))
    return frozenset(found)


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
