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
_GONE_STATES = ("Z", "X", "x")  # ended, but not yet reaped by its parent
_SUSPENDED_STATES = ("T", "t")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process in one boot of one machine."""

    host: str
    boot_id: str  # differs between machines, and after a reboot
    pid: int
    start_ticks: int  # from boot to process start; not affected by changes of the clock

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identity of a process on this machine; None: there is none, or it has ended."""
        found = _state_and_ticks(pid)
        if found is None or found[0] in _GONE_STATES:
            return None
        return cls(socket.gethostname(), boot_id(), pid, found[1])

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """This process's identity."""
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    @classmethod
    def parse(cls, document: dict[str, Any]) -> ProcessIdentity:
        """Inverse of to_json.  Raises KeyError or ValueError."""
        return cls(str(document["host"]), str(document["boot_id"]), int(document["pid"]), int(document["start_ticks"]))

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True if it belongs to this boot of this machine, so that its state is visible here."""
        return self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        """True if exactly this process exists on this machine, running or suspended."""
        found = ProcessIdentity.of(self.pid) if self.is_here else None
        return found is not None and found.start_ticks == self.start_ticks

    @property
    def is_suspended(self) -> bool:
        """True if it is alive on this machine and stopped by a signal, as by Ctrl-Z, or by a debugger."""
        found = _state_and_ticks(self.pid) if self.is_alive else None
        return found is not None and found[0] in _SUSPENDED_STATES


def boot_id() -> str:
    """Id of the current boot of this machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, on a site with hidepid
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name in brackets may hold anything, brackets too
    return fields[0], int(fields[19])
