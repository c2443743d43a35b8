"""System calls that Python's standard library lacks: namespaces, mounts, capabilities, Landlock, seccomp.

Each raises OSError with the name of the call.  Linux on x86-64 and arm64; Python 3.9 and the standard library, since
programs may have another interpreter than the run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Dict, Iterable, List, Sequence, Tuple

# --------------------------------------------------------------------------------------------------------------- kernel

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
# Numbers of calls that some C libraries have no function for: x86-64, arm64.
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
# Made once, in the server: making a class or an array type for each program would cost a twentieth of its time.
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
# Of root in a task container, over its own files and processes: chown, dac_override, fowner, fsetid, kill.
FILE_CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5


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
    """Move this process to new namespaces."""
    _checked("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def fork_into(namespaces: int) -> int:
    """Fork, the child in new namespaces: with CLONE_NEWPID as the first process of its own.  Needs CAP_SYS_ADMIN.

    The C library and Python are bypassed: no hook runs, and the C library still has the parent's thread id.  So the
    child should do little but call os.fork, which corrects both.
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
    """Remove a mount and all mounts below it from this namespace."""
    _checked(f"umount {target}", _LIBC.umount2(os.fsencode(target), _MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root; the old root is then at `old`, below the new one."""
    _call("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def set_host_name(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _checked("sethostname", _LIBC.sethostname(name.encode(), ctypes.c_size_t(len(name))))


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends.  Reset by changes of user ids."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def refuse_tracers() -> None:
    """Keep other processes of the same user from tracing this one; it also leaves no core file."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def forbid_new_privileges() -> None:
    """Set no_new_privs: programs gain nothing from set-uid bits or file capabilities; seccomp and Landlock need it."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def allow_tracers() -> None:
    """Give the files of this process in /proc to its user again, after a change of user or `refuse_tracers`."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 1)


def drop_bounding_set(keep: int = 0) -> None:
    """Empty the bounding set but for some bits: exec can no longer gain capabilities.  Needs CAP_SETPCAP."""
    for capability in range(_LAST_CAPABILITY + 1):
        if keep >> capability & 1:
            continue
        try:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:  # this kernel has fewer
                return
            raise


def drop_capabilities(keep: int = 0) -> None:
    """Give up every capability but these bits, of the first 32, for good."""
    held = (ctypes.c_uint32 * 6)(keep, keep) if keep else _NO_CAPABILITIES
    _call("capset", _CAPABILITY_HEADER, held)
    try:
        _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 4.3 has none
            raise


def install_filter(program: bytes) -> None:
    """Filter every further system call of this process and its children by a BPF program."""
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
    """Version of Landlock's interface; 0: the kernel has none, or it is disabled."""
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
    """Add a rule to a ruleset; rule: a struct landlock_path_beneath_attr."""
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


# --------------------------------------------------------------------------------------------------------------- filter
#
# The system calls that a program may make: a BPF program for seccomp.
#
# Calls that are not listed fail with EPERM.  Left out on purpose: socket (no network, not even local ones), ptrace,
# process_vm_*, mount, unshare, setns, bpf, keyctl, perf_event_open, io_uring_*, userfaultfd, memfd_create, SysV memory,
# links, sendmsg (descriptors in transit between sockets count for all processes of a user, who then can send none), and
# every call that changes ids, priorities or limits.  Python 3.9 and the standard library.


# Name: number on x86-64, on arm64; -1: missing.
_PLAIN = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "open": (2, -1), "openat": (257, 56), "close": (3, 57),
    "close_range": (436, 436), "fstat": (5, 80), "stat": (4, -1), "lstat": (6, -1), "newfstatat": (262, 79),
    "statx": (332, 291), "lseek": (8, 62), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, -1), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "getdents": (78, -1), "getdents64": (217, 61), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1),
    "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83),
    "umask": (95, 166),
    "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "flock": (73, 32), "pipe": (22, -1),
    "pipe2": (293, 59), "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1), "pselect6": (270, 72),
    "epoll_create": (213, -1), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, -1),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "mincore": (27, 232), "msync": (26, 227),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "gettid": (186, 178), "getpid": (39, 172),
    "getppid": (110, 173), "getpgrp": (111, -1), "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "times": (100, 153), "getrlimit": (97, 163), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, -1),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, -1), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120), "sched_getparam": (143, 121),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "futex": (202, 98),
    "futex_waitv": (449, 449), "set_robust_list": (273, 99), "rseq": (334, 293), "set_tid_address": (218, 96),
    "arch_prctl": (158, -1), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260),
    "waitid": (247, 95), "restart_syscall": (219, 128), "membarrier": (324, 283), "sendto": (44, 206),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209),
    "getsockname": (51, 204), "getpeername": (52, 205), "fadvise64": (221, 223), "copy_file_range": (326, 285),
    "sendfile": (40, 71), "statfs": (137, 43), "fstatfs": (138, 44), "getcpu": (309, 168),
}  # fmt: skip
# These change any file of the user by path: Landlock does not restrict them.
_CHANGE_FILES = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "utimensat": (280, 88),
    "truncate": (76, 45),
}
_EXECUTE_CALLS = {"execve": (59, 221)}
# What a shell, compilers and test runners need besides, in a container: its files, processes and sockets are its own.
_OF_CONTAINERS = {
    "execveat": (322, 281), "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36),
    "mknod": (133, -1), "mknodat": (259, 33), "openat2": (437, 437), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "fchmodat2": (452, 452), "sync": (162, 81), "syncfs": (306, 267),
    "sync_file_range": (277, 84), "readahead": (187, 213), "splice": (275, 76), "tee": (276, 77),
    "vmsplice": (278, 75), "preadv2": (327, 286), "pwritev2": (328, 287), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "inotify_init": (253, -1), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28), "sendmsg": (46, 211), "recvmsg": (47, 212), "sendmmsg": (307, 269),
    "recvmmsg": (299, 243), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "setsockopt": (54, 208), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "getpriority": (140, 141), "setrlimit": (160, 164), "setfsuid": (122, 151),
    "setfsgid": (123, 152), "capget": (125, 90), "capset": (126, 91), "personality": (135, 92),
    "signalfd": (282, -1), "signalfd4": (289, 74), "eventfd": (284, -1), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_getoverrun": (225, 109),
    "timer_delete": (226, 111), "epoll_pwait2": (441, 441), "rt_sigsuspend": (130, 133),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pause": (34, -1), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "get_robust_list": (274, 100), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_getattr": (315, 275),
    "sched_setattr": (314, 274), "sched_rr_get_interval": (148, 127), "mlock": (149, 228), "mlock2": (325, 284),
    "munlock": (150, 229), "mlockall": (151, 230), "munlockall": (152, 231), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192),
}  # fmt: skip
# They succeed without effect: a container has one user, and installers and archives name others.
_WITHOUT_EFFECT = {
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setgroups": (116, 159),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setresuid": (117, 147), "setresgid": (119, 149),
}  # fmt: skip
_FORK = {"fork": (57, -1), "vfork": (58, -1)}
_CLONE, _CLONE3, _PRCTL, _PRLIMIT, _IOCTL = (56, 220), (435, 435), (157, 167), (302, 261), (16, 29)
_FCNTL = (72, 25)
_SOCKET, _SOCKETPAIR, _KILL, _TKILL, _TGKILL = (41, 198), (53, 199), (62, 129), (200, 130), (234, 131)

