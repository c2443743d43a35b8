"""Owners of a run directory: one launcher, one attempt of it, and for a moment one submission.

    what            held by, in                         shows life     is stale once
    DirectoryLock   a launcher and all that it starts,  (the kernel)   they have ended
                    a lock of the file `lock`
    RunOwner        a launcher, launcher.json           renew          it has ended; on another machine: it has shown
                                                                       nothing for SILENCE_S
    SubmissionLock  `rlhpc submit`, a file              -              it has ended; on another machine: it is older
                    beside the directory                               than ABANDONED_S
    Fence           an attempt, owner.json              -              another attempt has taken it

All are got by `take`; `check` asks whether one still has it, `release` gives it back, `holder` says who has it.  They
are four since none holds everywhere (docs/decisions/016-one-owner.md): the lock tells of every process of this
machine, even of one that a killed launcher has left suspended, and only where the filesystem has locks; signs of life
tell of other machines; a submission has no directory yet and nobody who would renew; and a process that was suspended
for longer than anybody waits is kept from doing harm by the fence alone.

Guarantees: of two simultaneous launchers on one machine one is refused, and of two submissions; on a filesystem with
locks no process of an earlier attempt is alive on this machine when a launcher has the directory; once Fence.take
returns, no process of an earlier attempt changes what readers see.  Nothing is decided by the clocks of two machines.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from rlhpc.base.files import (
    PRIVATE,
    is_absent,
    link_new,
    listing,
    matching,
    naming,
    rename,
    sync_directory,
    write_atomically,
    write_synced,
)
from rlhpc.base.patience import Deadline, briefly, seen
from rlhpc.base.processes import ProcessIdentity
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import OwnershipLost, RunDirectoryError

Tell = Callable[[str], None]
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lock or directory, and since when, as recorded in a file."""

    process: ProcessIdentity
    unix_time_s: float  # by the clock of its machine: for people

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


# ------------------------------------------------------------------------------------------------------- directory lock
#
# The lock of a run directory: held by the launcher and every process that it starts, as long as one of them lives.
#
# An open file whose lock children inherit; the kernel releases it with the last of them, however they ended.

_NAME = RunLayout(Path()).lock.name
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class LockHeld(Exception):
    """The lock is held by another process."""


class DirectoryLock:
    """A lock that is held."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor, self._path = descriptor, path

    @classmethod
    def take(cls, layout: RunLayout) -> DirectoryLock:
        """Lock an existing run directory.  Raises LockHeld; OSError if the file cannot be created."""
        while True:
            descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            lock = cls(descriptor, layout.lock)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.release()
                raise LockHeld from error
            except OSError as error:
                if error.errno not in _NO_LOCKS_HERE:  # without them, signs of life and the fence protect the directory
                    lock.release()
                    raise
            if lock.is_of_the_directory:
                return lock
            lock.release()  # the run was deleted in between

    def release(self) -> None:
        """Give up this process's share alone.  Idempotent."""
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

    @staticmethod
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


# ------------------------------------------------------------------------------------------------------------- launcher

