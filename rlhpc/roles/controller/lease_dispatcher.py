"""Keep every slot filled and every generator supplied.

Draws prompts while slots are free, and grants leases up to the credit that each generator has stated.  The only
backpressure of the system is here: no free slot, no prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from typing import Protocol

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.contracts import PromptSource, ServerChannel
from rlhpc.errors import ChannelFull, PeerUnreachable

log = logging.getLogger("rlhpc.lease_dispatcher")


class LivePolicy(Protocol):
    """What WeightSync knows of generators."""

    live_version: int  # stamped on admission; -1: none yet

    @property
    def ready_members(self) -> Set[str]:
        """Generators that may be given leases now."""


class Credit(Protocol):
    """What ProcessRegistry knows of generators."""

    def capacity(self, name: str) -> int:
        """Samples this generator is willing to hold."""


class LeaseDispatcher:
    """Admits and grants whenever it is woken."""

    def __init__(
        self,
        leases: ServerChannel,
        buffer: RolloutBuffer,
        prompts: PromptSource,
        policy: LivePolicy,
        credit: Credit,
        on_disk: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """on_disk: waited for between admission and lease, where another prompt might be drawn after a restart."""
        self._leases, self._buffer, self._prompts = leases, buffer, prompts
        self._policy, self._credit, self._on_disk = policy, credit, on_disk
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
            if self.is_open and self._policy.live_version >= 0:
                is_new = self._admit()
                if is_new and self._on_disk is not None:
                    # Who samples a group by its id goes on after a restart, and must not find another prompt there.
                    await self._on_disk()
                if self.is_open:  # still
                    await self._grant()

    def _admit(self) -> bool:
        self._buffer.readmit(self._policy.live_version)
        is_new = self._buffer.has_slot
        while self._buffer.has_slot:
            version = self._policy.live_version
            prompt = self._prompts.draw(version)
            self._buffer.admit(prompt, version, self._prompts.num_rollouts(prompt.prompt_id))
        return is_new

    async def _grant(self) -> None:
        """Grant leases, the generator with most credit first, so that replicas stay equally full."""
        ready = sorted(self._policy.ready_members)  # of equals the first: who is granted what is the same in every run
        credit = {name: self._credit.capacity(name) - self._buffer.outstanding(name) for name in ready}
        while credit:
            name = max(credit, key=credit.__getitem__)
            if credit[name] <= 0:
                return
            lease = self._buffer.grant(name, credit[name])
            if lease is None:
                if not self._buffer.is_quarantining:
                    return
                del credit[name]
                continue
            try:
                await self._leases.send(name, lease)
            except (PeerUnreachable, ChannelFull) as error:
                log.warning("lease of group %d not delivered: %s", lease.group_id, error)
                self._buffer.hand_back(name, lease.group_id, lease.sample_indices, lease.prefixes)
                del credit[name]
                continue
            credit[name] -= len(lease.sample_indices)
