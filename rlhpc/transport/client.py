"""The connecting end of a channel over ZeroMQ: a DEALER, for roles with and without an event loop.

Receives the server's messages of a ChannelSpec and sends the clients'.  A message that does not decode, or a duplicate,
raises ProtocolError: with CURVE only the server can have sent it, so it is a bug.  Messages lost because the connection
broke and was restored are counted in messages_lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import BlockingClientChannel, ChannelStatistics, ClientChannel
from rlhpc.protocol.errors import ChannelClosed, ChannelFull, ChannelTimeout, ProtocolError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.codec import Codec, Frame
from rlhpc.transport.security import load_secret, public_key
from rlhpc.transport.sessions import Counters, Greeting, SequenceCheck, Session
from rlhpc.transport.sockets import (
    Inbox,
    SocketPump,
    contents,
    make_socket,
    pull,
    push,
    receive_queue,
    secure_client,
    terminate,
)

HANDSHAKE_POLL_S = 0.005
# A signal that arrives between Python's last look for signals and the system call does not interrupt the call: its
# handler runs when the call returns.
SIGNAL_DELAY_S = 0.25
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)


class _Dealer:
    """Shared by both clients: the socket, the session and its sequence numbers.  Never waits."""

    def __init__(
        self,
        spec: ChannelSpec,
        address: str,
        *,
        name: str,
        incarnation: str,
        server_name: str,
        config: TransportConfig,
        secrets: Path,
    ) -> None:
        # First: what cannot be read leaves nothing open.
        keys = (load_secret(secrets, name), public_key(secrets, server_name)) if config.curve else None
        self.server_name = server_name
        self.title = f"channel {spec.name} of {name} to {server_name}"
        self.counters = Counters()
        self.received = SequenceCheck()
        self.is_open = True
        self._incoming = Codec(*spec.from_server)
        self._outgoing = Codec((*spec.to_server, Greeting))
        self._next_sent = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = make_socket(self._context, zmq.DEALER, spec, config)
        self.socket.routing_id = Session.open(name, incarnation).routing_id
        if keys is not None:
            secure_client(self.socket, *keys)
        self._monitor: zmq.Socket[bytes] | None = self.socket.get_monitor_socket()
        self.socket.connect(address)
        self._refused: tuple[object, int, list[Frame]] | None = None  # encoded, not yet accepted by the socket
        self.try_send(Greeting(), self._push_now)
        self.counters = Counters()  # the greeting is not an application message

    def try_send(self, message: object, transmit: Callable[[list[Frame]], bool]) -> bool:
        """Pass one message to `transmit`; its sequence number is used only if it was sent."""
        if not self.is_open:
            raise ChannelClosed(f"{self.title} is closed")
        if self._refused is None or self._refused[0] is not message or self._refused[1] != self._next_sent:
            self._refused = message, self._next_sent, self._outgoing.encode(message, self._next_sent)
        frames = self._refused[2]
        if not transmit(frames):
            return False
        self._refused = None
        self._next_sent += 1
        self.counters.sent(sum(map(len, frames)))
        return True

    def read(self, parts: list[Any]) -> Any:
        """Return the message.  Raises ProtocolError and counts it."""
        frames = contents(parts)
        try:
            sequence, message = self._incoming.decode(frames, self.server_name)
            self.received.accept(sequence, self.server_name)
        except ProtocolError:
            self.counters.messages_rejected += 1
            raise
        self.counters.received(sum(map(len, frames)))
        return message

    def admission_by(self, is_late: bool) -> str | None:
        """Return "" once the server has admitted us, the reason if it has refused, or None: not known yet.

        After a refusal, closing flushes nothing.
        """
        why = self._handshake_result()
        if why is None and is_late:
            why = "no answer"
        if why:
            self.socket.linger = 0
        return why

    def _handshake_result(self) -> str | None:
        while self._monitor is not None and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stop_monitor()
            elif event in _REFUSED:
                return "the server refuses our key"
        return "" if self._monitor is None else None

    def close(self) -> None:
        """Flush for at most LINGER_MS, unless admission has failed.  Waits."""
        self._stop_monitor()
        self.socket.close()
        terminate(self._context)

    def _push_now(self, frames: list[Frame]) -> bool:
        return push(self.socket, frames)

    def _stop_monitor(self) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()  # does not close our end, for which terminating the context would wait
            self._monitor.close(linger=0)
            self._monitor = None


class ZmqClient(ClientChannel):
    """A DEALER socket in an asyncio role.  Made inside a running loop, used by it alone."""

    def __init__(self, spec: ChannelSpec, address: str, **identity: Any) -> None:
        """Begin to connect; messages may be sent at once.  Keywords: those of _Dealer.

        Raises RunDirectoryError for keys.
        """
        self._dealer = _Dealer(spec, address, **identity)
        self._inbox: Inbox[Any] = Inbox(receive_queue(spec), self._dealer.title, self._drain)
        self._pump = SocketPump(self._dealer.socket, self._deliver, self._inbox.has_room)

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening; the queue as in ZmqServer."""
        return self._dealer.counters.snapshot(received=len(self._inbox), lost=self._dealer.received.lost)

    async def admission(self, timeout_s: float) -> str:
        """Wait for the handshake; return "" if the server has admitted us, else why not."""
        deadline = Deadline(timeout_s)
        while (why := self._dealer.admission_by(deadline.is_over)) is None:  # noqa: ASYNC110 - monitors are polled
            await asyncio.sleep(HANDSHAKE_POLL_S)
        return why

    async def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message.  Also raises ProtocolError for a message that may not go to the server."""
        deadline = Deadline(timeout_s)
        while not self._dealer.try_send(message, self._pump.try_send):
            if deadline.is_over:
                raise ChannelFull(f"{self._dealer.title}: no message was accepted for {timeout_s:g} s")
            await self._pump.room(deadline.left_s)

    async def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message."""
        item = await self._inbox.take(timeout_s)
        if isinstance(item, ProtocolError):
            raise item
        return item

    async def close(self) -> None:
        """Flush what was queued for at most a second."""
        if self._inbox.is_closed:
            return
        self._inbox.close()
        self._dealer.is_open = False
        self._pump.stop()
        await asyncio.to_thread(self._dealer.close)

    def _drain(self) -> None:
        self._pump.drain()

    def _deliver(self, parts: list[Any]) -> None:
        try:
            self._inbox.put(self._dealer.read(parts))
        except ProtocolError as error:
            self._inbox.put(error)  # receive raises it, in order