_CLONE_THREAD, _CLONE_NEW_ANYTHING = 0x00010000, 0x7E020000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
# PDEATHSIG, DUMPABLE, CAPBSET_READ, TIMERSLACK, CHILD_SUBREAPER, NO_NEW_PRIVS, CAP_AMBIENT
_PRCTL_OPTIONS_OF_CONTAINERS = (1, 2, 3, 4, 23, 29, 30, 36, 37, 38, 39, 47)
# F_SETOWN, F_SETOWN_EX, F_SETSIG: signals to others; F_SETLEASE, F_NOTIFY; F_SETPIPE_SZ: a user's pipes share a limit
# of pages, so that others would lack them.
_NO_FCNTLS = (8, 15, 10, 1024, 1026, 1031)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_KILL_PROCESS, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

Instruction = Tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class Calls:
    """System calls allowed to a program beyond computing and using its own files."""

    may_execute: bool = False  # other programs, in its place
    may_fork: bool = False
    may_change_files: bool = True  # mode, times, length by path: if it can only name its own files
    only_process: int = 0  # the only one that it may signal; 0: any that it sees, in a PID namespace of its own
    is_contained: bool = False  # it has a root directory, a network and processes of its own (container_init.py)


@lru_cache(maxsize=8)
def compile_filter(calls: Calls) -> bytes:
    """The BPF program: an array of struct sock_filter.  Raises OSError on an unknown machine."""
    name = machine()
    column = 0 if name == "x86_64" else 1
    deny, unknown = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)
    allow = (_RETURN, 0, 0, _ALLOW)
    program: List[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[name]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if name == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)]
    plain = {**_PLAIN, **(_CHANGE_FILES if calls.may_change_files else {})}
    plain = {**plain, **(_EXECUTE_CALLS if calls.may_execute else {}), **(_FORK if calls.may_fork else {})}
    plain = {**plain, **(_OF_CONTAINERS if calls.is_contained else {})}
    for numbers in plain.values():
        if numbers[column] >= 0:
            program += [(_EQUAL, 0, 1, numbers[column]), allow]
    # glibc makes threads by clone3 or, if that fails, by clone, whose flags a filter can read.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), unknown]
    program += _judged(_CLONE[column], 0, _judge_clone(may_fork=calls.may_fork, allow=allow, deny=deny))
    options = _PRCTL_OPTIONS + (_PRCTL_OPTIONS_OF_CONTAINERS if calls.is_contained else ())
    program += _judged(_PRCTL[column], 0, _one_of(options, allow, deny))
    program += _judged(_FCNTL[column], 1, _one_of(_NO_FCNTLS, deny, allow))
    program += _judged(_IOCTL[column], 1, _one_of(_IOCTLS, allow, (_RETURN, 0, 0, _ERRNO | errno.ENOTTY)))
    program += _judged(_SOCKETPAIR[column], 0, _one_of((_AF_UNIX,), allow, deny))
    if calls.is_contained:
        program += _judged_in_containers(column, allow, deny)
    # A process may read its limits, not set them: the pointer to new limits is null, in both halves.
    reads = [_argument(2), (_EQUAL, 0, 3, 0), _argument(2, upper=True), (_EQUAL, 0, 1, 0), allow, deny]
    program += _judged(_PRLIMIT[column], 0, [(_EQUAL, 0, len(reads) - 1, 0), *reads])
    for numbers in (_KILL, _TKILL, _TGKILL):
        if not calls.only_process:
            program += [(_EQUAL, 0, 1, numbers[column]), allow]
        elif numbers is not _TKILL:
            program += _judged(numbers[column], 0, _one_of((calls.only_process,), allow, deny))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, deny])


