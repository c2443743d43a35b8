"""Keep a role's log below a bound: of a longer one its beginning and its end stay.

Input: a file that other processes append to, all of them from this machine.  Output: the same file, shorter, with a
line that says what is left out.  A user's function may print in a loop, for weeks.  Python 3.9, standard library.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOOK_S = 2.0


class BoundedLog:
    """Looks at the file every LOOK_S seconds in a thread, while the block runs; may be entered several times."""

    def __init__(self, path: Path, name: str, max_bytes: int) -> None:
        """name: of the process, for the line in the file."""
        self._path, self._name, self._max_bytes = path, name, max_bytes
        self._left_out = self._remark_bytes = 0

    def __enter__(self) -> BoundedLog:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bounded-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that waits
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Shorten the file if it has become too long.  A file that cannot be read or written is left as it is."""
        with suppress(OSError):  # the run directory was moved or deleted, or its disk fails: the role will say so
            if self._path.stat().st_size > self._max_bytes:
                self._shorten()

    def _shorten(self) -> None:
        """What is appended between the last read and the cut is lost: microseconds of one that writes too much."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND)  # O_APPEND: whoever writes meanwhile is not overwritten
        try:
            quarter = self._max_bytes // 4
            head = os.pread(file, quarter, 0).rfind(b"\n") + 1 or quarter
            begin = os.fstat(file).st_size - quarter
            tail = bytearray(os.pread(file, quarter, begin))
            whole = tail.find(b"\n") + 1  # the tail begins with a whole line
            while more := os.pread(file, 1 << 20, begin + len(tail)):
                tail += more
            os.ftruncate(file, head)
            self._left_out += begin + whole - head - self._remark_bytes
            remark = self._remark()
            self._remark_bytes = len(remark)
            left = memoryview(remark + bytes(tail[whole:]))
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)

    def _remark(self) -> bytes:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        said = f"{self._left_out:,} bytes are left out here: run.log_bytes={self._max_bytes:,} is the most of one log"
        return f"{when} {self._name} rlhpc.task WARNING {said}\n".encode()
