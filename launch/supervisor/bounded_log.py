"""Keep a role's log below a bound: of a longer one its beginning and its end stay.

Input: an open file that other processes append to, all of them from this machine.  Output: the same file, shorter, with
a line that says what is left out.  A user's function may print in a loop, for weeks.  The open file counts, not its
name: a log that was renamed or deleted is written all the same.  Python 3.9, standard library.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOOK_S = 2.0
_REMARK = re.compile(rb"^\S+ \S+ \S+ rlhpc\.task WARNING ([\d,]+) bytes are left out here: .*\n", re.MULTILINE)
_LONGEST_REMARK = 1000


class BoundedLog:
    """Looks at a file every LOOK_S seconds in a thread.  What was left out before is read from the file itself."""

    def __init__(self, name: str, max_bytes: int) -> None:
        """name: of the process, for the line in the file."""
        self._name, self._max_bytes = name, max_bytes

    @contextmanager
    def over(self, file: int) -> Iterator[None]:
        """Keep a file that is open for reading and appending short while the block runs."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(file, is_over), name="bounded-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads on this node: the role counts, and its log is shortened at its end
            is_over.set()
        try:
            yield
        finally:
            if not is_over.is_set():
                is_over.set()
                thread.join()
            self.look(file)

    def _watch(self, file: int, is_over: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the thread that waits
        while not is_over.wait(LOOK_S):
            self.look(file)

    def look(self, file: int) -> None:
        """Shorten the file if it has become too long.  A file that cannot be read or written is left as it is."""
        with suppress(OSError):  # the run directory was moved or deleted, or its disk fails: the role will say so
            if os.fstat(file).st_size > self._max_bytes:
                self._shorten(file)

    def _shorten(self, file: int) -> None:
        """What is appended between the last read and the cut is lost: microseconds of one that writes too much."""
        quarter = self._max_bytes // 4
        beginning = os.pread(file, quarter + _LONGEST_REMARK, 0)
        before = _REMARK.search(beginning)
        if before is not None:
            head, left_out, kept = before.start(), int(before[1].replace(b",", b"")), before.end()
        else:
            head = kept = beginning.rfind(b"\n", 0, quarter) + 1 or quarter
            left_out = 0
        begin = os.fstat(file).st_size - quarter
        tail = bytearray(os.pread(file, quarter, begin))
        whole = tail.find(b"\n") + 1  # the tail begins with a whole line
        while more := os.pread(file, 1 << 20, begin + len(tail)):
            tail += more
        os.ftruncate(file, head)
        remark = self._remark(left_out + begin + whole - kept)
        if beginning[head - 1 : head] != b"\n":
            remark = b"\n" + remark
        left = memoryview(remark + bytes(tail[whole:]))
        while left:
            left = left[os.write(file, left) :]

    def _remark(self, left_out: int) -> bytes:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        said = f"{left_out:,} bytes are left out here: run.log_bytes={self._max_bytes:,} is the most of one log"
        return f"{when} {self._name} rlhpc.task WARNING {said}\n".encode()
