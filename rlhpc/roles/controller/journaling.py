"""Write the journal as fast as the disk allows, and tell generators what they may forget.

    Delivery ─▶ buffer, journal ─▶ commit, in its lane ─▶ Delivered       one commit for all that came meanwhile

A failed write is reported and retried with growing pauses (rlhpc/patience.py): meanwhile nothing is acknowledged,
and no weights are published.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field

from rlhpc.buffer.rollout_journal import RolloutJournal
from rlhpc.contracts import Clock, ServerChannel
from rlhpc.errors import ChannelError, JournalError
from rlhpc.messages import Delivered, Delivery
from rlhpc.patience import Patience
from rlhpc.roles.controller.disk_writer import DiskLane

log = logging.getLogger("rlhpc.journal")
SEND_S = 1.0  # for a generator to take an acknowledgement; the next one says more


@dataclass(slots=True)
class _Receipts:
    """Deliveries of one outbox."""

    outbox: str
    acknowledged: int = 0
    received: dict[int, int] = field(default_factory=dict)  # number → rollout of the journal that it became
    is_asked_again: bool = False  # something came again that is acknowledged: that message may be lost

    def advance(self, num_durable: int) -> bool:
        """Count deliveries as acknowledged that are on disk, as far as none before them is missing.

        Returns whether the generator is to be told.
        """
        before, is_asked_again, self.is_asked_again = self.acknowledged, self.is_asked_again, False
        while self.received.get(self.acknowledged + 1, num_durable + 1) <= num_durable:
            self.acknowledged += 1
            del self.received[self.acknowledged]
        return is_asked_again or self.acknowledged > before


async def at_once() -> None:
    """In the place of Journaling.durable where there is no journal."""


class Journaling:
    """Commits and acknowledges."""

    def __init__(self, journal: RolloutJournal, leases: ServerChannel, clock: Clock, lane: DiskLane) -> None:
        """lane: that commits."""
        self._journal, self._leases, self._lane = journal, leases, lane
        self._patience = Patience(clock)
        self._receipts: dict[str, _Receipts] = {}  # by generator
        self._work, self._committed = asyncio.Event(), asyncio.Event()

    @property
    def disk_trouble(self) -> str:
        """Why the last commit was refused, and what happens next; "": it was not."""
        return self._patience.trouble

    def received(self, name: str, delivery: Delivery) -> None:
        """A rollout has arrived, and the journal has it in memory, or has had it before."""
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
        """Commit what the journal has, though no rollout may arrive for long."""
        if not self._journal.holds(self._journal.position):
            self._work.set()

    async def durable(self) -> None:
        """Return once everything that the journal has now is on disk."""
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
