"""Out of memory: map torch's errors to ours, and return unused GPU memory to other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhpc.errors import GroupFailed


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turn every out-of-memory error into GroupFailed: torch raises RuntimeError or a subclass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise GroupFailed(f"no room for {what}: {reason}") from error


def give_back_unused(device: torch.device) -> None:
    """On a GPU, return the memory that torch's allocator caches but no tensor uses to the driver.

    After steps of many lengths that can be a whole GPU, which no other process could use.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
