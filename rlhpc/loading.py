"""Libraries are loaded without a search for garbage, and what they are made of is never searched again.

Modules are a million objects that live as long as the process.  While they load, Python walks through all of them again
and again, a quarter of the CPU time that a trainer takes to start, and afterwards at every full collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """For imports: if there were any, what the process holds then counts as permanent (gc.freeze).  May be nested.

    Garbage in reference cycles that is there already stays for ever: use it where a process starts.
    """
    if not gc.isenabled():  # by the caller, or whoever called that
        yield
        return
    num_before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_before:
            gc.freeze()
        gc.enable()
