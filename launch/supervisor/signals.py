"""Slurm's signals to the batch step, as flags.

USR2 arrives `warn_s` before the time limit; TERM at scancel, preemption, the failure of another node, and the limit.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class SlurmSignals:
    """The signals that Slurm has sent so far."""

    def __init__(self) -> None:
        """Install the handlers.  One instance per process."""
        self.warned = False  # of the time limit
        self.end_requested = False
        self._reader, self._writer = os.pipe()  # a signal between reading the flags and select must not be lost
        os.set_blocking(self._writer, False)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._warn)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 64)

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self.warned = True
        self._wake()

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.end_requested = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # the pipe is full, which wakes the reader, too
