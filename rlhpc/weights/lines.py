"""Messages between processes of one machine: lines of JSON over a unix socket.

Input: a connected socket; output: messages, in order.  Every failure is the same error: the other end is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhpc.errors import GroupFailed


class Lost(GroupFailed):
    """The other end of a connection is gone, or did not reply."""


class Line:
    """A socket that carries lines of JSON.  Every failure is a Lost."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """timeout_s: of every read and write."""
        connection.settimeout(timeout_s)
        self._connection = connection
        self._file = connection.makefile("rwb")

    def write(self, message: dict[str, Any]) -> None:
        """Raises Lost."""
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            raise Lost(f"a member of the group is gone: {error}") from error

    def read(self) -> dict[str, Any]:
        """The next message.  Raises Lost, also at the time-out."""
        try:
            text = self._file.readline()
        except (OSError, ValueError) as error:
            raise Lost(f"a member of the group did not answer: {error}") from error
        if not text.endswith(b"\n"):
            raise Lost("a member of the group is gone")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        """For any thread: one that waits here for the other end is woken, and loses it.  Idempotent."""
        with contextlib.suppress(OSError):  # not connected any more; to close a file is to wait for who reads it
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):  # bytes left to flush to a peer that is gone
            self._file.close()
        self._connection.close()


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for `path` below the 107 bytes of a socket address, however deep the run directory is (Linux)."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
