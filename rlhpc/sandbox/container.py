"""Task containers as a worker sees them: opened from an unpacked root, given commands one after the other, closed.

    with Containers() as containers, containers.open(root, ContainerLimits()) as container:
        container.run(["/bin/sh", "-c", "echo 1 > /number"], time_s=10.0)  # FinishedCommand(status=0, …)

Input: an unpacked root (images.py), limits, commands.  Output: FinishedCommand.  A command's failure is never an
exception.  SandboxError: the node cannot have containers, or their server has ended; ContainerGone: this one has.
"""

from __future__ import annotations

import array
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from rlhpc.protocol.errors import SandboxError
from rlhpc.sandbox.client import start_server
from rlhpc.sandbox.container_init import LONGEST_MESSAGE, OWNER, ContainerLimits

MOST_OUTPUT_BYTES = 1 << 16
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT: Mapping[str, str] = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
_OPEN_S = 60.0
_GRACE_S = 20.0  # beyond a command's time, on a busy node
_SHORTAGES = ("No space left", "Cannot allocate memory")
_UNREACHABLE = (
    f"; containers of root run as user {OWNER}, who cannot reach it: legal: a container.root_cache below directories "
    "that all users may enter"
)
REMEDY = (
    "allow unprivileged user namespaces on nodes of reward services (sysctl user.max_user_namespaces above 0, kernel."
    "unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0 where these exist), or run reward "
    "services on other nodes, with Linux 5.14 or later"
)


class ContainerGone(Exception):
    """A container has ended between two commands, or with one: a new one may take its place."""


@dataclass(frozen=True, slots=True)
class Root:
    """An unpacked root directory, and what its image says of commands."""

    path: Path
    num_bytes: int
    num_files: int
    environment: Mapping[str, str]
    working_directory: str


@dataclass(frozen=True, slots=True)
class FinishedCommand:
    """A command that has ended, with all that it started."""

    status: int  # its exit status, negative for a signal
    stopped_for: str  # "": it ended by itself; "time", "memory", "output": killed for exceeding that limit
    output: bytes  # standard output and error; of a long one beginning and end
    wall_s: float
    peak_bytes: int  # of memory, as far as it was seen


class Containers:
    """The process that forks containers, and the connection to it.  Belongs to one thread."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.way = ""  # "overlay" or "copy": how roots are made here

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def server_pid(self) -> int:
        """Process id of the server; 0 if there is none."""
        return self._server.pid if self._server else 0

    def start(self) -> None:
        """Start the server.  Raises SandboxError if this node cannot have containers."""
        settings = {"user": OWNER if os.geteuid() == 0 else -1}
        self._server, self._channel, said = start_server("container_init", settings)
        self.way = str(said["way"])
        if said["error"]:
            self.close()
            raise SandboxError(f"this node has no containers: {said['error']}; {REMEDY}")

    def open(self, root: Root, limits: ContainerLimits, directories: Sequence[str] = ()) -> Container:
        """Make a container; directories: made in it if they are missing.

        Raises SandboxError; the next call starts another server if this one has ended.
        """
        if self._channel is None:
            self.start()
        assert self._channel is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "root": str(root.path),
            "root_size": [root.num_bytes * 5 // 4 + (root.num_files << 12), root.num_files],
            "limits": asdict(limits),
            "directories": [*directories, root.working_directory],
        }
        container = Container(ours, root)
        try:
            with theirs:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
                self._channel.sendmsg([json.dumps(request).encode()], rights)
            answer = container._answer(_OPEN_S)
        except (OSError, ContainerGone) as error:
            container.close()
            self.close()
            raise SandboxError(f"the server of containers is gone: {error}") from error
        if why := answer["error"]:
            container.close()
            short = any(word in why for word in _SHORTAGES)
            raise SandboxError(
                f"container of {root.path}: {why}"
                + ("; legal: a larger container.disk_bytes" if short else "")
                + (_UNREACHABLE if "Permission denied" in why and os.geteuid() == 0 else "")
            )
        return container

    def close(self) -> None:
        """End the server and every container.  Idempotent."""
        server, channel = self._server, self._channel
        self._server = self._channel = None
        if channel is not None:
            channel.close()
        if server is not None:
            server.kill()
            server.wait()


class Container:
    """One container.  After ContainerGone only close() may be called."""

    def __init__(self, channel: socket.socket, root: Root) -> None:
        """Made by Containers.open."""
        self._channel, self._root = channel, root

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        time_s: float,
        environment: Mapping[str, str] | None = None,
        directory: str = "",
        output_bytes: int = MOST_OUTPUT_BYTES,
    ) -> FinishedCommand:
        """Run a command to its end; directory: where it begins, "" for the image's.  Raises ContainerGone."""
        request = {
            "argv": list(argv),
            "env": {**ENVIRONMENT, **self._root.environment, **(environment or {})},
            "cwd": directory or self._root.working_directory,
            "time_s": time_s,
            "output_bytes": min(output_bytes, MOST_OUTPUT_BYTES),
        }
        if len(json.dumps(request)) > LONGEST_MESSAGE // 2:
            return FinishedCommand(126, "", b"argument list too long\n", 0.0, 0)
        self._send({"run": request})
        answer = self._answer(time_s + _GRACE_S)
        output = self._receive(_GRACE_S)[1:]
        return FinishedCommand(**answer, output=output)

    def put(self, at: str, files: Mapping[str, Path], *, is_fresh: bool = True) -> str:
        """Put files, by their paths in it, into a directory; is_fresh: an empty one, over whatever is at this path.

        Without is_fresh before any command: links would be followed.  Returns why that is impossible, "" if they are
        there: a command may have filled the disk.
        """
        listed, descriptor = [], os.memfd_create("files", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as content:
                for name, file in files.items():
                    with open(file, "rb") as source:
                        shutil.copyfileobj(source, content)
                        listed.append([name, 0o755 if file.stat().st_mode & 0o100 else 0o644, source.tell()])
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._send({"put": {"at": at, "files": listed, "is_fresh": is_fresh}}, descriptor)
        finally:
            os.close(descriptor)
        return str(self._answer(_OPEN_S)["error"])

    def read(self, paths: Sequence[str], most_bytes: int = 4096) -> list[str | None]:
        """The texts of small files; None for one that is missing, or no plain file."""
        self._send({"read": {"paths": list(paths), "bytes": most_bytes}})
        found: list[str | None] = self._answer(_OPEN_S)["found"]
        return found

    def close(self) -> None:
        """End the container.  Idempotent."""
        self._channel.close()

    def _send(self, message: dict[str, Any], descriptor: int = -1) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            self._channel.sendmsg([json.dumps(message).encode()], rights)
        except OSError as error:
            raise ContainerGone(str(error)) from error

    def _answer(self, time_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._receive(time_s))
        return answer

    def _receive(self, time_s: float) -> bytes:
        self._channel.settimeout(time_s)
        try:
            message = self._channel.recv(LONGEST_MESSAGE)
        except OSError as error:
            raise ContainerGone(str(error)) from error
        if not message:
            raise ContainerGone("it has ended")
        return message
