"""Parents and children that end together: what the kernel does for a process whose parent ends.

Linux only; elsewhere nothing happens.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlhpc.deadline import Deadline

_LIBC = ctypes.CDLL(None)  # loaded here: a child between fork and exec should do as little as can be
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_KILLED_S, _POLL_S = 5.0, 0.01  # for the kernel to end what was killed
_LOOK_S = 0.2  # at a child that is stopped


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to the calling process when the thread that started it ends.

    It holds neither for grandparents nor for a parent that was gone before: see die_with.
    """
    with suppress(OSError, AttributeError):  # no prctl: not Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with(parent: int) -> None:
    """In a child between fork and exec: be killed when the process `parent`, which has forked it, ends."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, sessions of their own included."""
    with suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_child(pid: int, standstill_s: float = float("inf"), say: Callable[[], object] = lambda: None) -> int:
    """Wait until this child has ended, and reap all others that end meanwhile.

    standstill_s: kill it after so long in which it was stopped by a signal; time in which this process was stopped too,
    as in a job that is suspended, hardly counts.  say: called before that.
    Returns its exit status, negative for a signal.
    """
    stopped_s = -1.0  # negative: it is not stopped
    while True:
        is_stopped = stopped_s >= 0
        found, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED | (os.WNOHANG if is_stopped else 0))
        if not found:
            time.sleep(_LOOK_S)
            stopped_s += _LOOK_S
            if stopped_s >= standstill_s:
                say()
                os.kill(pid, signal.SIGKILL)
                stopped_s = -1.0
        elif found == pid and os.WIFSTOPPED(status):
            stopped_s = 0.0
        elif found == pid and os.WIFCONTINUED(status):
            stopped_s = -1.0
        elif found == pid:
            return os.waitstatus_to_exitcode(status)


def end_children() -> None:
    """Kill and reap every child of this process, those adopted meanwhile too.

    One that the kernel does not end within seconds (a driver that hangs) stays.
    """
    deadline = Deadline(_KILLED_S)
    while not deadline.is_over and (children := _children()):
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Of all threads of this process; none where the kernel does not list them."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found
