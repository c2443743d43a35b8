"""Admit the processes of a run, and remove those that died or left.

Input: Hello and Heartbeat.  Output: registered processes, generators to send weights to, leases freed by deaths.
A death is noticed by silence, or by the Hello of a successor.  The run survives the loss of generators, not of other
roles.  The prompts that a lost generator sampled each lose a lease, which is recorded on disk before anything else
(rlhpc/buffer/lost_leases.py).
"""

from __future__ import annotations

import logging
from contextlib import suppress

from rlhpc.buffer.lost_leases import LostLeaseFile
from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelError, RoleFailed
from rlhpc.messages import Heartbeat, Hello, Reregister, StopRole
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.controller.disk_writer import DiskLane
from rlhpc.roles.controller.process_registry import ProcessRegistry
from rlhpc.roles.controller.state import ControllerState
from rlhpc.roles.controller.weight_sync import WeightSync
from rlhpc.transport.incarnation import is_same_start

log = logging.getLogger("rlhpc.processes")
ANSWER_S = 1.0  # for a process to receive a message: others are heard meanwhile by nobody
OUTLIVES_CONTROLLERS = ("generator-", "reward-")  # a trainer that is taken for dead ends the attempt


class RunProcesses:
    """Arrivals and losses, from the first Hello on.  Each says whether the set of generators has changed."""

    def __init__(
        self,
        context: RoleContext,
        control: ServerChannel,
        registry: ProcessRegistry,
        weight_sync: WeightSync,
        state: ControllerState,
        lane: DiskLane,
    ) -> None:
        """lane: that writes lost leases."""
        self._lane = lane
        self._control, self._registry, self._weight_sync, self._state = control, registry, weight_sync, state
        self._file = LostLeaseFile(context.layout.strikes, context.fence)
        self._dead_after_s = context.config.transport.dead_after_s

    # --------------------------------------------------------------------------------------------------------- arrivals

    async def greet(self, name: str, message: Hello) -> bool:
        """Register a process, or tell it to stop.  True: the set of generators has changed."""
        if self._registry.is_superseded(name, message):
            self._registry.register(name, message)  # which refuses it; StopRole would reach its successor
            return False
        known, has_lost = self._registry.member(name), False
        if known is not None and known.hello.incarnation != message.incarnation:
            if message.role == "generator" and is_same_start(known.hello.incarnation, message.incarnation):
                log.warning("%s has connected again", name)  # a channel failed; it says what it goes on with
                self._state.buffer.forget_holder(name, is_dead=False)
                has_lost = True
            else:
                has_lost = await self._lose(name, "was started again")  # its leases are lost
        if not self._registry.register(name, message):
            await self._tell(name, StopRole("other settings than the run's"))
            return has_lost
        if message.role != "generator":
            return False
        if misplaced := self._weight_sync.misplaced(name, message.weight_devices):
            log.error("%s is not admitted: %s", name, misplaced)
            self._registry.forget(name)
            await self._tell(name, StopRole(misplaced))
            return has_lost
        await self._weight_sync.joined(name, message.weight_devices, message.incarnation)
        return True

    async def beat(self, name: str, message: Heartbeat) -> None:
        """Record a heartbeat; whoever was declared dead, perhaps because it was paused, may register again."""
        if not self._registry.record(name, message) and name.startswith(OUTLIVES_CONTROLLERS):
            await self._tell(name, Reregister())

    async def _tell(self, name: str, message: object) -> None:
        with suppress(ChannelError):  # it is gone already
            await self._control.send(name, message, timeout_s=ANSWER_S)

    # ----------------------------------------------------------------------------------------------------------- losses

    async def lose_silent(self) -> bool:
        """Part with processes that have been silent for too long.  True: a generator was among them.

        Raises RoleFailed if a trainer was.
        """
        lost = [await self._lose(name, f"is silent for {self._dead_after_s:g} s") for name in self._registry.silent()]
        return any(lost)

    async def write(self) -> None:
        """Write new lost leases, and completions of suspect prompts, to disk.  Raises OwnershipLost."""
        if self._state.lost_leases.unwritten:
            await self._lane.run(self._file.append, self._state.lost_leases)

    async def _lose(self, name: str, why: str) -> bool:
        """Part with one process.  True: it was a generator.  Raises RoleFailed for a trainer."""
        member = self._registry.member(name)
        self._registry.forget(name)
        log.warning("%s %s", name, why)
        role = member.hello.role if member is not None else ""
        if role == "trainer":
            raise RoleFailed(f"{name} {why}")
        if role == "generator":
            lost = member.beat.metrics.get("tokens_unreported", 0.0) if member is not None else 0.0
            self._state.totals.tokens_lost += int(lost)
            # One that said that it leaves has handed back what it had; what was on its way is nobody's fault.
            await self._reclaim(name, is_dead=member is None or member.beat.state != "draining")
            await self._weight_sync.lost(name)
        return role == "generator"

    async def _reclaim(self, name: str, *, is_dead: bool = True) -> None:
        """Reclaim the leases of a generator that is dead, or silent for too long, or has left."""
        self._state.totals.leases_regranted += self._state.buffer.forget_holder(name, is_dead=is_dead)
        await self.write()
