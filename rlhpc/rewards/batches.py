"""Collect completions for batched functions until a worker judges them together.

A batch does not wait to be full: when a worker becomes free, it gets all waiting completions, up to `most`.  If a batch
fails, its completions are judged again one by one, so that only those that cause the failure are verifier errors.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rlhpc.errors import RoleFailed
from rlhpc.rewards.turns import Turns

Worker = TypeVar("Worker")
Found = TypeVar("Found")


@dataclass(eq=False, slots=True)
class Asked(Generic[Found]):
    """A completion that waits."""

    completion: str
    reference: str
    found: asyncio.Future[Found] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Batches(Generic[Worker, Found]):
    """The waiting completions of one pool."""

    def __init__(
        self,
        turns: Turns[Worker],
        most: int,
        num_workers: int,
        together: Callable[[str, Worker, Sequence[Asked[Found]]], Awaitable[Sequence[Found] | None]],
        alone: Callable[[str, str, str], Awaitable[Found]],
    ) -> None:
        """together: has a worker judge, and gives it back; None: the batch has failed.  alone: takes a worker."""
        self._turns, self._most, self._num_workers = turns, most, num_workers
        self._together, self._alone = together, alone
        self._waiting: defaultdict[str, deque[Asked[Found]]] = defaultdict(deque)
        self._num_serving: defaultdict[str, int] = defaultdict(int)
        self._serving: set[asyncio.Task[None]] = set()

    async def judge(self, task: str, completion: str, reference: str) -> Found:
        """Judge a completion.  Cancelling affects no other one.  Raises RoleFailed if the pool has ended."""
        asked: Asked[Found] = Asked(completion, reference)
        self._waiting[task].append(asked)
        if self._num_serving[task] < self._num_workers:
            self._num_serving[task] += 1
            serving = asyncio.create_task(self._serve(task))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        return await asked.found

    async def close(self) -> None:
        """Call it after the end of the pool: all that wait get RoleFailed."""
        await asyncio.gather(*self._serving)

    async def _serve(self, task: str) -> None:
        batch: list[Asked[Found]] = []
        try:
            while self._waiting[task]:
                worker = await self._turns.take(task)
                batch = self._next(task)
                if batch:
                    await self._judge(task, worker, batch)
                else:
                    self._turns.put_back(task, worker)
        except RoleFailed as error:
            for asked in (*batch, *self._waiting.pop(task, ())):
                if not asked.found.done():
                    asked.found.set_exception(RoleFailed(str(error)))
        finally:
            self._num_serving[task] -= 1

    def _next(self, task: str) -> list[Asked[Found]]:
        waiting, batch = self._waiting[task], list[Asked[Found]]()
        while waiting and len(batch) < self._most:
            asked = waiting.popleft()
            if not asked.found.done():  # otherwise the caller was cancelled
                batch.append(asked)
        return batch

    async def _judge(self, task: str, worker: Worker, batch: Sequence[Asked[Found]]) -> None:
        found = await self._together(task, worker, batch)
        if found is None:
            found = await asyncio.gather(*(self._alone(task, each.completion, each.reference) for each in batch))
        for asked, each in zip(batch, found, strict=True):
            if not asked.found.done():
                asked.found.set_result(each)
