"""Create ZeroMQ sockets configured for channels, and move whole messages through them without blocking.

Input: a ChannelSpec and the [transport] settings.  Output: configured sockets.  Traps handled here and nowhere else:

* no ZMTP heartbeats: a socket that stops reading because its queue is full does not answer pings either, so the
  sender assumes it is dead, reconnects, and loses messages in transit (281 of 288 in our trial).  TCP keepalive is
  answered by the kernel, and roles send their own heartbeats.
* ZAP_ENFORCE_DOMAIN: without it a connection that finds no ZAP handler is admitted.
* a unix socket's path is limited to 107 bytes, too few for many values of TMPDIR.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq
from zmq.utils import z85

from rlhpc.base.files import make_private
from rlhpc.base.host_address import host_address
from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import ChannelClosed, ChannelTimeout, ConfigError, RunDirectoryError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.codec import MAX_FRAME_BYTES, Frame

# ---------------------------------------------------------------------------------------------------------------- inbox
#
# A bounded queue of received messages that many tasks may wait on and that can be closed.
#
# Input: decoded messages.  Output: the same, in order.  Guarantees: a wait that times out or is cancelled consumes no
# message; closing wakes all waiters.  asyncio.Queue cannot be closed before Python 3.13.


Item = TypeVar("Item")

TAKES_BEFORE_YIELD = 64  # a backlog must not keep other tasks from the loop


class Inbox(Generic[Item]):
    """Owned by one event loop."""

    def __init__(self, capacity: int, owner: str, on_room: Callable[[], None] = lambda: None) -> None:
        """`owner` names the channel in errors; `on_room` is called when a full inbox is half empty again."""
        self._items: deque[Item] = deque()
        self._capacity, self._owner, self._on_room = capacity, owner, on_room
        self._waiters: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._was_full = False
        self._takes = 0

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self) -> bool:
        """True if put is allowed."""
        return len(self._items) < self._capacity

    @property
    def is_closed(self) -> bool:
        """True if take raises ChannelClosed."""
        return self._is_closed

    def put(self, item: Item) -> None:
        """Append; the caller has checked has_room."""
        self._items.append(item)
        self._was_full |= not self.has_room()
        self._wake()

    async def take(self, timeout_s: float | None) -> Item:
        """Return the oldest item.  Raises ChannelTimeout, ChannelClosed; neither consumes one."""
        self._takes += 1
        if self._takes % TAKES_BEFORE_YIELD == 0 or (timeout_s is not None and timeout_s <= 0):
            await asyncio.sleep(0)
        if self._items and not self._is_closed:
            return self._pop()
        deadline = Deadline(math.inf if timeout_s is None else timeout_s)
        while True:
            if self._is_closed:
                raise ChannelClosed(f"{self._owner} is closed")
            if self._items:
                return self._pop()
            if deadline.is_over:
                raise ChannelTimeout(f"{self._owner}: no message within {deadline.limit_s:g} s")
            await sleep_until_woken(self._waiters, deadline.left_s)

    def close(self) -> None:
        """Forget what is queued and wake every take with ChannelClosed.  Idempotent."""
        self._is_closed = True
        self._items.clear()
        self._wake()

    def _pop(self) -> Item:
        item = self._items.popleft()
        if self._was_full and 2 * len(self._items) <= self._capacity:
            self._was_full = False
            self._on_room()
        return item

    def _wake(self) -> None:
        wake_all(self._waiters)


async def sleep_until_woken(waiters: set[asyncio.Future[None]], limit_s: float) -> None:
    """Sleep until wake_all(waiters), or for limit_s; the caller checks again either way."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    waiters.add(waiter)
    alarm = None if limit_s == math.inf else loop.call_later(limit_s, _wake_one, waiter)
    try:
        await waiter
    finally:
        waiters.discard(waiter)
        if alarm is not None:
            alarm.cancel()


def wake_all(waiters: set[asyncio.Future[None]]) -> None:
    """Wake all waiters; each checks whether there is something for it."""
    for waiter in waiters:
        _wake_one(waiter)


