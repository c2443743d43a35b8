"""What both programs need that start roles: the launcher of `rlhpc run`, and the wrapper of a Slurm task."""

from __future__ import annotations

import contextlib
import ctypes
import signal

LONGEST_TEMPORARY_PATH = 60  # a unix socket's path has 107 bytes, and vLLM's names have 36
_LIBC = ctypes.CDLL(None)  # loaded here: a child between fork and exec should do as little as can be
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it ends.  Without effect where it cannot."""
    with contextlib.suppress(AttributeError):  # not Linux
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
