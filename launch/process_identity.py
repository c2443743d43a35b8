"""Identify a process on a machine, robust against reused pids and changed clocks.

Input: a pid.  Output: ProcessIdentity, which can be stored and later checked, by any process on any machine, for
whether that process is alive.  Linux: /proc.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE_STATES = ("Z", "X", "x")  # has ended; whoever started it has not asked for its status, and may never do


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine."""

    host: str
    boot_id: str  # another machine, or the same one since it was started again, has another
    pid: int
    start_ticks: int  # from the boot to the birth of the process; setting the clock does not change them

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a process of this machine; None: there is none, or it has ended."""
        found = _state_and_ticks(pid)
        if found is None or found[0] in _GONE_STATES:
            return None
        return cls(socket.gethostname(), boot_id(), pid, found[1])

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Ours."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    @classmethod
    def parse(cls, document: dict[str, Any]) -> ProcessIdentity:
        """What to_json made.  Raises KeyError or ValueError."""
        return cls(str(document["host"]), str(document["boot_id"]), int(document["pid"]), int(document["start_ticks"]))

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True if it is of this machine as it runs now: whether it lives can be seen from here."""
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        """True if this very process runs, or stands still, on this machine."""
        found = ProcessIdentity.of(self.pid) if self.is_here else None
        return found is not None and found.start_ticks == self.start_ticks


def boot_id() -> str:
    """Name of this boot of this machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in brackets may hold anything, brackets too
    return fields[0], int(fields[19])
