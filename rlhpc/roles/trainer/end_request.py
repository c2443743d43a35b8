"""Which signals end a trainer, and which do not.

It ignores Slurm's signals, which reach every process of a job step, because only the controller knows which step to
finish and what to save.  A trainer whose parent has died exits.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_STDERR = 2


class EndRequest:
    """Listens for signals; created in the main thread, where KeyboardInterrupt is raised."""

    def __init__(self) -> None:
        """Listen from now on."""
        self._is_requested = False
        self._was_told = False
        self._parent_pid = os.getppid()
        for number in FROM_SLURM:
            signal.signal(number, self._stay)
            signal.siginterrupt(number, False)  # a signal must not interrupt system calls of libraries
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C

    def is_made(self) -> bool:
        """Whether a signal has asked this process to leave."""
        return self._is_requested

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True
        raise KeyboardInterrupt  # an interrupted blocking call keeps its state

    def _stay(self, number: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent_pid:  # so the kernel sends it because the parent is dead (lifecycle.py)
            self._leave(number, frame)
        if not self._was_told:
            self._was_told = True
            # Not through logging: the line that the signal has interrupted may hold its stream.
            name = signal.Signals(number).name
            line = f"{time.strftime('%F %T')} trainer {name}: signal from Slurm: the controller decides when to stop\n"
            os.write(_STDERR, line.encode())
