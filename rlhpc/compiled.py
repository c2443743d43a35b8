"""Machine code for loops over numbers: numba behind one decorator.

Trap: numba decides where its cache lives when a function is decorated, at import.  It takes ``__pycache__`` beside the
source if that can be written, else the user's cache directory (``NUMBA_CACHE_DIR`` sets another), and raises
RuntimeError where neither can be: an import that works for one user of a shared install and not for the next.  Here the
function is then compiled without a cache, once per process.  Entries are keyed by CPU model and by the source's time of
change, and are replaced by rename, so that one home directory serves nodes of different kinds at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function`, compiled at its first call; cached on disk where a directory can be written.

    It runs without the interpreter's lock: an engine decodes while a checksum is taken.
    """
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "cannot cache function …: no locator available"
        return cast(Function, njit(nogil=True)(function))
