"""Seal resolved groups into HDF5 segments: a file is complete and on disk, or absent.

Input: ResolvedGroup.  Output: rollouts/segment_NNNNNN.h5.  The HDF5 image is built in memory and written with plain
calls, so that a full disk is an ordinary error: the HDF5 library crashes when it runs out of space and is then closed.
Guarantees: after a failed write the groups stay in memory for another try; a sealed file is never changed or replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from rlhpc.buffer.hdf5_columns import Attributes, hdf5_image
from rlhpc.buffer.resolved import ResolvedGroup
from rlhpc.buffer.segment_columns import SCHEMA, to_columns
from rlhpc.buffer.segment_files import write_sealed
from rlhpc.contracts import Clock
from rlhpc.crc import crc32
from rlhpc.errors import SegmentError
from rlhpc.ownership import Fence
from rlhpc.run_layout import RunLayout

# The HDF5 format leaves a block at the head of a file to the application.  Ours holds the checksum of all that follows,
# which a reader verifies before the HDF5 library, which is not made for hostile bytes, parses any of it.
USER_BLOCK_BYTES = 512
USER_BLOCK_MAGIC = b"rlhpc rollouts\n"
MAX_SEGMENT_TOKENS = 1 << 23  # of completions, 109 MB of arrays: sealing or reading one takes twice that


class SegmentWriter:
    """The only writer of a run's rollouts directory.

    `add` and `cut` do no input or output; one thread may call them while another one seals.  Only one seals at a time.
    """

    def __init__(
        self,
        directory: Path,
        first_index: int,
        *,
        run_name: str,
        run_attempt: int,
        max_groups: int,
        max_s: float,
        clock: Clock,
        wall_clock: Clock = time.time,
        fence: Fence | None = None,
    ) -> None:
        self._directory, self._fence = directory, fence
        self._next_index = first_index
        self._attributes: Attributes = {"run_name": run_name, "run_attempt": run_attempt}
        self._max_groups, self._max_s = max_groups, max_s
        self._clock, self._wall_clock = clock, wall_clock
        self._pending: list[ResolvedGroup] = []
        self._num_pending_tokens = 0
        self._pending_since_s = 0.0
        self._num_before_cut = 0  # pending groups that were added before the last cut
        self._index_after_cut = first_index
        # Written by a try that failed, and perhaps there: the next one writes the same bytes.
        self._refused: tuple[Sequence[ResolvedGroup], bytes] | None = None
        self._counting = threading.Lock()  # held briefly only: pending groups, and the position of the cut

    @property
    def next_index(self) -> int:
        """Number of the segment that is sealed next."""
        return self._next_index

    @property
    def num_pending(self) -> int:
        """Groups that are only in memory."""
        return len(self._pending)

    @property
    def is_due(self) -> bool:
        """Enough groups are pending, or one has been for long enough."""
        if not self._pending:
            return False
        is_full = len(self._pending) >= self._max_groups or self._num_pending_tokens >= MAX_SEGMENT_TOKENS
        return is_full or self._clock() - self._pending_since_s >= self._max_s

    def add(self, resolved: ResolvedGroup) -> None:
        """Keep a group for the next segment."""
        with self._counting:
            if not self._pending:
                self._pending_since_s = self._clock()
            self._pending.append(resolved)
            self._num_pending_tokens += _num_tokens(resolved)

    def cut(self) -> None:
        """From now on no segment mixes groups added before this call with groups added after it."""
        with self._counting:
            self._num_before_cut = len(self._pending)
            if not self._pending:
                self._index_after_cut = self._next_index

    def seal_to_cut(self) -> int:
        """Seal what was added before the last cut; return the number of the first segment after it.

        Raises as seal does; what was sealed before stays sealed.
        """
        while self._num_before_cut:
            self.seal()
        return self._index_after_cut

    def tick(self) -> Path | None:
        """Seal a segment if one is due.  Raises as seal does."""
        return self.seal() if self.is_due else None

    def seal(self) -> Path | None:
        """Write the oldest pending groups, as many as fit and none from beyond a cut; return the segment.

        None if there are none.  Raises SegmentError when it cannot be written; nothing is left on disk and the groups
        stay pending.  OwnershipLost: another attempt owns the run directory, and the groups are part of an abandoned
        timeline.
        """
        groups, image = self._refused or self._image_of_the_oldest()
        if not groups:
            return None
        self._refused = groups, image
        path = self._directory / RunLayout(Path()).segment(self._next_index).name
        try:
            write_sealed(path, image, staging=self._staging())
        except (SegmentError, OSError) as error:  # the latter of owner.json
            cause = error.__cause__ if isinstance(error, SegmentError) else error
            raise SegmentError(f"{error}; {len(self._pending)} resolved groups stay in memory") from cause
        self._refused = None
        self._count_sealed(groups)
        return path

    def _image_of_the_oldest(self) -> tuple[Sequence[ResolvedGroup], bytes]:
        with self._counting:
            groups = self._oldest()
        if not groups:
            return groups, b""
        when = {"segment_index": self._next_index, "sealed_unix_s": self._wall_clock()}
        return groups, to_hdf5(groups, {**self._attributes, **when})

    def _oldest(self) -> list[ResolvedGroup]:
        """At most max_groups, and as many tokens as a segment holds unless the first has more."""
        groups = self._pending[: min(self._max_groups, self._num_before_cut or self._max_groups)]
        totals = accumulate(map(_num_tokens, groups))
        num_groups = sum(total <= MAX_SEGMENT_TOKENS for total in totals)
        return groups[: max(1, num_groups)]

    def _staging(self) -> Path | None:
        if self._fence is None:
            return None
        self._fence.check()
        return self._fence.staging(self._directory)

    def seal_all(self) -> list[Path]:
        """Seal until nothing is pending.  Raises as seal does; what was sealed before stays sealed."""
        paths = []
        while (path := self.seal()) is not None:
            paths.append(path)
        return paths

    def _count_sealed(self, groups: Sequence[ResolvedGroup]) -> None:
        num_groups = len(groups)
        with self._counting:
            self._next_index += 1
            self._pending_since_s = self._clock()
            del self._pending[:num_groups]
            self._num_pending_tokens -= sum(map(_num_tokens, groups))
            if self._num_before_cut:
                self._num_before_cut -= num_groups
                self._index_after_cut = self._next_index


def _num_tokens(resolved: ResolvedGroup) -> int:
    return sum(len(scored.rollout.token_ids) for scored in resolved.group.members)


def to_hdf5(groups: Sequence[ResolvedGroup], attributes: Attributes, *, compress: bool = True) -> bytes:
    """The bytes of a segment file with these groups and file attributes."""
    columns = to_columns(groups)
    counts = {
        "schema": SCHEMA,
        "num_groups": len(columns["groups/group_id"]),
        "num_rollouts": len(columns["rollouts/group_id"]),
        "num_completion_tokens": len(columns["rollouts/token_ids"]),
    }
    image = hdf5_image(columns, {**attributes, **counts}, user_block_bytes=USER_BLOCK_BYTES, compress=compress)
    body = image.getbuffer()[USER_BLOCK_BYTES:]
    head = USER_BLOCK_MAGIC + f"bytes {len(body)}\ncrc32 {crc32(body):08x}\n".encode()
    image.getbuffer()[: len(head)] = head
    return image.getvalue()
