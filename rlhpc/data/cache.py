"""Cache for results of long work on data, kept between commands: one file each, named by a digest of its inputs.

Input: everything that determines the result.  Output: bytes.  In $RLHPC_CACHE, else in rlhpc/ of $XDG_CACHE_HOME or
~/.cache; may be deleted at any time; if it is not writable, the work is repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from rlhpc.files import write_atomically
from rlhpc.own_user import own_home


def cached(
    kind: str, made_of: str, make: Callable[[], bytes], *, is_whole: Callable[[bytes], bool] = lambda _: True
) -> bytes:
    """What `make` returns, from the cache if it was made before; kind: the directory, for people who look.

    is_whole: False for what a disk has damaged, which is made again.
    """
    file = _home() / kind / hashlib.blake2b(made_of.encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError):
        if is_whole(kept := file.read_bytes()):
            return kept
    content = make()
    with contextlib.suppress(OSError):  # a home that is full, read-only or not there
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)
    return content


def _home() -> Path:
    if own := os.environ.get("RLHPC_CACHE", ""):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else own_home() / ".cache") / "rlhpc"
