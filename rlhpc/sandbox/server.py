"""The warm process that runs programs: isolated once at its start, then forks for each request.

    worker ── S (this loop; never reads a request) ── P (server.py; init of a PID namespace) ── Q (the program)

Started as `python -I -X utf8 -c "…; main(FD)"` over a SOCK_SEQPACKET socket pair, with an empty environment.  It ends
when the other end closes.  S's memory, which every program inherits, holds nothing but this code and preloaded modules.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from typing import Any, Dict, List, NoReturn, Sequence, Tuple

from rlhpc.sandbox import kernel
from rlhpc.sandbox import kernel as root
from rlhpc.sandbox.client import ProgramLimits
from rlhpc.sandbox.kernel import BOX, Calls, compile_filter, make_rules, mount_box

# -------------------------------------------------------------------------------------------------------------- program
#
# Become the program: drop all privileges that it must not have, then run it.  Python 3.9 and the standard library.

_MOST_THREADS = 64
_NAME = "program.py"
_BINARY = BOX + "/program"
_FIRST_OTHER = 3
# Loaded in the server, so that no program waits for it.
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": BOX, "TMPDIR": BOX, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Program:
    """The program to run; descriptors are the server's."""

    kind: str  # "python": text, run here; "compiler": the same, may start programs; "binary": executed from BOX
    arguments: Tuple[str, ...]  # without its name
    source: int
    standard: Tuple[int, int, int]
    results: int  # -1: none
    user: int  # -1: keep the server's


def become(program: Program, told: int, limits: ProgramLimits, place: Facilities) -> NoReturn:
    """Become the program; never returns.  Writes "+" to `told` when every layer is on, else the error."""
    try:
        kernel.forbid_new_privileges()
        if place.files >= 0:  # first, since all other descriptors are closed next
            kernel.restrict_self(place.files)
        source = _take_descriptors(program, told)
        limits.apply()
        if place.has_namespaces:  # processes are counted in this namespace, or for a user of its own
            resource.setrlimit(resource.RLIMIT_NPROC, (_MOST_THREADS, _MOST_THREADS))
        _give_up_privileges(program)
        calls = calls_of(program.kind, only_process=0 if place.has_namespaces else os.getpid())
        if place.has_seccomp:
            kernel.install_filter(compile_filter(calls))
    except BaseException as error:  # noqa: BLE001  whatever it is, the program has not begun
        os.write(_FIRST_OTHER, ("%s: %s" % (type(error).__name__, error)).encode()[:1000])
        os._exit(1)
    os.write(_FIRST_OTHER, b"+")
    if program.kind != "binary":
        os.close(_FIRST_OTHER)
        _run_python(source, program.arguments)
    os.set_inheritable(_FIRST_OTHER, False)
    try:
        os.execve(_BINARY, [_BINARY, *program.arguments], dict(ENVIRONMENT))
    except OSError as error:
        os.write(2, str(error).encode())
        os._exit(127)


def calls_of(kind: str, *, only_process: int) -> Calls:
    """System calls of a kind of program; only_process: 0 if it has namespaces of its own."""
    return Calls(
        may_execute=kind != "python",
        may_fork=kind == "compiler",
        may_change_files=only_process == 0,
        only_process=only_process,
    )


def _take_descriptors(program: Program, told: int) -> bytes:
    """Set up the program's descriptors, close all others.  Returns a Python program's text; a binary goes to BOX."""
    with os.fdopen(program.source, "rb") as text:
        source = text.read()
    if program.kind == "binary":
        with open(_BINARY, "wb") as binary:
            binary.write(source)
        os.chmod(_BINARY, 0o755)
    # First moved above all targets, so that none is overwritten.
    high = [_above(descriptor) for descriptor in (*program.standard, told, program.results) if descriptor >= 0]
    for target, descriptor in enumerate(high):
        os.dup2(descriptor, target, inheritable=True)
    os.closerange(len(high), 1 << 16)
    return source


def _above(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 32)


def _give_up_privileges(program: Program) -> None:
    if program.user >= 0:
        os.setgroups([])
        os.setresgid(program.user, program.user, program.user)
        os.setresuid(program.user, program.user, program.user)
    kernel.drop_capabilities()
    kernel.die_with_parent(signal.SIGKILL)
    if program.kind != "binary":
        kernel.refuse_tracers()
    os.umask(0o077)


