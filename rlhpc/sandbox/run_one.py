"""Run one program: receive it, put it into namespaces of its own, wait, say how it ended.

R, a child of the server, watches the clock and the worker; P is the init of a new PID namespace, which no signal of the
program reaches and with which everything in it ends; Q becomes the program (program.py).  How Q ended is told by the
kernel to P, and by P to R over a pipe that Q does not have, so that no program can forge it.
Python 3.9 and the standard library.
"""

from __future__ import annotations

import array
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

NO_MORE = 42  # exit status of R: the worker has gone
STOP = b"stop"
_BOX_FILES = 1024
_LONGEST_MESSAGE = 1 << 16
_MOST_DESCRIPTORS = 8


@dataclass(frozen=True)
class Place:
    """What the server found on this node, and what is left to do for each program."""

    has_namespaces: bool
    has_seccomp: bool
    first_user: int  # -1: the program keeps the user of the server
    box_user: int  # who owns /box, where first_user is -1
    files: int  # descriptor of Landlock's rules; -1 where there is no Landlock


def run_one(channel: socket.socket, place: Place) -> int:
    """Serve one request.  Returns R's exit status."""
    kernel.die_with_parent(signal.SIGKILL)
    message, descriptors = _receive(channel)
    if not message:
        return NO_MORE
    if message == STOP:  # for a program that had just ended
        return 0
    try:
        answer = _run(channel, place, json.loads(message), descriptors)
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


def _run(channel: socket.socket, place: Place, request: Dict[str, Any], descriptors: List[int]) -> Dict[str, Any]:
    limits = Limits(**request["limits"])
    user = place.first_user + os.getpid() % 100_000 if place.first_user >= 0 else -1
    if place.has_namespaces:
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
        mount_box(limits.box_bytes, _BOX_FILES, user if user >= 0 else place.box_user)
    program = Program(
        kind=request["kind"],
        arguments=tuple(request["arguments"]),
        source=descriptors[0],
        standard=(descriptors[1], descriptors[2], descriptors[3]),
        results=descriptors[4] if len(descriptors) > 4 else -1,
        user=user,
    )
    ours, theirs = os.pipe()
    started = time.monotonic()
    init = os.fork()
    if init == 0:
        _be_init(ours, theirs, channel, program, place, limits)
    os.close(theirs)
    answer = _watch(channel, ours, init, started + limits.wall_s)
    answer["wall_s"] = time.monotonic() - started
    return answer


def _watch(channel: socket.socket, results: int, init: int, deadline: float) -> Dict[str, Any]:
    """Until P has spoken, the worker says stop or goes, or time is up; in the end nothing of the program is left."""
    poll = select.poll()
    poll.register(results, select.POLLIN)
    poll.register(channel, select.POLLIN)
    ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
    said = os.read(results, _LONGEST_MESSAGE) if results in ready else b""
    os.kill(init, signal.SIGKILL)
    _pid, status, usage = os.wait4(init, 0)
    if said:
        answer: Dict[str, Any] = json.loads(said)
        return answer
    if results in ready:
        return {"error": "the init process ended with status %d" % status}
    answer = {"status": -signal.SIGKILL, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": 0, "error": ""}
    answer["stopped_for"] = "output" if ready else "time"
    return answer


def _be_init(
    results: int, said: int, channel: socket.socket, program: Program, place: Place, limits: Limits
) -> NoReturn:
    """P: start the program, adopt whatever it leaves behind, tell how it ended, and end all with itself."""
    code = 1
    try:
        os.close(results)
        channel.close()
        kernel.die_with_parent(signal.SIGKILL)
        kernel.refuse_tracers()
        if any(event & select.POLLERR for _fd, event in _polled(said)):  # R died before it could be watched
            os._exit(1)
        if not place.has_namespaces:
            kernel.adopt_orphans()
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            become(program, told, limits, place)
        os.close(told)
        with os.fdopen(ready, "rb") as words:
            first = words.read()  # until the program begins
        status, usage = _wait_for(child)
        answer = {
            "status": os.waitstatus_to_exitcode(status),
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
            "stopped_for": "",
            "error": "" if first == b"+" else first.decode(errors="replace") or "the program did not begin",
        }
        os.write(said, json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _polled(descriptor: int) -> List[Tuple[int, int]]:
    poll = select.poll()
    poll.register(descriptor, 0)
    return poll.poll(0)


def _wait_for(child: int) -> Tuple[int, Any]:
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == child:
            return status, usage
