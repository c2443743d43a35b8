"""One launcher at a time for a run directory: on one machine by a lock, between machines by heartbeat files.

Input: a run directory to start or resume.  Output: a RunOwner, or RunDirectoryError that names the
owner.  Guarantees: of two simultaneous launchers on one machine one is refused; on a filesystem with locks no process
of an earlier attempt is alive on this machine when ownership is granted.  A process on another machine that was
suspended for longer than SILENCE_S is kept from doing harm by ownership.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.common.paths import quoted, written_unix_s
from launch.run_directory.directory_lock import DirectoryLock, LockHeld, holders, lock_directory
from launch.run_directory.process_identity import ProcessIdentity
from rlhpc.deadline import Deadline
from rlhpc.errors import RunDirectoryError
from rlhpc.files import is_absent, write_atomically
from rlhpc.ownership import Fence
from rlhpc.patience import briefly, seen
from rlhpc.privacy import PRIVATE
from rlhpc.run_layout import RunLayout

Tell = Callable[[str], None]

# Without a sign of life from another machine, where a controller writes twice a second: it counts as dead.
SILENCE_S = 20.0
RENEW_S = 2.0
LEAVE_S = 10.0  # for processes of a dead launcher to exit; the kernel has signalled them, and they need about 4 s
KILL_S = 10.0  # for the kernel to end what was killed
POLL_S = 0.2
OWN_FILES = {RunLayout(Path()).lock.name, RunLayout(Path()).launcher.name}  # files that exist before the run does
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # by a start that was killed (rlhpc/files.py)


class RunOwner:
    """This process as the launcher of a run.  Use as a context manager: leaving it releases the directory."""

    def __init__(self, layout: RunLayout, lock: DirectoryLock | None) -> None:
        self._layout, self._lock = layout, lock
        self._fence: Fence | None = None
        self._renewed_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record = read_launcher(self._layout)
        if record is not None and record == ProcessIdentity.of_this_process():
            seen(partial(self._layout.launcher.unlink, missing_ok=True), None)  # its process ends: nobody believes it
        if self._lock is None:  # the directory is not ours
            return
        if seen(partial(is_absent, self._layout.config), False):  # refused before anything was written
            for remove in (self._layout.lock.unlink, self._layout.root.rmdir):
                with suppress(OSError):
                    remove()
        self._lock.close()

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that every process of the run inherits."""
        return () if self._lock is None else (self._lock.descriptor,)

    def begins(self, owner: str) -> None:
        """An attempt begins whose processes write in the name of `owner`; "": the owner is not known yet."""
        self._fence = Fence(self._layout, owner) if owner else None

    def renew(self) -> None:
        """Show that this launcher is alive; called several times a second.  Raises OwnershipLost."""
        if time.monotonic() - self._renewed_at < RENEW_S:
            return
        self._renewed_at = time.monotonic()
        self.check()
        with suppress(OSError):  # the disk does not answer: the controller notices, too
            os.utime(self._layout.launcher)

    def check(self) -> None:
        """Raises OwnershipLost if another launcher has taken the run over."""
        with suppress(OSError):
            if self._fence is not None:
                self._fence.check()


def register_launcher(layout: RunLayout) -> None:
    """Record that this process is the run's launcher."""
    record = {**ProcessIdentity.of_this_process().to_json(), "unix_time_s": time.time()}  # the time is for people
    write_atomically(layout.launcher, json.dumps(record).encode())


