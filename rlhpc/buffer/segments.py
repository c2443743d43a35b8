"""Seal resolved groups into HDF5 segments, and read them back: a file is complete and on disk, or absent.

In this file: the files of a rollouts directory; the writer; the reader.

Input: ResolvedGroup.  Output: rollouts/segment_NNNNNN.h5.  The HDF5 image is built in memory and written with plain
calls, so that a full disk is an ordinary error: the HDF5 library crashes when it runs out of space and is then closed.
Guarantees: after a failed write the groups stay in memory for another try; a sealed file is never changed or replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.files import is_listed, listing, matching, move_durably, rename, sync_directory
from rlhpc.base.native import crc32
from rlhpc.base.ownership import Fence
from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.segment_format import (
    LATER_COLUMNS,
    READABLE,
    SCHEMA,
    TEXT_COLUMNS,
    WORD_COLUMNS,
    Attributes,
    Columns,
    Hdf5Columns,
    decode_text,
    empty_column,
    from_columns,
    hdf5_image,
    opened_file,
    opened_image,
    texts_of,
    to_columns,
)
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import SegmentError

# -------------------------------------------------------------------------------------------------------- segment files
#
# The files of a rollouts directory: made whole, listed in order, set aside when a restart undoes them.
#
# Input: bytes and paths.  Independent of the content of segments.


_SEGMENT_NAME = re.compile(r"segment_(\d{6,})\.h5")  # run_layout.RunLayout.segment


def write_sealed(path: Path, data: bytes, *, staging: Path | None = None) -> None:
    """Make `path` hold these bytes durably, or leave it absent.

    staging: directory on the same filesystem in which the file is prepared; default: that of `path`.
    Raises SegmentError when it exists already, with other bytes, or cannot be written (disk full, quota, no directory).
    """
    partial = (staging or path.parent) / (path.name + ".partial")
    is_ours = False  # a file at `path` that another process has sealed is not ours to remove
    try:
        if is_listed(path):
            if path.read_bytes() != data:
                raise SegmentError(f"{path} exists and is never replaced; has the run directory two controllers?")
            sync_directory(path.parent)  # an earlier try has made the file and then failed
            return
        _write_durably(partial, data)
        rename(partial, path)
        is_ours = True
        sync_directory(path.parent)
    except OSError as error:
        for leftover in (partial, path) if is_ours else (partial,):
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise SegmentError(f"{path} could not be written: {error.strerror or error}") from error


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a directory in order.  Raises SegmentError when one is missing between two others."""
    numbered = _numbered_segments(directory)
    indices = [index for index, _ in numbered]
    missing = sorted(set(range(indices[0], indices[-1])) - set(indices)) if indices else []
    if missing:
        raise SegmentError(f"{directory}: segment {missing[0]} is missing, though segment {indices[-1]} exists")
    return [path for _, path in numbered]


def segments_that_are_left(directory: Path, tell: Callable[[str], object]) -> list[Path]:
    """The segments of a directory in order; a missing one between two others is reported, and left out."""
    try:
        return segment_paths(directory)
    except SegmentError as error:
        tell(str(error))
        return [path for _, path in _numbered_segments(directory)]


def set_aside_lost_segments(directory: Path, first_lost_index: int, attempt: int) -> list[Path]:
    """Move segments that a resume undoes, those from first_lost_index on, to lost_attempt_N/; return the new paths.

    attempt: number of the run attempt that resumes.  Half-written files are deleted.  May be repeated after a crash.
    Raises SegmentError when a file cannot be moved; the others are moved or not.
    """
    lost_directory = directory / f"lost_attempt_{attempt}"
    lost = [path for index, path in _numbered_segments(directory) if index >= first_lost_index]
    try:
        for partial in matching(directory, "segment_*.partial"):
            partial.unlink()
        if not lost:
            return []
        # Last one first: a crash half-way leaves no gap in what stays.
        moved = move_durably(reversed(lost), lost_directory)
    except OSError as error:
        raise SegmentError(
            f"{directory}: segments from {first_lost_index} on could not be set aside: {error}"
        ) from error
    return moved[::-1]


