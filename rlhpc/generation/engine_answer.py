"""Wait for what an engine is asked between two steps, and give up one that does not answer.

Input: a call of vLLM.  Output: its result.  A kernel that never ends raises nothing: the engine's processes live, and
so does its generator, which would hold its GPU and break every weight group until the run ends.  vLLM has such a limit,
of 300 s, for the workers of tensor parallelism alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

ANSWER_S = 300.0  # below the time in which the controller gives the run up (weight_sync.py: 8 broadcasts)
SLICES = 10


class EngineSilent(Exception):
    """The engine has not answered in time."""


async def answered(call: Awaitable[Result], broadcast_s: float) -> Result:
    """Await a call; a pause of this process, however long, counts for a tenth of the limit at most.

    broadcast_s: an engine may wait for so long for the bucket that is under way.  Raises EngineSilent, and what the
    call raises.
    """
    limit_s, task = max(ANSWER_S, 2 * broadcast_s), asyncio.ensure_future(call)
    try:
        for _ in range(SLICES):
            done, _ = await asyncio.wait({task}, timeout=limit_s / SLICES)
            if done:
                return task.result()
        raise EngineSilent(f"no answer within {limit_s:g} s")
    finally:
        task.cancel()


async def unless(event: asyncio.Event, ask: Callable[[], Awaitable[None]]) -> None:
    """Ask, if the event is not set when this runs: `answered` runs it later than it is called."""
    if not event.is_set():
        await ask()


async def comes(event: asyncio.Event, limit_s: float) -> bool:
    """Whether an event is set by then; never swallows a cancellation."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()