SILENCE_S = (
    20.0  # without a sign of life from another machine, where a controller writes twice a second: counts as dead
)
LIVES_ELSEWHERE_S = 60.0  # if the status file is younger, jobs may be alive although Slurm does not answer
RENEW_S = 2.0
LEAVE_S = 10.0  # for processes of a dead launcher to exit; the kernel has signalled them, and they need about 4 s
KILL_S = 10.0  # for the kernel to end what was killed
OWN_FILES = {RunLayout(Path()).lock.name, RunLayout(Path()).launcher.name}  # files that exist before the run does
_HALF_WRITTEN = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")  # by a start that was killed (rlhpc/base/files.py)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that launcher.json names, alive or not."""

    layout: RunLayout
    process: ProcessIdentity

    @classmethod
    def register(cls, layout: RunLayout) -> None:
        """Record that this process is the run's launcher."""
        write_atomically(layout.launcher, Holder.of_this_process().to_json().encode())

    @classmethod
    def holder(cls, layout: RunLayout) -> Launcher | None:
        """The launcher on record; None: none, or not readable."""
        try:
            return cls(layout, ProcessIdentity.parse(json.loads(layout.launcher.read_bytes())))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def alive(cls, layout: RunLayout, tell: Tell = lambda _: None) -> Launcher | None:
        """The launcher on record if it is alive, on this machine or another, else None.

        On another machine a heartbeat is awaited for up to SILENCE_S.
        """
        found = cls.holder(layout)
        if found is None:
            return None
        process = found.process
        if process.is_here:
            return found if process.is_alive else None
        tell(f"waiting up to {SILENCE_S:.0f} s for a heartbeat of the run on {process.host} (pid {process.pid})")
        return found if _shows_life(layout) else None

    @classmethod
    def refuse(cls, layout: RunLayout, tell: Tell = lambda _: None) -> None:
        """Raises RunDirectoryError if a launcher other than this process is alive in this directory, on any machine."""
        found = cls.alive(layout, tell)
        if found is None or found.is_this_process:
            return
        where = "" if found.process.is_here else f" on {found.process.host}"
        raise RunDirectoryError(
            f"{layout.root}: a run is active here{where} (launcher pid {found.process.pid}); "
            f"`rlhpc stop {shlex.quote(str(layout.root))}` stops it"
        )

    @property
    def is_this_process(self) -> bool:
        """True if the launcher is the calling process."""
        return self.process == ProcessIdentity.of_this_process()

    @property
    def is_stale(self) -> bool:
        """True if the launcher seems to have ended; for displays only, since it compares the clocks of two machines."""
        if self.process.is_here:
            return not self.process.is_alive
        return time.time() - _modified_ns(self.layout.launcher) / 1e9 >= SILENCE_S

    def await_end(self, tell: Tell = lambda _: None) -> None:
        """Wait until the launcher has ended, or, on another machine, has sent no heartbeat for SILENCE_S."""
        if self.process.is_here:
            has_told = False
            while self.process.is_alive:
                if not has_told and self.process.is_suspended:
                    pid, has_told = self.process.pid, True
                    tell(
                        f"waiting for launcher pid {pid}, which is suspended (Ctrl-Z?): `kill -CONT {pid}` lets it end"
                    )
                time.sleep(POLL_S)
            return
        while Launcher.holder(self.layout) == self and _shows_life(self.layout):
            time.sleep(POLL_S)


