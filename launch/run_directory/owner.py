"""One launcher at a time for a run directory: on one machine by a lock, between machines by heartbeat files.

Input: a run directory to start or resume.  Output: a RunOwner, or RunDirectoryError that names the
owner.  Guarantees: of two simultaneous launchers on one machine one is refused; on a filesystem with locks no process
of an earlier attempt is alive on this machine when ownership is granted.  A process on another machine that was
suspended for longer than SILENCE_S is kept from doing harm by ownership.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from launch.common.text import quoted, written_unix_s
from rlhpc.base.files import PRIVATE, is_absent, link_new, naming, write_atomically
from rlhpc.base.ownership import Fence
from rlhpc.base.patience import Deadline, briefly, seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import RunDirectoryError

# ----------------------------------------------------------------------------------------------------- process identity
#
# Identify a process on a machine, robust against reused pids and changed clocks.
#
# Input: a pid.  Output: ProcessIdentity, which can be stored and later checked, by any process on any machine, for
# whether that process is alive.  Linux: /proc.


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
        """Make a JSON object for a file."""
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


# ------------------------------------------------------------------------------------------------------- directory lock
#
# The lock of a run directory: held by the launcher and every process that it starts, as long as one of them lives.
#
# Input: a RunLayout.  Output: an open file whose lock children inherit; the kernel releases it with the last of them,
# however they ended.  It tells whether a process of this run is still alive on this machine, even if a killed launcher
# has left a suspended process behind.  On filesystems without locks ownership.py alone keeps attempts apart.


_NAME = RunLayout(Path()).lock.name
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockHeld(Exception):
    """The lock is held by another process."""


class DirectoryLock:
    """A lock that is held.  Closing it releases only this process's share."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self._path = descriptor, path

    def close(self) -> None:
        """Release it.  Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def is_of_the_directory(self) -> bool:
        """False if the file has been deleted since: then the lock excludes nobody."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def lock_directory(layout: RunLayout) -> DirectoryLock:
    """Lock an existing run directory.  Raises LockHeld; OSError if the file cannot be created."""
    while True:
        descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        lock = DirectoryLock(descriptor, layout.lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise LockHeld from error
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:  # without file locks, ownership.py alone protects the directory
                lock.close()
                raise
        if lock.is_of_the_directory:
            return lock
        lock.close()  # the run was deleted in between


def holders(layout: RunLayout) -> list[ProcessIdentity]:
    """Other processes on this machine that have the lock file open, as far as they are visible to this user."""
    try:
        wanted = layout.lock.stat()
    except FileNotFoundError:
        return []
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            if any(_is_open(path, wanted) for path in (directory / "fd").iterdir()):
                identity = ProcessIdentity.of(int(directory.name))
                found += [identity] if identity is not None else []
    return found


def _is_open(path: Path, wanted: os.stat_result) -> bool:
    try:
        # The name first: stat of a file on a filesystem that does not answer would hang.
        return Path(os.readlink(path)).name == _NAME and os.path.samestat(path.stat(), wanted)  # noqa: PTH115
    except OSError:  # closed meanwhile
        return False


# ------------------------------------------------------------------------------------------------------ submission lock
#
# One submission at a time: a file that exists while a process prepares a run directory and submits its jobs.
#
# Input: the path of that file.  Guarantees: of two simultaneous submissions one proceeds and one is refused; the lock
# of a dead process is taken over.  Created with O_EXCL, which works on every shared filesystem, unlike file locks.


ABANDONED_S = 600.0  # on another host, whose processes cannot be seen


@dataclass(frozen=True, slots=True)
class Holder:
    """Who submits, and since when."""

    process: ProcessIdentity
    unix_time_s: float

    @classmethod
    def of_this_process(cls) -> Holder:
        """This process, now."""
        return cls(ProcessIdentity.of_this_process(), time.time())

    @classmethod
    def parse(cls, text: bytes) -> Holder:
        """Inverse of to_json.  Raises KeyError, TypeError or ValueError."""
        document = json.loads(text)
        return cls(ProcessIdentity.parse(document), float(document["unix_time_s"]))

    def to_json(self) -> str:
        """Make a JSON text for a file."""
        return json.dumps({**self.process.to_json(), "unix_time_s": self.unix_time_s})

    def is_gone(self, age_s: float) -> bool:
        """True if it has ended, or may be assumed to have ended.  age_s: of its lock."""
        if self.process.is_here:
            return not self.process.is_alive
        return self.process.host == socket.gethostname() or age_s > ABANDONED_S


@contextmanager
def submits_alone(lock: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold `lock` while the block runs.  Raises RunDirectoryError: another process holds it, and how to remove it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    text = Holder.of_this_process().to_json().encode()
    if not _made(lock, text):
        _take_over(lock, tell)
        if not _made(lock, text):
            raise RunDirectoryError(_refusal(lock))
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if lock.read_bytes() == text:  # unless another process has taken it over
                lock.unlink()


def _made(lock: Path, text: bytes) -> bool:
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with naming(lock), os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError:  # a full disk: an empty lock would keep everybody out until it is old
        lock.unlink(missing_ok=True)
        raise
    return True


def _take_over(lock: Path, tell: Callable[[str], None]) -> None:
    """Move a stale lock out of the way.  Raises RunDirectoryError: it is not stale, or not known to be."""
    found = _read(lock)
    if found is None:
        return
    text, holder = found
    age_s = _age_s(lock)
    if not (holder.is_gone(age_s) if holder else age_s > ABANDONED_S):
        raise RunDirectoryError(_refusal(lock))
    aside = lock.with_name(f"{lock.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        lock.rename(aside)
    except FileNotFoundError:
        return
    try:
        if aside.read_bytes() != text:  # another process has taken it over meanwhile: give its lock back
            with suppress(OSError):
                link_new(aside, lock)
            raise RunDirectoryError(_refusal(lock))
    finally:
        aside.unlink(missing_ok=True)
    tell(f"taken over  {lock}: left behind by {_describe_holder(holder)}")


def _read(lock: Path) -> tuple[bytes, Holder | None] | None:
    """Its text, and its holder (None: half written, or damaged); None: it does not exist."""
    try:
        text = lock.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return text, Holder.parse(text)
    except (KeyError, ValueError, TypeError):
        return text, None


def _age_s(lock: Path) -> float:
    """Age by the clock of the file server alone: those of two hosts may differ by minutes."""
    now = lock.with_name(f"{lock.name}.{socket.gethostname()}.{os.getpid()}.now")
    try:
        now.touch()
        return now.stat().st_mtime - lock.stat().st_mtime
    except FileNotFoundError:  # given up meanwhile
        return 0.0
    finally:
        now.unlink(missing_ok=True)


def _refusal(lock: Path) -> str:
    found = _read(lock)
    return (
        f"{lock}: a submission is in progress, by {_describe_holder(found[1] if found else None)}; "
        "try again when it has "
        f"ended, or, if that process is dead, `rm {quoted(lock)}`"
    )


def _describe_holder(holder: Holder | None) -> str:
    if holder is None:
        return "an unknown process"
    return f"pid {holder.process.pid} on {holder.process.host}, {time.time() - holder.unix_time_s:.0f} s ago"


# ---------------------------------------------------------------------------------------------------------------- owner


Tell = Callable[[str], None]

# Without a sign of life from another machine, where a controller writes twice a second: it counts as dead.
LIVES_ELSEWHERE_S = 60.0  # if the status file is younger, jobs may be alive although Slurm does not answer
SILENCE_S = 20.0
RENEW_S = 2.0
LEAVE_S = 10.0  # for processes of a dead launcher to exit; the kernel has signalled them, and they need about 4 s
KILL_S = 10.0  # for the kernel to end what was killed
POLL_S = 0.2
OWN_FILES = {RunLayout(Path()).lock.name, RunLayout(Path()).launcher.name}  # files that exist before the run does
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # by a start that was killed (rlhpc/base/files.py)


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
        tell(f"waiting for processes of a dead launcher to end: {_describe_processes(left)}")
        if not Deadline(LEAVE_S).wait_for(lambda: not holders(layout), POLL_S):
            tell(f"still alive: {_describe_processes(holders(layout))}; the next start ends them")


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
            tell(f"waiting for processes of an earlier start to end: {_describe_processes(left)}")
            has_told = True
        if deadline.is_over:
            if has_killed or not left:
                who = _describe_processes(left) or "by a process on another machine, or of another user"
                raise RunDirectoryError(
                    f"{layout.root}: {layout.lock.name} is locked ({who}), so the run may still be running"
                )
            tell(f"killing     {_describe_processes(left)}: left behind by a dead launcher")
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


def _describe_processes(processes: list[ProcessIdentity]) -> str:
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
