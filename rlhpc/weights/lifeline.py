"""Detect within seconds that another member of a weight group is gone, independently of the group's connections.

Input: the group's store.  Output: a text naming who is gone, "" while all are there.  An NCCL collective without its
watchdog (nccl_group.py) reports nothing: the GPU kernel keeps waiting for a dead peer until the time-out.  So every
receiver keeps a TCP connection to the publisher on which, after a password, nothing is ever sent.  The operating system
closes it when a process ends; keepalive probes detect a lost host.  A hung process is not detected here, but by the
time-out.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
from contextlib import suppress
from typing import Any

KEY = "lifeline"  # key in the store
LOOPBACK = "127.0.0.1"
CONNECT_S = 30.0
_PASSWORD_BYTES = 32
# 2 s of silence, then a probe every 2 s: after 3 without an answer the other host is gone.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class Lifeline:
    """One member's end: the publisher has a connection to every receiver, a receiver has one to the publisher."""

    def __init__(self, who: str, listener: socket.socket | None, password: bytes) -> None:
        """See listen() and reach()."""
        self._who, self._listener, self._password = who, listener, password
        self._strangers: dict[socket.socket, bytes] = {}  # bytes received from unauthenticated connections
        self.sockets: list[socket.socket] = []
        self._poll = select.poll()
        self._lock = threading.Lock()  # two threads must not poll at once, as they would while a group connects
        self._lost = ""
        if listener is not None:
            listener.setblocking(False)
            self._poll.register(listener, select.POLLIN)

    @classmethod
    def listen(cls, store: Any, host: str) -> Lifeline:
        """The publisher's end, at a port of `host`; "": of this machine only.  Raises OSError or RuntimeError."""
        listener = socket.create_server((host or LOOPBACK, 0), backlog=socket.SOMAXCONN)
        password = secrets.token_hex(_PASSWORD_BYTES // 2)
        address = f"{host or LOOPBACK}:{listener.getsockname()[1]}"
        try:
            store.set(KEY, f"{address} {password}")
        except BaseException:
            listener.close()
            raise
        return cls("a receiver is gone", listener, password.encode())

    @classmethod
    def reach(cls, store: Any) -> Lifeline:
        """A receiver's end.  Waits for the publisher as long as the store does.  Raises OSError or RuntimeError."""
        address, password = store.get(KEY).decode().split()
        host, port = address.rsplit(":", 1)
        line = cls("the publisher is gone", None, b"")
        line._keep(socket.create_connection((host, int(port)), timeout=CONNECT_S))
        line.sockets[0].sendall(password.encode())
        return line

    def lost(self) -> str:
        """Who is gone; "" if no loss is known.  Never blocks; a lost member stays lost.  For any thread."""
        if not self._lost and self._lock.acquire(blocking=False):  # else another thread is looking
            try:
                for descriptor, _ in self._poll.poll(0):
                    self._look_at(descriptor)
            finally:
                self._lock.release()
        return self._lost

    def close(self) -> None:
        """Close all connections; the other ends are then lost.  Idempotent."""
        with self._lock:
            self._lost = self._lost or "this member has left the group"
            for line in (*self.sockets, *self._strangers, *([self._listener] if self._listener else [])):
                self._drop(line)
            self._strangers.clear()
            self.sockets.clear()
            self._listener = None

    def _look_at(self, descriptor: int) -> None:
        if self._listener is not None and descriptor == self._listener.fileno():
            with suppress(OSError):  # it has gone again
                stranger, _ = self._listener.accept()
                self._strangers[stranger] = b""
                self._poll.register(stranger, select.POLLIN)
                self._listen_to(stranger)
            return
        for line in [line for line in self._strangers if line.fileno() == descriptor]:
            self._listen_to(line)
            return
        # Nothing is ever sent on a line, so anything readable is its end.
        if any(line.fileno() == descriptor for line in self.sockets):
            self._lost = self._who

    def _listen_to(self, stranger: socket.socket) -> None:
        """A connection counts once it has sent the password; if it ends before, that is ignored."""
        try:
            said = stranger.recv(_PASSWORD_BYTES - len(self._strangers[stranger]), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        so_far = self._strangers[stranger] + said
        self._strangers[stranger] = so_far
        if said and len(so_far) < _PASSWORD_BYTES:
            return
        del self._strangers[stranger]
        if secrets.compare_digest(so_far, self._password):
            self._keep(stranger)
        else:
            self._drop(stranger)

    def _keep(self, line: socket.socket) -> None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sockets.append(line)
        self._poll.register(line, select.POLLIN)

    def _drop(self, line: socket.socket) -> None:
        with suppress(KeyError):
            self._poll.unregister(line)
        line.close()