def _judged_in_containers(column: int, allow: Instruction, deny: Instruction) -> List[Instruction]:
    """Sockets of kinds that stay inside, its own limits (not those of the first process), and what has no effect."""
    program = _judged(_SOCKET[column], 0, _one_of((_AF_UNIX, _AF_INET, _AF_INET6), allow, deny))
    program += _judged(_PRLIMIT[column], 0, _one_of((0,), allow, deny))
    for numbers in _WITHOUT_EFFECT.values():
        if numbers[column] >= 0:
            program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO)]
    return program


def _argument(index: int, *, upper: bool = False) -> Instruction:
    """Load the lower or upper half of an argument; both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * upper)


def _judged(number: int, argument: int, body: List[Instruction]) -> List[Instruction]:
    """If the call is `number`: load an argument, then `body`, which returns.  Otherwise go on, the number loaded."""
    return [(_EQUAL, 0, len(body) + 1, number), _argument(argument), *body]


def _one_of(values: Iterable[int], then: Instruction, otherwise: Instruction) -> List[Instruction]:
    return [line for value in values for line in ((_EQUAL, 0, 1, value), then)] + [otherwise]


def _judge_clone(*, may_fork: bool, allow: Instruction, deny: Instruction) -> List[Instruction]:
    """Allow threads, and processes if may_fork; none in a new namespace."""
    new = [(_SET, 0, 1, _CLONE_NEW_ANYTHING), deny]
    return [*new, allow] if may_fork else [*new, (_SET, 0, 1, _CLONE_THREAD), allow, deny]


# ------------------------------------------------------------------------------------------------------------- landlock
#
# Landlock: a process restricts itself, for good, to certain files (landlock(7)).
#
# Input: paths that may be read, paths that may be written.  All others are refused, whoever owns them, and so are TCP
# and, if the kernel supports it, signals to processes outside and their abstract sockets.
# Python 3.9 and the standard library.

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 16, 32, 128, 256
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_VERSION_1 = (1 << 13) - 1
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE | _REFER
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP, _SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3


def make_rules(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Return the descriptor of a ruleset, for `kernel.restrict_self`.  Raises OSError.

    Missing paths are skipped.  A rule also holds for later mounts below its path, but not for a mount on it.
    """
    version = landlock_version()
    handled = _ALL_OF_VERSION_1
    handled |= (
        (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEV if version >= 5 else 0)
    )
    network, scopes = (_TCP if version >= 4 else 0), (_SIGNALS_AND_ABSTRACT_SOCKETS if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = create_ruleset(struct.pack("=QQQ", handled, network, scopes)[:size])
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, _OWN & handled)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= _OF_A_FILE
        add_path_rule(ruleset, struct.pack("=Qi", access, opened))
    finally:
        os.close(opened)


