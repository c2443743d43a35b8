"""Compiled numeric loops: numba behind one decorator.

Trap: numba decides where its cache lives when a function is decorated, at import.  It takes ``__pycache__`` beside the
source if that is writable, else the user's cache directory (``NUMBA_CACHE_DIR`` sets another), and raises RuntimeError
if neither is: an import that works for one user of a shared install and fails for the next.  In that case the function
is compiled without a cache here, once per process.

Trap: numba replaces a function's index before its code, and takes a source of the same size and time for the same.
Another node that reads between the two gets code of another processor or of an older source, and so do all later ones
if the writer dies there.  Files here bear a digest of source and processor in their names: those of one name are alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from llvmlite import binding
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function`, compiled at its first call; cached on disk where a directory is writable.

    It runs without the GIL, so an engine decodes while a checksum is computed.  Of other modules it may use only what
    never changes: only its own source is looked at.
    """
    function.__qualname__ += f"_{_digest(function.__code__.co_filename):08x}"
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "cannot cache function …: no locator available"
        return cast(Function, njit(nogil=True)(function))


@cache
def _digest(source: str) -> int:
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    return zlib.crc32(Path(source).read_bytes() + processor.encode())
