"""Keep vLLM paused while at least one holder wants it paused.

Input: holds and releases, each under its holder's name.  Output: calls of pause_generation and resume_generation.
Requests are kept.  Guarantee: nothing is sampled between a hold that has returned and the release of the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from rlhpc.generation.busy_clock import BusyClock


class PauseSwitch:
    """The names of the holders that keep an engine paused."""

    def __init__(self, llm: Any, call: Callable[[Any], Awaitable[Any]], busy: BusyClock) -> None:
        """call: awaits a call of vLLM and maps its errors."""
        self._llm, self._call, self._busy = llm, call, busy
        self._holders: set[str] = set()
        self._is_paused = False
        self._changing = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        """True if vLLM was asked to pause, and has paused."""
        return self._is_paused

    async def hold(self, name: str) -> None:
        """Pause after the current step.  Idempotent."""
        async with self._changing:
            self._holders.add(name)
            if not self._is_paused:
                await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
                self._is_paused = True
                self._busy.pause()

    async def release(self, name: str) -> None:
        """Resume, unless there is another holder.  Idempotent."""
        async with self._changing:
            self._holders.discard(name)
            if self._is_paused and not self._holders:
                await self._call(self._llm.resume_generation())
                self._is_paused = False
                self._busy.resume()
