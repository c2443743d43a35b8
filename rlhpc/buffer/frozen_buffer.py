"""A snapshot of the buffer, for a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhpc.buffer.history import Position
from rlhpc.buffer.resolved import ResolvedGroup
from rlhpc.buffer.segment_files import write_sealed
from rlhpc.buffer.segments import SegmentWriter, to_hdf5

BUFFERED_FILE = "buffered.h5"


@dataclass(frozen=True, slots=True)
class FrozenBuffer:
    """A snapshot of the buffer for a checkpoint.  It is immutable, so that a thread may write it."""

    groups: tuple[ResolvedGroup, ...]  # neither consumed nor dropped at that moment
    ledger: dict[str, Any]
    next_step: int
    segments: SegmentWriter  # cut at that moment
    position: Position  # of the journal, at that moment

    def seal(self) -> int:
        """Seal what was resolved before that moment; return the number of the first segment that a resume undoes.

        Raises SegmentError when it cannot be written, OwnershipLost.
        """
        return self.segments.seal_to_cut()

    def write(self, directory: Path, next_index: int) -> dict[str, Any]:
        """Write what was not resolved into `directory`; return the JSON that goes with it: ledger and positions.

        next_index: what `seal` has returned.  Raises SegmentError when it cannot be written.
        """
        # Uncompressed: it is read once, by a resume, or never.
        write_sealed(directory / BUFFERED_FILE, to_hdf5(self.groups, {"next_step": self.next_step}, compress=False))
        return {"ledger": self.ledger, "next_segment_index": next_index, "journal": asdict(self.position)}
