"""A bounded queue of received messages that many tasks may wait on and that can be closed.

Input: decoded messages.  Output: the same, in order.  Guarantees: a wait that times out or is cancelled consumes no
message; closing wakes all waiters.  asyncio.Queue cannot be closed before Python 3.13.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from rlhpc.deadline import Deadline
from rlhpc.errors import ChannelClosed, ChannelTimeout

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
        """Whether put is allowed."""
        return len(self._items) < self._capacity

    @property
    def is_closed(self) -> bool:
        """Whether take raises ChannelClosed."""
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
