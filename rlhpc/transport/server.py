"""The binding end of a channel over ZeroMQ: a ROUTER that knows its peers by name.

Receives the clients' messages of a ChannelSpec and sends the server's.  Keeps the guarantees of ServerChannel:

* order and no duplicates: sequence numbers per session (sessions.py); lost messages are counted in messages_lost;
* no outsiders: with CURVE only keys of this run are admitted, and each only under its own name;
* no silent drop: ROUTER_MANDATORY turns an unknown peer into PeerUnreachable and a full queue into ChannelFull.

Differs from the usual recipe: the routing id is ``name/incarnation/random``, not the bare name.  With bare names a
stopped process that resumes takes over the connection of its successor, and the two keep taking it from each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from rlhpc.base.patience import Deadline
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.contracts import ChannelStatistics, Clock, ServerChannel
from rlhpc.protocol.errors import ChannelClosed, ChannelFull, ConfigError, PeerUnreachable, ProtocolError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.codec import Codec
from rlhpc.transport.security import allowed_keys, load_secret
from rlhpc.transport.sessions import Counters, Greeting, Peer, PeerBook, checked_name
from rlhpc.transport.sockets import (
    AllowList,
    Inbox,
    Rarely,
    SocketPump,
    ZapHandler,
    bind,
    contents,
    make_socket,
    receive_queue,
    secure_server,
    terminate,
)

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
        """Names that have greeted us, as every opened channel does; they may have died since."""
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
        """Close where nobody can have connected and nothing was sent, so that there is nothing to wait for."""
        self._end()
        terminate(self._context)
        self._binding.remove()

    def _keep_address(self) -> None:
        """Look again and again whether a cleaner of temporary files has deleted the socket, which keeps others out."""
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
