"""Compiled numeric loops: numba behind one decorator.

Trap: numba decides where its cache lives when it decorates a function.  It takes ``__pycache__`` beside the source if
that is writable, else the user's cache directory (``NUMBA_CACHE_DIR`` sets another), and raises RuntimeError
if neither is: a call that works for one user of a shared install and fails for the next.  In that case the function
is compiled without a cache here, once per process.

Trap: numba replaces a function's index before its code, and takes a source of the same size and time for the same.
Another node that reads between the two gets code of another processor or of an older source, and so do all later ones
if the writer dies there.  Files here bear a digest of source and processor in their names: those of one name are alike.
"""

from __future__ import annotations

import gc
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from pathlib import Path
from typing import Any, TypeVar, cast

from zlib_ng.zlib_ng import crc32

# ------------------------------------------------------------------------------------------------------------------ crc
#
# CRC-32 as zlib, gzip and PNG have it, a dozen times as fast: zlib-ng uses the processor's carry-less multiplication.
#
# Every message and every file of a run has one.  Measured on 54 KB: 1 µs, zlib's own 13 µs.


__all__ = ["crc32"]


# -------------------------------------------------------------------------------------------------------------- loading
#
# Load libraries with Python's garbage collector off, and exclude their objects from later collections.
#
# Modules are half a million objects that live as long as the process.  The collector would traverse them again and
# again while they load, a quarter of the CPU time of a trainer's start, and afterwards at every full collection.


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


# ------------------------------------------------------------------------------------------------------------- compiled


Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function`, which its first call compiles, with all others of its module; cached on disk where possible.

    It runs without the GIL, so an engine decodes while a checksum is computed.  Of other modules it may use only what
    never changes: only its own source is looked at.  numba is loaded by the first call: it takes half a second.
    """
    return cast(Function, _Uncompiled(function))


_COMPILING = threading.RLock()


class _Uncompiled:
    """A function before its first call, which puts numba's in its place: compiled functions call each other by name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        names = self._function.__globals__
        with _COMPILING:
            for name, value in list(names.items()):
                if isinstance(value, _Uncompiled):
                    names[name] = value._compile()
            function = self._compile()
        return function(*arguments)

    def _compile(self) -> Callable[..., Any]:
        if self._compiled is None:
            self._compiled = _by_numba(self._function)
        return self._compiled


def _by_numba(function: Callable[..., Any]) -> Callable[..., Any]:
    from numba import njit  # half a second, and vLLM's workers do not start where it is loaded before them

    function.__qualname__ += f"_{_digest(function.__code__.co_filename):08x}"
    try:
        return cast(Callable[..., Any], njit(cache=True, nogil=True)(function))
    except RuntimeError:  # "cannot cache function …: no locator available"
        return cast(Callable[..., Any], njit(nogil=True)(function))


@cache
def _digest(source: str) -> int:
    from llvmlite import binding  # as above

    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    return zlib.crc32(Path(source).read_bytes() + processor.encode())
