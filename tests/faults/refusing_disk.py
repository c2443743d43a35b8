"""A file system that refuses for a while: every system call of some kinds below a run directory fails.

Input: a run directory.  Output: the environment of processes for which it refuses, and a switch.  By a library that is
preloaded (refusing_disk.c): nothing is mounted, and no privilege is needed, but a C compiler.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

KINDS = ("open", "create", "read", "write", "fsync", "rename", "stat", "list", "unlink", "mkdir")
ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ETIMEDOUT, errno.ENOENT)
READ_ONLY = ("create", "write", "fsync", "rename", "unlink", "mkdir")
COMPILER = shutil.which("cc") or shutil.which("gcc")


class RefusingDisk:
    """Refuses below `below`, while asked to, the processes that were started in `environment`."""

    def __init__(self, place: Path, below: Path) -> None:
        """place: a directory elsewhere, for the library and the switch."""
        self._library, self._switch = place / "refusing_disk.so", place / f"{below.name}.refuses"
        if not self._library.exists():
            source = Path(__file__).with_suffix(".c")
            made = self._library.with_suffix(".new")
            command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-w", "-o", str(made), str(source), "-ldl"]
            subprocess.run(command, check=True, capture_output=True)
            made.rename(self._library)
        self.environment = {
            "LD_PRELOAD": str(self._library),
            "REFUSING": str(self._switch),
            "REFUSING_BELOW": os.path.realpath(below),
        }

    @contextmanager
    def refuses(self, number: int, kinds: Sequence[str] = KINDS) -> Iterator[None]:
        """Fail calls of these kinds with this errno while the block runs."""
        partial = self._switch.with_suffix(".new")
        partial.write_text(f"{number} {','.join(kinds)}")
        partial.rename(self._switch)
        try:
            yield
        finally:
            self._switch.unlink()

    @property
    def num_refused(self) -> int:
        """Calls that have failed."""
        count = self._switch.with_name(f"{self._switch.name}.count")
        return count.stat().st_size if count.exists() else 0
