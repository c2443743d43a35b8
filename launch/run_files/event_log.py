"""The supervisor's event log: one JSON line per event in the run directory, and the same text in the batch log."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


class EventLog:
    """Appends to one file; each job (or array task) has its own, so that a file has only one writer."""

    def __init__(self, path: Path, restart: int) -> None:
        self._path, self._restart = path, restart
        self.attempt = -1  # the current attempt

    def say(self, event: str, text: str) -> None:
        """Log an event: one word for programs, a sentence for people."""
        now = time.time()
        line = {"unix_time_s": now, "restart": self._restart, "attempt": self.attempt, "event": event, "text": text}
        clock = time.strftime("%H:%M:%S", time.localtime(now))
        with suppress(OSError):  # the batch log lies on the same filesystem, which may be full
            sys.stdout.write(f"{clock} rlhpc supervisor: {text}\n")
            sys.stdout.flush()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, (json.dumps(line) + "\n").encode())
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk must not end the run because its log cannot be written
            with suppress(OSError):
                sys.stdout.write(f"{clock} rlhpc supervisor: {self._path} not written: {error}\n")
