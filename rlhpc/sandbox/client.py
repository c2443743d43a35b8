"""Client of the sandbox in a reward worker: starts it once, then runs programs one after the other.

Input: a program, its standard input, ProgramLimits.  Output: FinishedProgram.  A program's failure is never an
exception; a failure of the sandbox itself is SandboxError, which becomes the verdict verifier_error.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhpc.protocol.errors import SandboxError

# --------------------------------------------------------------------------------------------------------------- limits
#
# Resource limits of a program, and its result.  Python 3.9 and the standard library.

MIB = 1 << 20


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program."""

    cpu_s: float = 4.0  # of processor time, all its threads together
    wall_s: float = 16.0  # elapsed: for a program that sleeps, or a busy node
    memory_bytes: int = 1024 * MIB  # of address space
    box_bytes: int = 32 * MIB  # of files, which are in memory
    output_bytes: int = 1 * MIB  # of standard output, and of standard error

    def apply(self) -> None:
        """Apply the limits to this process and its descendants."""
        seconds = max(
            1, -(-int(self.cpu_s * 1000) // 1000)
        )  # the kernel counts whole seconds; the rest is checked afterwards
        own = {
            resource.RLIMIT_CPU: (seconds, seconds + 1),
            resource.RLIMIT_AS: (self.memory_bytes, self.memory_bytes),
            resource.RLIMIT_STACK: (min(self.memory_bytes // 4, 256 * MIB),) * 2,
            resource.RLIMIT_FSIZE: (self.box_bytes, self.box_bytes),
            resource.RLIMIT_NOFILE: (64, 64),
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MEMLOCK: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
            resource.RLIMIT_RTPRIO: (0, 0),
            resource.RLIMIT_NICE: (0, 0),
            resource.RLIMIT_SIGPENDING: (64, 64),
        }
        for what, (soft, hard) in own.items():
            highest = resource.getrlimit(what)[1]
            if highest != resource.RLIM_INFINITY:
                soft, hard = min(soft, highest), min(hard, highest)
            resource.setrlimit(what, (soft, hard))


@dataclass(frozen=True)
class FinishedProgram:
    """A program that has ended."""

    status: int  # its exit status, negative for a signal
    stopped_for: str  # "": it ended by itself; "time", "output": killed for exceeding that limit
    stdout: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    peak_bytes: int
    results: bytes = b""  # written to descriptor 4, if requested


# --------------------------------------------------------------------------------------------------------------- client

Strength = Literal["strong", "basic", "none"]
STRENGTHS: tuple[Strength, ...] = ("none", "basic", "strong")
Kind = Literal["python", "binary", "compiler"]

_ROOT = Path(__file__).parents[2]
_COMMAND = (  # dies of Ctrl-C without a traceback, also while it loads
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); sys.path.insert(0, {root!r}); "
    "from rlhpc.sandbox.{module} import main; main({fd})"
)
_START_S = 60.0
_GRACE_S = 10.0  # beyond the wall time, for the server's own work on a busy node
_LONGEST_MESSAGE = 1 << 16
_READ_BYTES = 1 << 16
_SEALS = fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_REMEDY = (
    "allow unprivileged user namespaces on the node (sysctl user.max_user_namespaces above 0, kernel."
    "unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where these exist), run reward "
    "services on another node, or accept less: sandbox.require"
)


@dataclass(frozen=True, slots=True)
class Layers:
    """Isolation layers of this node: by layer, "" if available, else the reason why not."""

    why_not: dict[str, str] = field(default_factory=dict)

    @property
    def strength(self) -> Strength:
        """Strong: namespaces and seccomp; basic: Landlock and seccomp; none: limits only."""
        missing = {name for name, why in self.why_not.items() if why}
        if not missing & {"namespaces", "seccomp"}:
            return "strong"
        return "basic" if not missing & {"landlock", "seccomp"} else "none"

    def described(self) -> str:
        """One line for people."""
        words = [f"{name}: {'no, ' + why if why else 'yes'}" for name, why in self.why_not.items()]
        return f"{self.strength} ({'; '.join(words)})"


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Settings of the isolation of programs."""

    require: Strength = "strong"
    python: str = ""  # interpreter of programs; "": this one
    readable_paths: tuple[str, ...] = ()


class Sandbox:
    """A server process and the connection to it.  Belongs to one thread."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self._settings = settings or SandboxSettings()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.layers = Layers()  # as of the last start of the server

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def server_pid(self) -> int:
        """Process id of the server; 0 if there is none."""
        return self._server.pid if self._server else 0

    def start(self) -> Layers:
        """Start the server.  Raises SandboxError if it does not start, or isolates less than `require` asks for."""
        layers = self.layers = self._start_server()
        required = self._settings.require
        if STRENGTHS.index(layers.strength) < STRENGTHS.index(required):
            self.close()
            raise SandboxError(
                f"sandbox.require={required!r}, but this node isolates programs only as {layers.described()}; {_REMEDY}"
            )
        return layers

    def run(
        self,
        program: bytes,
        stdin: bytes = b"",
        limits: ProgramLimits | None = None,
        *,
        kind: Kind = "python",
        arguments: Sequence[str] = (),
        wants_results: bool = False,
    ) -> FinishedProgram:
        """Run one program to its end; wants_results: also keep its output on descriptor 4.

        Raises SandboxError if the sandbox fails; the next call starts another.
        """
        if self._channel is None:
            self.start()
        assert self._channel is not None
        limits = limits or ProgramLimits()
        whole = False
        try:
            with contextlib.ExitStack() as stack:
                pipes = [stack.enter_context(_Pipe(limits.output_bytes)) for _ in range(3 if wants_results else 2)]
                given = [stack.enter_context(_memory_file(text)) for text in (program, stdin)]
                request = {"limits": asdict(limits), "kind": kind, "arguments": list(arguments)}
                descriptors = array.array("i", [*given, *(pipe.theirs for pipe in pipes)])
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                self._channel.sendmsg([json.dumps(request).encode()], rights)
                for pipe in pipes:
                    pipe.give()
                answer = _await_answer(self._channel, pipes, time.monotonic() + limits.wall_s + _GRACE_S)
                for pipe in pipes:
                    pipe.drain()
            whole = True
        except OSError as error:
            raise SandboxError(f"sandbox: the server is gone: {error}") from error
        finally:
            if not whole:
                self.close()
        if answer["error"]:
            raise SandboxError(f"sandbox: {answer['error']}")
        return _finished(answer, pipes, limits)

    def close(self) -> None:
        """End the server and every program.  Idempotent."""
        server, channel = self._server, self._channel
        self._server = self._channel = None
        if channel is not None:
            channel.close()
        if server is not None:
            server.kill()
            server.wait()

    def _start_server(self) -> Layers:
        settings = {"readable_paths": list(self._settings.readable_paths)}
        self._server, self._channel, said = start_server("server", settings, self._settings.python)
        return Layers(said)


def start_server(
    module: str, settings: dict[str, Any], python: str = ""
) -> tuple[subprocess.Popen[bytes], socket.socket, dict[str, Any]]:
    """Start the `main` of a module of this package.  Returns (process, connection, its answer to the settings).

    python: its interpreter, "" for this one.  Raises SandboxError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = _COMMAND.format(root=str(_ROOT), module=module, fd=theirs.fileno())
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    python = _located(python or sys.executable)
    with theirs:
        try:
            server = subprocess.Popen(
                [python, "-I", "-X", "utf8", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=libraries,
                cwd="/",
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"sandbox: {python} does not start: {error.strerror}") from error
    assert server.stderr is not None
    with server.stderr as complaints:
        ours.settimeout(_START_S)
        said = b""
        with contextlib.suppress(OSError):
            ours.send(json.dumps(settings).encode())
            said = ours.recv(_LONGEST_MESSAGE)
        if not said:
            server.kill()
            why = complaints.read().decode(errors="replace").strip()[-500:]
            ours.close()
            server.wait()
            raise SandboxError(f"sandbox: {command!r} of {python} failed: {why}")
    return server, ours, json.loads(said)


def _located(python: str) -> str:
    """Absolute path of the interpreter, which without PATH and started by name would take "/" for its prefix."""
    return str(Path(shutil.which(python) or python).absolute())


class _Pipe:
    """Reads a program's output, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.ours, self.theirs = os.pipe()
        os.set_blocking(self.ours, False)
        self.taken = bytearray()

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self.ours)
        self.give()

    def give(self) -> None:
        """Close our copy of the program's end."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    @property
    def is_over(self) -> bool:
        """True if more was written than is allowed."""
        return len(self.taken) > self._most_bytes

    def take(self) -> bool:
        """Read the available bytes.  Returns whether more may come."""
        try:
            return self._take_a_piece()
        except BlockingIOError:
            return True

    def drain(self) -> None:
        """Read the rest: every process that could write has ended, or is ending."""
        with contextlib.suppress(BlockingIOError):
            while not self.is_over and self._take_a_piece():
                pass

    def _take_a_piece(self) -> bool:
        piece = os.read(self.ours, _READ_BYTES)
        self.taken += piece
        return bool(piece)


@contextlib.contextmanager
def _memory_file(content: bytes) -> Any:
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, *_SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def _await_answer(channel: socket.socket, pipes: Sequence[_Pipe], deadline: float) -> dict[str, Any]:
    """Read the program's output until the server reports its end."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    by_descriptor = {pipe.ours: pipe for pipe in pipes}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _events in poll.poll(left_s * 1000):
            if descriptor == channel.fileno():
                said = channel.recv(_LONGEST_MESSAGE)
                if not said:
                    raise ConnectionResetError("it has closed its socket")
                answer: dict[str, Any] = json.loads(said)
                return answer
            pipe = by_descriptor[descriptor]
            if not pipe.take():
                poll.unregister(descriptor)
            elif pipe.is_over:
                poll.unregister(descriptor)
                channel.send(b"stop")
    raise TimeoutError("it did not answer in time")


def _finished(answer: dict[str, Any], pipes: Sequence[_Pipe], limits: ProgramLimits) -> FinishedProgram:
    stopped_for = answer["stopped_for"]
    if any(pipe.is_over for pipe in pipes):
        stopped_for = "output"
    elif answer["cpu_s"] > limits.cpu_s or answer["status"] == -signal.SIGXCPU:
        stopped_for = "time"
    out, errors, *results = (bytes(pipe.taken[: limits.output_bytes]) for pipe in pipes)
    return FinishedProgram(
        status=answer["status"],
        stopped_for=stopped_for,
        stdout=out,
        stderr=errors,
        cpu_s=answer["cpu_s"],
        wall_s=answer["wall_s"],
        peak_bytes=answer["peak_bytes"],
        results=results[0] if results else b"",
    )
