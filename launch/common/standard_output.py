"""Standard output whose reader has left, or whose disk is full."""

from __future__ import annotations

import os
import sys


def flush_or_give_up() -> None:
    """Write what is buffered, or drop it: Python would try again at exit, and complain on stderr."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