def _run_python(source: bytes, arguments: Tuple[str, ...]) -> NoReturn:
    """Do what `python program.py ARGUMENT…` does, in this interpreter."""
    # Kept, since freeing them would cost time.
    _hidden = [sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rlhpc"]
    module: Any = types.ModuleType("__main__")
    module.__file__ = _NAME
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    sys.argv = [_NAME, *arguments]
    gc.enable()
    code = 0
    try:
        exec(compile(source, _NAME, "exec"), module.__dict__)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:  # noqa: BLE001  what a program raises is its end, told on standard error as python does
        code = 1
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  a closed or a broken output
        code = code or 120
    os._exit(code & 0xFF)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write("%s\n" % (end.code,))
    sys.stderr.flush()
    return 1


# -------------------------------------------------------------------------------------------------------------- run one
#
# Run one program: receive it, put it into its namespaces, wait, report its end.
#
# P, a child of the server and the init of a new PID namespace, watches the clock and the worker; Q becomes the program.
# No signal of the program reaches P, and processes that it leaves behind end before the answer is given.  P learns Q's
# exit status from the kernel, and sends it over a socket that Q does not have, so that no program can forge it.
# Python 3.9 and the standard library.

NO_MORE = 42  # exit status of P: the worker has gone
STOP = b"stop"
USERS = 32  # of one server, in turn
_BOX_FILES = 1024
_LONGEST_MESSAGE = 1 << 16
_MOST_DESCRIPTORS = 8
_Ended = Tuple[int, Any]  # status of wait(2), resource usage


@dataclass(frozen=True)
class Facilities:
    """Isolation that the server found on this node and applies to each program."""

    has_namespaces: bool
    has_seccomp: bool
    first_user: int  # of USERS that no other server has; -1: the program keeps the user of the server
    box_user: int  # owner of /box if first_user is -1
    files: int  # descriptor of Landlock's rules; -1 without Landlock


def run_one(channel: socket.socket, place: Facilities, number: int) -> NoReturn:
    """P: serve request `number` and end with status 0, or NO_MORE; any other is an unreported failure."""
    code = 1
    try:
        kernel.die_with_parent(signal.SIGKILL)
        code = _serve_one(channel, place, number)
    finally:
        os._exit(code)


def _serve_one(channel: socket.socket, place: Facilities, number: int) -> int:
    message, descriptors = _receive(channel)
    if not message:
        return NO_MORE
    if message == STOP:  # for a program that had just ended
        return 0
    try:
        answer = _run(channel, place, number, json.loads(message), descriptors)
    except OSError as error:
        answer = {"error": str(error)}
    try:
        channel.send(json.dumps(answer).encode())
    except (BrokenPipeError, ConnectionResetError):
        return NO_MORE
    return 0


def _receive(channel: socket.socket) -> Tuple[bytes, List[int]]:
    numbers = array.array("i")
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * numbers.itemsize)
    message, controls, _flags, _address = channel.recvmsg(_LONGEST_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return message, list(numbers)


def _run(
    channel: socket.socket, place: Facilities, number: int, request: Dict[str, Any], descriptors: List[int]
) -> Dict[str, Any]:
    limits = ProgramLimits(**request["limits"])
    user = place.first_user + number % USERS if place.first_user >= 0 else -1
    if place.has_namespaces:
        mount_box(limits.box_bytes, _BOX_FILES, user if user >= 0 else place.box_user)
    else:
        kernel.adopt_orphans()
    kernel.refuse_tracers()
    program = Program(
        kind=request["kind"],
        arguments=tuple(request["arguments"]),
        source=descriptors[0],
        standard=(descriptors[1], descriptors[2], descriptors[3]),
        results=descriptors[4] if len(descriptors) > 4 else -1,
        user=user,
    )
    started = time.monotonic()
    said, told = os.pipe()
    child = os.fork()
    if child == 0:
        become(program, told, limits, place)
    for descriptor in (told, *descriptors):  # so that the worker sees the end of the program's output
        os.close(descriptor)
    (status, usage), stopped_for = _watch(channel, child, started + limits.wall_s)
    _end_all(place)
    first = os.read(said, _LONGEST_MESSAGE)  # "+" when it began; no writer is left
    has_begun = first == b"+" or (not first and stopped_for)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - started,
        "peak_bytes": usage.ru_maxrss * 1024,
        "stopped_for": stopped_for,
        "error": "" if has_begun else first.decode(errors="replace") or "the program did not begin",
    }


