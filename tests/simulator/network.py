"""Channels between simulated processes: the product's in-memory channels, with wires in between.

A message takes a random time, after those sent before it on the same wire.  What was sent to or by a process that dies
may still arrive.  A connection that breaks loses what is under way in both directions, and nothing else: that is what
a channel may lose (docs/design.md).  Everything else (sessions, fences, the codec) is that of rlhpc/transport.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from rlhpc.protocol.messages import ChannelSpec
from rlhpc.transport.sessions import Session
from tests.engines.memory_channel import MemoryClient, MemoryServer
from tests.simulator.loop import OUTSIDE, PROCESS, Process


class Wire:
    """One direction of one connection."""

    def __init__(self, rng: random.Random, longest_s: float, arrive: Callable[[Any], object]) -> None:
        self._random, self._longest_s, self._arrive = rng.random, longest_s, arrive
        self._under_way: deque[Any] = deque()
        self._last_s = 0.0
        self._num_lost = 0  # of those whose arrival is still to come

    def send(self, item: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._random() ** 3 * self._longest_s)  # seldom slow
        self._under_way.append(item)
        token = PROCESS.set(OUTSIDE)
        loop.call_at(self._last_s, self._deliver)
        PROCESS.reset(token)

    def _deliver(self) -> None:
        if self._num_lost:
            self._num_lost -= 1
        else:
            self._arrive(self._under_way.popleft())

    def delay(self, seconds: float) -> None:
        """What is sent from now on waits."""
        self._last_s = max(self._last_s, asyncio.get_running_loop().time() + seconds)

    def lose(self) -> int:
        """Lose what is under way; return its number."""
        lost = len(self._under_way)
        self._num_lost += lost
        self._under_way.clear()
        return lost


class SimulatedServer(MemoryServer):
    """The controller's end."""

    def __init__(self, spec: ChannelSpec, rng: random.Random, process: Process, longest_s: float) -> None:
        super().__init__(spec)
        self._rng, self._process, self._longest_s = rng, process, longest_s
        self.connections: dict[str, SimulatedClient] = {}  # the newest of each name
        self.on_send: Callable[[str, Any], None] = lambda peer, message: None
        self.on_receive: Callable[[str, Any], None] = lambda peer, message: None

    def attach(self, name: str, incarnation: str, process: Process) -> SimulatedClient:
        """As `connect`, with wires."""
        client = SimulatedClient(self, Session.open(name, incarnation), process)
        if self._hears(client):
            self._peers.accept(client.session.routing_id, 0)
            self._clients[name] = client
        self.connections[name] = client
        return client

    async def send(self, peer: str, message: object, timeout_s: float = 10.0) -> None:
        await super().send(peer, message, timeout_s)
        self.on_send(peer, message)

    async def receive(self, timeout_s: float | None = None) -> tuple[str, Any]:
        peer, message = await super().receive(timeout_s)
        self.on_receive(peer, message)
        return peer, message

    def accept(self, client: MemoryClient, frames: Any) -> bool:
        """What a client sends goes on its wire; there is always room."""
        assert isinstance(client, SimulatedClient)
        client.up.send(frames)
        return True

    def arrived(self, client: SimulatedClient, frames: Any) -> None:
        if not self._process.is_dead and not self._inbox.is_closed:
            super().accept(client, frames)

    def wires(self) -> tuple[random.Random, float]:
        """What a client's wires are made of."""
        return self._rng, self._longest_s


class SimulatedClient(MemoryClient):
    """The other end."""

    def __init__(self, server: SimulatedServer, session: Session, process: Process) -> None:
        super().__init__(server, session)
        self.process, self.is_gone = process, False
        rng, longest_s = server.wires()
        self.up = Wire(rng, longest_s, lambda frames: server.arrived(self, frames))
        self.down = Wire(rng, longest_s, self._arrived)

    def accept(self, frames: Any) -> bool:
        """What the server sends goes on the wire; there is always room."""
        self.down.send(frames)
        return True

    def _arrived(self, frames: Any) -> None:
        if not self.process.is_dead and not self.is_closed:
            super().accept(frames)

    @property
    def is_closed(self) -> bool:
        """Closed, or its process is dead and the kernel has said so."""
        return self.is_gone or super().is_closed

    def break_connection(self) -> int:
        """Both directions lose what is under way; return the number of messages."""
        return self.up.lose() + self.down.lose()

    def delay(self, seconds: float) -> None:
        self.up.delay(seconds)
        self.down.delay(seconds)
