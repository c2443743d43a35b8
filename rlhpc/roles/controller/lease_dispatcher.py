"""Keep every generator supplied, from as few prompts as the bound on staleness allows.

Grants leases up to the credit that each generator has stated, and draws a prompt when one has credit and nothing is
left to grant: whatever is sampled is stamped with the version that is live when it begins.  The only backpressure of
the system is here: no free slot, no prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Set
from contextlib import suppress
from typing import Protocol

from rlhpc.buffer.rollout_buffer import RolloutBuffer
from rlhpc.contracts import PromptSource, ServerChannel
from rlhpc.errors import ChannelError, ChannelFull, PeerUnreachable
from rlhpc.messages import CancelGroup
from rlhpc.roles.controller.credit_queue import CreditQueue
from rlhpc.types import Lease

log = logging.getLogger("rlhpc.lease_dispatcher")


class LivePolicy(Protocol):
    """What WeightSync knows of generators."""

    live_version: int  # stamped on admission; -1: none yet

    @property
    def ready_members(self) -> Set[str]:
        """Generators that may be given leases now."""

    def is_ready(self, name: str) -> bool:
        """Whether this is one of them."""


class Credit(Protocol):
    """What ProcessRegistry knows of generators."""

    def capacity(self, name: str) -> int:
        """Samples this generator is willing to hold."""


class Brake(Protocol):
    """What ErrorGate knows of verifiers that fail."""

    def may_lease(self, name: str) -> bool:
        """Whether this generator may be granted a lease now."""

    def lease_granted(self) -> None:
        """Call for each that is granted."""


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
        fills_slots: bool = False,
        brake: Brake | None = None,
    ) -> None:
        """on_disk: waited for between admission and lease, where another prompt might be drawn after a restart.

        fills_slots: admit as soon as there is a slot, whoever may sample it and when: which prompts are admitted under
        which version then depends on nothing that takes time.
        """
        self._leases, self._buffer, self._prompts = leases, buffer, prompts
        self._policy, self._credit, self._on_disk = policy, credit, on_disk
        self._fills_slots, self._brake = fills_slots, brake
        self._work = asyncio.Event()
        self._queue = CreditQueue(self._credit_of)
        self._changed: set[str] = set()  # generators whose credit may be another
        self._is_all_changed = True
        self.is_open = True  # False: nothing new is admitted, the run is ending

    def wake(self, name: str = "") -> None:
        """Call when a slot, a credit, a generator or a version has changed.

        name: of the generator that alone is concerned; the others are not looked at then.
        """
        if name:
            self._changed.add(name)
        else:
            self._is_all_changed = True
        self._work.set()

    async def cancel(self, group_ids: list[int]) -> None:
        """Tell generators to stop sampling these groups, and empty the list.

        If a message is lost, the group is sampled in vain: nothing breaks.
        """
        while group_ids:
            group_id = group_ids.pop()
            for name in sorted(self._policy.ready_members):
                with suppress(ChannelError):
                    await self._leases.send(name, CancelGroup(group_id))

    async def run(self) -> None:
        """Admit and grant, endlessly."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self.is_open and self._policy.live_version >= 0:
                self._buffer.readmit(self._policy.live_version)
                # In quarantine what is free may be for nobody, and says nothing of what others could sample.
                if self._fills_slots or self._buffer.is_quarantining:
                    await self._admit(math.inf)
                await self._grant()

    async def _admit(self, num_samples: float) -> bool:
        """Draw prompts of which so many samples are wanted, as far as slots are free; whether some may be granted."""
        is_new = False
        while num_samples > 0 and self._buffer.has_slot:
            version = self._policy.live_version
            prompt = self._prompts.draw(version)
            size = self._prompts.num_rollouts(prompt.prompt_id)
            num_samples -= self._buffer.size_of(self._buffer.admit(prompt, version, size))
            is_new = True
        if is_new and self._on_disk is not None:
            # Who samples a group by its id goes on after a restart, and must not find another prompt there.
            await self._on_disk()
        return is_new

    async def _grant(self) -> None:
        """Grant leases, the generator with most credit first, so that replicas stay equally full."""
        self._look()
        while self.is_open and (most := self._queue.most()) is not None:  # it may end while something is written
            name, credit = most
            lease = self._buffer.grant(name, credit)
            if lease is not None:
                await self._send(name, lease)
            elif self._buffer.is_quarantining:
                self._leave_out(name)  # there may be something for another one
            elif not await self._admit(credit):
                return

    async def _send(self, name: str, lease: Lease) -> None:
        if self._brake is not None:
            self._brake.lease_granted()
        try:
            await self._leases.send(name, lease)
        except (PeerUnreachable, ChannelFull) as error:
            log.warning("lease of group %d not delivered: %s", lease.group_id, error)
            self._buffer.hand_back(name, lease.group_id, lease.sample_indices, lease.prefixes)
            self._leave_out(name)
        else:
            self._queue.look_at(name)

    def _look(self) -> None:
        """Look at the credit of whoever may have another than before."""
        relieved = self._buffer.take_relieved()
        if self._is_all_changed:
            self._is_all_changed = False
            self._queue.look_at_all(self._policy.ready_members)
        else:
            for name in self._changed | relieved:
                self._queue.look_at(name)
        self._changed.clear()

    def _leave_out(self, name: str) -> None:
        """Grant it nothing more now; it is looked at again with the next wake."""
        self._queue.set_aside(name)
        self._changed.add(name)

    def _credit_of(self, name: str) -> int:
        if not self._policy.is_ready(name) or (self._brake is not None and not self._brake.may_lease(name)):
            return 0
        return self._credit.capacity(name) - self._buffer.outstanding(name)
