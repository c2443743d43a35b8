"""Ownership of a run directory: only the attempt named in owner.json may write to it.

Input: a run directory, and an owner name, new for every attempt.  Output: complete files, or OwnershipLost.

A process that was stopped, or whose node hung, may wake up long after another attempt has begun.  Three things keep it
from writing into that attempt's timeline:

1. It reads owner.json before each change (Fence.check).
2. Segments, checkpoints and status are prepared in a staging directory of their owner and renamed from there.  A new
owner writes its own name first and then deletes the staging directories of all others: from then on their renames fail,
however late, and files renamed before are visible and can be checked.
3. A thread of each role looks at owner.json every second and ends its process (roles/lifecycle.py).

Needs no locks and compares no clocks: owner.json is opened again for each check, so that an NFS client asks the server.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rlhpc.base.files import is_absent, listing, matching, rename, sync_directory, write_atomically, write_synced
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import OwnershipLost, RunDirectoryError

_PREFIX, _GONE_PREFIX = ".owner_", ".gone_"
# Without an owner.json, before a run directory counts as moved or deleted: seconds, and looks, none long after another.
ABSENT_S, ABSENT_LOOKS, FORGOTTEN_S = 3.0, 3, 30.0
REMOVE_TRIES = 20
REMOVE_PAUSE_S = 0.1


class _Absence:
    """Looks, one soon after the other, that have found no owner.json."""

    def __init__(self) -> None:
        self._since_s = self._looked_s = 0.0
        self._num_looks = 0

    def is_over(self) -> None:
        """A look has found it."""
        self._num_looks = 0

    def is_certain(self) -> bool:
        """Count a look that has not found it; whether such looks have gone on for long enough."""
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

    def check(self) -> None:
        """Raises OwnershipLost: another attempt has taken over, or the directory is gone.  OSError: it cannot be
        determined.

        One look that finds no owner.json determines nothing: an NFS client may see none for a moment.  It is gone if
        looks have not found it for ABSENT_S.
        """
        found = read_owner(self.layout)
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

        It is created by take_over only: a process that has lost the run directory finds it gone.
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


def read_owner(layout: RunLayout) -> str | None:
    """Name of the owner; None: there is none, or no such directory.  Raises OSError if that cannot be determined."""
    try:
        with open(layout.owner, "rb", buffering=0) as file:  # noqa: PTH123  read before every write, so without detours
            document = json.loads(file.read())
    except FileNotFoundError:
        if not is_absent(layout.owner):
            raise
        return None
    except ValueError as error:
        raise OSError(errno.EIO, f"damaged: {error}", str(layout.owner)) from error
    return str(document.get("owner", ""))


def take_over(layout: RunLayout, attempt: int, *, job_id: int = 0, restart: int = 0) -> Fence:
    """Become the owner: once this returns, no process of an earlier attempt changes what readers see.

    attempt: number of the attempt that begins.  job_id, restart: of Slurm, 0 without it.
    Raises RunDirectoryError: another took it over at the same moment, or a staging directory cannot be deleted.
    OSError; then it may be called again.
    """
    owner = f"{attempt}-{uuid.uuid4().hex[:12]}"
    fence, directories = Fence(layout, owner), (layout.root, layout.rollouts, layout.checkpoints)
    for directory in directories:
        # Nobody else has this name: an NFS client that asked twice may be told that it exists.
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
                _refuse_if_lost(fence)  # otherwise we would delete our successor's
                _remove(path)
    _refuse_if_lost(fence)
    for directory in directories:  # an owner just before us may have deleted them before it saw us
        fence.staging(directory).mkdir(exist_ok=True)
    return fence


def _refuse_if_lost(fence: Fence) -> None:
    try:
        fence.check()
    except OwnershipLost as error:
        raise RunDirectoryError(f"{fence.layout.root}: another start took it over at the same moment") from error


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
    # Files too: an NFS client may hold on to the directory itself.  On another machine a file that is open there can
    # stay behind under a name of NFS's own, which nobody renames.
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
