"""Score the controller's canary beside the sampling, so that neither leases nor weights wait for it.

Input: TakeCanary.  Output: CanaryTaken.  Of several that wait only the newest counts.
"""

from __future__ import annotations

import asyncio

from rlhpc.contracts import ClientChannel, GenerationEngine
from rlhpc.messages import CanaryTaken, TakeCanary


class CanaryTaker:
    """Scores one row after the other."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._newest: TakeCanary | None = None
        self._has_come = asyncio.Event()

    def take(self, command: TakeCanary) -> None:
        """Score this one next, instead of one that still waits."""
        self._newest = command
        self._has_come.set()

    async def run(self, control: ClientChannel) -> None:
        """Score what comes, endlessly.  Raises EngineError."""
        while True:
            await self._has_come.wait()
            self._has_come.clear()
            command, self._newest = self._newest, None
            if command is not None:
                score = await self._engine.score(command.token_ids)
                await control.send(CanaryTaken(command.number, score.policy_version, score.logprobs))