def _numbered_segments(directory: Path) -> list[tuple[int, Path]]:
    matches = map(_SEGMENT_NAME.fullmatch, listing(directory))
    return sorted((int(match[1]), directory / match[0]) for match in matches if match)


def _write_durably(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        remaining = memoryview(data)
        while remaining:  # one call writes 2 GiB at most, and less when the disk fills up
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------- segments


# The HDF5 format leaves a block at the head of a file to the application.  Ours holds the checksum of all that follows,
# which a reader verifies before the HDF5 library, which is not made for hostile bytes, parses any of it.
USER_BLOCK_BYTES = 512
USER_BLOCK_MAGIC = b"rlhpc rollouts\n"
MAX_SEGMENT_TOKENS = 1 << 23  # of completions, 109 MB of arrays: sealing or reading one takes twice that
_BYTES_PER_TOKEN = 13  # of these arrays; a teacher's and routes count as so many tokens more


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
        keeps_routes: bool = False,
    ) -> None:
        self._directory, self._fence, self.keeps_routes = directory, fence, keeps_routes
        self._next_index = first_index
        self._attributes: Attributes = {"run_name": run_name, "run_attempt": run_attempt}
        self._max_groups, self._max_s = max_groups, max_s
        self._clock, self._wall_clock = clock, wall_clock
        self._pending: list[ResolvedGroup] = []
        self._num_pending_tokens = 0
        self._pending_since_s = 0.0
        self._num_before_cut = 0  # pending groups that were added before the last cut
        self._index_after_cut = first_index
        # Written by a failed try, and perhaps on disk: the next try writes the same bytes.
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
        """True if enough groups are pending, or one has been pending for long enough."""
        if not self._pending:
            return False
        is_full = len(self._pending) >= self._max_groups or self._num_pending_tokens >= MAX_SEGMENT_TOKENS
        return is_full or self._clock() - self._pending_since_s >= self._max_s

    def add(self, resolved: ResolvedGroup) -> None:
        """Keep a group for the next segment."""
        resolved = resolved if self.keeps_routes else resolved.without_routes()
        with self._counting:
            if not self._pending:
                self._pending_since_s = self._clock()
            self._pending.append(resolved)
            self._num_pending_tokens += _num_tokens(resolved)

    def cut(self) -> None:
        """Let no segment from now on mix groups added before this call with groups added after it."""
        with self._counting:
            self._num_before_cut = len(self._pending)
            if not self._pending:
                self._index_after_cut = self._next_index

    def seal_to_cut(self) -> int:
        """Seal the groups added before the last cut; return the number of the first segment after it.

        Raises as seal does; segments sealed before that stay sealed.
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
        """The oldest groups: at most max_groups, and as many tokens as a segment holds unless the first has more."""
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
    """Tokens of completions, and as many as would take the room of their teachers' numbers and routes."""
    members = resolved.group.members
    said = [each.teacher for each in members if each.teacher is not None]
    num_bytes = sum(4 * len(each.logprobs) + 8 * each.flat_top_ids.size for each in said)
    num_bytes += sum(len(each.rollout.routes.packed) for each in members if each.rollout.routes is not None)
    return sum(len(each.rollout.token_ids) for each in members) + num_bytes // _BYTES_PER_TOKEN


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


# ------------------------------------------------------------------------------------------------------- segment reader
#
# Read sealed segments back, using only data whose checksum matches.
#
# Input: segment files.  Output: ResolvedGroup.  Any problem with a file is a SegmentError that names it.


_MALFORMED = (KeyError, ValueError, TypeError, RuntimeError, IndexError, OverflowError)  # what h5py and decoding raise


