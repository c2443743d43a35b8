"""Libraries are loaded with Python's garbage collector off, and it never looks at what they are made of.

Modules are half a million objects that live as long as the process.  The collector walks through them again and
again while they load, a quarter of the CPU time that a trainer takes to start, and afterwards at every full collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """For imports: if there were any, what the process holds then counts as permanent (gc.freeze).  May be nested.

    Garbage in reference cycles, from before or made by the imports, is never freed: use it where a process starts.
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
