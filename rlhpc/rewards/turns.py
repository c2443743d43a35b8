"""Which waiting completion gets the next idle worker: tasks in turn, so that none of them blocks the others.

Input: workers that become idle, tasks that wait.  Output: a worker for each.  The task that has the fewest workers
comes first.  A task that has lost a worker (it hung, or killed its process) gets one at a time until it has given one
back whole: with several workers the other tasks go on as before.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import Generic, TypeVar

from rlhpc.errors import RoleFailed

Worker = TypeVar("Worker")


class Turns(Generic[Worker]):
    """Idle workers, and who waits for one.  Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: deque[Worker] = deque()
        self._waiting: dict[str, deque[asyncio.Future[Worker]]] = {}  # by task; the one served last stands last
        self._held: defaultdict[str, int] = defaultdict(int)  # workers by task
        self._suspects: set[str] = set()  # tasks that have lost a worker since they gave one back
        self._end = ""

    async def take(self, task: str) -> Worker:
        """Wait for a worker.  Raises RoleFailed once there will be none any more."""
        if self._end:
            raise RoleFailed(self._end)
        if self._idle and not self._waiting and self._may_take(task):
            self._held[task] += 1
            return self._idle.popleft()
        turn: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, deque()).append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.put_back(task, turn.result())
            raise

    def exchange(self, taken: Worker, wanted: Worker) -> Worker:
        """The wanted worker in place of one that was taken, if it is idle; else the one that was taken."""
        if wanted not in self._idle:
            return taken
        self._idle.remove(wanted)
        self._idle.append(taken)
        return wanted

    def give_back(self, task: str, worker: Worker) -> None:
        """The worker has answered, and may be asked again."""
        self._held[task] -= 1
        self._suspects.discard(task)
        self.add(worker)

    def put_back(self, task: str, worker: Worker) -> None:
        """Return a worker that was not asked."""
        self._held[task] -= 1
        self.add(worker)

    def lose(self, task: str) -> None:
        """The worker that the task had is gone."""
        self._held[task] -= 1
        self._suspects.add(task)
        self._serve()

    def add(self, worker: Worker) -> None:
        """Add an idle worker."""
        self._idle.append(worker)
        self._serve()

    def end(self, why: str) -> None:
        """All that wait, or come later, get RoleFailed with this text."""
        self._end = why
        for turns in self._waiting.values():
            for turn in turns:
                if not turn.done():
                    turn.set_exception(RoleFailed(why))
        self._waiting.clear()

    def _serve(self) -> None:
        while self._idle and (task := self._next()) is not None:
            turns = self._waiting[task]
            turn = turns.popleft()
            if not turns:
                del self._waiting[task]
            elif len(self._waiting) > 1:
                self._waiting[task] = self._waiting.pop(task)  # now the last one
            if not turn.done():  # else it was cancelled
                self._held[task] += 1
                turn.set_result(self._idle.popleft())

    def _next(self) -> str | None:
        return min(filter(self._may_take, self._waiting), key=self._held.__getitem__, default=None)

    def _may_take(self, task: str) -> bool:
        return task not in self._suspects or not self._held[task]
