"""System calls that Python's standard library lacks: namespaces, mounts, capabilities, Landlock, seccomp.

Each raises OSError with the name of the call.  Linux on x86-64 and arm64; Python 3.9 and the standard library, since
the interpreter of the programs may be another one than the run's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from functools import cache
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 36, 38, 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3, _LAST_CAPABILITY = 0x20080522, 63
_LANDLOCK_CREATE_RULESET_VERSION, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
# Numbers of calls without a function in every C library: x86-64, arm64.
_NUMBERS = {
    "clone": (56, 220),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC_WITH_LOCK = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock, which the child then holds
# Made once, in the server: a class or an array type made by each program would cost it a twentieth of its time.
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


@cache
def machine() -> str:
    """x86_64 or aarch64.  Raises OSError on any other."""
    name = platform.machine()
    if os.uname().sysname != "Linux" or name not in ("x86_64", "aarch64"):
        raise OSError(errno.ENOSYS, f"no sandbox on {os.uname().sysname} {name}")
    return name


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def fork_into(namespaces: int) -> int:
    """As os.fork, the child in new namespaces: with CLONE_NEWPID as the first process of its own.  Needs CAP_SYS_ADMIN.

    Neither the C library nor Python learns of it: no hook runs, and the C library still has the parent's thread id.  So
    the child should do little but call os.fork, which corrects both.
    """
    number, zero = _NUMBERS["clone"][0 if machine() == "x86_64" else 1], ctypes.c_ulong(0)
    flags = ctypes.c_ulong(namespaces | signal.SIGCHLD)
    pid: int = _LIBC_WITH_LOCK.syscall(ctypes.c_long(number), flags, zero, zero, zero, zero)
    return _checked("clone", pid)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, bind (MS_BIND), or change a mount (MS_REMOUNT)."""
    result = _LIBC.mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(f"mount {target}", result)


def unmount(target: str) -> None:
    """Remove a mount and all below it from this namespace."""
    _checked(f"umount {target}", _LIBC.umount2(os.fsencode(target), _MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; what was the root is at `old`, below it."""
    _call("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def set_host_name(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _checked("sethostname", _LIBC.sethostname(name.encode(), ctypes.c_size_t(len(name))))


def die_with_parent(number: int) -> None:
    """Get this signal when the parent ends.  Lost when user ids change."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def refuse_tracers() -> None:
    """No other process of the same user may look into this one; it leaves no core file."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """No program started from here gains any, by set-uid bits or file capabilities; seccomp and Landlock need it."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Capabilities can no longer be gained by exec.  Needs CAP_SETPCAP."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # this kernel has fewer
                return
            raise


def drop_capabilities() -> None:
    """Give up every capability for good."""
    _call("capset", _CAPABILITY_HEADER, _NO_CAPABILITIES)
    try:
        _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 4.3 has none
            raise


def install_filter(program: bytes) -> None:
    """Have every further system call of this process and its children judged by a BPF program (filter.py)."""
    instructions = ctypes.create_string_buffer(program, len(program))
    described = _Filter(len(program) // 8, ctypes.cast(instructions, ctypes.c_void_p))
    result = _LIBC.prctl(
        _PR_SET_SECCOMP,
        ctypes.c_ulong(_SECCOMP_MODE_FILTER),
        ctypes.byref(described),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    _checked("PR_SET_SECCOMP", result)


def landlock_version() -> int:
    """Version of the interface; 0: this kernel has none, or it is not switched on."""
    try:
        version = _call(
            "landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_CREATE_RULESET_VERSION)
        )
    except OSError:
        return 0
    return version


def create_ruleset(attributes: bytes) -> int:
    """Returns the file descriptor of a Landlock ruleset."""
    return _call(
        "landlock_create_ruleset", ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )


def add_path_rule(ruleset: int, rule: bytes) -> None:
    """rule: a struct landlock_path_beneath_attr."""
    kind = ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH)
    _call("landlock_add_rule", ctypes.c_int(ruleset), kind, ctypes.c_char_p(rule), ctypes.c_uint32(0))


def restrict_self(ruleset: int) -> None:
    """Put this process and its children under a ruleset, for good."""
    _call("landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))


def _call(name: str, *arguments: Any) -> int:
    number = _NUMBERS[name][0 if machine() == "x86_64" else 1]
    return _checked(name, _LIBC.syscall(ctypes.c_long(number), *arguments))


def _prctl(name: str, option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(name, _LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero))


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
