"""The files of a journal: append rollouts and make them durable; a full file is followed by the next one.

    rollouts/journal_000000.h5, journal_000001.h5 …      each made whole, then filled by plain writes

Input: JournalRecord.  Output: the number up to which rollouts are on disk.
Guarantees: a rollout up to that number survives the death of this process, and of its machine.  A failed write, a full
disk for example, changes nothing that was durable, and the next try writes the same rollouts to the same place.
A file is written by one attempt; the next attempt begins another.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import resource
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.files import numbered_files
from rlhpc.base.native import crc32
from rlhpc.base.ownership import Fence
from rlhpc.buffer.journal_layout import (
    COLUMNS,
    DEFAULT_ROOM,
    PROMPT_ROW,
    ROLLOUT_ROW,
    TOKEN_COLUMNS,
    USER_BLOCK_BYTES,
    JournalLayout,
    Sizes,
    new_file,
    read_layout,
)
from rlhpc.buffer.log import make_file, write_at
from rlhpc.buffer.segment_format import decode_text, decode_token_rewards, encode_text, encode_token_rewards
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import JournalError
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, ScoredRollout, Verdict

# --------------------------------------------------------------------------------------------------------- journal rows
#
# A rollout as bytes of a journal file, and back.
#
#     ScoredRollout + admitted_version  ⇄  one row of `rollouts`, one of `prompts`, tokens, text
#
# Pure.  A row's checksum is the CRC32 of the row's other bytes and then of everything that it refers to, in the order
# of the columns: a row whose checksum holds is what was appended.


# The same bytes as the rows of journal_layout.py (a test compares them); struct is ten times as fast as a numpy row.
_ROLLOUT = struct.Struct("<5qd7i16s16s")
_PROMPT = struct.Struct("<4q3i")
_CRC = struct.Struct("<I")
_made = tuple.__new__  # makes a NamedTuple without its constructor's Python call


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """A delivered rollout, and what is needed of its group to continue it."""

    sequence: int  # number of the rollout in the run, from 1, in the order of arrival
    scored: ScoredRollout
    prompt: Prompt  # of the group
    admitted_version: int  # of the group


class Encoded(NamedTuple):
    """What a prompt or a rollout adds to a file."""

    row: bytes
    text: bytes
    tokens: tuple[NDArray[Any], ...]  # one per token column; making a memoryview takes as long as a checksum
    used: Sizes  # of the file, including it


def encode_prompt(prompt: Prompt, group_id: int, used: Sizes) -> Encoded:
    """Encode a prompt that follows what the file holds already (`used`)."""
    task = encode_text(prompt.task)
    text = task + encode_text(prompt.reference)
    numbers = (len(prompt.token_ids), len(task), len(text) - len(task))
    row = _PROMPT.pack(group_id, prompt.prompt_id, used.prompt_tokens, used.text_bytes, *numbers)
    row += _CRC.pack(_crc_of(row, [prompt.token_ids], text))
    after = used.plus(Sizes(prompts=1, prompt_tokens=len(prompt.token_ids), text_bytes=len(text)))
    return Encoded(row, text, (prompt.token_ids,), after)


@lru_cache(maxsize=1024)  # few differ, and encoding one takes as long as the rest of a row
def _as_json(parts: tuple[tuple[str, float], ...]) -> bytes:
    return json.dumps(dict(parts)).encode()


def encode_rollout(record: JournalRecord, prompt_row: int, used: Sizes) -> Encoded:
    """Encode a rollout that follows what the file holds already; prompt_row: row of its prompt in the same file."""
    scored, rollout = record.scored, record.scored.rollout
    text = detail = encode_text(scored.detail)
    if scored.reward_parts:
        text += _as_json(tuple(scored.reward_parts.items()))
    token_rewards = encode_token_rewards(scored.token_rewards)
    num_parts, text = len(text) - len(detail), text + token_rewards
    num_tokens = len(rollout.token_ids)
    row = _ROLLOUT.pack(
        record.sequence,
        rollout.group_id,
        rollout.prompt_id,
        used.tokens,
        used.text_bytes,
        scored.reward,
        rollout.sample_index,
        record.admitted_version,
        num_tokens,
        prompt_row,
        len(detail),
        num_parts,
        len(token_rewards),
        scored.verdict.encode(),
        rollout.finish_reason.encode(),
    )
    tokens = (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    row += _CRC.pack(_crc_of(row, tokens, text))
    rollouts, prompts, prompt_tokens, before, text_bytes = used
    after = _made(Sizes, (rollouts + 1, prompts, prompt_tokens, before + num_tokens, text_bytes + len(text)))
    return _made(Encoded, (row, text, tokens, after))


def decode_prompt(
    row: bytes, token_ids: NDArray[np.int32], text: memoryview, kept: NDArray[np.int32]
) -> tuple[int, Prompt] | None:
    """(group_id, prompt), or None if the row's checksum does not hold.

    token_ids, text: the whole columns, as far as they were read.  kept: the array of token_ids of which the prompt
    keeps a view.
    """
    group_id, prompt_id, token_start, text_start, num_tokens, task_bytes, reference_bytes = _PROMPT.unpack(row[:-4])
    text_end = text_start + task_bytes + reference_bytes
    if not _is_within(len(token_ids), token_start, num_tokens) or min(task_bytes, reference_bytes) < 0:
        return None
    if not 0 <= text_start <= text_end <= len(text):
        return None
    mine, words = token_ids[token_start : token_start + num_tokens], bytes(text[text_start:text_end])
    if _CRC.pack(_crc_of(row[:-4], [mine], words)) != row[-4:]:
        return None
    mine = kept[token_start : token_start + num_tokens]
    return group_id, Prompt(prompt_id, decode_text(words[:task_bytes]), mine, decode_text(words[task_bytes:]))


def decode_rollout(
    row: bytes,
    prompts: Sequence[tuple[int, Prompt] | None],
    columns: Sequence[NDArray[Any]],
    text: memoryview,
    kept: Sequence[NDArray[Any]],
) -> JournalRecord | None:
    """The rollout of a row, or None if its checksum, or that of its prompt, does not hold.

    prompts: of all rows of `prompts`.  columns: the four of TOKEN_COLUMNS, whole, as far as they were read.  kept: the
    arrays of the same columns of which the rollout keeps views.
    """
    numbers = _ROLLOUT.unpack(row[:-4])
    sequence, group_id, prompt_id, token_start, text_start, reward, sample_index, admitted = numbers[:8]
    num_tokens, prompt_row, detail_bytes, parts_bytes, rewards_bytes, verdict, finish = numbers[8:]
    text_end = text_start + detail_bytes + parts_bytes + rewards_bytes
    if not _is_within(len(columns[0]), token_start, num_tokens) or min(detail_bytes, parts_bytes, rewards_bytes) < 0:
        return None
    if not 0 <= text_start <= text_end <= len(text) or not 0 <= prompt_row < len(prompts):
        return None
    mine = [column[token_start : token_start + num_tokens] for column in columns]
    words = bytes(text[text_start:text_end])
    if _CRC.pack(_crc_of(row[:-4], mine, words)) != row[-4:]:
        return None
    found = prompts[prompt_row]
    if found is None or found[0] != group_id or found[1].prompt_id != prompt_id:
        return None
    token_ids, behaviour_logprobs, versions, loss_mask = (
        column[token_start : token_start + num_tokens] for column in kept
    )
    rollout = Rollout(
        group_id=group_id,
        sample_index=sample_index,
        prompt_id=prompt_id,
        token_ids=token_ids,
        behaviour_logprobs=behaviour_logprobs,
        versions=versions,
        loss_mask=loss_mask.view(np.bool_),
        finish_reason=FinishReason(finish.rstrip(b"\0").decode()),
    )
    parts_end = detail_bytes + parts_bytes
    scored = ScoredRollout(
        rollout,
        reward,
        Verdict(verdict.rstrip(b"\0").decode()),
        json.loads(words[detail_bytes:parts_end]) if parts_bytes else {},
        decode_text(words[:detail_bytes]),
        decode_token_rewards(words[parts_end:]),
    )
    return JournalRecord(sequence, scored, found[1], admitted)


def _crc_of(row: bytes, tokens: Sequence[NDArray[Any]], text: bytes) -> int:
    crc = crc32(row)
    for values in tokens:
        crc = crc32(values, crc)
    return crc32(text, crc)


def _is_within(length: int, start: int, count: int) -> bool:
    return start >= 0 and count >= 0 and start + count <= length


assert ROLLOUT_ROW.itemsize == _ROLLOUT.size + _CRC.size
assert PROMPT_ROW.itemsize == _PROMPT.size + _CRC.size


# -------------------------------------------------------------------------------------------------------- journal files


_JOURNAL_NAME = re.compile(r"journal_(\d{6,})\.h5")
_MOST_BUFFERS = 512  # of one system call; the limit is 1,024


def journal_paths(directory: Path) -> list[Path]:
    """The journal files of a rollouts directory, in order.  Raises OSError."""
    return [path for _, path in numbered_files(directory, _JOURNAL_NAME)]


class JournalFiles:
    """The only writer of a run's journal.  One thread at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        run_name: str,
        attempt: int,
        first_sequence: int = 1,
        room: Sizes = DEFAULT_ROOM,
        fence: Fence | None = None,
        wall_clock: Clock = time.time,
    ) -> None:
        """first_sequence: number of the next rollout.  Creates no file until there is something to write."""
        self._directory, self._fence, self._wall_clock = directory, fence, wall_clock
        self._run_name, self._attempt, self._room = run_name, attempt, room
        self._next_sequence = first_sequence
        self._file: _OpenFile | None = None

    @property
    def next_sequence(self) -> int:
        """Number of the rollout that is appended next: all below it are on disk."""
        return self._next_sequence

    def append(self, records: Sequence[JournalRecord]) -> None:
        """Write rollouts, numbered from next_sequence on, and return once they are on disk.

        Raises JournalError when that fails: those below next_sequence, which may have grown, are on disk, the others
        may be appended again.  OwnershipLost: another attempt owns the run directory, and counts none of these.
        """
        try:
            while records:
                if self._file is None:
                    self._file = self._begin_file(records[0])
                done = self._file.append(records)
                if self._fence is not None:
                    self._fence.check()  # after the write: a later owner will find it
                self._file.keep()
                self._next_sequence += done
                records = records[done:]
                if records:
                    self._end_file()
        except OSError as error:
            if self._fence is not None:
                with contextlib.suppress(OSError):  # the same disk may refuse this, too
                    self._fence.check()  # the usual reason, where the staging directory is gone
            raise JournalError(
                f"{self._directory}: rollouts cannot be written: {error.strerror or error}; {len(records)} stay in "
                "memory"
            ) from error

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_file(self, first: JournalRecord) -> _OpenFile:
        """Make the next file, with room for at least one rollout.  Raises OSError."""
        if self._fence is not None:
            self._fence.check()
        files = numbered_files(self._directory, _JOURNAL_NAME)
        index = files[-1][0] + 1 if files else 0
        path = self._directory / f"journal_{index:06d}.h5"
        needed = encode_rollout(first, 0, encode_prompt(first.prompt, 0, Sizes()).used).used
        layout, blocks = new_file(
            self._room.or_more(needed),
            run_name=self._run_name,
            attempt=self._attempt,
            first_sequence=first.sequence,
            created_unix_s=self._wall_clock(),
        )
        return _OpenFile(make_file(path, layout.file_bytes, blocks, self._fence), layout)


