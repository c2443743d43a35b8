"""A root directory of its own: system directories, read-only, and nothing else of the node.

    /usr /bin /lib …        as on the node, read-only
    the interpreter         read-only, wherever it lies
    /dev                    null, zero, full, random, urandom, with times and modes that cannot be changed
    /box/own                empty; each program gets a new file system in memory there (`mount_box`)
    /tmp                    the same directory

No /proc, no /sys, no /etc but what the linker reads, no home directories.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import os
from typing import Dict, List, Sequence

from rlhpc.sandbox.kernel import (
    MS_BIND,
    MS_NOATIME,
    MS_NODEV,
    MS_NODIRATIME,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_RELATIME,
    MS_REMOUNT,
    mount,
    pivot_root,
    unmount,
)

BOXES = "/box"
BOX = "/box/own"  # below another directory, since Landlock passes over rules of what is mounted on
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STAGE = "/sys"  # exists everywhere, and is not needed here
_OLD = "/.old"
# Flags that an unprivileged user may not remove from a mount that he binds.
_KEPT = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": MS_NOATIME}
_KEPT.update({"nodiratime": MS_NODIRATIME, "relatime": MS_RELATIME})


def enter_root(readable: Sequence[str]) -> None:
    """Make this the process's root; `readable`: more paths that programs see, read-only.

    The process has a mount namespace of its own and CAP_SYS_ADMIN in it.  Raises OSError.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in _outermost([*SYSTEM, *readable]):
        _show(path)
    for path in DEVICES:
        _bind(path, is_device=True)
    for name in (BOXES, BOX, _OLD):
        os.mkdir(_STAGE + name, 0o755)
    if not os.path.lexists(_STAGE + "/tmp"):  # an interpreter may lie there
        os.symlink(BOX, _STAGE + "/tmp")
    pivot_root(_STAGE, _STAGE + _OLD)
    os.chdir("/")
    unmount(_OLD)
    os.rmdir(_OLD)
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def mount_box(num_bytes: int, num_files: int, user: int) -> None:
    """Put an empty file system in memory at BOX, for this mount namespace, and go there."""
    options = "size=%d,nr_inodes=%d,mode=700,uid=%d" % (num_bytes, num_files, user)
    mount("tmpfs", BOX, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir(BOX)


def _outermost(paths: Sequence[str]) -> List[str]:
    """The paths that exist and are not below another one that exists."""
    found: List[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.lexists(path)}):
        if not any(path == other or path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def _show(path: str) -> None:
    """A link stays one (/lib is usr/lib on most systems); a directory or a file is bound."""
    if os.path.islink(path):
        os.makedirs(os.path.dirname(_STAGE + path), mode=0o755, exist_ok=True)
        os.symlink(os.readlink(path), _STAGE + path)
        path = os.path.realpath(path)
        if os.path.lexists(_STAGE + path) or any(path.startswith(part + "/") for part in SYSTEM):
            return
    _bind(path)


def _bind(path: str, *, is_device: bool = False) -> None:
    target = _STAGE + path
    if os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, flags=MS_BIND | MS_REC)
    for point, options in _mounts_below(target).items():
        kept = sum(flag for name, flag in _KEPT.items() if name in options)
        no_devices = 0 if is_device else MS_NODEV  # read-only as well: it may be written, its times and its mode not
        mount("none", point, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | no_devices | kept)


def _mounts_below(target: str) -> Dict[str, List[str]]:
    """Every mount at or below a path, with its options (proc_pid_mountinfo(5))."""
    found = {}
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            words = line.split(b" ")
            point = os.fsdecode(words[4].decode("unicode_escape").encode("latin-1"))
            if point == target or point.startswith(target + "/"):
                found[point] = os.fsdecode(words[5]).split(",")
    return found
