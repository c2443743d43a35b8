"""Drive a non-blocking ZeroMQ socket from an asyncio loop.

Passes every message to a callback while there is room for it; wakes senders when they should try again.

A ZeroMQ file descriptor is edge-triggered, and *any* call on the socket may consume an edge.  So senders are woken
after each receive, and the socket is polled for messages after each send.  zmq.asyncio does the same, but there a
cancelled receive can lose the message, and each message costs a future and a pass of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from rlhpc.transport.codec import Frame
from rlhpc.transport.inbox import sleep_until_woken, wake_all
from rlhpc.transport.sockets import Socket, pull, push

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
