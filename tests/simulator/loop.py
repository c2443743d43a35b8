"""An event loop without chance: virtual time, one callback at a time, in an order that a seed draws.

Input: a seed, coroutines that belong to simulated processes.  Output: the same course of events, every time.
A process may be killed or stood still between any two of its callbacks, that is at each of its awaits: they are thrown
away from then on, or kept until it goes on.  What asyncio.to_thread runs, runs at once as a callback of its own;
a random time passes before it and until the loop hears of its end, so that a process may die on either side.  What an
executor of the product is given, it does one after the other, in order: all of them have one thread.
Within one loop everything happens in one thread of this process; nobody waits for real time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any

THREAD_S = 0.02  # the longest time that passes before a thread does its work, and after it
LATE_S = 0.002  # how late a timer may be


class Died(BaseException):
    """Raised in a simulated process that dies within a callback: no `except` of the product catches it."""


class Process:
    """What is killed, and stands still, as a whole."""

    def __init__(self, name: str, on_death: Callable[[], None] = lambda: None) -> None:
        self.name, self.on_death = name, on_death
        self.is_dead = False
        self.stands_still_until = 0.0
        self.events_left: int | None = None  # until it dies; None: it is to live
        self.file_operations_left: int | None = None  # the same

    def kill(self) -> None:
        """Nothing of it runs any more.  Idempotent."""
        if not self.is_dead:
            self.is_dead = True
            self.on_death()


OUTSIDE = Process("outside")  # wires, the supervisor: never killed
PROCESS: ContextVar[Process] = ContextVar("simulated process", default=OUTSIDE)


class _Task(asyncio.Task[Any]):
    """Sets of tasks are walked in the same order in every run: they are ordered by hash."""

    serial = 0

    def __hash__(self) -> int:
        return self.serial


class _Future(asyncio.Future[Any]):
    serial = 0

    def __hash__(self) -> int:
        return self.serial


class _Handle(asyncio.TimerHandle):
    """What asyncio's is, without what debugging needs: one is made for every event."""

    __slots__ = ()

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Context | None) -> None:
        self._callback, self._args, self._cancelled = callback, args, False
        self._context = copy_context() if context is None else context

    def cancel(self) -> None:
        """It is passed over when its time comes."""
        self._cancelled, self._callback, self._args = True, None, ()


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Use `run`, once; then `close`."""

    def __init__(self, seed: str) -> None:
        rng = random.Random(f"{seed} loop")
        self._random = rng.random
        self._disorder = rng.choice((0.0, 0.3, 1.0))  # share of callbacks that overtake those before them
        self._now_s = 1000.0
        self._ready: list[_Handle] = []
        self._timers: list[tuple[float, int, _Handle]] = []
        self._serial = itertools.count(1)
        self._tasks: list[_Task] = []
        self._jobs: dict[Any, deque[Callable[[], None]]] = {}  # by executor: the first one is under way
        self._is_closed = False
        self.num_events = 0
        self.after_event: Callable[[Process], None] = lambda process: None
        self.signals: dict[tuple[str, int], Callable[[], object]] = {}  # (process, signal) → what it does

    # ------------------------------------------------------------------------------------------------------- running

    def run(self, main: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """Run until `main` returns; raises what it raises, TimeoutError after so many virtual seconds."""
        asyncio._set_running_loop(self)
        try:
            task, end_s = self.create_task(main), self._now_s + limit_s
            while not task.done():
                if self._now_s > end_s:
                    raise TimeoutError
                self._turn()
            return task.result()
        finally:
            asyncio._set_running_loop(None)

    def _turn(self) -> None:
        """One callback; where none is ready, the clock goes to the next timer."""
        ready, timers = self._ready, self._timers
        if not ready:
            if not timers:
                raise RuntimeError("nothing will ever happen any more")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            ready.append(heapq.heappop(timers)[2])
        overtakes = len(ready) > 1 and self._random() < self._disorder
        handle = ready.pop(int(self._random() * len(ready)) if overtakes else 0)
        process: Process = handle._context.get(PROCESS, OUTSIDE)
        if process.is_dead or handle._cancelled:
            return
        if process.stands_still_until > self._now_s:
            heapq.heappush(timers, (process.stands_still_until, next(self._serial), handle))
            return
        if process.events_left is not None:
            process.events_left -= 1
            if process.events_left < 0:
                process.kill()
                return
        self.num_events += 1
        try:
            handle._context.run(handle._callback, *handle._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001  as asyncio's; who fails is looked at where it was started
            pass
        self.after_event(process)

    def close(self) -> None:
        """End what is left: every coroutine, so that nothing of this run happens during the next one."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            for _ in range(5):  # a task group does not let go at once
                with suppress(BaseException):
                    task.get_coro().close()
                    break
        self._tasks.clear()

    # ------------------------------------------------------------------------------------- what asyncio asks of a loop

    def time(self) -> float:
        return self._now_s

    def block(self, seconds: float) -> None:
        """A callback sleeps: the clock goes on, and nothing else does."""
        self._now_s += seconds

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = _Handle(callback, args, context)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        handle = _Handle(callback, args, context)
        heapq.heappush(self._timers, (when + self._random() * LATE_S, next(self._serial), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.serial = next(self._serial)
        return future

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task = _Task.__new__(_Task)
        task.serial = next(self._serial)
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc]
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        done, jobs = self.create_future(), self._jobs.setdefault(executor, deque()) if executor else deque()
        jobs.append(partial(self._work, done, func, args, jobs))
        if len(jobs) == 1:
            self.call_later(self._random() * THREAD_S, jobs[0])
        return done

    def _work(
        self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...], jobs: deque[Any]
    ) -> None:
        """As a thread would."""
        try:
            result, error = func(*args), None
        except Exception as raised:  # noqa: BLE001  whoever awaits it gets it
            result, error = None, raised
        self.call_later(self._random() * THREAD_S, self._report, done, result, error)
        jobs.popleft()
        if jobs:
            self.call_later(self._random() * THREAD_S, jobs[0])

    @staticmethod
    def _report(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        self.signals[PROCESS.get().name, sig] = lambda: self.call_soon(callback, *args, context=handler_context)
        handler_context = copy_context()

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Who fails is looked at where it was started."""


def start(loop: SimulatedLoop, process: Process, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Run a coroutine, and all that it starts, as a process."""
    context = Context()
    context.run(PROCESS.set, process)
    return loop.create_task(main, context=context)
