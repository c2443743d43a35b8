"""The files of a journal: append rollouts and make them durable; a full file is followed by the next one.

    rollouts/journal_000000.h5, journal_000001.h5 …      each made whole, then filled by plain writes

Input: JournalRecord.  Output: the number up to which rollouts are on disk.
Guarantees: a rollout up to that number survives the death of this process, and of its machine.  A failed write, a full
disk for one, changes nothing that was durable, and the same rollouts are written again to the same place by the next
try.  A file is written by one attempt; the next attempt begins another.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhpc.buffer.journal_layout import DEFAULT_ROOM, TOKEN_COLUMNS, JournalLayout, Sizes, new_file
from rlhpc.buffer.journal_rows import JournalRecord, encode_prompt, encode_rollout
from rlhpc.contracts import Clock
from rlhpc.errors import JournalError
from rlhpc.files import sync_directory
from rlhpc.ownership import Fence
from rlhpc.types import Prompt

_NAME = re.compile(r"journal_(\d{6,})\.h5")
_MOST_BUFFERS = 512  # of one system call; the limit is 1,024


def journal_paths(directory: Path) -> list[Path]:
    """The journal files of a rollouts directory, in order.  Raises OSError."""
    names = sorted((int(match[1]), name) for name in os.listdir(directory) if (match := _NAME.fullmatch(name)))  # noqa: PTH208
    return [directory / name for _, name in names]


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
        """first_sequence: number of the next rollout.  Makes no file before there is something to write."""
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
                    self._fence.check()  # after the write: whoever takes over later will find it
                self._next_sequence += done
                records = records[done:]
                if records:
                    self._end_file()
        except OSError as error:
            if self._fence is not None:
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
        paths = journal_paths(self._directory)
        index = int(_NAME.fullmatch(paths[-1].name)[1]) + 1 if paths else 0  # type: ignore[index]
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
        self._used = Sizes()
        self._prompt_rows: dict[int, int] = {}  # group → its row in `prompts`

    def append(self, records: Sequence[JournalRecord]) -> int:
        """Write as many as there is room for; return their number once they are on disk.  Raises OSError."""
        rollout_rows, prompt_rows, text, prompts = list[bytes](), list[bytes](), list[bytes](), list[Prompt]()
        used, room, new_rows = self._used, self._layout.room, dict[int, int]()
        for record in records:
            rollout, before = record.scored.rollout, used
            group_id = rollout.group_id
            row, prompt = self._prompt_rows.get(group_id, new_rows.get(group_id)), None
            if row is None:
                row, prompt = used.prompts, encode_prompt(rollout.prompt, group_id, used)
                before = prompt.used
            encoded = encode_rollout(record, row, before)
            if not encoded.used.fits(room):
                break
            if prompt is not None:
                new_rows[group_id] = row
                prompts.append(rollout.prompt)
                prompt_rows.append(prompt.row)
                text.append(prompt.text)
            rollout_rows.append(encoded.row)
            text.append(encoded.text)
            used = encoded.used
        done = len(rollout_rows)
        if done:
            rollouts = [record.scored.rollout for record in records[:done]]
            self._write(
                {
                    "rollouts": [memoryview(b"".join(rollout_rows))],
                    "prompts": [memoryview(b"".join(prompt_rows))],
                    "prompt_token_ids": [prompt.token_ids.data for prompt in prompts],
                    "text": [memoryview(b"".join(text))],
                    **{name: [getattr(rollout, name).data for rollout in rollouts] for name in TOKEN_COLUMNS},
                }
            )
        self._used = used
        self._prompt_rows |= new_rows
        return done

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _write(self, columns: Mapping[str, Sequence[memoryview]]) -> None:
        for name, pieces in columns.items():
            write_at(self._descriptor, self._layout.place(name, self._used.of(name)), pieces)
        os.fdatasync(self._descriptor)


def write_at(descriptor: int, offset: int, pieces: Sequence[memoryview]) -> None:
    """Write pieces one after the other from a byte of a file on.  Raises OSError; then some may be written."""
    left = list(pieces)
    while left:
        now = left[:_MOST_BUFFERS]
        written = os.pwritev(descriptor, now, offset)
        offset += written
        del left[: len(now)]
        if written < sum([piece.nbytes for piece in now]):
            left = [*_behind(now, written), *left]


def _behind(pieces: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of pieces without their first bytes."""
    for index, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece.cast("B")[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= piece.nbytes
    return []


def make_file(path: Path, file_bytes: int, blocks: Sequence[tuple[int, bytes]], fence: Fence | None) -> int:
    """Make a file that is whole and on disk before it has its name; return a descriptor to write to it.

    Raises OSError; then there is no such file.
    """
    staging = path.parent if fence is None else fence.staging(path.parent)
    partial = staging / f"{path.name}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(descriptor, file_bytes)
        for offset, block in blocks:
            write_at(descriptor, offset, [memoryview(block)])
        os.fsync(descriptor)
        partial.rename(path)
        sync_directory(path.parent)
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return descriptor
