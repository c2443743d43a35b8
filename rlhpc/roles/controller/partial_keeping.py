"""Receive what generators report of running rollouts, and keep it on disk beside the journal.

    LeaseProgress ─▶ prefixes in the ledger ─▶ partials_*.bin, in their lane    one write for all that came meanwhile
                  └─▶ ShowWhole, to a generator whose beginning is not known here

Nothing waits for these files, neither weights nor acknowledgements.  A failed write is dropped with one warning, and
after a pause a file is begun with all that is known then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from rlhpc.buffer.partial_codec import PartialRollout, decode_partials
from rlhpc.buffer.partial_files import PartialLog
from rlhpc.buffer.partial_intake import PartialIntake
from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelError, JournalError, OwnershipLost
from rlhpc.messages import CancelGroup, LeaseProgress, LeaseReturn, ShowWhole
from rlhpc.patience import seen
from rlhpc.roles.controller.disk_writer import DiskLane

log = logging.getLogger("rlhpc.partials")
SEND_S = 1.0  # for a generator to take a message; its next report asks for another
BATCH_S = 0.2  # reports that come meanwhile are written together
REFUSED_PAUSE_S = 20.0  # after a disk has refused


class PartialKeeping:
    """The way of partial rollouts into the controller."""

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
        """lane: that writes.

        timeline: of this controller; reports of others are ignored, as their weights do not count.

        newest_version: that any generator can have sampled with.
        commit_groups: called when something was received: without its admission a rollout is not continued.
        """
        self._timeline, self._commit_groups, self._lane = timeline, commit_groups, lane
        self._intake, self._files, self._leases, self._newest_version = intake, files, leases, newest_version
        self._news: list[PartialRollout] = []
        self._work = asyncio.Event()
        self._complained: set[str] = set()  # of whom
        self._has_refused = False  # the disk

    async def receive(self, name: str, message: LeaseProgress) -> None:
        """Take a generator's report."""
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
        """A generator that leaves has handed back members of a lease: keep what there is of them now."""
        self._keep(self._intake.whole((message.group_id, index) for index in message.sample_indices))

    async def run(self) -> None:
        """Write, endlessly."""
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
        """Close the files.  is_complete: nothing will be continued."""
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