class RunOwner:
    """This process as the launcher of a run."""

    def __init__(self, layout: RunLayout, lock: DirectoryLock | None) -> None:
        """lock: None if the directory belongs to someone else."""
        self._layout, self._lock = layout, lock
        self._fence: Fence | None = None
        self._renewed_at = 0.0

    @classmethod
    @contextmanager
    def take(cls, layout: RunLayout, tell: Tell, *, may_take_over: bool) -> Iterator[Self]:
        """Be the launcher of a run while the block runs.

        may_take_over: False for a start that expects an empty directory (no --resume, no --fresh): existing content is
        left unchanged, and refused later.  Raises RunDirectoryError: the run is alive, or one of its processes cannot
        be ended.
        """
        is_ours = layout.is_run or layout.being_deleted.exists()
        if holds_something(layout.root) and not (may_take_over and is_ours):
            yield cls(layout, None)
            return
        layout.root.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        owner = cls(layout, _lock(layout, tell))
        try:
            Launcher.refuse(layout, tell)
            briefly(lambda: Launcher.register(layout), layout.launcher)
            yield owner
        finally:
            owner.release()

    def release(self) -> None:
        """Give the directory back, and delete it if nothing was begun in it."""
        record = Launcher.holder(self._layout)
        if record is not None and record.is_this_process:
            seen(partial(self._layout.launcher.unlink, missing_ok=True), None)  # one left behind counts as stale
        if self._lock is None:
            return
        if seen(partial(is_absent, self._layout.config), False):  # refused before anything was written
            for remove in (self._layout.lock.unlink, self._layout.root.rmdir):
                with suppress(OSError):
                    remove()
        self._lock.release()

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that every process of the run inherits."""
        return () if self._lock is None else (self._lock.descriptor,)

    def begins(self, owner: str) -> None:
        """Set the owner whose name the processes of the beginning attempt write in; "": not known yet."""
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


def holds_something(directory: Path) -> bool:
    """True if the directory has anything but the files that a launcher writes before a run exists."""
    names = {*os.listdir(directory)} if directory.is_dir() else set()  # noqa: PTH208  names are enough
    return any(_HALF_WRITTEN.fullmatch(name) is None for name in names - OWN_FILES)


def await_left_behind(layout: RunLayout, tell: Tell) -> None:
    """Return when the processes that a dead launcher left on this machine have ended, or after LEAVE_S."""
    if left := DirectoryLock.holders(layout):
        tell(f"waiting for processes of a dead launcher to end: {_describe(left)}")
        if not Deadline(LEAVE_S).wait_for(lambda: not DirectoryLock.holders(layout), POLL_S):
            tell(f"still alive: {_describe(DirectoryLock.holders(layout))}; the next start ends them")


def _lock(layout: RunLayout, tell: Tell) -> DirectoryLock:
    """Acquire the lock; end processes that a dead launcher left behind."""
    deadline = Deadline(LEAVE_S)
    has_told = has_killed = False
    while True:
        try:
            return DirectoryLock.take(layout)
        except LockHeld:
            if (found := Launcher.holder(layout)) is not None and found.process.is_alive:
                Launcher.refuse(layout)
        left = DirectoryLock.holders(layout)
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
    """Kill a process and its children: every process of a run leads its own process group."""
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


# ------------------------------------------------------------------------------------------------------ submission lock
#
# One submission at a time: a file that exists while a process prepares a run directory and submits its jobs.
#
# Created with O_EXCL, which works on every shared filesystem, unlike file locks.

ABANDONED_S = 600.0  # on another host, whose processes cannot be seen


class SubmissionLock:
    """A lock file that exists while the block runs."""

    def __init__(self, path: Path, tell: Tell) -> None:
        """tell: called when the lock of a dead process is taken over."""
        self._path, self._tell = path, tell
        self._mine = Holder.of_this_process().to_json().encode()

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Create the lock file.  Raises RunDirectoryError: another process holds it, and how to remove it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_made():
            return
        self._put_stale_aside()
        if not self._is_made():
            raise RunDirectoryError(self._refusal())

    def release(self) -> None:
        """Delete it, unless another process has taken it over."""
        with suppress(FileNotFoundError):
            if self._path.read_bytes() == self._mine:
                self._path.unlink()

    def holder(self) -> tuple[bytes, Holder | None] | None:
        """Text and holder of the lock file (holder None: half written or damaged); None if nobody holds the lock."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return text, Holder.parse(text)
        except (KeyError, ValueError, TypeError):
            return text, None

    def is_stale(self, holder: Holder | None) -> bool:
        """True if the process that holds the lock has ended, or may be assumed to have."""
        if holder is not None and holder.process.is_here:
            return not holder.process.is_alive
        if holder is not None and holder.process.host == socket.gethostname():  # before a reboot
            return True
        return self._age_s() > ABANDONED_S

    def _is_made(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with naming(self._path), os.fdopen(descriptor, "wb") as file:
                file.write(self._mine)
        except OSError:  # a full disk: an empty lock would keep everybody out until it is old
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _put_stale_aside(self) -> None:
        """Move a stale lock out of the way.  Raises RunDirectoryError: it is not stale, or not known to be."""
        found = self.holder()
        if found is None:
            return
        text, holder = found
        if not self.is_stale(holder):
            raise RunDirectoryError(self._refusal())
        aside = self._beside("")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        try:
            if aside.read_bytes() != text:  # another process has taken it over meanwhile: give its lock back
                with suppress(OSError):
                    link_new(aside, self._path)
                raise RunDirectoryError(self._refusal())
        finally:
            aside.unlink(missing_ok=True)
        self._tell(f"taken over  {self._path}: left behind by {_describe_holder(holder)}")

    def _age_s(self) -> float:
        """Age by the clock of the file server alone: those of two hosts may differ by minutes."""
        now = self._beside(".now")
        try:
            now.touch()
            return now.stat().st_mtime - self._path.stat().st_mtime
        except FileNotFoundError:  # given up meanwhile
            return 0.0
        finally:
            now.unlink(missing_ok=True)

    def _beside(self, suffix: str) -> Path:
        """A path beside this one that no other process uses."""
        return self._path.with_name(f"{self._path.name}.{socket.gethostname()}.{os.getpid()}{suffix}")

    def _refusal(self) -> str:
        found = self.holder()
        return (
            f"{self._path}: a submission is in progress, by {_describe_holder(found[1] if found else None)}; "
            f"try again when it has ended, or, if that process is dead, `rm {shlex.quote(str(self._path))}`"
        )


def _describe_holder(holder: Holder | None) -> str:
    if holder is None:
        return "an unknown process"
    return f"pid {holder.process.pid} on {holder.process.host}, {time.time() - holder.unix_time_s:.0f} s ago"


# ---------------------------------------------------------------------------------------------------------------- fence
#
# Only the attempt named in owner.json may write.  Input: an owner name, new for every attempt.  Output: complete files,
# or OwnershipLost.
#
# A process that was stopped, or whose node hung, may wake up long after another attempt has begun.  Three things keep
# it from writing into that attempt's timeline:
#
# 1. It reads owner.json before each change (Fence.check).
# 2. Segments, checkpoints and status are prepared in a staging directory of their owner and renamed from there.  A new
#    owner writes its own name first and then deletes the staging directories of all others: from then on their renames
#    fail, however late, and files renamed before are visible and can be checked.
# 3. A thread of each role looks at owner.json every second and ends its process (roles/lifecycle.py).
#
# Needs no locks: owner.json is opened again for each check, so that an NFS client asks the server.

_PREFIX, _GONE_PREFIX = ".owner_", ".gone_"
# A run directory counts as moved or deleted after so many seconds, and checks in close succession, without owner.json.
ABSENT_S, ABSENT_LOOKS, FORGOTTEN_S = 3.0, 3, 30.0
REMOVE_TRIES = 20
REMOVE_PAUSE_S = 0.1


class _Absence:
    """Checks in close succession that have found no owner.json."""

    def __init__(self) -> None:
        self._since_s = self._looked_s = 0.0
        self._num_looks = 0

    def is_over(self) -> None:
        """Reset: a check has found owner.json."""
        self._num_looks = 0

    def is_certain(self) -> bool:
        """Count a check that has not found owner.json; True if such checks have gone on for long enough."""
        now_s = time.monotonic()
        if not self._num_looks or now_s - self._looked_s > FORGOTTEN_S:
            self._since_s, self._num_looks = now_s, 0
        self._looked_s = now_s
        self._num_looks += 1
        return self._num_looks >= ABSENT_LOOKS and now_s - self._since_s >= ABSENT_S


@dataclass(frozen=True, slots=True)
class Fence:
    """The check that a process makes before it changes the run directory."""

    layout: RunLayout
    owner: str
    _absence: _Absence = field(default_factory=_Absence, compare=False, repr=False)

    @classmethod
    def take(cls, layout: RunLayout, attempt: int, *, job_id: int = 0, restart: int = 0) -> Fence:
        """Become the owner: once this returns, no process of an earlier attempt changes what readers see.

        attempt: number of the attempt that begins.  job_id, restart: of Slurm, 0 without it.
        Raises RunDirectoryError: another took it over at the same moment, or a staging directory cannot be deleted.
        OSError; then it may be called again.
        """
        owner = f"{attempt}-{uuid.uuid4().hex[:12]}"
        fence, directories = cls(layout, owner), (layout.root, layout.rollouts, layout.checkpoints)
        for directory in directories:
            # The name is unique: "exists" here means that an NFS client sent the request twice.
            fence.staging(directory).mkdir(parents=True, exist_ok=True)
        document = {
            "owner": owner,
            "attempt": attempt,
            "job_id": job_id,
            "restart": restart,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "unix_time_s": time.time(),  # for people
        }
        write_atomically(layout.owner, json.dumps(document).encode())
        for directory in directories:
            for path in (*matching(directory, f"{_PREFIX}*"), *matching(directory, f"{_GONE_PREFIX}*")):
                if path != fence.staging(directory):
                    fence._refuse_if_lost()  # otherwise we would delete our successor's
                    _remove(path)
        fence._refuse_if_lost()
        for directory in directories:  # an owner just before us may have deleted them before it saw us
            fence.staging(directory).mkdir(exist_ok=True)
        return fence

    @staticmethod
    def holder(layout: RunLayout) -> str | None:
        """Name of the owner; None: there is none, or no such directory.  Raises OSError: it cannot be determined."""
        try:
            with open(layout.owner, "rb", buffering=0) as file:  # noqa: PTH123  before every write: without detours
                document = json.loads(file.read())
        except FileNotFoundError:
            if not is_absent(layout.owner):
                raise
            return None
        except ValueError as error:
            raise OSError(errno.EIO, f"damaged: {error}", str(layout.owner)) from error
        return str(document.get("owner", ""))

    def check(self) -> None:
        """Raises OwnershipLost: another attempt has taken over, or the directory is gone.  OSError: it cannot be
        determined.

        One check that finds no owner.json proves nothing: an NFS client may see none for a moment.  The directory is
        gone if checks have not found owner.json for ABSENT_S.
        """
        found = self.holder(self.layout)
        if found is not None:
            self._absence.is_over()
        elif not self._absence.is_certain():
            raise FileNotFoundError(errno.ENOENT, "is not there at the moment", str(self.layout.owner))
        if found != self.owner:
            by = f" by {found}" if found else f", moved or deleted: there is no {self.layout.owner.name}"
            raise OwnershipLost(
                f"{self.layout.root}: was taken over{by}; this process belongs to {self.owner} and stops writing"
            )

    def staging(self, directory: Path) -> Path:
        """The directory below root, rollouts or checkpoints in which files for that directory are prepared.

        It is created by `take` only: a process that has lost the run directory finds it gone.
        """
        return directory / f"{_PREFIX}{self.owner}"

    def write(self, path: Path, content: bytes, *, is_synced: bool = True) -> None:
        """Replace `path` by `content`, atomically and only while we are the owner.

        is_synced: False for files that are rewritten often and may be lost in a power cut.
        Raises OwnershipLost; OSError, in which case the old file, if any, is untouched.
        """
        self.check()
        temporary = self.staging(path.parent) / path.name
        try:
            write_synced(temporary, content, is_synced=is_synced)
            rename(temporary, path)
        except FileNotFoundError as error:
            with suppress(OSError):
                self.check()  # the usual reason: the staging directory was deleted meanwhile
            raise error from None
        if is_synced:
            sync_directory(path.parent)

    def _refuse_if_lost(self) -> None:
        try:
            self.check()
        except OwnershipLost as error:
            raise RunDirectoryError(f"{self.layout.root}: another start took it over at the same moment") from error


def _remove(path: Path) -> None:
    """Delete a staging directory whose owner may be writing into it."""
    gone = path if path.name.startswith(_GONE_PREFIX) else path.with_name(f"{_GONE_PREFIX}{uuid.uuid4().hex[:12]}")
    try:
        if gone != path:
            path.rename(gone)  # from here on its name no longer exists
    except FileNotFoundError:
        if is_absent(path):
            return
        raise
    # Files too: an NFS client may keep the directory itself.  A file that is open on another machine can stay behind
    # under a name made by NFS, which is never renamed.
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(gone, ignore_errors=True)
        left = [name for name in listing(gone) if not name.startswith(".nfs")]
        if not left:
            return
        time.sleep(REMOVE_PAUSE_S)
    why: OSError | None = None
    try:
        shutil.rmtree(gone)
    except OSError as error:
        why = error
    raise RunDirectoryError(
        f"{gone}: cannot be deleted, it contains {left[0]}; a process of an earlier attempt writes there"
    ) from why
