"""How long to tolerate failing writes, and when to try again.

A full disk is seldom permanent: somebody notices, a quota is raised, another job ends.  Segments that are due wait in
memory meanwhile, and none is lost; a checkpoint is left out, and another one is tried soon (checkpoints.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlhpc.buffer.segments import SegmentWriter
from rlhpc.contracts import Clock
from rlhpc.errors import SegmentError

log = logging.getLogger("rlhpc.segments")

DISK_PATIENCE_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 4.0  # the run goes on within five seconds of room
LONGEST_CHECKPOINT_PAUSE_S = 20.0  # another try costs all ranks a copy of their state


class DiskPatience:
    """Tolerance for failing writes of one kind of file, from the first failure until a write succeeds."""

    def __init__(self, clock: Clock, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        self._clock, self._limit_s, self._longest_pause_s = clock, DISK_PATIENCE_S, longest_pause_s
        self._failing_since: float | None = None
        self.pause_s = 0.0  # seconds to wait after the last failure: doubles with every failure
        self._failed_at = 0.0
        self.trouble = ""  # why the last write failed and what happens next, for logs and people; "": it succeeded

    @property
    def may_try(self) -> bool:
        """True unless a write has failed very recently."""
        return self._failing_since is None or self._clock() - self._failed_at >= self.pause_s

    @property
    def is_exhausted(self) -> bool:
        """True if the last write failed and none has succeeded for too long."""
        return self._failing_since is not None and self._failed_at - self._failing_since > self._limit_s

    def failed(self, error: Exception) -> None:
        """A write has failed."""
        self._failed_at = self._clock()
        if self._failing_since is None:
            self._failing_since, self.pause_s = self._failed_at, 0.0
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), self._longest_pause_s)
        left_s = self._limit_s - (self._failed_at - self._failing_since)
        next_try = f"trying again for {left_s:.0f} s, next in {self.pause_s:.0f} s"
        self.trouble = f"{error}; {'not tried again' if self.is_exhausted else next_try}"

    def succeeded(self) -> None:
        """A write has succeeded."""
        self._failing_since, self.trouble = None, ""


async def written_patiently(write: Callable[[], Awaitable[object]]) -> None:
    """Call until it can write, for as long as `DiskPatience` allows.  Raises what it raises then: SegmentError.

    For the end of a run, where nothing else goes on: a full disk must not cost a run that is done.
    """
    patience = DiskPatience(asyncio.get_running_loop().time)
    while True:
        try:
            await write()
        except (OSError, SegmentError) as error:
            patience.failed(error)
            if patience.is_exhausted:
                raise SegmentError(f"the end of the run cannot be written: {error}") from error
            log.error("the end of the run cannot be written: %s", patience.trouble)  # noqa: TRY400
            await asyncio.sleep(patience.pause_s)
        else:
            return


class PatientSealing:
    """Retries failed writes with growing pauses, for as long as `DiskPatience` allows."""

    def __init__(self, segments: SegmentWriter, clock: Clock) -> None:
        self._segments, self._patience = segments, DiskPatience(clock)

    @property
    def disk_trouble(self) -> str:
        """Why the last segment was refused, and what happens next; "": it was not."""
        return self._patience.trouble

    def tick(self) -> None:
        """Seal a segment if one is due.  One thread at a time.  Raises SegmentError if writes fail for too long."""
        if not self._patience.may_try:
            return
        try:
            self._segments.tick()
        except SegmentError as error:
            self._patience.failed(error)
            if self._patience.is_exhausted:
                raise
            log.error("%s", self._patience.trouble)  # noqa: TRY400  it will be said again and again
        else:
            self._patience.succeeded()
