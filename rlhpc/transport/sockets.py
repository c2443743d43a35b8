"""Create ZeroMQ sockets configured for channels, and move whole messages through them without blocking.

Input: a ChannelSpec and the [transport] settings.  Output: configured sockets.  Traps handled here and nowhere else:

* no ZMTP heartbeats: a socket that stops reading because its queue is full does not answer pings either, so the
  sender assumes it is dead, reconnects, and loses messages in transit (281 of 288 in our trial).  TCP keepalive is
  answered by the kernel, and roles send their own heartbeats.
* ZAP_ENFORCE_DOMAIN: without it a connection that finds no ZAP handler is admitted.
* a unix socket's path is limited to 107 bytes, too few for many values of TMPDIR.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from rlhpc.config_sections import TransportConfig
from rlhpc.errors import ConfigError
from rlhpc.files import make_private
from rlhpc.host_address import host_address
from rlhpc.topology import ChannelSpec
from rlhpc.transport.codec import MAX_FRAME_BYTES, Frame
from rlhpc.transport.zap import ZAP_DOMAIN

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
    """Where a server listens."""

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

    interface: IPv4 address for tcp; None: the one at which other hosts reach us (rlhpc/host_address.py).
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
            # The connection was lost between two frames.  ZeroMQ discards the rest of the message, which must be
            # sent all the same, or the next message would be discarded instead.
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