# ----------------------------------------------------------------------------------------------------------------- root
#
# A private root directory: system directories of the node, read-only, and nothing else of it.
#
#     /usr /bin /lib …        as on the node, read-only
#     the interpreter         read-only, at its path
#     /dev                    null, zero, full, random, urandom, with times and modes that cannot be changed
#     /box/own                empty; each program gets a new file system in memory there (`mount_box`)
#     /tmp                    the same directory
#
# No /proc, no /sys, of /etc only the linker's files, no home directories.  Python 3.9 and the standard library.

BOXES = "/box"
BOX = "/box/own"  # below another directory, since Landlock ignores rules of a mount point itself
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STAGE = "/sys"  # exists everywhere, and is not needed here
_OLD = "/.old"
# Flags that an unprivileged user may not remove from a mount that he binds.
_KEPT = {"nosuid": MS_NOSUID, "nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": MS_NOATIME}
_KEPT.update({"nodiratime": MS_NODIRATIME, "relatime": MS_RELATIME})


def enter_root(readable: Sequence[str]) -> None:
    """Build the root and make it this process's; `readable`: more paths that programs see, read-only.

    Needs a mount namespace of its own and CAP_SYS_ADMIN in it.  Raises OSError.
    """
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in _outermost([*SYSTEM, *readable]):
        _show(path)
    for path in DEVICES:
        _bind(path, is_device=True)
    for name in (BOXES, BOX, _OLD):
        os.mkdir(_STAGE + name, 0o755)
    if not os.path.lexists(_STAGE + "/tmp"):  # the interpreter may be there
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
    """Copy a link as a link (/lib is usr/lib on most systems); bind a directory or a file."""
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
        no_devices = 0 if is_device else MS_NODEV  # a read-only device may be written, but not its times and mode
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
