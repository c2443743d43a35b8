"""Signals to a supervisor, as flags.

Slurm sends a batch step USR2 `warn_s` before the time limit, and TERM at scancel, preemption, the failure of another
node, and the limit.  A terminal sends INT, and HUP when it is closed.  Other schedulers, and `--signal` of sbatch, warn
by the others of ENDS; each of them would kill a process that does not handle it.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGALRM, signal.SIGPWR)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)  # that reach the task of a role


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals while the block runs; what is started in it has them blocked until it unblocks them itself.

    Python without a handler dies of them, and of SIGINT, where its own start is interrupted, with status 1.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignal(KeyboardInterrupt):
    """A signal that ends a start before its attempt can begin.  It passes whoever catches every Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name} has ended this start before the run began")
        self.status = 128 + number  # as shells report it


class Signals:
    """The requests that this supervisor has received so far."""

    sender = ""  # of a signal that asks for the end

    def __init__(self) -> None:
        self.warned = False  # of the time limit
        self.end_requested = False  # after the current step, which is saved
        self.interrupts = 0  # ends within seconds; a second signal: at once
        self._reader, self._writer = os.pipe()  # a signal between reading the flags and poll must not be lost
        os.set_blocking(self._writer, False)
        self._poll = select.poll()  # select() knows no descriptor above 1023
        self._poll.register(self._reader, select.POLLIN)

    def sleep(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        if self._poll.poll(1000 * seconds):
            os.read(self._reader, 64)

    def lost_to(self) -> str:
        """The owner that has taken the run over, in words; "" if none is known here."""
        return ""

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


class SlurmSignals(Signals):
    """The signals that Slurm has sent so far."""

    sender = "Slurm"

    def __init__(self) -> None:
        """Install the handlers.  One instance per process."""
        super().__init__()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, every process seems to end with status 0
        for number in WARNINGS:
            signal.signal(number, self._warn)
        for number in (*ENDS, signal.SIGINT):
            signal.signal(number, self._end)
