"""Processes by identity, read from /proc: a pid together with its start time identifies one process uniquely.

No process is looked up by program name alone, and no signal reaches a pid that has been reused.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhpc.deadline import Deadline
from rlhpc.errors import RunDirectoryError
from rlhpc.own_user import own_name


@dataclass(frozen=True, slots=True)
class Process:
    """One process.  birth: clock ticks since the machine started."""

    pid: int
    birth: int

    @property
    def is_alive(self) -> bool:
        """False once it has ended, also while its parent has not fetched its status."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.birth and fields[0] not in "ZX"

    @property
    def memory_mib(self) -> float:
        """Its proportional set size (PSS), MiB: shared pages are divided by their users; 0.0 if unknown."""
        with contextlib.suppress(psutil.Error):
            return float(psutil.Process(self.pid).memory_full_info().pss / 2**20)
        return 0.0

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it lives."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def process(pid: int) -> Process | None:
    """The process that has this pid now, or None."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def slurm_user() -> str:
    """Return the name of the user that this process runs as.  Raises RunDirectoryError: the uid has none here."""
    name = own_name()
    if not name:
        raise RunDirectoryError(f"user {os.getuid()} has no name here, and Slurm identifies users by name")
    return name


def write_record(path: Path, pid: int) -> None:
    """Write `pid birth`, so that a later command finds this very process."""
    fields = _stat(pid)
    partial = path.with_suffix(".partial")
    partial.write_text(f"{pid} {fields[19] if fields else 0}\n", encoding="ascii")
    partial.replace(path)


def read_record(path: Path) -> Process | None:
    """What `write_record` wrote, or None when there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        pid, birth = path.read_text(encoding="ascii").split()
        return Process(int(pid), int(birth))
    return None


def end(processes: Iterable[Process], grace_s: float) -> None:
    """SIGTERM, and SIGKILL to what is left after `grace_s`; returns when all are gone (or 5 s after the SIGKILL)."""
    wanted = list(processes)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for each in wanted:
            each.send(number)
        if wait_gone(wanted, patience_s):
            return


def wait_gone(processes: Iterable[Process], patience_s: float) -> bool:
    """True when all have ended within `patience_s`."""
    left = list(processes)
    for _ in Deadline(patience_s).polls(0.02):
        left = [each for each in left if each.is_alive]
        if not left:
            return True
    return False


def with_descendants(roots: Iterable[Process]) -> list[Process]:
    """The given processes and everything below them in the tree."""
    pids: set[int] = set()
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            pids |= {root.pid, *(child.pid for child in psutil.Process(root.pid).children(recursive=True))}
    return [here for pid in sorted(pids) if (here := process(pid))]


def holding(path: Path, program: str) -> list[Process]:
    """Processes of a program (its name begins so) that have a file open."""
    found = []
    for each in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if each.info["name"].startswith(program) and any(file.path == str(path) for file in each.open_files()):
                found += [here] if (here := process(each.pid)) else []
    return found


def with_environment(any_of: Iterable[str], all_of: Iterable[str]) -> list[Process]:
    """Processes in whose environment one of `any_of` and all of `all_of` stand; each is `NAME=value` or `NAME=`.

    `NAME=` stands for any value.  This process and its ancestors are left out.
    """
    either, every = tuple(any_of), tuple(all_of)
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for each in psutil.process_iter(["environ"]):
        entries = [f"{name}={value}" for name, value in (each.info["environ"] or {}).items()]
        is_meant = any(_stands(item, entries) for item in either) and all(_stands(item, entries) for item in every)
        if is_meant and each.pid not in own:
            found += [here] if (here := process(each.pid)) else []
    return found


def _stands(item: str, entries: list[str]) -> bool:
    return any(entry.startswith(item) for entry in entries) if item.endswith("=") else item in entries


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on: state, parent, …, birth (index 19)."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    return None