class _OpenFile:
    """One file that is being filled."""

    def __init__(self, descriptor: int, layout: JournalLayout) -> None:
        self._descriptor, self._layout = descriptor, layout
        self._used = self._used_after = Sizes()
        self._prompt_rows: dict[int, int] = {}  # group → its row in `prompts`
        self._new_rows: dict[int, int] = {}  # those of the last call

    def append(self, records: Sequence[JournalRecord]) -> int:
        """Write as many as there is room for; return their number once they are on disk.  Raises OSError.

        The next call writes to the same place unless `keep` was called.
        """
        rollouts, prompts, text = list[Encoded](), list[Encoded](), list[bytes]()
        used, room, new_rows = self._used, self._layout.room, dict[int, int]()
        for record in records:
            rollout, prompt = record.scored.rollout, None
            row = self._prompt_rows.get(rollout.group_id, new_rows.get(rollout.group_id))
            if row is None:
                row, prompt = used.prompts, encode_prompt(record.prompt, rollout.group_id, used)
            encoded = encode_rollout(record, row, used if prompt is None else prompt.used)
            if not encoded.used.fits(room):
                break
            if prompt is not None:
                new_rows[rollout.group_id] = row
                prompts.append(prompt)
                text.append(prompt.text)
            rollouts.append(encoded)
            text.append(encoded.text)
            used = encoded.used
        if rollouts:
            self._write(
                {
                    "rollouts": [b"".join([each.row for each in rollouts])],
                    "prompts": [b"".join([each.row for each in prompts])],
                    "prompt_token_ids": [each.tokens[0] for each in prompts],
                    "text": [b"".join(text)],
                    **dict(zip(TOKEN_COLUMNS, zip(*[each.tokens for each in rollouts], strict=True), strict=True)),
                },
                used,
            )
        self._used_after, self._new_rows = used, new_rows
        return len(rollouts)

    def keep(self) -> None:
        """Count what the last `append` wrote."""
        self._used = self._used_after
        self._prompt_rows |= self._new_rows

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _write(self, columns: Mapping[str, Sequence[Any]], after: Sizes) -> None:
        """Write columns to disk.  after: entries that the file has then."""
        for name, pieces in columns.items():
            place = self._layout.place(name, self._used.of(name))
            write_at(self._descriptor, place, pieces, self._layout.place(name, after.of(name)) - place)
        os.fdatasync(self._descriptor)


# ------------------------------------------------------------------------------------------------------- journal reader
#
# Read a journal back, using only data whose checksum matches.
#
# Input: journal files, complete, being written, or left behind by a kill.  Output: JournalRecord, and what is damaged.
# A damaged row costs that row: all others of its file are read.


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
