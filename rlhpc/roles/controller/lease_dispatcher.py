"""Keep every slot filled and every generator supplied.

Draws prompts while slots are free, and grants leases up to the credit that each generator has stated.  The only
backpressure of the system is here: no free slot, no prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from rlhpc.buffer.ledger import AdmissionLedger
from rlhpc.contracts import PromptSource, ServerChannel
from rlhpc.errors import ChannelFull, PeerUnreachable

log = logging.getLogger("rlhpc.lease_dispatcher")


class LeaseDispatcher:
    """Admits and grants whenever it is woken."""

    def __init__(
        self,
        leases: ServerChannel,
        ledger: AdmissionLedger,
        prompts: PromptSource,
        *,
        generators: Callable[[], Iterable[str]],
        capacity: Callable[[str], int],
        version: Callable[[], int],
    ) -> None:
        """`generators` are those that may be given leases now; `version` is the live one, stamped on admission."""
        self._leases, self._ledger, self._prompts = leases, ledger, prompts
        self._generators, self._capacity, self._version = generators, capacity, version
        self._work = asyncio.Event()
        self.is_open = True  # False: nothing new is admitted, the run is ending

    def wake(self) -> None:
        """Call when a slot, a credit, a generator or a version has changed."""
        self._work.set()

    async def run(self) -> None:
        """Admit and grant, endlessly."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self.is_open and self._version() >= 0:
                self._admit()
                await self._grant()

    def _admit(self) -> None:
        while self._ledger.has_slot:
            self._ledger.admit(self._prompts.draw(), self._version())

    async def _grant(self) -> None:
        """Grant leases, the generator with most credit first, so that replicas stay equally full."""
        credit = {name: self._capacity(name) - self._ledger.outstanding(name) for name in self._generators()}
        while credit:
            name = max(credit, key=lambda generator: credit[generator])
            if credit[name] <= 0:
                return
            lease = self._ledger.grant(name, credit[name])
            if lease is None:
                if not self._ledger.is_quarantining():
                    return
                del credit[name]
                continue
            try:
                await self._leases.send(name, lease)
            except (PeerUnreachable, ChannelFull) as error:
                log.warning("lease of group %d not delivered: %s", lease.group_id, error)
                self._ledger.hand_back(name, lease.group_id, lease.sample_indices, lease.prefixes)
                del credit[name]
                continue
            credit[name] -= len(lease.sample_indices)