def _watch(channel: socket.socket, child: int, deadline: float) -> Tuple[_Ended, str]:
    """Wait until it ends, the worker stops it or ends, or time is up.  Returns its status, and why it was killed."""
    woken, wakes = os.pipe()
    for descriptor in (woken, wakes):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(channel, select.POLLIN)
    ready: Dict[int, int] = {}
    while (ended := _ended(child)) is None:  # also before the first wait: it may have ended before the handler was set
        left_s = deadline - time.monotonic()
        if left_s <= 0 or channel.fileno() in ready:
            os.kill(child, signal.SIGKILL)
            return os.wait4(child, 0)[1:], "time" if left_s <= 0 else "output"
        ready = dict(poll.poll(left_s * 1000))
        if woken in ready:
            os.read(woken, _LONGEST_MESSAGE)
    return ended, ""


def _ended(child: int) -> _Ended | None:
    """Status and usage of the child, None if it runs; also reaps orphans that have ended."""
    while True:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid in (0, child):
            return (status, usage) if pid else None


def _end_all(place: Facilities) -> None:
    """End all processes that the program has left behind in its PID namespace, whose init this process is."""
    if not place.has_namespaces:
        return
    assert os.getpid() == 1, "anywhere else this would end processes of others"
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


# --------------------------------------------------------------------------------------------------------------- server

_PRELOADED = (
    "__future__ abc array base64 bisect calendar cmath collections collections.abc contextlib copy ctypes dataclasses "
    "datetime decimal enum fractions functools hashlib heapq inspect io itertools json math numbers operator os.path "
    "queue random re statistics string struct sys textwrap threading time traceback typing unicodedata warnings"
)
FIRST_USER = 2_000_000_000  # as real root, every server has USERS ids from here that nobody else has
_MOST_PROCESSES = 1 << 22  # of a kernel; with USERS, ids stay below 2^31
_OWN = kernel.CLONE_NEWPID | kernel.CLONE_NEWNS  # namespaces of one program
_INNER_ID = 1000  # id of the only user inside a user namespace


@dataclass(frozen=True)
class _Isolation:
    layers: Dict[str, str]  # layer → "" if available, else why not
    place: Facilities


def first_user(server_pid: int) -> int:
    """The first of the USERS ids that the programs of a server that runs as real root take in turn."""
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
    """Raise oom_score_adj: out of memory, the kernel ends this process before the node's trainer and reward service."""
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


def _serve(channel: socket.socket, place: Facilities) -> int:
    """Serve one request at a time: a child takes it, so that it never enters this process.  Returns the exit status."""
    for number in itertools.count():
        # Blocks without taking; at the end of the stream the child finds nothing.
        channel.recv_into(bytearray(1), 1, socket.MSG_PEEK)
        child = kernel.fork_into(_OWN) if place.has_namespaces else os.fork()
        if child == 0:
            run_one(channel, place, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != 0:  # the worker may not have an answer: it sees the server end and starts another
            return 0 if code == NO_MORE else 1
    raise AssertionError


def _isolate(readable_paths: Sequence[str]) -> _Isolation:
    """Apply every layer that this node offers; report those that are missing."""
    own = {sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)}
    # The prefix of an interpreter in /bin or /lib is "/": it only needs system directories, and nothing else is shown.
    readable = [*sorted(own - {"/"}), *readable_paths]
    layers, is_root = _take_namespaces(readable)
    has_namespaces = not layers["namespaces"]
    layers["landlock"] = "" if kernel.landlock_version() else "this kernel has no Landlock, or it is not in `lsm=`"
    layers["seccomp"] = _tried(_install_a_filter)
    if has_namespaces:
        kernel.drop_bounding_set()  # for every program; this process keeps its own capabilities
    writable = [root.BOXES, "/dev/null"] if has_namespaces else ["/dev/null"]
    shown = [*root.SYSTEM, *root.DEVICES, *readable]
    place = Facilities(
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
    """Enter the root and try a program's user: root of a container may enter, and yet lack the ids of programs."""
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
    """Change to a user id.  Raises OSError without the right to: not root, or root of a user namespace."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _install_a_filter() -> None:
    kernel.forbid_new_privileges()
    kernel.install_filter(compile_filter(Calls()))


def _tried(action) -> str:  # type: ignore[no-untyped-def]
    """Run a function in a child.  Returns its error, or ""."""
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
