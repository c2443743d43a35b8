"""After a failure, wait until the checkpoint in progress is complete, as long as its writer is alive."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from rlhpc.contracts import ServerChannel
from rlhpc.errors import ChannelTimeout, CheckpointError, JournalError
from rlhpc.messages import Heartbeat, SaveReport
from rlhpc.roles.controller.awake_clock import AwakeClock
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.journaling import Journaling
from rlhpc.roles.controller.process_registry import ProcessRegistry
from rlhpc.roles.controller.trainer_link import RANK_0

log = logging.getLogger("rlhpc.controller")
LOOK_S = 0.5


class LastSave:
    """The checkpoint that is being written when a run fails."""

    def __init__(
        self,
        control: ServerChannel,
        registry: ProcessRegistry,
        checkpoints: CheckpointWriter,
        journaling: Journaling,
        awake: AwakeClock,
    ) -> None:
        self._control, self._registry, self._awake = control, registry, awake
        self._checkpoints, self._journaling = checkpoints, journaling

    async def outlast(self, stop: asyncio.Event) -> None:
        """Wait for the trainer's report, then for the journal; not after `stop`.  A failure is logged."""
        if self._checkpoints.awaits_trainer:
            log.warning("the run has failed; waiting for the trainer to finish writing a checkpoint")
        while self._checkpoints.awaits_trainer and self._is_trainer_alive() and not stop.is_set():
            self._awake.look()
            with suppress(ChannelTimeout):
                name, message = await self._control.receive(LOOK_S)
                if isinstance(message, Heartbeat):
                    self._registry.record(name, message)
                elif isinstance(message, SaveReport):
                    self._checkpoints.reported(message)
        if not self._checkpoints.awaits_trainer:
            await self._complete()

    async def _complete(self) -> None:
        """A checkpoint is complete only when the journal has all that it knows."""
        ends = [asyncio.create_task(self._checkpoints.finish()), asyncio.create_task(self._journaling.run())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(error, (CheckpointError, JournalError)):
                log.error("the last checkpoint was not completed either", exc_info=error)

    def _is_trainer_alive(self) -> bool:
        return self._registry.member(RANK_0) is not None and RANK_0 not in self._registry.silent()
