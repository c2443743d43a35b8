"""Load libraries with Python's garbage collector off, and exclude their objects from later collections.

Modules are half a million objects that live as long as the process.  The collector would traverse them again and again
while they load, a quarter of the CPU time of a trainer's start, and afterwards at every full collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Wrap imports: if any module was loaded, all objects become permanent (gc.freeze).  May be nested.

    Garbage in reference cycles, older or created by the imports, is never freed: use it when a process starts.
    """
    if not gc.isenabled():  # disabled by an outer caller
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
