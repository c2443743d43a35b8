"""Send a request to one of several replicas and get a reply, even if some of them are slow or dead.

Input: requests.  Output: replies.  Both are frozen dataclasses with a `request_id`, over any ClientChannel.  A request
that is not answered in time goes to another replica, so it must be idempotent.  Every attempt has its own number, which
no earlier client of the same name has used; a reply to an abandoned attempt is counted and dropped.  A replica that is
busy with other requests sends StillWaiting: it times out only after being silent for as long as an attempt may take.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import secrets
from collections.abc import Sequence
from typing import Any, Self

from rlhpc.protocol.contracts import ClientChannel
from rlhpc.protocol.errors import ChannelClosed, ChannelError, ChannelTimeout, ProtocolError
from rlhpc.protocol.messages import StillWaiting

ID_BITS = 62  # of the first number: there is room behind it, in 63


@dataclasses.dataclass(slots=True)
class _Replica:
    """One channel and its statistics."""

    channel: ClientChannel
    index: int
    outstanding: int = 0
    num_replies: int = 0  # including those to abandoned attempts
    timeouts_in_a_row: int = 0  # a hung replica has few outstanding requests and would look the least busy
    replied_at: float = -math.inf  # loop time of its last reply
    heard_at: float = -math.inf  # of its last message
    is_open: bool = True
    reader: asyncio.Task[None] | None = None


@dataclasses.dataclass(slots=True)
class _Attempt:
    """A request sent to a replica."""

    replica: _Replica
    turn: int  # number of the replica's replies before this one is due, if it answers in order
    waiter: asyncio.Future[Any]
    waited_at: float = -math.inf  # loop time at which the replica last said that it has it, and goes on


class RpcClient:
    """Calls over channels that nothing else receives from.  Use with ``async with``, which closes the channels."""

    def __init__(
        self, channels: Sequence[ClientChannel], *, max_attempts: int = 3, silence_s: float = math.inf
    ) -> None:
        """Nothing is received before __aenter__.

        silence_s: give up on a replica that is silent for this long while another one is not.
        """
        self._silence_s = silence_s
        self.num_retries = 0  # requests that were resent
        self._max_attempts = max_attempts
        self._replicas = [_Replica(channel, index) for index, channel in enumerate(channels)]
        self._waiting: dict[int, _Attempt] = {}
        # Not from 1: a replica replies to names, and our next life would take replies to this one for its own.
        self._next_id = itertools.count(secrets.randbits(ID_BITS))

    async def __aenter__(self) -> Self:
        """Begin to receive."""
        for replica in self._replicas:
            replica.reader = asyncio.create_task(self._read(replica))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Same as close."""
        await self.close()

    def add(self, channel: ClientChannel) -> None:
        """Add a replica, for example one that restarted on another node.  Call it after __aenter__."""
        replica = _Replica(channel, len(self._replicas))
        self._replicas.append(replica)
        replica.reader = asyncio.create_task(self._read(replica))

    async def replace(self, old: ClientChannel, new: ClientChannel) -> None:
        """Replace the channel of a restarted replica, and close the old one; its calls are resent."""
        self.add(new)
        for replica in self._replicas:
            if replica.channel is old:
                await self._retire(replica)

    async def call(self, request: Any, timeout_s: float, tried: set[int] | None = None) -> Any:
        """Return the reply, under the request's own id.

        timeout_s: of one attempt, counted from its turn: a replica that answers earlier requests, of any client, has a
        queue, and the call waits as long as it makes progress.  The replica with the fewest outstanding requests is
        tried first, after a failure another one.  A channel that is closed meanwhile does not count as an attempt.
        tried: kept by a caller whom a reply may not content; another call with it goes to a replica that is not in it.
        Raises ChannelTimeout after max_attempts, ChannelClosed if no replica is left, ProtocolError if the request may
        not be sent.
        """
        tried = set() if tried is None else tried
        num_failures = 0
        while num_failures < self._max_attempts:
            replica = self._choose(tried)
            self.num_retries += bool(tried)
            tried.add(replica.index)
            try:
                reply = await self._attempt(replica, request, timeout_s)
            except ChannelClosed:
                replica.is_open = False
            except (ChannelError, TimeoutError):
                num_failures += 1
                replica.timeouts_in_a_row += 1
            else:
                return dataclasses.replace(reply, request_id=request.request_id)
        raise ChannelTimeout(
            f"{type(request).__name__} {request.request_id}: no reply from {len(tried)} replicas in "
            f"{self._max_attempts} attempts of {timeout_s:g} s"
        )

    async def close(self) -> None:
        """End all calls with ChannelClosed and close the channels.  Idempotent."""
        for replica in self._replicas:
            replica.is_open = False  # before the rest: an abandoned call must not go to another replica
        for replica in self._replicas:
            await self._retire(replica)

    async def _retire(self, replica: _Replica) -> None:
        replica.is_open = False
        if replica.reader is not None:
            replica.reader.cancel()
            await asyncio.gather(replica.reader, return_exceptions=True)
        await replica.channel.close()
        self._give_up(replica)

    def _choose(self, tried: set[int]) -> _Replica:
        candidates = [replica for replica in self._replicas if replica.is_open]
        if not candidates:
            raise ChannelClosed("no replica is left")
        return min(candidates, key=lambda r: (r.index in tried, r.timeouts_in_a_row, r.outstanding, r.index))

    async def _attempt(self, replica: _Replica, request: Any, timeout_s: float) -> Any:
        request_id = next(self._next_id)
        turn = replica.num_replies + replica.outstanding
        attempt = self._waiting[request_id] = _Attempt(replica, turn, asyncio.get_running_loop().create_future())
        replica.outstanding += 1
        try:
            await replica.channel.send(dataclasses.replace(request, request_id=request_id), timeout_s)
            await self._answered(attempt, timeout_s)
            return attempt.waiter.result()
        finally:
            replica.outstanding -= 1
            del self._waiting[request_id]

    async def _answered(self, attempt: _Attempt, timeout_s: float) -> None:
        """Wait for a reply.

        Raises TimeoutError timeout_s after its turn has come, the last reply before that, or the replica's last
        StillWaiting for it; or once the replica seems to hang, judging by the others.
        """
        replica, waiter, now = attempt.replica, attempt.waiter, asyncio.get_running_loop().time
        asked_at = counts_from = now()
        is_its_turn = False
        while not waiter.done():
            counts_from = max(counts_from, attempt.waited_at)
            if not is_its_turn:
                counts_from = max(counts_from, replica.replied_at)
                is_its_turn = replica.num_replies >= attempt.turn
            ends_at = min(counts_from + timeout_s, max(asked_at, replica.heard_at) + self._silence_s)
            await asyncio.wait((waiter,), timeout=max(0.01, ends_at - now()))
            if waiter.done():
                return
            is_late = now() >= max(counts_from, attempt.waited_at) + timeout_s
            if is_late and (is_its_turn or replica.replied_at <= counts_from):
                raise TimeoutError
            is_silent = now() - max(asked_at, replica.heard_at) >= self._silence_s
            if is_silent and any(r.is_open and now() - r.heard_at < self._silence_s for r in self._replicas):
                raise TimeoutError
            asked_at = now() if is_silent else asked_at  # if all are silent, they may all have long queues

    async def _read(self, replica: _Replica) -> None:
        """Pass replies to their waiting calls, until the channel is closed."""
        try:
            await self._pass_on(replica)
        finally:  # also of an error, such as of memory: nobody reads what comes any more
            replica.is_open = False
            self._give_up(replica)

    async def _pass_on(self, replica: _Replica) -> None:
        while True:
            try:
                reply = await replica.channel.receive()
            except ProtocolError:  # its request times out and is resent
                continue
            except ChannelClosed:
                return
            replica.timeouts_in_a_row, replica.heard_at = 0, asyncio.get_running_loop().time()
            if isinstance(reply, StillWaiting):
                for request_id in reply.request_ids:
                    if (attempt := self._waiting.get(request_id)) is not None:
                        attempt.waited_at = replica.heard_at
                continue
            replica.replied_at = replica.heard_at
            replica.num_replies += 1
            attempt = self._waiting.get(reply.request_id)
            if attempt is not None and attempt.replica is replica and not attempt.waiter.done():
                attempt.waiter.set_result(reply)  # else it is too late, and its call has given up

    def _give_up(self, replica: _Replica) -> None:
        """Fail the attempts that are waiting on a closed channel."""
        for attempt in self._waiting.values():
            if attempt.replica is replica and not attempt.waiter.done():
                attempt.waiter.set_exception(ChannelClosed("the channel was closed before the reply came"))
