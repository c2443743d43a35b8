"""Read a journal back, using only data whose checksum matches.

Input: journal files, complete, being written, or left behind by a kill.  Output: JournalRecord, and what is damaged.
A damaged row costs that row: all others of its file are read.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.buffer.journal_files import journal_paths
from rlhpc.buffer.journal_layout import COLUMNS, TOKEN_COLUMNS, USER_BLOCK_BYTES, JournalLayout, read_layout
from rlhpc.buffer.journal_rows import JournalRecord, decode_prompt, decode_rollout
from rlhpc.errors import JournalError

_ROWS_AT_ONCE = 512  # rows of a table: a file that was just begun is not read whole


@dataclass(frozen=True, slots=True)
class JournalContent:
    """Content of one file."""

    path: Path
    layout: JournalLayout
    records: list[JournalRecord]
    damaged_rows: list[int]  # of `rollouts`: something was written there, and the checksum does not hold
    is_torn: bool  # whether all damaged rows are at the end: they were being written when the writer died


def read_journal(path: Path, *, is_mapped: bool = False) -> JournalContent:
    """Everything in a file that is whole.  Arrays are views of one block per column.

    is_mapped: for callers that keep many files at once.  The verified copy is freed; arrays are views of the mapped
    file, whose pages the system reads on access and may evict.  The file may be deleted meanwhile.
    Raises JournalError: the file is not a journal, is cut off before its first column, or cannot be read.
    """
    with _opened(path) as descriptor:
        return _read(path, descriptor, is_mapped=is_mapped)


def read_first_sequence(path: Path) -> int:
    """Number of the first rollout of a file.  Raises as read_journal."""
    with _opened(path) as descriptor:
        return read_layout(os.pread(descriptor, USER_BLOCK_BYTES, 0)).first_sequence


def read_rollout_rows(path: Path) -> tuple[JournalLayout, NDArray[Any]]:
    """The rows of `rollouts`, *not* compared with their checksums, and without what they refer to.

    Those that a kill or a full disk has cut off are left out: their checksum stands at their end, where zeros are.
    Raises as read_journal.
    """
    with _opened(path) as descriptor:
        layout = read_layout(os.pread(descriptor, USER_BLOCK_BYTES, 0))
        rows = _rows(descriptor, layout, "rollouts")
        return layout, rows[rows["crc32"] != 0]


def read_journals(directory: Path) -> Iterator[JournalContent]:
    """All files of a run, in order.  Raises JournalError, OSError."""
    for path in journal_paths(directory):
        yield read_journal(path)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor; errors while it is read name the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error
    except JournalError as error:
        raise JournalError(f"{path} {error}") from error


def _read(path: Path, descriptor: int, *, is_mapped: bool) -> JournalContent:
    layout = read_layout(os.pread(descriptor, USER_BLOCK_BYTES, 0))
    rollout_rows = _rows(descriptor, layout, "rollouts")
    prompt_rows = _rows(descriptor, layout, "prompts")
    text = _column(descriptor, layout, "text", _text_end(rollout_rows, prompt_rows, layout)).data
    prompt_tokens = _column(descriptor, layout, "prompt_token_ids", _tokens_end(prompt_rows, layout.room.prompt_tokens))
    columns = [
        _column(descriptor, layout, name, _tokens_end(rollout_rows, layout.room.tokens)) for name in TOKEN_COLUMNS
    ]
    file = _mapping(descriptor) if is_mapped else None
    kept = [
        read if file is None else _mapped(file, layout, name, len(read))
        for name, read in zip(("prompt_token_ids", *TOKEN_COLUMNS), (prompt_tokens, *columns), strict=True)
    ]
    prompts = [decode_prompt(row.tobytes(), prompt_tokens, text, kept[0]) for row in prompt_rows]
    decoded = [decode_rollout(row.tobytes(), prompts, columns, text, kept[1:]) for row in rollout_rows]
    records = [record for record in decoded if record is not None]
    last = max((index for index, record in enumerate(decoded) if record is not None), default=-1)
    unread = [index for index, record in enumerate(decoded) if record is None]
    # Zeros before a whole row are a damaged row; zeros after the last one were never written.
    damaged = [index for index in unread if index < last or any(rollout_rows[index].tobytes())]
    return JournalContent(path, layout, records, damaged, bool(damaged) and damaged[0] > last)


def _rows(descriptor: int, layout: JournalLayout, table: str) -> NDArray[Any]:
    """The rows of a table up to the last one that is not all zero."""
    kind, room, parts, end = COLUMNS[table], layout.room.of(table), list[NDArray[Any]](), 0
    for first in range(0, room, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, room - first)
        rows = _column(descriptor, layout, table, count, first)
        parts.append(rows)
        if rows.view(np.uint8).any():  # most rows are zeros, and this takes a sixth of the time of what follows
            used = np.flatnonzero(rows.view(np.uint8).reshape(len(rows), kind.itemsize).any(axis=1))
            end = first + int(used[-1]) + 1
        if len(rows) < count:
            break
    return np.concatenate(parts[: max(1, -(-end // _ROWS_AT_ONCE))])[:end]


def _text_end(rollout_rows: NDArray[Any], prompt_rows: NDArray[Any], layout: JournalLayout) -> int:
    """Bytes of `text` that any row refers to."""
    ends = [0]
    for rows in (rollout_rows, prompt_rows):
        texts = [name for name in rows.dtype.names or () if name.endswith("_bytes")]
        ends += (rows["text_start"] + sum(rows[name].astype(np.int64) for name in texts)).tolist()
    return _largest(ends, layout.room.text_bytes)


def _tokens_end(rows: NDArray[Any], room: int) -> int:
    return _largest([0, *(rows["token_start"] + rows["num_tokens"]).tolist()], room)


def _largest(ends: list[int], room: int) -> int:
    """The largest end that fits: a damaged row may have any."""
    return max(end for end in ends if 0 <= end <= room)


def _column(descriptor: int, layout: JournalLayout, name: str, length: int, first: int = 0) -> NDArray[Any]:
    """Entries of a column; fewer if the file is cut off."""
    # numpy's own memory: it asks for large pages, and faults on small ones cost as much as the reading.
    values = np.empty(length, COLUMNS[name])
    left, offset = values.view(np.uint8).data, layout.place(name, first)
    while left and (count := os.preadv(descriptor, [left[: 1 << 30]], offset)):
        left, offset = left[count:], offset + count
    values.flags.writeable = False
    return values[: length - -(-len(left) // values.itemsize)]


def _mapping(descriptor: int) -> NDArray[np.uint8] | None:
    """The bytes of a file; None where it cannot be mapped, or should not: a mapping keeps a descriptor."""
    try:
        lowest_free = os.dup(descriptor)
        os.close(lowest_free)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and lowest_free > most // 2:  # the other half is for connections
            return None
        return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError:  # some file systems have no mappings
        return None


def _mapped(file: NDArray[np.uint8], layout: JournalLayout, name: str, length: int) -> NDArray[Any]:
    """The first entries of a column."""
    return file[layout.place(name, 0) : layout.place(name, length)].view(COLUMNS[name])
