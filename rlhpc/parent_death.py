"""End processes together with their parents, by means of the Linux kernel.

Linux only; a no-op on other systems.  Python 3.9 and the standard library.
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

_LIBC = ctypes.CDLL(None)  # loaded here: a child between fork and exec should do as little as possible
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_KILLED_S, _POLL_S = 5.0, 0.01  # for the kernel to end a killed process
_LOOK_S = 0.2  # polling interval for stopped children


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to the calling process when the thread that started it ends.

    It covers neither grandparents nor a parent that had ended before: see die_with.
    """
    with suppress(OSError, AttributeError):  # no prctl: not Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with(parent: int) -> None:
    """In a child between fork and exec: be killed when `parent`, the process that forked it, ends."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, even in another session."""
    with suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_child(pid: int, standstill_s: float = float("inf"), say: Callable[[], object] = lambda: None) -> int:
    """Wait until this child has ended, and reap all others that end meanwhile.

    standstill_s: kill it once a signal has kept it stopped for this long; time in which this process was stopped too,
    as in a suspended job, hardly counts.  say: called before the kill.
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

    A child that the kernel does not end within seconds (a hanging driver) is left behind.
    """
    deadline = Deadline(_KILLED_S)
    while not deadline.is_over and (children := _children()):
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Children of all threads of this process; none if the kernel does not list them."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found
