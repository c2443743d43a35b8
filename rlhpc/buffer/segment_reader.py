"""Read sealed segments back, trusting nothing that a checksum does not confirm.

Eats segment files, makes ResolvedGroup.  Whatever is wrong with a file is a SegmentError that names it.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

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
from rlhpc.buffer.segments import USER_BLOCK_BYTES, USER_BLOCK_MAGIC, sync_directory
from rlhpc.errors import SegmentError

_SEGMENT_NAME = re.compile(r"segment_(\d{6,})\.h5")
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
        with h5py.File(io.BytesIO(data), "r") as file:
            _check_schema(path, file)
            columns: Columns = {
                f"{table}/{name}": dataset[:]
                for table in ("groups", "rollouts")
                for name, dataset in file[table].items()
            }
            groups = from_columns(columns, str(path))
            if len(groups) != file.attrs["num_groups"]:
                raise SegmentError(f"{path} says that it has {file.attrs['num_groups']} groups, but has {len(groups)}")
    except (OSError, *_MALFORMED) as error:
        raise SegmentError(f"{path} is not a readable rollout segment: {error!r}") from error
    return groups


def read_rollouts_directory(directory: Path) -> Iterator[ResolvedGroup]:
    """All groups of a run, segment after segment.  Raises SegmentError also for a gap in the numbers of segments."""
    for path in segment_paths(directory):
        yield from read_segment(path)


def segment_paths(directory: Path) -> list[Path]:
    """The segments of a directory in order.  Raises SegmentError when one is missing between two others."""
    numbered = _numbered_segments(directory)
    indices = [index for index, _ in numbered]
    missing = sorted(set(range(indices[0], indices[-1])) - set(indices)) if indices else []
    if missing:
        raise SegmentError(f"{directory}: segment {missing[0]} is missing, though segment {indices[-1]} is there")
    return [path for _, path in numbered]


def read_columns(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Some columns of one segment, e.g. "rollouts/reward", without reading the others and *without* checksums.

    Words (verdicts, reasons) come as arrays of str, texts as arrays of objects.  Raises SegmentError.
    """
    wanted = [
        name for column in names for name in ([column, f"{column}_offsets"] if column in TEXT_COLUMNS else [column])
    ]
    try:
        # No lock: sealed files do not change, and NFS and Lustre often refuse locks.
        with h5py.File(path, "r", locking=False) as file:
            _check_schema(path, file)
            columns = {name: file[name][:] for name in wanted}
        return {name: _readable(columns, name) for name in names}
    except (OSError, *_MALFORMED) as error:
        raise SegmentError(f"{path}: columns {list(names)} cannot be read: {error!r}") from error


def set_aside_lost_segments(directory: Path, first_lost_index: int, attempt: int) -> list[Path]:
    """Move segments that a resume undoes, those from first_lost_index on, to lost_attempt_N/; return the new paths.

    attempt: number of the run attempt that resumes.  Half-written files are deleted.  May be repeated after a crash.
    Raises SegmentError when a file cannot be moved; the others are moved or not.
    """
    lost_directory = directory / f"lost_attempt_{attempt}"
    lost = [path for index, path in _numbered_segments(directory) if index >= first_lost_index]
    try:
        for partial in directory.glob("segment_*.partial"):
            partial.unlink()
        if not lost:
            return []
        lost_directory.mkdir(exist_ok=True)
        # From the last one back: a crash half-way leaves no gap in what stays.
        moved = [path.rename(lost_directory / path.name) for path in reversed(lost)]
        sync_directory(lost_directory)
        sync_directory(directory)
    except OSError as error:
        raise SegmentError(
            f"{directory}: segments from {first_lost_index} on could not be set aside: {error}"
        ) from error
    return moved[::-1]


def _numbered_segments(directory: Path) -> list[tuple[int, Path]]:
    matches = ((_SEGMENT_NAME.fullmatch(path.name), path) for path in directory.glob("segment_*.h5"))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _verify_file(path: Path, data: bytes) -> None:
    """Compare the checksum in the user block, if there is one: h5repack drops it, and the rows' own remain."""
    if not data.startswith(USER_BLOCK_MAGIC):
        return
    fields = dict(line.split(b" ", 1) for line in data[:USER_BLOCK_BYTES].split(b"\n")[1:3] if b" " in line)
    body = memoryview(data)[USER_BLOCK_BYTES:]
    if fields.get(b"bytes") != str(len(body)).encode():
        raise SegmentError(f"{path} is truncated or damaged: {len(body)} bytes follow its head")
    if fields.get(b"crc32") != f"{zlib.crc32(body):08x}".encode():
        raise SegmentError(f"{path} is damaged: the checksum of the file differs")


def _check_schema(path: Path, file: h5py.File) -> None:
    schema = file.attrs["schema"]
    if schema != SCHEMA:
        raise SegmentError(f"{path} has schema {schema}; this version of rlhpc reads schema {SCHEMA}")


def _readable(columns: Columns, name: str) -> NDArray[Any]:
    if name in TEXT_COLUMNS:
        return np.array([decode_text(text) for text in texts_of(columns, name)], dtype=object)
    return columns[name].astype(np.str_) if name in WORD_COLUMNS else columns[name]
