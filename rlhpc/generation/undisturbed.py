"""Run an awaitable to its end, even if the task that waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def undisturbed(work: Coroutine[Any, Any, Result]) -> Result:
    """Await to the end even if the caller is cancelled: weights must not be partly adopted."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
