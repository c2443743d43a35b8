"""The system calls that a program may make: a BPF program for seccomp.

What is not listed fails with EPERM.  Among what is missing on purpose: socket (no network, not even local ones),
ptrace, process_vm_*, mount, unshare, setns, bpf, keyctl, perf_event_open, io_uring_*, userfaultfd, memfd_create, SysV
memory, links, sendmsg (descriptors on their way between sockets count for all processes of a user, who then can send
none), and every call that changes ids, priorities or limits.  Python 3.9 and the standard library.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Iterable, List, Tuple

from rlhpc.sandbox.kernel import machine

# Name: number on x86-64, on arm64; -1: not there.
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
# By path, of any file that is its user's: Landlock does not judge these.
_CHANGE_FILES = {
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "utimensat": (280, 88),
    "truncate": (76, 45),
}
_EXECUTE = {"execve": (59, 221)}
_FORK = {"fork": (57, -1), "vfork": (58, -1)}
_CLONE, _CLONE3, _PRCTL, _PRLIMIT, _IOCTL = (56, 220), (435, 435), (157, 167), (302, 261), (16, 29)
_FCNTL = (72, 25)
_SOCKETPAIR, _KILL, _TKILL, _TGKILL = (53, 199), (62, 129), (200, 130), (234, 131)

_CLONE_THREAD, _CLONE_NEW_ANYTHING = 0x00010000, 0x7E020000
_AF_UNIX = 1
_PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
# F_SETOWN, F_SETOWN_EX, F_SETSIG: signals to others; F_SETLEASE, F_NOTIFY; F_SETPIPE_SZ: pages of all pipes of a user
# count together, so that those of others would be short.
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
    """What a program may do beyond computing and using its own files."""

    may_execute: bool = False  # other programs, in its place
    may_fork: bool = False
    may_change_files: bool = True  # mode, times, length by path: where only its own can be named
    only_process: int = 0  # the one that it may signal; 0: whichever it sees, in a PID namespace of its own


@lru_cache(maxsize=8)
def compile_filter(calls: Calls) -> bytes:
    """The BPF program: an array of struct sock_filter.  Raises OSError on a machine that is not known."""
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
    plain = {**plain, **(_EXECUTE if calls.may_execute else {}), **(_FORK if calls.may_fork else {})}
    for numbers in plain.values():
        if numbers[column] >= 0:
            program += [(_EQUAL, 0, 1, numbers[column]), allow]
    # glibc makes threads by clone3 and, where it is not there, by clone, whose flags can be read here.
    program += [(_EQUAL, 0, 1, _CLONE3[column]), unknown]
    program += _judged(_CLONE[column], 0, _judge_clone(may_fork=calls.may_fork, allow=allow, deny=deny))
    program += _judged(_PRCTL[column], 0, _one_of(_PRCTL_OPTIONS, allow, deny))
    program += _judged(_FCNTL[column], 1, _one_of(_NO_FCNTLS, deny, allow))
    program += _judged(_IOCTL[column], 1, _one_of(_IOCTLS, allow, (_RETURN, 0, 0, _ERRNO | errno.ENOTTY)))
    program += _judged(_SOCKETPAIR[column], 0, _one_of((_AF_UNIX,), allow, deny))
    # Limits of its own may be read, none set: the pointer to new ones is null, in both halves.
    reads = [_argument(2), (_EQUAL, 0, 3, 0), _argument(2, upper=True), (_EQUAL, 0, 1, 0), allow, deny]
    program += _judged(_PRLIMIT[column], 0, [(_EQUAL, 0, len(reads) - 1, 0), *reads])
    for numbers in (_KILL, _TKILL, _TGKILL):
        if not calls.only_process:
            program += [(_EQUAL, 0, 1, numbers[column]), allow]
        elif numbers is not _TKILL:
            program += _judged(numbers[column], 0, _one_of((calls.only_process,), allow, deny))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, deny])


def _argument(index: int, *, upper: bool = False) -> Instruction:
    """Load the lower or upper half of an argument; both machines are little-endian."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * upper)


def _judged(number: int, argument: int, body: List[Instruction]) -> List[Instruction]:
    """If the call is `number`: load an argument, then `body`, which returns.  Otherwise go on, the number loaded."""
    return [(_EQUAL, 0, len(body) + 1, number), _argument(argument), *body]


def _one_of(values: Iterable[int], then: Instruction, otherwise: Instruction) -> List[Instruction]:
    return [line for value in values for line in ((_EQUAL, 0, 1, value), then)] + [otherwise]


def _judge_clone(*, may_fork: bool, allow: Instruction, deny: Instruction) -> List[Instruction]:
    """Threads, and processes where they may be; nothing in a new namespace."""
    new = [(_SET, 0, 1, _CLONE_NEW_ANYTHING), deny]
    return [*new, allow] if may_fork else [*new, (_SET, 0, 1, _CLONE_THREAD), allow, deny]