def read_segment(path: Path) -> list[ResolvedGroup]:
    """All groups of a segment, in the order in which they were resolved; every checksum verified.

    Arrays are views of one block per column: copy what outlives the rest.
    Raises SegmentError naming the file, and the row where only that is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SegmentError(f"{path} cannot be read: {error.strerror or error}") from error
    _verify_file(path, data)
    try:
        with opened_image(data) as file:
            _known_schema(path, file)
            names = dict.fromkeys([*file.names("groups"), *file.names("rollouts"), *LATER_COLUMNS])
            columns, num_groups = _columns(path, file, list(names)), file.attribute("num_groups")
            groups = from_columns(columns, str(path))
            if len(groups) != num_groups:
                raise SegmentError(f"{path} says that it has {num_groups} groups, but has {len(groups)}")
    except (OSError, *_MALFORMED) as error:
        raise SegmentError(f"{path} is not a readable rollout segment: {error!r}") from error
    return groups


def read_rollouts_directory(directory: Path) -> Iterator[ResolvedGroup]:
    """All groups of a run, segment after segment.  Raises SegmentError also for a gap in the numbers of segments."""
    for path in segment_paths(directory):
        yield from read_segment(path)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Some columns of one segment, e.g. "rollouts/reward", without reading the others and *without* checksums.

    Words (verdicts, reasons) come as arrays of str, texts as arrays of objects.  Raises SegmentError.
    """
    wanted = [
        name for column in names for name in ([column, f"{column}_offsets"] if column in TEXT_COLUMNS else [column])
    ]
    try:
        with opened_file(path) as file:
            columns = _columns(path, file, wanted)
        return {name: _readable(columns, name) for name in names}
    except (OSError, *_MALFORMED) as error:
        raise SegmentError(f"{path}: columns {list(names)} cannot be read: {error!r}") from error


def read_raw_columns(
    path: Path, names: Sequence[str], *, is_verified: bool
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """(attributes of the file, some columns as they are stored); for readers of whole runs that need no objects.

    is_verified: every checksum is verified first, which reads the whole file.  Raises SegmentError.
    """
    data = b""
    if is_verified:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SegmentError(f"{path} cannot be read: {error.strerror or error}") from error
        _verify_file(path, data)
        if not data.startswith(USER_BLOCK_MAGIC):
            read_segment(path)  # the file's checksum is gone; those of the rows are left
    try:
        with opened_image(data) if is_verified else opened_file(path) as file:
            return file.attributes(), _columns(path, file, names)
    except (OSError, *_MALFORMED) as error:
        raise SegmentError(f"{path}: columns {list(names)} cannot be read: {error!r}") from error


def _verify_file(path: Path, data: bytes) -> None:
    """Compare the checksum in the user block, if there is one: h5repack drops it, and the rows' own remain."""
    if not data.startswith(USER_BLOCK_MAGIC):
        return
    fields = dict(line.split(b" ", 1) for line in data[:USER_BLOCK_BYTES].split(b"\n")[1:3] if b" " in line)
    body = memoryview(data)[USER_BLOCK_BYTES:]
    if fields.get(b"bytes") != str(len(body)).encode():
        raise SegmentError(f"{path} is truncated or damaged: {len(body)} bytes follow its head")
    if fields.get(b"crc32") != f"{crc32(body):08x}".encode():
        raise SegmentError(f"{path} is damaged: the checksum of the file differs")


def _columns(path: Path, file: Hdf5Columns, names: Sequence[str]) -> Columns:
    schema, num_rollouts = _known_schema(path, file), int(file.attribute("num_rollouts"))
    missing = {name for name in names if LATER_COLUMNS.get(name, schema) > schema}
    return {name: empty_column(name, num_rollouts) if name in missing else file.column(name) for name in names}


def _known_schema(path: Path, file: Hdf5Columns) -> int:
    if (schema := int(file.attribute("schema"))) not in READABLE:
        raise SegmentError(f"{path} has schema {schema}; this version of rlhpc reads schema {SCHEMA}")
    return schema


def _readable(columns: Columns, name: str) -> NDArray[Any]:
    if name in TEXT_COLUMNS:
        return np.array([decode_text(text) for text in texts_of(columns, name)], dtype=object)
    return columns[name].astype(np.str_) if name in WORD_COLUMNS else columns[name]
