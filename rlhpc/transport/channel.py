"""Both ends of a channel over ZeroMQ: a ROUTER that knows its peers by name, and a DEALER for each of them.

Each receives the other's messages of a ChannelSpec, in order and without duplicates: sequence numbers per session
(sessions.py); lost messages are counted in messages_lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import BlockingClientChannel, ChannelStatistics, ClientChannel, Clock, ServerChannel
from rlhpc.protocol.errors import (
    ChannelClosed,
    ChannelFull,
    ChannelTimeout,
    ConfigError,
    PeerUnreachable,
    ProtocolError,
)
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.codec import Codec, Frame
from rlhpc.transport.security import allowed_keys, load_secret, public_key
from rlhpc.transport.sessions import Counters, Greeting, Peer, PeerBook, SequenceCheck, Session, checked_name
from rlhpc.transport.sockets import (
    AllowList,
    Inbox,
    Rarely,
    SocketPump,
    ZapHandler,
    bind,
    contents,
    make_socket,
    pull,
    push,
    receive_queue,
    secure_client,
    secure_server,
    terminate,
)

# ------------------------------------------------------------------------------------------------------ the binding end
#
# A ROUTER that knows its peers by name.  Keeps the guarantees of ServerChannel besides:
#
# * no outsiders: with CURVE only keys of this run are admitted, and each only under its own name;
# * no silent drop: ROUTER_MANDATORY turns an unknown peer into PeerUnreachable and a full queue into ChannelFull.
#
# Differs from the usual recipe: the routing id is ``name/incarnation/random``, not the bare name.  With bare names a
# stopped process that resumes takes over the connection of its successor, and the two keep taking it from each other.


log = logging.getLogger("rlhpc.transport")
LOOK_S = 2.0  # polling interval for a unix socket that has been deleted


class ZmqServer(ServerChannel):
    """A ROUTER socket, with its own context and ZAP handler.  Made inside a running loop, used by it alone."""

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        name: str,
        config: TransportConfig,
        secrets: Path,
        clock: Clock,
        interface: str | None = None,
    ) -> None:
        """Bind.

        name: of this role instance.  secrets: see security.py; not read without CURVE.  interface: see sockets.bind.
        Raises RunDirectoryError for keys, ConfigError for an address.
        """
        self.name = checked_name(name)
        # First: what cannot be read leaves nothing open.
        keys = (AllowList(partial(allowed_keys, secrets), clock), load_secret(secrets, name)) if config.curve else None
        self._title = f"channel {spec.name} of {name}"
        self._incoming = Codec((*spec.to_server, Greeting))
        self._outgoing = Codec(*spec.from_server)
        self._peers = PeerBook()
        self._counters = Counters()
        self._told: defaultdict[str, Rarely] = defaultdict(lambda: Rarely(clock))  # by what was at fault
        self._inbox: Inbox[tuple[str, Any]] = Inbox(receive_queue(spec), self._title, self._drain)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = ZapHandler(self._context, keys[0], clock) if keys is not None else None
        self._socket = make_socket(self._context, zmq.ROUTER, spec, config)
        self._socket.router_mandatory = 1
        self._socket.router_handover = 1  # a session may reconnect before its loss is noticed
        if keys is not None:
            secure_server(self._socket, keys[1])
        self._binding = bind(self._socket, config.kind, interface)
        self._pump = SocketPump(self._socket, self._deliver, self._inbox.has_room)
        self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._keep_address)

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._binding.address

    @property
    def peers(self) -> frozenset[str]:
        """Names of peers that have greeted us, as every opened channel does; they may have died since."""
        return self._peers.names

    @property
    def connections_denied(self) -> int:
        """Handshakes with a key that does not belong to this run."""
        return self._zap.num_denied if self._zap else 0

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening.

        ZeroMQ does not report its own queues: receive_queue_depth counts messages received from it and not yet returned
        by receive.
        """
        return self._counters.snapshot(
            received=len(self._inbox),
            lost=self._peers.lost,
            denied=self.connections_denied,
        )

    async def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        """Return (peer name, message)."""
        return await self._inbox.take(timeout_s)

    async def send(self, peer: str, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message to one peer.  Also raises ProtocolError for a message that may not go to clients."""
        deadline = Deadline(timeout_s)
        while not self._try_send(peer, message):
            if deadline.is_over:
                raise ChannelFull(f"{self._title}: the queue to {peer} was full for {timeout_s:g} s")
            await self._pump.room(deadline.left_s)

    async def close(self) -> None:
        """Flush what was queued for at most a second; then remove the address."""
        if self._inbox.is_closed:
            return
        self._end()
        await asyncio.to_thread(terminate, self._context)  # waits for the flush, and ends the ZAP handler
        self._binding.remove()

    def close_now(self) -> None:
        """Close without waiting, if nobody can have connected and nothing was sent."""
        self._end()
        terminate(self._context)
        self._binding.remove()

    def _keep_address(self) -> None:
        """Listen again if a cleaner of temporary files has deleted the socket, which keeps others out."""
        try:
            if self._binding.renew(self._socket):
                self._pump.drain()
                log.warning("%s: the socket at %s was deleted, and is made again", self._title, self.address)
        except (OSError, ConfigError) as error:
            if self._told["address"].may_tell():
                log.warning("%s: the socket at %s was deleted: %s", self._title, self.address, error)
        self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._keep_address)

    def _end(self) -> None:
        self._next_look.cancel()
        self._inbox.close()
        self._pump.stop()
        self._socket.close()

    def _try_send(self, name: str, message: object) -> bool:
        """Encode again at every attempt: another task may have used the number meanwhile."""
        if self._inbox.is_closed:
            raise ChannelClosed(f"{self._title} is closed")
        peer = self._find_peer(name)
        frames = self._outgoing.encode(message, peer.next_sent)
        try:
            if not self._pump.try_send([peer.routing_id, *frames]):
                return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerUnreachable(f"{self._title}: {name} has disconnected") from error
        peer.next_sent += 1
        self._counters.sent(sum(map(len, frames)))
        return True

    def _find_peer(self, name: str) -> Peer:
        if name not in self._peers.names:
            self._pump.drain()  # its greeting may have just arrived
        return self._peers.find(name)

    def _drain(self) -> None:
        self._pump.drain()

    def _deliver(self, parts: list[Any]) -> None:
        """Put one message into the inbox, or count it as rejected."""
        identity, *rest = parts
        try:
            routing_id = identity.bytes
            peer = self._peers.name_of(routing_id, identity.get("User-Id") if self._zap else None)
            frames = contents(rest)
            sequence, message = self._incoming.decode(frames, peer)
            self._peers.accept(routing_id, sequence)
        except ProtocolError as error:
            self._reject(error)
            return
        if not isinstance(message, Greeting):
            self._counters.received(sum(map(len, frames)))
            self._inbox.put((peer, message))

    def _reject(self, error: ProtocolError) -> None:
        """Count it; log it, unless the same fault was logged within the last minute."""
        self._counters.messages_rejected += 1
        if self._told[error.field.partition(".")[0]].may_tell():
            log.warning("%s: messages rejected so far: %d; %s", self._title, self._counters.messages_rejected, error)


# --------------------------------------------------------------------------------------------------- the connecting end
#
# A DEALER, for roles with and without an event loop.  A message that does not decode, or a duplicate, raises
# ProtocolError: with CURVE only the server can have sent it, so it is a bug.


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
