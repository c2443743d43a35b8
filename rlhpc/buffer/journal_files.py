"""The files of a journal: append rollouts and make them durable; a full file is followed by the next one.

    rollouts/journal_000000.h5, journal_000001.h5 …      each made whole, then filled by plain writes

Input: JournalRecord.  Output: the number up to which rollouts are on disk.
Guarantees: a rollout up to that number survives the death of this process, and of its machine.  A failed write, a full
disk for example, changes nothing that was durable, and the next try writes the same rollouts to the same place.
A file is written by one attempt; the next attempt begins another.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.buffer.journal_layout import DEFAULT_ROOM, TOKEN_COLUMNS, JournalLayout, Sizes, new_file
from rlhpc.buffer.journal_rows import Encoded, JournalRecord, encode_prompt, encode_rollout
from rlhpc.contracts import Clock
from rlhpc.errors import JournalError
from rlhpc.files import numbered_files, rename, sync_directory
from rlhpc.ownership import Fence

_NAME = re.compile(r"journal_(\d{6,})\.h5")
_MOST_BUFFERS = 512  # of one system call; the limit is 1,024


def journal_paths(directory: Path) -> list[Path]:
    """The journal files of a rollouts directory, in order.  Raises OSError."""
    return [path for _, path in numbered_files(directory, _NAME)]


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
        files = numbered_files(self._directory, _NAME)
        index = files[-1][0] + 1 if files else 0
        path = self._directory / f"journal_{index:06d}.h5"
        needed = encode_rollout(first, 0, encode_prompt(first.scored.rollout.prompt, 0, Sizes()).used).used
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
                row, prompt = used.prompts, encode_prompt(rollout.prompt, rollout.group_id, used)
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
        """after: entries that the file has once these are written."""
        for name, pieces in columns.items():
            place = self._layout.place(name, self._used.of(name))
            write_at(self._descriptor, place, pieces, self._layout.place(name, after.of(name)) - place)
        os.fdatasync(self._descriptor)


def write_at(descriptor: int, offset: int, pieces: Sequence[Any], num_bytes: int) -> None:
    """Write pieces (bytes, memoryviews, arrays), num_bytes in all, one after the other from this offset on.

    Raises OSError; then some may be written.
    """
    if len(pieces) <= _MOST_BUFFERS and os.pwritev(descriptor, pieces, offset) == num_bytes:
        return
    left = [memoryview(piece) for piece in pieces]  # a short write is rare: write everything again
    while left:
        now = left[:_MOST_BUFFERS]
        written = os.pwritev(descriptor, now, offset)
        offset += written
        del left[: len(now)]
        if written < sum(piece.nbytes for piece in now):
            left = [*_behind(now, written), *left]


def _behind(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The pieces without their first num_bytes bytes."""
    for index, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece.cast("B")[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= piece.nbytes
    return []


def make_file(path: Path, file_bytes: int, blocks: Sequence[tuple[int, bytes]], fence: Fence | None) -> int:
    """Make a file that is complete and on disk before it gets its name; return a descriptor to write to it.

    Raises OSError; then there is no such file.
    """
    staging = path.parent if fence is None else fence.staging(path.parent)
    partial = staging / f"{path.name}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(descriptor, file_bytes)
        for offset, block in blocks:
            write_at(descriptor, offset, [block], len(block))
        os.fsync(descriptor)
        rename(partial, path)
        sync_directory(path.parent)
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return descriptor