class ZmqBlockingClient(BlockingClientChannel):
    """A DEALER socket in a role without an event loop.  One thread uses it."""

    def __init__(self, spec: ChannelSpec, address: str, **identity: Any) -> None:
        """Begin to connect; messages may be sent at once.  Keywords: those of _Dealer.

        Raises RunDirectoryError for keys.
        """
        self._dealer = _Dealer(spec, address, **identity)

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening; nothing waits outside ZeroMQ."""
        return self._dealer.counters.snapshot(received=0, lost=self._dealer.received.lost)

    def admission(self, timeout_s: float) -> str:
        """Wait for the handshake; return "" if the server has admitted us, else why not."""
        deadline = Deadline(timeout_s)
        while (why := self._dealer.admission_by(deadline.is_over)) is None:
            time.sleep(HANDSHAKE_POLL_S)
        return why

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message.  Also raises ProtocolError for a message that may not go to the server."""
        deadline = Deadline(timeout_s)
        while not self._dealer.try_send(message, lambda frames: push(self._dealer.socket, frames)):
            if not self._wait_for(zmq.POLLOUT, deadline):
                raise ChannelFull(f"{self._dealer.title}: no message was accepted for {timeout_s:g} s")

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message."""
        deadline = Deadline(math.inf if timeout_s is None else timeout_s)
        while True:
            if not self._dealer.is_open:
                raise ChannelClosed(f"{self._dealer.title} is closed")
            parts = pull(self._dealer.socket)
            if parts is not None:
                return self._dealer.read(parts)
            if not self._wait_for(zmq.POLLIN, deadline):
                raise ChannelTimeout(f"{self._dealer.title}: no message within {timeout_s or 0:g} s")

    def close(self) -> None:
        """Flush what was queued for at most a second."""
        if self._dealer.is_open:
            self._dealer.is_open = False
            self._dealer.close()

    def _wait_for(self, event: int, deadline: Deadline) -> bool:
        """Return False once the deadline has passed without the event; a signal's handler runs meanwhile."""
        while True:
            left_s = deadline.left_s
            if self._dealer.socket.poll(math.ceil(min(left_s, SIGNAL_DELAY_S) * 1e3), event):
                return True
            if left_s <= SIGNAL_DELAY_S:
                return False
