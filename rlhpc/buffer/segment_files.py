"""The files of a rollouts directory: made whole, listed in order, set aside when a restart undoes them.

Input: bytes and paths.  Independent of the content of segments.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from rlhpc.errors import SegmentError
from rlhpc.files import is_listed, listing, matching, move_durably, rename, sync_directory

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
            sync_directory(path.parent)  # a try before has made it, and heard an error
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
    """The segments of a directory in order; one that is missing between two others is told, and left out."""
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
