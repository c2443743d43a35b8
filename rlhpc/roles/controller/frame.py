"""The frame of every controller: runs the loops, waits for a save in progress, stops the other roles, writes the rest.

Input: the parts that a composition root has built.  Guarantees: the status says that roles are told to leave before
they are; a checkpoint that the trainer is writing when the run fails is completed; state that is only in memory is
written at the end, however the run ended.  Two controllers fill the frame: that of reinforcement learning
(controller.py) and that of supervised fine-tuning (supervised.py).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhpc.base.patience import patiently_here
from rlhpc.protocol.contracts import ServerChannel
from rlhpc.protocol.errors import (
    ChannelError,
    ChannelTimeout,
    CheckpointError,
    JournalError,
    OwnershipLost,
    RunDirectoryError,
)
from rlhpc.protocol.messages import ChannelSpec, Heartbeat, SaveReport, StopRole, TrainerReady
from rlhpc.roles.controller.batch_maker import RANK_0, TrainerLink
from rlhpc.roles.controller.checkpoints import CheckpointWriter
from rlhpc.roles.controller.leases import AwakeClock, ProcessRegistry
from rlhpc.roles.controller.persistence import DiskWriter
from rlhpc.roles.controller.run_status import StatusBoard
from rlhpc.roles.lifecycle import RoleContext, StopRequest
from rlhpc.transport.open import open_server

log = logging.getLogger("rlhpc.controller")
PAUSE_COUNTS_FOR = 8  # a pause of this process counts for at most this part of the silence that others are allowed
LOOK_S = 0.5  # between checks that the trainer which writes a checkpoint is alive
FAREWELL_S = 2.0  # for StopRole to reach the others
WATCH_INTERVAL_S = 0.5
ANSWER_S = 1.0  # send timeout: the sending loop is blocked meanwhile
SHOWN_S = 10.0  # to write the status that announces the end of the run
CLOSING_S = 60.0  # to write the state that only this process has


async def run_controller(
    context: RoleContext, channels: Sequence[ChannelSpec], assemble: Callable[..., ControllerFrame]
) -> None:
    """Open the channels, assemble(context, *servers), run to the last step or until asked to stop, and close."""
    stop = StopRequest()
    async with AsyncExitStack() as stack:
        servers: list[ServerChannel] = []
        for spec in channels:
            opening = partial(open_server, spec, **context.listener)
            server = await patiently_here(opening, context.layout.rendezvous)
            stack.push_async_callback(server.close)
            servers.append(server)
        await assemble(context, *servers).run_and_close(stop)


@dataclass(kw_only=True, eq=False)
class ControllerFrame(ABC):
    """Runs a controller's loops, and ends the run."""

    context: RoleContext
    control: ServerChannel
    awake: AwakeClock
    disk: DiskWriter
    registry: ProcessRegistry
    trainer: TrainerLink
    checkpoints: CheckpointWriter
    board: StatusBoard

    # ------------------------------------------------------------------------------------------------- what differs

    @abstractmethod
    def loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the endless loops, beside training."""

    @abstractmethod
    async def train(self, stop: asyncio.Event) -> None:
        """Train to the last step; on `stop`, to the next boundary, and save."""

    @abstractmethod
    async def stop_waiting(self) -> None:
        """Training is done or is to stop: begin nothing more that it would wait for."""

    @abstractmethod
    async def close_run(self) -> None:
        """Finish the records of a complete or stopped run, and write to the status which it is."""

    @abstractmethod
    def last_writes(self, *, is_complete: bool) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the writes of state that is only in memory; each is tried, also if others fail."""

    def loops_of_a_save(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return the loops that have to run until a checkpoint is complete."""
        return ()

    # -------------------------------------------------------------------------------------------------------- running

    async def run_and_close(self, stop: StopRequest) -> None:
        """Run; however that ends, tell the other roles to leave, then write the state that is only in memory."""
        try:
            try:
                await self.run(stop)
            finally:
                await self.say_farewell()
        finally:
            await self.close()

    async def run(self, stop: StopRequest) -> None:
        """Run until the last step or `stop`; then finish the records."""
        try:
            await self._run_loops(stop)
        except BaseExceptionGroup:
            await self._outlast_save(stop.event)
            raise
        await self.close_run()

    async def _run_loops(self, stop: StopRequest) -> None:
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(loop) for loop in (*self.loops(), self.awake.run())]
            training, stopped = group.create_task(self.train(stop.event)), group.create_task(stop.event.wait())
            await asyncio.wait((training, stopped), return_when=asyncio.FIRST_COMPLETED)
            await self.stop_waiting()
            if self.board.figures.phase == "training":  # it ends by itself at the next step boundary, having saved
                await stop.wait_for(training)
            for task in (*loops, stopped, training):
                task.cancel()

    async def trainer_is_ready(self, version: int) -> TrainerReady:
        """Wait until the trainer has loaded its model.  Raises CheckpointError if its version is not `version`."""
        ready = await self.trainer.ready(self.context.meet_timeout_s, self._missing_trainers)
        if ready.policy_version != version:
            raise CheckpointError(
                f"the trainer is at policy version {ready.policy_version}, the controller at {version}"
            )
        return ready

    def _missing_trainers(self) -> list[str]:
        ranks = (f"trainer-{rank}" for rank in range(self.context.config.trainer.num_ranks))
        return [name for name in ranks if self.registry.member(name) is None]

    def saved(self, report: SaveReport) -> None:
        """Take the trainer's report that a checkpoint is written, or could not be."""
        self.checkpoints.reported(report)

    async def show(self, limit_s: float | None = None) -> None:
        """Write the status; wait for limit_s at most, and leave it to its lane then.  Raises OwnershipLost."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.disk.notes.run(self.board.write, self.board.document())

    # --------------------------------------------------------------------------------------------------------- ending

    async def _outlast_save(self, stop: asyncio.Event) -> None:
        """A run has failed: wait for the trainer's report on a checkpoint as long as it lives, then for its completion.

        Returns when `stop` is set.  A failure is logged.
        """
        checkpoints = self.checkpoints
        if checkpoints.awaits_trainer:
            log.warning("the run has failed; waiting for the trainer to finish writing a checkpoint")
        while checkpoints.awaits_trainer and not stop.is_set():
            if self.registry.member(RANK_0) is None or RANK_0 in self.registry.silent():
                return
            self.awake.look()
            with suppress(ChannelTimeout):
                name, message = await self.control.receive(LOOK_S)
                if isinstance(message, Heartbeat):
                    self.registry.record(name, message)
                elif isinstance(message, SaveReport):
                    checkpoints.reported(message)
        if checkpoints.awaits_trainer:
            return
        ends = [asyncio.ensure_future(each) for each in (checkpoints.finish(), *self.loops_of_a_save())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(error, (CheckpointError, JournalError)):
                log.error("the last checkpoint was not completed either", exc_info=error)

    async def say_farewell(self) -> None:
        """Send StopRole to every process, and whether another controller will follow."""
        self.board.figures.is_ending = True
        with suppress(OwnershipLost):  # first: a supervisor that sees a process end must know that it was told to
            await self.show(SHOWN_S)
        is_complete = self.board.figures.phase == "complete"
        farewell = StopRole("the run is complete" if is_complete else "the controller stops", is_complete)
        ranks = self.registry.names("trainer")
        others = [name for name in self.registry.names() if not (self.trainer.obeys and name in ranks)]
        for name in others:
            with suppress(ChannelError):  # it is gone already
                await self.control.send(name, farewell, timeout_s=FAREWELL_S)
        if self.trainer.obeys and RANK_0 in ranks:  # which tells the other ranks
            with suppress(ChannelError):
                await self.trainer.tell(farewell)
        await self.show(SHOWN_S)

    async def close(self) -> None:
        """Write to disk all state that is only in memory.

        All parts are tried, also if one fails; then the first failure is raised.  RunDirectoryError: the
        disk has not answered for CLOSING_S.
        """
        self.checkpoints.give_up()
        is_complete = self.board.figures.phase == "complete"
        last = [asyncio.ensure_future(each) for each in self.last_writes(is_complete=is_complete)]
        _, late = await asyncio.wait(last, timeout=CLOSING_S)
        unfinished = await self.disk.close(0.0 if late else CLOSING_S)
        if late or unfinished:
            for each in late:
                each.cancel()
            names = ", ".join(unfinished)
            raise RunDirectoryError(
                f"{self.context.layout.root}: the disk has not answered for {CLOSING_S:g} s: {names}"
            )
        for each in last:
            each.result()
