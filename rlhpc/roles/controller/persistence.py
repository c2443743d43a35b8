"""Write the controller's files: in order, beside its event loop, and again where the disk has refused.

In this file: segments, sealed again where the disk has refused; threads that write, a lane for each kind of file;
running rollouts; the journal.

The journal is written as fast as the disk allows, and generators are told which rollouts they may delete:

    Delivery ─▶ buffer, journal ─▶ commit, in its lane ─▶ Delivered   one commit for all arrivals since the last

A failed write is reported and retried with growing pauses (rlhpc/base/patience.py): meanwhile nothing is acknowledged,
and no weights are published.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from rlhpc.base.patience import Patience, seen
from rlhpc.buffer.prefixes import PartialIntake, PartialLog, PartialRollout, decode_partials
from rlhpc.buffer.rollout_journal import RolloutJournal
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.protocol.contracts import Clock, ServerChannel
from rlhpc.protocol.errors import ChannelError, JournalError, OwnershipLost, SegmentError
from rlhpc.protocol.messages import CancelGroup, Delivered, Delivery, LeaseProgress, LeaseReturn, ShowWhole

# -------------------------------------------------------------------------------------------------------- disk patience
#
# Seal segments again where the disk has refused, for as long as `Patience` allows (rlhpc/base/patience.py).
#
# Meanwhile due segments wait in memory, and none is lost; a checkpoint is skipped, and another is tried soon
# (checkpoints.py).

log = logging.getLogger("rlhpc.persistence")

LONGEST_CHECKPOINT_PAUSE_S = 20.0  # each further try costs all ranks a copy of their state


class PatientSealing:
    """Retries failed writes with growing pauses, for as long as `Patience` allows."""

    def __init__(self, segments: SegmentWriter, clock: Clock) -> None:
        self._segments, self._patience = segments, Patience(clock)

    @property
    def disk_trouble(self) -> str:
        """Reason why the last segment could not be written, and what happens next; "" if it was written."""
        return self._patience.trouble

    def tick(self) -> None:
        """Seal a segment if one is due.  One thread at a time.

        Raises SegmentError, OSError if writes fail for too long.
        """
        if not self._patience.may_try:
            return
        try:
            self._segments.tick()
        except (SegmentError, OSError) as error:
            self._patience.failed(error)
            if self._patience.is_exhausted:
                raise
            log.error("%s", self._patience.trouble)  # noqa: TRY400  it will be said again and again
        else:
            self._patience.succeeded()


# ---------------------------------------------------------------------------------------------------------- disk writer
#
# Do the controller's disk work on threads, in order, so that a slow disk holds up neither heartbeats nor rollouts.
#
#     owner of some files ──▶ their lane ──▶ one thread, one job after the other ──▶ disk
#
# Input: calls that touch files.  Output: their return values.  Guarantees: the jobs of a lane are done in the order in
# which they were given, never two at a time; a job that was given is done, also if its caller is cancelled.  Lanes do
# not wait for each other: a checkpoint of minutes delays no acknowledgement.  While the event loop runs, nothing else
# touches the files of a lane: the last write before the end is a job, too.  A disk that never answers keeps no process
# from ending.

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Thread(Executor):
    """One daemon thread: at exit Python would wait for threads of a ThreadPoolExecutor, however long they hang."""

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
    """A queue of jobs on files that belong together, and the thread that does them."""

    def __init__(self, name: str) -> None:
        """name: for people; the thread starts with the first job."""
        self.name = name
        self._thread = _Thread(name)
        self._unfinished: set[asyncio.Future[Any]] = set()

    @property
    def unfinished(self) -> set[asyncio.Future[Any]]:
        """Jobs that were given and are not done."""
        return {job for job in self._unfinished if not job.done()}

    async def run(self, job: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Do a job after all that were given before it; return its result or raise its exception.

        The job is queued at once; if the caller is cancelled it is still done, and its failure is logged.
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
        self.journal = DiskLane("journal")  # acknowledgements and new weights wait for these jobs
        self.partials = DiskLane("partials")
        self.segments = DiskLane("segments")  # seconds a job
        self.checkpoints = DiskLane("checkpoints")  # minutes a job: every byte is read again
        self.notes = DiskLane("notes")  # status, timeline, lost leases, actions of the guard
        self.metrics = DiskLane("metrics")
        self._lanes = self.journal, self.partials, self.segments, self.checkpoints, self.notes, self.metrics

    async def close(self, limit_s: float) -> list[str]:
        """Wait until all jobs are done, for limit_s at most; return the names of lanes with unfinished jobs."""
        if unfinished := set[asyncio.Future[Any]]().union(*(lane.unfinished for lane in self._lanes)):
            await asyncio.wait(unfinished, timeout=limit_s)
        late = [lane.name for lane in self._lanes if lane.unfinished]
        for lane in self._lanes:
            lane.close()
        return late


# ------------------------------------------------------------------------------------------------------ partial keeping
#
# Receive the generators' reports on running rollouts, and keep them on disk beside the journal.
#
#     LeaseProgress ─▶ prefixes in the ledger ─▶ partials_*.log, in their lane   one write for all since the last
#                   └─▶ ShowWhole, to a generator if the beginning of a rollout is missing here
#
# Neither weights nor acknowledgements wait for these files.  A failed write is dropped with one warning, and after a
# pause a new file is begun with all prefixes known by then.

SEND_S = 1.0  # send timeout; a ShowWhole that is lost is sent again after the generator's next report
BATCH_S = 0.2  # reports that arrive within this time are written together
REFUSED_PAUSE_S = 20.0  # after a failed write


class PartialKeeping:
    """Receives partial rollouts and writes them to disk."""

    def __init__(
        self,
        intake: PartialIntake,
        files: PartialLog,
        leases: ServerChannel,
        lane: DiskLane,
        *,
        timeline: int,
        newest_version: Callable[[], int],
        commit_groups: Callable[[], None],
    ) -> None:
        """lane: the one that writes the files.

        timeline: this controller's; reports of other timelines are ignored, as their weights do not count.

        newest_version: the newest with which any generator can have sampled.
        commit_groups: called when prefixes are kept: a rollout is continued only if its admission is on disk.
        """
        self._timeline, self._commit_groups, self._lane = timeline, commit_groups, lane
        self._intake, self._files, self._leases, self._newest_version = intake, files, leases, newest_version
        self._news: list[PartialRollout] = []
        self._work = asyncio.Event()
        self._complained: set[str] = set()  # generators about which a warning was logged
        self._has_refused = False  # whether the last write failed

    async def receive(self, name: str, message: LeaseProgress) -> None:
        """Add a generator's report to the ledger's prefixes."""
        if message.timeline != self._timeline:
            return
        try:
            pieces = decode_partials(message.pieces.data, message.num_bytes)
        except ValueError as error:
            self._complain(name, str(error))
            return
        receipt = self._intake.receive(name, pieces, self._newest_version())
        if receipt.num_adopted:
            log.info("%s goes on with %d rollouts that it has begun", name, receipt.num_adopted)
        for group_id in receipt.unwanted:
            with suppress(ChannelError):
                await self._leases.send(name, CancelGroup(group_id), timeout_s=SEND_S)
        if receipt.refused:
            self._complain(name, "; ".join(receipt.refused))
        self._keep(receipt.kept)
        if receipt.wanted:
            with suppress(ChannelError):  # it is gone, or busy
                await self._leases.send(name, ShowWhole(tuple(receipt.wanted)), timeout_s=SEND_S)

    def handed_back(self, message: LeaseReturn) -> None:
        """Keep the present tokens of members of a lease that a leaving generator has handed back."""
        self._keep(self._intake.whole((message.group_id, index) for index in message.sample_indices))

    async def run(self) -> None:
        """Write prefixes, endlessly."""
        if not await self._lane.run(seen, lambda: self._files.is_empty, False):
            # What an earlier attempt has left is replaced by what this one took up, before it makes versions anew that
            # the rest may be of.
            self._work.set()
        while True:
            await self._work.wait()
            self._work.clear()
            await self._write()
            await asyncio.sleep(REFUSED_PAUSE_S if self._has_refused else BATCH_S)

    async def close(self, *, is_complete: bool) -> None:
        """Close the files.  is_complete: no rollout will be continued."""
        if is_complete:
            with suppress(JournalError, OwnershipLost):  # they are small, and a run that is complete reads none
                await self._lane.run(self._files.discard)
        await self._lane.run(self._files.close)

    def _keep(self, pieces: list[PartialRollout]) -> None:
        if pieces:
            self._news += pieces
            self._work.set()
            self._commit_groups()

    async def _write(self) -> None:
        pieces, self._news = self._news, []
        try:
            if self._files.wants_all:
                await self._lane.run(self._files.begin, self._intake.all())
            else:
                await self._lane.run(self._files.append, pieces)
        except JournalError as error:
            if not self._has_refused:
                log.warning("%s; after a restart, running rollouts may be sampled again; nothing else is lost", error)
            self._has_refused = True
            self._work.set()
        else:
            self._has_refused = False

    def _complain(self, name: str, why: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            log.warning("%s: its reports of running rollouts are refused (logged once): %s", name, why)


# ----------------------------------------------------------------------------------------------------------- journaling


@dataclass(slots=True)
class _Receipts:
    """Deliveries from one outbox."""

    outbox: str
    acknowledged: int = 0
    received: dict[int, int] = field(default_factory=dict)  # delivery number → number of the rollout in the journal
    is_asked_again: bool = False  # an acknowledged delivery came again: the acknowledgement may be lost

    def advance(self, num_durable: int) -> bool:
        """Count deliveries that are on disk as acknowledged, up to the first that is not.

        Returns whether an acknowledgement is to be sent.
        """
        before, is_asked_again, self.is_asked_again = self.acknowledged, self.is_asked_again, False
        while self.received.get(self.acknowledged + 1, num_durable + 1) <= num_durable:
            self.acknowledged += 1
            del self.received[self.acknowledged]
        return is_asked_again or self.acknowledged > before


async def at_once() -> None:
    """Return at once; takes the place of Journaling.durable where there is no journal."""


class Journaling:
    """Commits the journal and acknowledges deliveries."""

    def __init__(self, journal: RolloutJournal, leases: ServerChannel, clock: Clock, lane: DiskLane) -> None:
        """lane: the one that commits."""
        self._journal, self._leases, self._lane = journal, leases, lane
        self._patience = Patience(clock)
        self._receipts: dict[str, _Receipts] = {}  # by generator
        self._work, self._committed = asyncio.Event(), asyncio.Event()

    @property
    def disk_trouble(self) -> str:
        """Reason why the last commit failed, and what happens next; "" if it did not."""
        return self._patience.trouble

    def received(self, name: str, delivery: Delivery) -> None:
        """Note a rollout that has arrived and that the journal has, at least in memory."""
        receipts = self._receipts.get(name)
        if receipts is None or receipts.outbox != delivery.outbox:
            receipts = self._receipts[name] = _Receipts(delivery.outbox)
        receipts.acknowledged = max(receipts.acknowledged, delivery.oldest - 1)
        if delivery.number > receipts.acknowledged:
            receipts.received.setdefault(delivery.number, self._journal.num_added)
        else:
            receipts.is_asked_again = True
        self._work.set()

    def commit_soon(self) -> None:
        """Commit the journal soon, without waiting for the next rollout."""
        if not self._journal.holds(self._journal.position):
            self._work.set()

    async def durable(self) -> None:
        """Return once the journal's present content is on disk."""
        position = self._journal.position
        while not self._journal.holds(position):
            self._committed.clear()
            self._work.set()
            await self._committed.wait()

    async def run(self) -> None:
        """Commit and acknowledge, endlessly.  Raises JournalError when the disk has refused for too long."""
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                num_durable = await self._lane.run(self._journal.commit)
            except JournalError as error:
                self._patience.failed(error)
                if self._patience.is_exhausted:
                    raise
                log.error("%s", self._patience.trouble)  # noqa: TRY400  it will be said again and again
                await asyncio.sleep(self._patience.pause_s)
                self._work.set()
                continue
            self._patience.succeeded()
            self._committed.set()
            await self._acknowledge(num_durable)

    async def _acknowledge(self, num_durable: int) -> None:
        for name, receipts in list(self._receipts.items()):
            if receipts.advance(num_durable):
                with suppress(ChannelError):  # it is gone, or busy: the next acknowledgement says more
                    message = Delivered(receipts.acknowledged, receipts.outbox)
                    await self._leases.send(name, message, timeout_s=SEND_S)
