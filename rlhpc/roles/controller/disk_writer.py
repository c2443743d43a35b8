"""Do the controller's disk work on threads, in order, so that a slow disk holds up neither heartbeats nor rollouts.

    owner of some files ──▶ their lane ──▶ one thread, one job after the other ──▶ disk

Input: calls that touch files.  Output: what they return.
Guarantees: the jobs of a lane are done in the order in which they were given, never two at a time; a job that was given
is done, also if whoever waited for it was cancelled.  Lanes do not wait for each other: a checkpoint of minutes holds
back no acknowledgement.  While the event loop runs, nothing else touches what a lane writes: the last write before the
end is a job, too.  A disk that never answers keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger("rlhpc.disk_writer")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Thread(Executor):
    """One daemon thread: Python waits at its end for those of a ThreadPoolExecutor, however long they hang."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        if self._thread.ident is None:
            self._thread.start()
        done: Future[Result] = Future()
        self._jobs.put((done, partial(job, *args, **kwargs)))
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:
            done, job = given
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001  whoever waits for it gets it
                done.set_exception(error)
            else:
                done.set_result(result)
            del given, done, job  # not kept until the next one comes


class DiskLane:
    """The jobs of files that belong together, and the thread that does them."""

    def __init__(self, name: str) -> None:
        """name: for people; the thread starts with the first job."""
        self.name = name
        self._thread = _Thread(name)
        self._unfinished: set[asyncio.Future[Any]] = set()

    @property
    def unfinished(self) -> set[asyncio.Future[Any]]:
        """The jobs that were given and are not done."""
        return set(self._unfinished)

    async def run(self, job: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Do a job after all that were given before it, and return what it returns.  Raises what it raises.

        It is given at once; a caller that is cancelled meanwhile leaves it to be done, and a failure is logged then.
        """
        given = asyncio.get_running_loop().run_in_executor(self._thread, partial(job, *args, **kwargs))
        self._unfinished.add(given)
        given.add_done_callback(self._unfinished.discard)
        try:
            return await asyncio.shield(given)
        except asyncio.CancelledError:
            given.add_done_callback(self._log_failure)
            raise

    def close(self) -> None:
        """Take no more jobs; the thread ends after those that were given."""
        self._thread.shutdown()

    def _log_failure(self, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.warning("%s: a write that nobody waited for any more has failed: %s", self.name, error)


class DiskWriter:
    """The lanes of one controller."""

    def __init__(self) -> None:
        self.journal = DiskLane("journal")  # acknowledgements and new weights wait for it
        self.partials = DiskLane("partials")
        self.segments = DiskLane("segments")  # seconds a job
        self.checkpoints = DiskLane("checkpoints")  # minutes a job: every byte is read again
        self.notes = DiskLane("notes")  # status, timeline, lost leases, actions of the guard
        self.metrics = DiskLane("metrics")
        self._lanes = self.journal, self.partials, self.segments, self.checkpoints, self.notes, self.metrics

    async def close(self, limit_s: float) -> list[str]:
        """Wait until all jobs are done, for limit_s at most; return the names of lanes that have some left."""
        if unfinished := set[asyncio.Future[Any]]().union(*(lane.unfinished for lane in self._lanes)):
            await asyncio.wait(unfinished, timeout=limit_s)
        late = [lane.name for lane in self._lanes if lane.unfinished]
        for lane in self._lanes:
            lane.close()
        return late
