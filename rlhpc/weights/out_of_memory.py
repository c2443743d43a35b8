"""Memory that is not there: torch's errors as this package's, and room for those beside torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhpc.errors import GroupFailed


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Every way of running out of memory is a GroupFailed: torch raises RuntimeError or a subclass of it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise GroupFailed(f"no room for {what}: {reason}") from error


def give_back_unused(device: torch.device) -> None:
    """On a GPU, return to the driver what torch's allocator keeps and no tensor has.

    After steps of many lengths that can be all of a GPU, and the allocator gives it to nobody else.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
