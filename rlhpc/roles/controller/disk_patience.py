"""Seal segments again where the disk has refused, for as long as `Patience` allows (rlhpc/patience.py).

Segments that are due wait in memory meanwhile, and none is lost; a checkpoint is left out, and another one is tried
soon (checkpoints.py).
"""

from __future__ import annotations

import logging

from rlhpc.buffer.segments import SegmentWriter
from rlhpc.contracts import Clock
from rlhpc.errors import SegmentError
from rlhpc.patience import Patience

log = logging.getLogger("rlhpc.segments")

LONGEST_CHECKPOINT_PAUSE_S = 20.0  # another try costs all ranks a copy of their state


class PatientSealing:
    """Retries failed writes with growing pauses, for as long as `Patience` allows."""

    def __init__(self, segments: SegmentWriter, clock: Clock) -> None:
        self._segments, self._patience = segments, Patience(clock)

    @property
    def disk_trouble(self) -> str:
        """Why the last segment was refused, and what happens next; "": it was not."""
        return self._patience.trouble

    def tick(self) -> None:
        """Seal a segment if one is due.  One thread at a time.

        Raises SegmentError, OSError if writes fail for too long.
        """
        if not self._patience.may_try:
            return
        try:
            self._segments.tick()
        except (SegmentError, OSError) as error:
            self._patience.failed(error)
            if self._patience.is_exhausted:
                raise
            log.error("%s", self._patience.trouble)  # noqa: TRY400  it will be said again and again
        else:
            self._patience.succeeded()
