"""Read sealed segments back, using only data whose checksum matches.

Input: segment files.  Output: ResolvedGroup.  Any problem with a file is a SegmentError that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.buffer.hdf5_columns import Hdf5Columns, opened_file, opened_image
from rlhpc.buffer.resolved import ResolvedGroup
from rlhpc.buffer.segment_columns import (
    SCHEMA,
    TEXT_COLUMNS,
    WORD_COLUMNS,
    Columns,
    decode_text,
    from_columns,
    texts_of,
)
from rlhpc.buffer.segment_files import segment_paths
from rlhpc.buffer.segments import USER_BLOCK_BYTES, USER_BLOCK_MAGIC
from rlhpc.crc import crc32
from rlhpc.errors import SegmentError

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
            _refuse_other_schema(path, file)
            num_groups = file.attribute("num_groups")
            columns = {name: file.column(name) for table in ("groups", "rollouts") for name in file.names(table)}
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
    _refuse_other_schema(path, file)
    return {name: file.column(name) for name in names}


def _refuse_other_schema(path: Path, file: Hdf5Columns) -> None:
    if (schema := int(file.attribute("schema"))) != SCHEMA:
        raise SegmentError(f"{path} has schema {schema}; this version of rlhpc reads schema {SCHEMA}")


def _readable(columns: Columns, name: str) -> NDArray[Any]:
    if name in TEXT_COLUMNS:
        return np.array([decode_text(text) for text in texts_of(columns, name)], dtype=object)
    return columns[name].astype(np.str_) if name in WORD_COLUMNS else columns[name]
