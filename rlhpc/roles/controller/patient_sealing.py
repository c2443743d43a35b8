"""Seal segments when they are due, and retry while the disk is full: groups wait in memory, and none is lost."""

from __future__ import annotations

import logging

from rlhpc.buffer.segments import SegmentWriter
from rlhpc.contracts import Clock
from rlhpc.errors import SegmentError
from rlhpc.roles.controller.disk_patience import DiskPatience

log = logging.getLogger("rlhpc.segments")


class PatientSealing:
    """Retries failed writes with growing pauses, for as long as `DiskPatience` allows."""

    def __init__(self, segments: SegmentWriter, clock: Clock) -> None:
        self._segments, self._patience = segments, DiskPatience(clock)

    def tick(self) -> None:
        """Seal a segment if one is due.  One thread at a time.  Raises SegmentError if writes fail for too long."""
        if not self._patience.may_try:
            return
        try:
            self._segments.tick()
        except SegmentError as error:
            self._patience.failed()
            if self._patience.is_exhausted:
                raise
            log.error("%s; %s", error, self._patience.prospect)  # noqa: TRY400  it will be said again and again
        else:
            self._patience.succeeded()
