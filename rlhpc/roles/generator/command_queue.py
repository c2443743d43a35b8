"""The controller's commands to a generator, without those for weight groups that a newer one has replaced.

Input: a channel to the controller.  Output: JoinGroup, ReceiveWeights, Reregister, StopRole, in their order.
Guarantees: a generator that was busy while groups were formed and dissolved joins the newest one next.  Joining a group
that the trainer has left costs a full time-out, in which the trainer forms and dissolves the next one: a generator that
tried them all would never catch up.  It reports every skipped group to the controller.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from rlhpc.contracts import ClientChannel
from rlhpc.errors import ChannelTimeout
from rlhpc.messages import JoinGroup, ReceiveWeights, WeightsLive


class CommandQueue:
    """Reads ahead."""

    def __init__(self, control: ClientChannel) -> None:
        self._control = control
        self._waiting: deque[Any] = deque()
        self._passed_over: set[int] = set()  # epochs

    async def next(self) -> Any:
        """Return the oldest command that still has to be executed.  Raises what the channel's receive() raises."""
        while True:
            command = await self._oldest()
            if isinstance(command, JoinGroup) and (newest := self._newest_epoch()) > command.group.epoch:
                self._passed_over.add(command.group.epoch)
                await self._tell(command.group.epoch, -1, f"join: epoch {newest} has replaced it")
            elif isinstance(command, ReceiveWeights) and command.manifest.epoch in self._passed_over:
                await self._tell(command.manifest.epoch, command.manifest.policy_version, "its group was not joined")
            else:
                return command

    async def _oldest(self) -> Any:
        if not self._waiting:
            self._waiting.append(await self._control.receive())
        with suppress(ChannelTimeout):
            while True:
                self._waiting.append(await self._control.receive(0))
        return self._waiting.popleft()

    def _newest_epoch(self) -> int:
        """Of the groups that are still to be joined; -1: there is none."""
        return max((each.group.epoch for each in self._waiting if isinstance(each, JoinGroup)), default=-1)

    async def _tell(self, epoch: int, version: int, error: str) -> None:
        await self._control.send(WeightsLive(epoch, version, 0.0, 0.0, error=error))
