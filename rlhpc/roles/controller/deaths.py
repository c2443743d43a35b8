"""Reclaim the leases of dead generators, and check whether any generator is left.

A death is noticed by silence, by the Hello of a successor, or, at the end of a local run, from the launcher, which
knows first.  The prompts that were being sampled each lose a lease, which is recorded on disk before anything else
(rlhpc/buffer/lost_leases.py).
"""

from __future__ import annotations

import asyncio
import logging

from rlhpc.buffer.lost_leases import LostLeaseFile
from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelError, PeerUnreachable
from rlhpc.messages import Reregister
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.controller.process_registry import ProcessRegistry
from rlhpc.roles.controller.state import ControllerState

log = logging.getLogger("rlhpc.deaths")
ANSWER_S = 1.0  # for a generator to receive a message


class Deaths:
    """The generators that this controller has lost."""

    def __init__(
        self, context: RoleContext, control: ServerChannel, registry: ProcessRegistry, state: ControllerState
    ) -> None:
        self._control, self._registry, self._state = control, registry, state
        self._file = LostLeaseFile(context.layout.strikes, context.fence)
        # A launcher restarts nobody; a supervisor does.
        self._num_irreplaceable = None if context.is_supervised else context.config.generation.num_replicas
        self._gone: set[str] = set()
        self.nobody_is_left = asyncio.Event()

    def is_back(self, name: str) -> None:
        """A generator has registered, for the first time or again."""
        self._gone.discard(name)

    async def of(self, name: str) -> None:
        """A generator is dead, or silent for too long: reclaim its leases.

        A silent one may wake up, so it counts as left as long as its connection stands.
        """
        self._state.totals.leases_regranted += self._state.buffer.forget_holder(name)
        await self.write()
        if self._num_irreplaceable is not None and await self._is_dead(name):
            self._gone.add(name)
            if len(self._gone) == self._num_irreplaceable:
                self.nobody_is_left.set()

    async def find(self) -> None:
        """Find dead generators of a local run that hold leases.  A supervised one is replaced by its successor's
        Hello."""
        if self._num_irreplaceable is None:
            return
        for name in self._registry.names("generator"):
            if self._state.buffer.outstanding(name) and await self._is_dead(name):
                log.warning("%s is gone", name)
                await self.of(name)

    async def write(self) -> None:
        """Write new lost leases, and completions of suspect prompts, to disk.  Raises OwnershipLost."""
        if self._state.lost_leases.unwritten:
            await asyncio.to_thread(self._file.append, self._state.lost_leases)

    async def _is_dead(self, name: str) -> bool:
        try:
            await self._control.send(name, Reregister(), timeout_s=ANSWER_S)
        except PeerUnreachable:
            return True
        except ChannelError:  # busy
            return False
        return False
