"""One submission at a time: a file that exists while a process prepares a run directory and submits its jobs.

Input: the path of that file.  Guarantees: of two simultaneous submissions one proceeds and one is refused; the lock of
a dead process is taken over.  Created with O_EXCL, which works on every shared filesystem, unlike file locks.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launch.common.paths import quoted
from launch.run_directory.process_identity import ProcessIdentity
from rlhpc.errors import RunDirectoryError
from rlhpc.files import link_new, naming

ABANDONED_S = 600.0  # on another host, whose processes cannot be seen


@dataclass(frozen=True, slots=True)
class Holder:
    """Who submits, and since when."""

    process: ProcessIdentity
    unix_time_s: float

    @classmethod
    def of_this_process(cls) -> Holder:
        """This process, now."""
        return cls(ProcessIdentity.of_this_process(), time.time())

    @classmethod
    def parse(cls, text: bytes) -> Holder:
        """Inverse of to_json.  Raises KeyError, TypeError or ValueError."""
        document = json.loads(text)
        return cls(ProcessIdentity.parse(document), float(document["unix_time_s"]))

    def to_json(self) -> str:
        """For a file."""
        return json.dumps({**self.process.to_json(), "unix_time_s": self.unix_time_s})

    def is_gone(self, age_s: float) -> bool:
        """True if it has ended, or may be assumed to have ended.  age_s: of its lock."""
        if self.process.is_here:
            return not self.process.is_alive
        return self.process.host == socket.gethostname() or age_s > ABANDONED_S


@contextmanager
def submits_alone(lock: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold `lock` while the block runs.  Raises RunDirectoryError: another process holds it, and how to remove it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    text = Holder.of_this_process().to_json().encode()
    if not _made(lock, text):
        _take_over(lock, tell)
        if not _made(lock, text):
            raise RunDirectoryError(_refusal(lock))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if lock.read_bytes() == text:  # unless another process has taken it over
                lock.unlink()


def _made(lock: Path, text: bytes) -> bool:
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with naming(lock), os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError:  # a full disk: an empty lock would keep everybody out until it is old
        lock.unlink(missing_ok=True)
        raise
    return True


def _take_over(lock: Path, tell: Callable[[str], None]) -> None:
    """Move a stale lock out of the way.  Raises RunDirectoryError: it is not stale, or not known to be."""
    found = _read(lock)
    if found is None:
        return
    text, holder = found
    age_s = _age_s(lock)
    if not (holder.is_gone(age_s) if holder else age_s > ABANDONED_S):
        raise RunDirectoryError(_refusal(lock))
    aside = lock.with_name(f"{lock.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        lock.rename(aside)
    except FileNotFoundError:
        return
    try:
        if aside.read_bytes() != text:  # another process has taken it over meanwhile: give its lock back
            with suppress(OSError):
                link_new(aside, lock)
            raise RunDirectoryError(_refusal(lock))
    finally:
        aside.unlink(missing_ok=True)
    tell(f"taken over  {lock}: left behind by {_describe(holder)}")


def _read(lock: Path) -> tuple[bytes, Holder | None] | None:
    """Its text, and its holder (None: half written, or damaged); None: it does not exist."""
    try:
        text = lock.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return text, Holder.parse(text)
    except (KeyError, ValueError, TypeError):
        return text, None


def _age_s(lock: Path) -> float:
    """By the clock of the file server alone: those of two hosts may differ by minutes."""
    now = lock.with_name(f"{lock.name}.{socket.gethostname()}.{os.getpid()}.now")
    try:
        now.touch()
        return now.stat().st_mtime - lock.stat().st_mtime
    except FileNotFoundError:  # given up meanwhile
        return 0.0
    finally:
        now.unlink(missing_ok=True)


def _refusal(lock: Path) -> str:
    found = _read(lock)
    return (
        f"{lock}: a submission is in progress, by {_describe(found[1] if found else None)}; try again when it has "
        f"ended, or, if that process is dead, `rm {quoted(lock)}`"
    )


def _describe(holder: Holder | None) -> str:
    if holder is None:
        return "an unknown process"
    return f"pid {holder.process.pid} on {holder.process.host}, {time.time() - holder.unix_time_s:.0f} s ago"
