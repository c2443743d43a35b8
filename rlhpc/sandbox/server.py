"""The warm process that runs programs: isolated once at its start, then forks for each request.

    worker ── S (this loop; never reads a request) ── P (run_one.py; init of a PID namespace) ── Q (the program)

Started as `python -I -X utf8 -c "…; main(FD)"` over a SOCK_SEQPACKET socket pair, with an empty environment.  It ends
when the other end closes.  S's memory, which every program inherits, holds nothing but this code and preloaded modules.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import json
import os
import socket
import sys
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from rlhpc.sandbox import kernel, root
from rlhpc.sandbox.filter import Calls, compile_filter
from rlhpc.sandbox.landlock import make_rules
from rlhpc.sandbox.program import ENVIRONMENT, calls_of
from rlhpc.sandbox.run_one import NO_MORE, USERS, Place, run_one

_PRELOADED = (
    "__future__ abc array base64 bisect calendar cmath collections collections.abc contextlib copy ctypes dataclasses "
    "datetime decimal enum fractions functools hashlib heapq inspect io itertools json math numbers operator os.path "
    "queue random re statistics string struct sys textwrap threading time traceback typing unicodedata warnings"
)
FIRST_USER = 2_000_000_000  # as real root, every server has USERS ids from here that nobody else has
_MOST_PROCESSES = 1 << 22  # of a kernel; with USERS, ids stay below 2^31
_OWN = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS  # namespaces of one program
_INNER_ID = 1000  # how a user namespace shows its only user
_LONGEST_MESSAGE = 1 << 16


@dataclass(frozen=True)
class _Isolation:
    layers: Dict[str, str]  # what there is: "" for yes, else why not
    place: Place


def first_user(server_pid: int) -> int:
    """The first of the USERS ids that a server's programs have in turn, where it runs as real root."""
    return FIRST_USER + server_pid % _MOST_PROCESSES * USERS


def main(descriptor: int) -> None:
    """Serve until the other end closes; leaves by os._exit."""
    status = 1
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=descriptor) as channel:
        settings = json.loads(channel.recv(_LONGEST_MESSAGE))
        _be_the_first_to_end()
        _preload()
        isolation = _isolate(settings["readable_paths"])
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        channel.send(json.dumps(isolation.layers).encode())
        status = _serve(channel, isolation.place)
    os._exit(status)


def _be_the_first_to_end() -> None:
    """Where memory is used up, the kernel ends a program, and neither the trainer nor the service on its node."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def _preload() -> None:
    for name in _PRELOADED.split():
        importlib.import_module(name)
    for kind in ("python", "binary", "compiler"):  # so that no program waits for its filter
        with contextlib.suppress(OSError):  # on an unknown machine, which _isolate reports
            compile_filter(calls_of(kind, only_process=0))
    # A program sees a sys.path without this package.
    sys.path.pop(0)
    gc.collect()
    gc.freeze()


def _serve(channel: socket.socket, place: Place) -> int:
    """Serve one request at a time: a child takes it, so that it never enters this process.  Returns the exit status."""
    for number in itertools.count():
        # Blocks without taking; at the end of the stream the child finds nothing.
        channel.recv_into(bytearray(1), 1, socket.MSG_PEEK)
        child = kernel.fork_into(_OWN) if place.has_namespaces else os.fork()
        if child == 0:
            run_one(channel, place, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:  # whether the worker has had an answer is not known: it hears of the end and starts another
            return 0 if code == NO_MORE else 1
    raise AssertionError


def _isolate(readable_paths: Sequence[str]) -> _Isolation:
    """Apply every layer that this node offers; report those that are missing."""
    own = {sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)}
    # One in /bin or /lib itself has "/" for its prefix: what it needs is of the system, and nothing else is shown.
    readable = [*sorted(own - {"/"}), *readable_paths]
    layers, is_root = _take_namespaces(readable)
    has_namespaces = not layers["namespaces"]
    layers["landlock"] = "" if kernel.landlock_version() else "this kernel has no Landlock, or it is not in `lsm=`"
    layers["seccomp"] = _tried(_install_a_filter)
    if has_namespaces:
        kernel.drop_bounding_set()  # of every program; what this process has already, it keeps
    writable = [root.BOXES, "/dev/null"] if has_namespaces else ["/dev/null"]
    shown = [*root.SYSTEM, *root.DEVICES, *readable]
    place = Place(
        has_namespaces=has_namespaces,
        has_seccomp=not layers["seccomp"],
        first_user=first_user(os.getpid()) if is_root else -1,
        box_user=_INNER_ID,
        files=-1 if layers["landlock"] else make_rules(shown, writable),
    )
    return _Isolation(layers, place)


def _take_namespaces(readable: List[str]) -> Tuple[Dict[str, str], bool]:
    """Enter namespaces and the root; as root directly, else through a user namespace of one user.

    Tried in a child first: a process that has failed half-way could not be used for the weaker layers.
    """
    failures, user = [], first_user(os.getpid())
    for is_root in (True, False) if os.geteuid() == 0 else (False,):
        why = _tried(lambda is_root=is_root: _enter_and_become(readable, user if is_root else -1))
        if not why:
            _enter(readable, is_root)
            return {"namespaces": ""}, is_root
        failures.append(why)
    return {"namespaces": "; ".join(dict.fromkeys(failures))}, not _tried(lambda: _change_user(user))


def _enter_and_become(readable: Sequence[str], user: int) -> None:
    """Up to the user of a program.  Root of a container may enter, and yet lack the ids that programs have in turn."""
    _enter(readable, user >= 0)
    if user >= 0:
        _change_user(user)


def _enter(readable: Sequence[str], is_root: bool) -> None:
    if not is_root:
        outer_user, outer_group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", "%d %d 1" % (_INNER_ID, outer_user)),
            ("gid_map", "%d %d 1" % (_INNER_ID, outer_group)),
        ):
            with open("/proc/self/" + name, "w") as target:
                target.write(text)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWCGROUP)
    kernel.set_host_name("sandbox")
    root.enter_root(readable)
    _fork_in_new_pid_namespace()


def _fork_in_new_pid_namespace() -> None:
    """Try whether a PID namespace, which each program gets, can be made."""
    child = kernel.fork_into(_OWN)
    if child == 0:
        try:
            root.mount_box(1 << 16, 8, 0 if os.geteuid() == 0 else _INNER_ID)
            grandchild = os.fork()
            os._exit(0 if grandchild == 0 else os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        except OSError as error:
            os._exit(error.errno or 1)
    number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if number != 0:
        raise OSError(number, "PID namespace or tmpfs: %s" % os.strerror(abs(number)))


def _change_user(user: int) -> None:
    """Raises OSError where this process may not: no root, or one of a user namespace."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _install_a_filter() -> None:
    kernel.forbid_new_privileges()
    kernel.install_filter(compile_filter(Calls()))


def _tried(action) -> str:  # type: ignore[no-untyped-def]
    """Run it in a child.  Returns why it failed, or nothing."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError as error:
            os.write(theirs, (error.strerror or str(error)).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        why = said.read().decode()
    ended = os.waitpid(child, 0)[1]
    return why or ("" if ended == 0 else "a trial process ended with status %d" % ended)
