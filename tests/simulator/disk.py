"""A disk below one directory: real files, of which a crash takes what was not synced, that may refuse, and be slow.

Input: the system calls that simulated processes make while it is installed.  Output: the files as a crash leaves them.
A killed process leaves all that it has written.  A power cut takes back what was not synced, whoever wrote it and
however long ago, as far as a file system may: of bytes written in place any piece of 512, and the names that files got
since their directory was synced.  A process may die at any of its file operations, before it is done.  Deletions last,
though they might come back.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.simulator.loop import OUTSIDE, PROCESS, Died, Process

SECTOR = 512
CALLS = ("open", "fdopen", "close", "pwritev", "ftruncate", "fsync", "fdatasync", "rename", "replace")


class SimulatedDisk:
    """What is below `root`."""

    def __init__(self, root: Path, now: Callable[[], float]) -> None:
        self._root, self._now = str(root), now
        self._real: dict[str, Any] = {}
        self._paths: dict[int, str] = {}  # of open descriptors
        self._holders: dict[int, Process] = {}  # the same
        self._unsynced: dict[str, list[tuple[int, bytes, bytes]]] = {}  # path → (offset, bytes before, bytes after)
        self._renamed: list[tuple[str, str]] = []  # whose directory was not synced since
        self.refuses_until = 0.0
        self.wall_clock_offset_s = 0.0
        self.is_over = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """os and time as the product sees them are this disk's and its clock's."""
        self._real = {name: getattr(os, name) for name in CALLS}
        wall_clock = time.time
        for name in CALLS:
            setattr(os, name, getattr(self, f"_{name}"))
        time.time = lambda: 1.7e9 + self._now() + self.wall_clock_offset_s
        try:
            yield
        finally:
            for name, call in self._real.items():
                setattr(os, name, call)
            time.time = wall_clock

    # ---------------------------------------------------------------------------------------------------------- a crash

    def crash(self, process: Process, rng: random.Random, *, is_power_cut: bool) -> None:
        """A process that wrote here is dead."""
        for descriptor in [each for each, holder in self._holders.items() if holder is process]:
            self._close(descriptor)
        if is_power_cut:
            self._take_back_names(rng)
            for path, writes in self._unsynced.items():
                if os.path.exists(path):  # noqa: PTH110
                    self._take_back_bytes(path, writes, rng)
            self._unsynced.clear()
            self._renamed.clear()

    def close(self) -> None:
        """Whatever is open still."""
        self.is_over = True
        for descriptor in list(self._paths):
            self._close(descriptor)

    def _take_back_names(self, rng: random.Random) -> None:
        for old, new in reversed(self._renamed):
            if rng.random() < 0.5 and os.path.exists(new) and not os.path.exists(old):  # noqa: PTH110
                with suppress(OSError):
                    self._real["rename"](new, old)
                    if new in self._unsynced:
                        self._unsynced[old] = self._unsynced.pop(new)

    def _take_back_bytes(self, path: str, writes: list[tuple[int, bytes, bytes]], rng: random.Random) -> None:
        share = rng.choice((0.0, 1.0, rng.random()))  # of what reaches the disk
        descriptor = self._real["open"](path, os.O_RDWR)
        try:
            for offset, before, _ in reversed(writes):
                os.pwrite(descriptor, before, offset)
            for offset, _, after in writes:
                first = 0
                while first < len(after):
                    end = min(len(after), first + SECTOR - (offset + first) % SECTOR)
                    if rng.random() < share:
                        os.pwrite(descriptor, after[first:end], offset + first)
                    first = end
        finally:
            self._real["close"](descriptor)

    # ----------------------------------------------------------------------------------------------------- system calls

    def _is_mine(self, path: Any) -> bool:
        return str(path).startswith(self._root)

    def _operate(self) -> None:
        """Before each operation: the process may be dead, or die here, or the disk refuse."""
        process = PROCESS.get()
        if process is OUTSIDE and not self.is_over:
            return
        if process.is_dead or self.is_over:
            raise Died
        if process.file_operations_left is not None:
            process.file_operations_left -= 1
            if process.file_operations_left < 0:
                process.kill()
                raise Died
        if self.refuses_until > self._now():
            raise OSError(errno.ENOSPC, "No space left on device")

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if not self._is_mine(path):
            return int(self._real["open"](path, flags, *rest, **more))
        if flags & os.O_CREAT:
            self._operate()
        if flags & os.O_WRONLY:
            flags = flags & ~os.O_WRONLY | os.O_RDWR  # `_pwritev` looks at what was there
        descriptor = int(self._real["open"](path, flags, *rest, **more))
        self._paths[descriptor], self._holders[descriptor] = str(path), PROCESS.get()
        return descriptor

    def _fdopen(self, descriptor: int, *rest: Any, **more: Any) -> Any:
        """Whoever has it now closes it without asking."""
        self._forget(descriptor)
        return self._real["fdopen"](descriptor, *rest, **more)

    def _close(self, descriptor: int) -> None:
        """Those of the dead are closed already, and their numbers may be others'."""
        if self._forget(descriptor) or not self.is_over:
            self._real["close"](descriptor)

    def _forget(self, descriptor: int) -> bool:
        self._holders.pop(descriptor, None)
        return self._paths.pop(descriptor, None) is not None

    def _pwritev(self, descriptor: int, pieces: Any, offset: int) -> int:
        path = self._paths.get(descriptor)
        if path is None:
            return int(self._real["pwritev"](descriptor, pieces, offset))
        self._operate()
        after = b"".join(bytes(piece) for piece in pieces)
        before = os.pread(descriptor, len(after), offset)
        self._unsynced.setdefault(path, []).append((offset, before.ljust(len(after), b"\0"), after))
        return int(self._real["pwritev"](descriptor, [after], offset))

    def _ftruncate(self, descriptor: int, size: int) -> None:
        if descriptor in self._paths:
            self._operate()
        self._real["ftruncate"](descriptor, size)

    def _fsync(self, descriptor: int) -> None:
        """On tmpfs nothing is to be done: what counts is what a crash takes back."""
        self._operate()
        path = self._paths.get(descriptor)
        if path is None:  # a file that is written whole
            return
        self._unsynced.pop(path, None)
        if self._renamed:
            self._renamed = [(old, new) for old, new in self._renamed if os.path.dirname(new) != path]  # noqa: PTH120

    _fdatasync = _fsync

    def _rename(self, old: Any, new: Any, call: str = "rename") -> None:
        if not self._is_mine(new):
            self._real[call](old, new)
            return
        self._operate()
        is_new = not os.path.exists(new)  # noqa: PTH110
        self._real[call](old, new)
        if is_new:
            self._renamed.append((str(old), str(new)))
        if str(old) in self._unsynced:
            self._unsynced[str(new)] = self._unsynced.pop(str(old))
        for descriptor, path in self._paths.items():
            if path == str(old):
                self._paths[descriptor] = str(new)

    def _replace(self, old: Any, new: Any) -> None:
        self._rename(old, new, "replace")