def _wake_one(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


# ------------------------------------------------------------------------------------------------------------------ zap
#
# Admit only this run's keys: the ZAP handler of one ZeroMQ context (RFC 27).
#
# Input: handshake requests at inproc://zeromq.zap.01.  Output: the name of the role instance whose key it is, which
# ZeroMQ then attaches to every message of that connection as its User-Id.
#
# CURVE without a handler admits everyone who knows the server's public key, and pyzmq's ThreadAuthenticator with domain
# "*" does not match named domains; hence our own.  A thread, because a handshake must not wait for a busy loop.


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


# -------------------------------------------------------------------------------------------------------------- sockets


LINGER_MS = 1_000
TERMINATE_S = 3.0
MAX_RECEIVE_QUEUE = 64  # messages queued at the receiving end, per peer; the rest waits at the sender
HANDSHAKE_MS = 10_000  # a connection without a handshake by then is closed
FRAME_OVERHEAD_BYTES = 1 << 12  # upper bound of CURVE's nonce and tag
ZERO_COPY_BYTES = 64 << 10  # when sending: below this a copy is cheaper than tracking
SHARED_BUFFER_BYTES = 16 << 10  # when receiving: smaller frames are unaligned in ZeroMQ's 8 KiB buffers
MAX_IPC_PATH_BYTES = 107
SOCKET_NAME = "s"
# Plain numbers: combining two members of zmq's enumeration makes a third one, for every frame.
_NO_WAIT, _NO_WAIT_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def make_socket(context: Context, kind: int, spec: ChannelSpec, config: TransportConfig) -> Socket:
    """Return a socket with queues, limits and keepalive set, neither bound nor connected."""
    socket = context.socket(kind)
    socket.linger = LINGER_MS
    socket.sndhwm = spec.capacity_messages
    socket.rcvhwm = receive_queue(spec)
    socket.maxmsgsize = MAX_FRAME_BYTES + FRAME_OVERHEAD_BYTES  # of one frame
    socket.handshake_ivl = HANDSHAKE_MS
    socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1_000
    third_s = max(1, int(config.dead_after_s / 3))
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = third_s, third_s, 2
    return socket


def receive_queue(spec: ChannelSpec) -> int:
    """Messages that may wait at the receiving end."""
    return min(spec.capacity_messages, MAX_RECEIVE_QUEUE)


def secure_server(socket: Socket, secret: bytes) -> None:
    """Use CURVE only, with the key of this role instance; the ZAP handler decides on admission."""
    socket.curve_server = 1
    socket.curve_secretkey = secret
    socket.zap_domain = ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: Socket, secret: bytes, server: bytes) -> None:
    """Use CURVE only, with the key of this role instance, and connect only to the server with that public key."""
    socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
    socket.curve_serverkey = server


