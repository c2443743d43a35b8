"""Map torch's out-of-memory errors to this package's error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhpc.errors import GroupFailed


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Every way of running out of memory is a GroupFailed: torch raises RuntimeError or a subclass of it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise GroupFailed(f"no room for {what}: {reason}") from error
