"""Admit only this run's keys: the ZAP handler of one ZeroMQ context (RFC 27).

Input: handshake requests at inproc://zeromq.zap.01.  Output: the name of the role instance whose key it is, which
ZeroMQ then attaches to every message of that connection as its User-Id.

CURVE without a handler admits everyone who knows the server's public key, and pyzmq's ThreadAuthenticator with domain
"*" does not match named domains; hence our own.  A thread, because a handshake must not wait for a busy loop.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from rlhpc.contracts import Clock
from rlhpc.errors import RunDirectoryError

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"rlhpc"
log = logging.getLogger("rlhpc.transport")
TELL_AFTER_S = 60.0
REREAD_AFTER_S = 0.5  # unknown keys must not make us read a shared file system for each attempt


class AllowList:
    """Public keys of the run, read again when an unknown one appears, since names may be added during the run."""

    def __init__(self, read: Callable[[], dict[bytes, str]], clock: Clock) -> None:
        """`read` returns name by public key (Z85)."""
        self._read, self._clock = read, clock
        self._names = read()
        self._read_at = clock()

    def name_of(self, key: bytes) -> str | None:
        """Return the owner of this key, or None."""
        if key not in self._names and self._clock() - self._read_at >= REREAD_AFTER_S:
            self._read_at = self._clock()
            try:
                self._names = self._read()
            except (
                RunDirectoryError,
                OSError,
            ):  # unsafe, removed, out of reach: known peers may stay, no new ones join
                return None
        return self._names.get(key)


class Rarely:
    """Rate limit for warnings: a refused client may try a thousand times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._told_at = clock, -math.inf

    def may_tell(self) -> bool:
        """True at most once in TELL_AFTER_S."""
        if self._clock() - self._told_at < TELL_AFTER_S:
            return False
        self._told_at = self._clock()
        return True


class ZapHandler:
    """Answers until its context ends.  Bind before the server socket does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList, clock: Clock) -> None:
        """Bind and start."""
        self.num_denied = 0
        self._told = Rarely(clock)
        self._allowed = allowed
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ADDRESS)
        threading.Thread(target=self._answer_all, name="zap", daemon=True).start()

    def _answer_all(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            self._socket.close()  # in any case: terminating the context waits for it

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Request: version, request id, domain, address, routing id, mechanism, credentials."""
        version, request_id, domain, address, _, mechanism, *credentials = request
        name = None
        if version == b"1.0" and domain == ZAP_DOMAIN and mechanism == b"CURVE" and len(credentials) == 1:
            name = self._allowed.name_of(z85.encode(credentials[0]))
        if name is None:
            self.num_denied += 1
            if self._told.may_tell():
                log.warning(
                    "refused connections without a key of this run, so far: %d, the last one from %s",
                    self.num_denied,
                    address.decode(errors="replace") or "this machine",
                )
            return [b"1.0", request_id, b"400", b"not a key of this run", b"", b""]
        return [b"1.0", request_id, b"200", b"OK", name.encode(), b""]