def read_launcher(layout: RunLayout) -> ProcessIdentity | None:
    """The process recorded in launcher.json; None: none, or not readable."""
    try:
        return ProcessIdentity.parse(json.loads(layout.launcher.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def launcher_of(layout: RunLayout) -> int | None:
    """Return the pid of this directory's launcher if it is alive on this machine, else None."""
    record = read_launcher(layout)
    return record.pid if record is not None and record.is_alive else None


def may_live(layout: RunLayout) -> bool:
    """Whether this directory's launcher is alive here, or has sent a heartbeat from elsewhere lately; never waits."""
    record = read_launcher(layout)
    if record is None or record.is_here:
        return record is not None and record.is_alive
    return time.time() - written_unix_s(layout.launcher) < SILENCE_S


@dataclass(frozen=True, slots=True)
class LivingLauncher:
    """A launcher that is alive, on this or another machine."""

    layout: RunLayout
    record: ProcessIdentity

    def await_end(self, tell: Tell = lambda _: None) -> None:
        """Return when it has ended, or, on another machine, has sent no heartbeat for SILENCE_S."""
        if self.record.is_here:
            has_told = False
            while self.record.is_alive:
                if not has_told and self.record.is_suspended:
                    pid, has_told = self.record.pid, True
                    tell(
                        f"waiting for launcher pid {pid}, which is suspended (Ctrl-Z?): `kill -CONT {pid}` lets it end"
                    )
                time.sleep(POLL_S)
            return
        while read_launcher(self.layout) == self.record and _shows_life(self.layout):
            time.sleep(POLL_S)


def find_launcher(layout: RunLayout, tell: Tell = lambda _: None) -> LivingLauncher | None:
    """Return the launcher of this directory if it is alive, else None.

    For a launcher on another machine a heartbeat is awaited for up to SILENCE_S.
    """
    record = read_launcher(layout)
    if record is None:
        return None
    if not record.is_here:
        tell(f"waiting up to {SILENCE_S:.0f} s for a heartbeat of the run on {record.host} (pid {record.pid})")
    lives = record.is_alive if record.is_here else _shows_life(layout)
    return LivingLauncher(layout, record) if lives else None


def await_left_behind(layout: RunLayout, tell: Tell) -> None:
    """Return when the processes that a dead launcher left on this machine have ended, or after LEAVE_S."""
    if left := holders(layout):
        tell(f"waiting for processes of a dead launcher to end: {_describe(left)}")
        if not Deadline(LEAVE_S).wait_for(lambda: not holders(layout), POLL_S):
            tell(f"still alive: {_describe(holders(layout))}; the next start ends them")


def refuse_launcher(layout: RunLayout, tell: Tell = lambda _: None) -> None:
    """Raises RunDirectoryError if a launcher other than this process is alive in this directory, on any machine."""
    found = find_launcher(layout, tell)
    if found is None or found.record == ProcessIdentity.of_this_process():
        return
    where = "" if found.record.is_here else f" on {found.record.host}"
    raise RunDirectoryError(
        f"{layout.root}: a run is active here{where} (launcher pid {found.record.pid}); "
        f"`rlhpc stop {quoted(layout.root)}` "
        "stops it"
    )


def holds_something(directory: Path) -> bool:
    """Whether the directory has anything but the files that a launcher writes before a run exists."""
    names = {*os.listdir(directory)} if directory.is_dir() else set()  # noqa: PTH208  names are enough
    return any(_HALF_WRITTEN.fullmatch(name) is None for name in names - OWN_FILES)


@contextmanager
def own_run(layout: RunLayout, tell: Tell, *, may_take_over: bool) -> Iterator[RunOwner]:
    """Be the launcher of a run while the block runs.

    may_take_over: False for a start that expects an empty directory (no --resume, no --fresh): existing content is left
    unchanged, and refused later.  Raises RunDirectoryError: the run is alive, or one of its processes cannot be ended.
    """
    is_ours = layout.is_run or layout.being_deleted.exists()
    if holds_something(layout.root) and not (may_take_over and is_ours):
        yield RunOwner(layout, None)
        return
    layout.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    with RunOwner(layout, _lock(layout, tell)) as owner:
        refuse_launcher(layout, tell)
        briefly(lambda: register_launcher(layout), layout.launcher)
        yield owner


def _lock(layout: RunLayout, tell: Tell) -> DirectoryLock:
    """Acquire the lock; end processes that a dead launcher left behind."""
    deadline = Deadline(LEAVE_S)
    has_told = has_killed = False
    while True:
        try:
            return lock_directory(layout)
        except LockHeld:
            if launcher_of(layout) is not None:
                refuse_launcher(layout)
        left = holders(layout)
        if left and not has_told:
            tell(f"waiting for processes of an earlier start to end: {_describe(left)}")
            has_told = True
        if deadline.is_over:
            if has_killed or not left:
                who = _describe(left) or "by a process on another machine, or of another user"
                raise RunDirectoryError(
                    f"{layout.root}: {layout.lock.name} is locked ({who}), so the run may still be running"
                )
            tell(f"killing     {_describe(left)}: left behind by a dead launcher")
            for process in left:
                _kill(process)
            has_killed, deadline = True, Deadline(KILL_S)
        time.sleep(POLL_S)


def _kill(process: ProcessIdentity) -> None:
    """Kill it and its children: every process of a run leads its own process group."""
    if not process.is_alive:
        return
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)


def _describe(processes: list[ProcessIdentity]) -> str:
    return ", ".join(f"pid {process.pid} ({_role(process.pid)})" for process in processes)


def _role(pid: int) -> str:
    """ "trainer", or the name of the program, for people."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return "ended"
    return words[words.index("rlhpc.roles") + 1] if "rlhpc.roles" in words else Path(words[0]).name


def _signs_of_life(layout: RunLayout) -> tuple[int, ...]:
    """A value that changes whenever the launcher or the controller of a run has written."""
    return tuple(_modified_ns(path) for path in (layout.launcher, layout.status))


def _shows_life(layout: RunLayout) -> bool:
    """Wait for a change; False if there is none for SILENCE_S."""
    before = _signs_of_life(layout)
    return Deadline(SILENCE_S).wait_for(lambda: _signs_of_life(layout) != before, POLL_S)


def _modified_ns(path: Path) -> int:
    """0 if it does not exist.  The file is opened so that an NFS client asks the server instead of its cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
