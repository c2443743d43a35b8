"""Compiled numeric loops: numba behind one decorator.

Trap: numba decides where its cache lives when a function is decorated, at import.  It takes ``__pycache__`` beside the
source if that is writable, else the user's cache directory (``NUMBA_CACHE_DIR`` sets another), and raises RuntimeError
if neither is: an import that works for one user of a shared install and fails for the next.  In that case the function
is compiled without a cache here, once per process.  Entries are keyed by CPU model and by the source's modification
time, and are replaced by rename, so nodes of different kinds can share a home directory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function`, compiled at its first call; cached on disk where a directory is writable.

    It runs without the GIL, so an engine decodes while a checksum is computed.
    """
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "cannot cache function …: no locator available"
        return cast(Function, njit(nogil=True)(function))