@dataclass(frozen=True, slots=True)
class Binding:
    """The place where a server listens."""

    address: str
    directory: Path | None  # of the unix socket

    def renew(self, socket: Socket) -> bool:
        """Listen again at the same address if its unix socket has been deleted; connections that stand are not touched.

        Returns whether it was.  Raises OSError; ConfigError: its directory has become somebody else's.
        """
        if self.directory is None or (self.directory / SOCKET_NAME).exists():
            return False
        make_private(self.directory)
        found, above = self.directory.lstat(), self.directory.parent.stat()
        is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not is_private or above.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{self.directory}: is not, or not only, this user's any more")
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, str(self.directory)) from error
        return True

    def remove(self) -> None:
        """Delete the files created by binding.  Idempotent."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def bind(socket: Socket, kind: str, interface: str | None) -> Binding:
    """Listen at a fresh address: a free port of the interface, or a unix socket in a directory of mode 0700.

    interface: IPv4 address for tcp; None: the one at which other hosts reach us (rlhpc/base/host_address.py).
    Raises ConfigError if it cannot be bound, or if RLHPC_INTERFACE names no interface of this host.
    """
    if kind == "tcp":
        wanted, directory = f"tcp://{interface or host_address()}:*", None
    else:
        directory = _short_private_directory()
        wanted = f"ipc://{directory}/{SOCKET_NAME}"
    try:
        socket.bind(wanted)
    except zmq.ZMQError as error:
        raise ConfigError(f"transport.kind={kind!r}: cannot bind {wanted}: {error.strerror}") from error
    return Binding(socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), directory)


def _short_private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="rlhpc-"))  # mkdtemp makes it 0700 under any umask
    if len(f"{directory}/{SOCKET_NAME}".encode()) <= MAX_IPC_PATH_BYTES:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp"))


def terminate(context: Context, timeout_s: float = TERMINATE_S) -> bool:
    """Wait until queued messages are flushed and the context has ended; False: it has not, and is abandoned.

    Terminating a context waits without limit for all its sockets.  A role that must exit before its time limit must not
    hang there, so a daemon thread does the waiting.
    """
    thread = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def push(socket: Socket, frames: Sequence[Frame]) -> bool:
    """Queue a whole message without waiting, or return False with no effect.

    A ROUTER raises zmq.ZMQError (EHOSTUNREACH) for a peer it does not know, with no effect either.
    """
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _NO_WAIT_MORE if index < last else _NO_WAIT
        try:
            socket.send(frame, flags, copy=len(frame) < ZERO_COPY_BYTES)
        except zmq.Again:
            if index == 0:
                return False
            # The connection was lost between two frames.  ZeroMQ discards the rest of the message; without sending it,
            # the next message would be discarded instead.
    return True


def pull(socket: Socket) -> list[Any] | None:
    """Take a whole message as zmq.Frame objects without waiting, or return None."""
    try:
        frames = [socket.recv(_NO_WAIT, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(socket.recv(copy=False))  # the parts of a message arrive together
    return frames


def contents(frames: Sequence[Any]) -> list[Frame]:
    """Return the content of zmq.Frame objects, without a copy if it has its own memory."""
    return [frame.bytes if len(frame) < SHARED_BUFFER_BYTES else frame.buffer for frame in frames]


# ----------------------------------------------------------------------------------------------------------------- pump
#
# Drive a non-blocking ZeroMQ socket from an asyncio loop.
#
# Passes every message to a callback while there is room for it; wakes senders when they should try again.
#
# A ZeroMQ file descriptor is edge-triggered, and *any* call on the socket may consume an edge.  So senders are woken
# after each receive, and the socket is polled for messages after each send.  zmq.asyncio does the same, but there a
# cancelled receive can lose the message, and each message costs a future and a pass of the loop.


BURST_MESSAGES = 64  # handled before other tasks get a turn
RETRY_S = 0.02  # a ROUTER does not signal when one particular peer has room again
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # as plain numbers, see sockets.py


class SocketPump:
    """Owned by the loop in which it is created."""

    def __init__(self, socket: Socket, deliver: Callable[[list[Any]], None], has_room: Callable[[], bool]) -> None:
        self._socket, self._deliver, self._has_room = socket, deliver, has_room
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._senders: set[asyncio.Future[None]] = set()
        self._is_open = True
        self._is_scheduled = False
        self._loop.add_reader(self._descriptor, self.drain)
        self._schedule()

    def drain(self) -> None:
        """Deliver received messages while there is room; call again once there is more."""
        for _ in range(BURST_MESSAGES):
            if not self._is_open:
                return
            if not self._has_room():
                self._socket.get(zmq.EVENTS)  # consumes the edge; the loop would spin on it otherwise
                break
            frames = pull(self._socket)
            if frames is None:
                break
            self._deliver(frames)
        else:
            self._schedule()
        wake_all(self._senders)

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """Queue a message or return False with no effect.  Raises zmq.ZMQError like push."""
        try:
            return push(self._socket, frames)
        finally:
            if not self._is_scheduled and int(self._socket.get(_EVENTS)) & _POLLIN:
                self._schedule()

    async def room(self, limit_s: float) -> None:
        """Sleep until trying again may help, at most for limit_s."""
        await sleep_until_woken(self._senders, min(limit_s, RETRY_S))

    def stop(self) -> None:
        """Stop using the socket and wake senders, which find the channel closed.  Idempotent."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._descriptor)
            wake_all(self._senders)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled_drain)

    def _scheduled_drain(self) -> None:
        self._is_scheduled = False
        if self._is_open:
            self.drain()
