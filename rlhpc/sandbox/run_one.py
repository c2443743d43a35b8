"""Run one program: receive it, put it into its namespaces, wait, report how it ended.

P, a child of the server and the init of a new PID namespace, watches the clock and the worker; Q becomes the program
(program.py).  No signal of the program reaches P, and what it leaves behind ends before the answer is given.  How Q
ended is told by the kernel to P, and by P over a socket that Q does not have, so that no program can forge it.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, Dict, List, NoReturn, Tuple

from rlhpc.sandbox import kernel
from rlhpc.sandbox.limits import Limits
from rlhpc.sandbox.program import Program, become
from rlhpc.sandbox.root import mount_box

NO_MORE = 42  # exit status of P: the worker has gone
STOP = b"stop"
USERS = 32  # of one server, in turn
_BOX_FILES = 1024
_LONGEST_MESSAGE = 1 << 16
_MOST_DESCRIPTORS = 8
_Ended = Tuple[int, Any]  # status of wait(2), resource usage


@dataclass(frozen=True)
class Place:
    """What the server found on this node, and what is left to do for each program."""

    has_namespaces: bool
    has_seccomp: bool
    first_user: int  # of USERS that no other server has; -1: the program keeps the user of the server
    box_user: int  # who owns /box, where first_user is -1
    files: int  # descriptor of Landlock's rules; -1 where there is no Landlock


def run_one(channel: socket.socket, place: Place, number: int) -> NoReturn:
    """P: serve request `number` and end with status 0, or NO_MORE; any other is an unreported failure."""
    code = 1
    try:
        kernel.die_with_parent(signal.SIGKILL)
        code = _serve(channel, place, number)
    finally:
        os._exit(code)


def _serve(channel: socket.socket, place: Place, number: int) -> int:
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
    channel: socket.socket, place: Place, number: int, request: Dict[str, Any], descriptors: List[int]
) -> Dict[str, Any]:
    limits = Limits(**request["limits"])
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
    for descriptor in (told, *descriptors):  # so that the worker sees the end of what the program writes
        os.close(descriptor)
    (status, usage), stopped_for = _watch(channel, child, started + limits.wall_s)
    _end_all(place)
    first = os.read(said, _LONGEST_MESSAGE)  # "+" when it began; nobody is left who could write
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
    """Wait until it ends, the worker says stop or goes, or time is up.  Returns how it ended, and why it was killed."""
    woken, wakes = os.pipe()
    for descriptor in (woken, wakes):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(channel, select.POLLIN)
    ready: Dict[int, int] = {}
    while (ended := _ended(child)) is None:  # also before the first wait: it may have ended before the handler stood
        left_s = deadline - time.monotonic()
        if left_s <= 0 or channel.fileno() in ready:
            os.kill(child, signal.SIGKILL)
            return os.wait4(child, 0)[1:], "time" if left_s <= 0 else "output"
        ready = dict(poll.poll(left_s * 1000))
        if woken in ready:
            os.read(woken, _LONGEST_MESSAGE)
    return ended, ""


def _ended(child: int) -> _Ended | None:
    """How the child ended, if it has; reaps orphans that have ended, too."""
    while True:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        if pid in (0, child):
            return (status, usage) if pid else None


def _end_all(place: Place) -> None:
    """End what the program has left behind in its PID namespace, whose init this process is."""
    if not place.has_namespaces:
        return
    assert os.getpid() == 1, "anywhere else this would end processes of others"
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
