"""The lock of a run directory: held by the launcher and every process that it starts, as long as one of them lives.

Input: a RunLayout.  Output: an open file whose lock children inherit; the kernel releases it with the last of them,
however they ended.  It tells whether a process of this run is still alive on this machine, even if a killed launcher
has left a suspended process behind.  On filesystems without locks ownership.py alone keeps attempts apart.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from launch.run_directory.process_identity import ProcessIdentity
from rlhpc.run_layout import RunLayout

_NAME = RunLayout(Path()).lock.name
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockHeld(Exception):
    """The lock is held by another process."""


class DirectoryLock:
    """A lock that is held.  Closing it releases only this process's share."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self._path = descriptor, path

    def close(self) -> None:
        """Release it.  Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def is_of_the_directory(self) -> bool:
        """False if the file has been deleted since: then the lock excludes nobody."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def lock_directory(layout: RunLayout) -> DirectoryLock:
    """Lock an existing run directory.  Raises LockHeld; OSError if the file cannot be created."""
    while True:
        descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        lock = DirectoryLock(descriptor, layout.lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise LockHeld from error
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:  # without file locks, ownership.py alone protects the directory
                lock.close()
                raise
        if lock.is_of_the_directory:
            return lock
        lock.close()  # the run was deleted in between


def holders(layout: RunLayout) -> list[ProcessIdentity]:
    """Other processes on this machine that have the lock file open, as far as they are visible to this user."""
    try:
        wanted = layout.lock.stat()
    except FileNotFoundError:
        return []
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            if any(_is_open(path, wanted) for path in (directory / "fd").iterdir()):
                identity = ProcessIdentity.of(int(directory.name))
                found += [identity] if identity is not None else []
    return found


def _is_open(path: Path, wanted: os.stat_result) -> bool:
    try:
        # The name first: stat of a file on a filesystem that does not answer would hang.
        return Path(os.readlink(path)).name == _NAME and os.path.samestat(path.stat(), wanted)  # noqa: PTH115
    except OSError:  # closed meanwhile
        return False
