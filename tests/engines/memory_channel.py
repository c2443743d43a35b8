"""A channel inside one process: the reference semantics, used by tests of other modules.

Messages pass through the codec as on the wire, so that any message that works here can be sent; arrays are shared
between two ends only read-only.  Capacity is exact: a number of messages per peer and direction.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rlhpc.base.patience import Deadline
from rlhpc.protocol.contracts import BlockingClientChannel, ChannelStatistics, ClientChannel, ServerChannel
from rlhpc.protocol.errors import ChannelClosed, ChannelFull, PeerUnreachable, ProtocolError
from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.codec import Codec, Frame
from rlhpc.transport.sessions import Counters, PeerBook, Session, peer_name
from rlhpc.transport.sockets import Inbox, sleep_until_woken, wake_all


class MemoryServer(ServerChannel):
    """The end that clients connect to by calling connect.  Used by one event loop."""

    def __init__(self, spec: ChannelSpec, replica: int = 0) -> None:
        self.spec = spec
        self.name = peer_name(spec.server, replica)
        self._codec = Codec(spec.to_server)
        self._outgoing = Codec(*spec.from_server)
        self._counters = Counters()
        self._inbox: Inbox[tuple[str, int, Any]] = Inbox(spec.capacity_messages, f"channel {spec.name} of {self.name}")
        self._queued: Counter[str] = Counter()  # by peer, in our inbox
        self._room: set[asyncio.Future[None]] = set()
        self._clients: dict[str, MemoryClient] = {}
        self._peers = PeerBook()

    def connect(self, name: str, incarnation: str = "first") -> MemoryClient:
        """Return the channel of a role instance.

        A later one of the same name replaces it, as over ZeroMQ; one from an earlier start is ignored.
        """
        client = MemoryClient(self, Session.open(name, incarnation))
        if self._hears(client):
            self._peers.accept(client.session.routing_id, 0)  # stands for the greeting
            self._clients[name] = client
        return client

    def connect_blocking(self, name: str, incarnation: str = "first") -> MemoryBlockingClient:
        """Return a channel for another thread.  Call it in the loop's thread; use the channel in the other one."""
        return MemoryBlockingClient(self.connect(name, incarnation), asyncio.get_running_loop())

    @property
    def address(self) -> str:
        """A name for logs."""
        return f"memory://{self.name}/{self.spec.name}"

    @property
    def peers(self) -> frozenset[str]:
        """Names that have connected; they may have left since."""
        return frozenset(self._clients)

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""
        return self._counters.snapshot(received=len(self._inbox))

    async def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        """Return (peer name, message)."""
        peer, nbytes, message = await self._inbox.take(timeout_s)
        self._queued[peer] -= 1
        self._counters.received(nbytes)
        wake_all(self._room)
        return peer, message

    async def send(self, peer: str, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message to one peer.  Also raises ProtocolError for a message that may not go to clients."""
        deadline = Deadline(timeout_s)
        frames = self._outgoing.encode(message, 0)
        while True:
            client = self._clients.get(peer)
            if self._inbox.is_closed:
                raise ChannelClosed(f"{self.address} is closed")
            if client is None or client.is_closed:
                raise PeerUnreachable(f"{self.address}: {peer} is not connected")
            if client.accept(frames):
                self._counters.sent(sum(map(len, frames)))
                return
            await _wait_for_room(client.room, deadline, f"{self.address}: the queue to {peer} was full")

    async def close(self) -> None:
        """Refuse further calls; as over ZeroMQ, clients are not told."""
        self._inbox.close()
        wake_all(self._room)

    def accept(self, client: MemoryClient, frames: list[Frame]) -> bool:
        """Queue a client's message, or return False with no effect.  A fenced one's is counted and dropped."""
        peer = client.name
        if self._inbox.is_closed or self._queued[peer] >= self.spec.capacity_messages:
            return False
        if not self._hears(client):
            self._counters.messages_rejected += 1
            return True
        _, message = self._codec.decode(frames, peer)
        self._queued[peer] += 1
        self._inbox.put((peer, sum(map(len, frames)), message))
        return True

    def _hears(self, client: MemoryClient) -> bool:
        try:
            self._peers.name_of(client.session.routing_id, None)
        except ProtocolError:
            return False
        return True

    @property
    def room(self) -> set[asyncio.Future[None]]:
        """Clients that wait for their message to be received."""
        return self._room


class MemoryClient(ClientChannel):
    """The other end.  Made by MemoryServer.connect."""

    def __init__(self, server: MemoryServer, session: Session) -> None:
        self.session = session
        self.name = name = session.name
        self.room: set[asyncio.Future[None]] = set()
        self._server = server
        self._incoming = Codec(*server.spec.from_server)
        self._outgoing = Codec(server.spec.to_server)
        self._counters = Counters()
        self._inbox: Inbox[tuple[int, Any]] = Inbox(
            server.spec.capacity_messages, f"channel {server.spec.name} of {name} to {server.name}"
        )

    @property
    def is_closed(self) -> bool:
        """Whether close was called."""
        return self._inbox.is_closed

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""
        return self._counters.snapshot(received=len(self._inbox))

    async def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message.  Also raises ProtocolError for a message that may not go to the server."""
        deadline = Deadline(timeout_s)
        frames = self._outgoing.encode(message, 0)
        while True:
            if self.is_closed:
                raise ChannelClosed(f"channel of {self.name} is closed")
            if self._server.accept(self, frames):
                self._counters.sent(sum(map(len, frames)))
                return
            await _wait_for_room(self._server.room, deadline, f"{self._server.address}: its queue was full")

    async def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message."""
        nbytes, message = await self._inbox.take(timeout_s)
        self._counters.received(nbytes)
        wake_all(self.room)
        return message

    async def close(self) -> None:
        """Refuse further calls.  Sent messages have arrived already."""
        self._inbox.close()
        wake_all(self.room)
        wake_all(self._server.room)

    def accept(self, frames: list[Frame]) -> bool:
        """Queue the server's message, or return False with no effect."""
        if not self._inbox.has_room():
            return False
        _, message = self._incoming.decode(frames, self._server.name)
        self._inbox.put((sum(map(len, frames)), message))
        return True


class MemoryBlockingClient(BlockingClientChannel):
    """A MemoryClient driven from another thread."""

    def __init__(self, client: MemoryClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    @property
    def statistics(self) -> ChannelStatistics:
        """Counters since opening."""
        return self._client.statistics

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        """Queue one message."""
        asyncio.run_coroutine_threadsafe(self._client.send(message, timeout_s), self._loop).result()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message."""
        return asyncio.run_coroutine_threadsafe(self._client.receive(timeout_s), self._loop).result()

    def close(self) -> None:
        """Refuse further calls."""
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()


async def _wait_for_room(waiters: set[asyncio.Future[None]], deadline: Deadline, who: str) -> None:
    """Sleep until there may be room.  Raises ChannelFull once the deadline has passed."""
    if deadline.is_over:
        raise ChannelFull(f"{who} for {deadline.limit_s:g} s")
    await sleep_until_woken(waiters, deadline.left_s)
