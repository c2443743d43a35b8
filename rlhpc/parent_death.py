"""Tell the kernel that a process is to end with its parent, so that a killed parent leaves nothing behind.

Linux only; elsewhere nothing happens.  It holds for the thread that started the process, not for grandparents, and not
for a parent that was gone before: the caller compares os.getppid() with the pid that it expects.  Python 3.9 and the
standard library.
"""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

_LIBC = ctypes.CDLL(None)  # loaded here: a child between fork and exec should do as little as can be
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this signal to the calling process when the thread that started it ends."""
    with suppress(OSError, AttributeError):  # no prctl: not Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
