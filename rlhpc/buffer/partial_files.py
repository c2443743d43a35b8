"""Running rollouts on disk, so that no death loses more of them than the last interval.

    rollouts/partials_000000.bin, partials_000001.bin …      records, one after the other:

    b"RLP1" │ crc32 u32 │ attempt u32 │ bytes u32 │ bytes before deflating u32 │ pieces (partial_codec.py)

The checksum covers all that follows it.  A file begins with everything known so far, then new pieces are appended; once
it has grown to several times its first size, the next file begins, and older ones are deleted: disk use is never much
more than the running rollouts.
Guarantees: a written piece survives the death of this process and of its machine; a damaged record costs its pieces and
those that continue them, and is never misread.  Nothing waits for these files: a failed write is given up, and the next
file begins with everything known then.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.buffer.journal_files import make_file, write_at
from rlhpc.buffer.partial_codec import PartialRollout, decode_partials, encode_partials, joined
from rlhpc.crc import crc32
from rlhpc.errors import JournalError
from rlhpc.files import numbered_files
from rlhpc.ownership import Fence

_NAME = re.compile(r"partials_(\d{6,})\.bin")
_MAGIC = b"RLP1"
_HEAD = struct.Struct("<4s4I")
_CRC_END = 8  # of magic and checksum
_TOKENS_A_RECORD = 1 << 20
LEAST_BYTES = 4 << 20  # minimum size of a file before the next one begins
GROWTH = 4  # and minimum growth, relative to its first size

Member = tuple[int, int]  # group, sample index


@dataclass(frozen=True, slots=True)
class PartialFile:
    """What a file holds."""

    path: Path
    partials: list[tuple[int, PartialRollout]]  # (attempt that wrote it, piece), in the order of writing
    damage: list[tuple[int, int]]  # (first byte, end) of everything that is not a whole record
    is_torn: bool  # whether the only damage is at the end, as when the writer died while writing


def partial_paths(directory: Path) -> list[Path]:
    """The files of a rollouts directory, in order.  Raises OSError."""
    return [path for _, path in numbered_files(directory, _NAME)]


def read_partial_file(path: Path) -> PartialFile:
    """Every whole record of a file.  Raises JournalError: it cannot be read, or is of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error
    partials, damage, at = list[tuple[int, PartialRollout]](), list[tuple[int, int]](), 0
    for begin, end, attempt, pieces in _records(path, data):
        if begin > at:
            damage.append((at, begin))
        partials += [(attempt, piece) for piece in pieces]
        at = end
    if any(data[at:]):  # zeros: a length that was on disk before the bytes
        damage.append((at, len(data)))
    return PartialFile(path, partials, damage, len(damage) == 1 and damage[0][1] == len(data))


def read_partials(directory: Path, first_attempt: int = 0) -> tuple[dict[Member, PartialRollout], list[str]]:
    """The last that was known of each member, as a piece from its first token on; and descriptions of what is damaged.

    Includes members that were finished later.  first_attempt: what earlier attempts wrote does not count.
    Raises OSError.
    """
    known, problems = dict[Member, PartialRollout](), list[str]()
    for path in partial_paths(directory):
        try:
            file = read_partial_file(path)
        except JournalError as error:
            if not path.exists():  # a newer file, perhaps not yet there at the first look, holds all of it
                return read_partials(directory, first_attempt)
            problems.append(str(error))
            continue
        if file.damage:
            where = ", ".join(f"{first} to {end}" for first, end in file.damage)
            problems.append(f"{path}: bytes {where} are damaged, or were being written when their writer died")
        for attempt, piece in file.partials:
            before = known.get((piece.group_id, piece.sample_index))
            tokens = before.tokens if before is not None else None
            if attempt >= first_attempt and piece.follows(tokens):
                known[piece.group_id, piece.sample_index] = PartialRollout(
                    piece.group_id, piece.sample_index, piece.prompt_id, 0, 0, joined(tokens, piece)
                )
    return known, problems


class PartialLog:
    """The only writer of an attempt's files.  One thread at a time."""

    def __init__(self, directory: Path, attempt: int, fence: Fence | None = None) -> None:
        """Creates no file until there is something to write."""
        self._directory, self._attempt, self._fence = directory, attempt, fence
        self._descriptor: int | None = None
        self._num_bytes = self._most_bytes = 0  # of the file

    @property
    def is_empty(self) -> bool:
        """Whether there is no file, not even of an earlier attempt.  Raises OSError."""
        return not partial_paths(self._directory)

    @property
    def wants_all(self) -> bool:
        """Whether `begin` is to be called next, with all that is known: there is no file, or it has grown too large."""
        return self._num_bytes >= self._most_bytes

    def append(self, pieces: Sequence[PartialRollout]) -> None:
        """Write pieces and return once they are on disk.

        Raises JournalError: they are given up, and `wants_all` holds.  OwnershipLost.
        """
        with self._writing():
            if self._descriptor is None:
                raise OSError("there is no file to append to")
            data = b"".join(self._records_of(pieces))
            write_at(self._descriptor, self._num_bytes, [memoryview(data)], len(data))
            os.fdatasync(self._descriptor)
            self._num_bytes += len(data)

    def begin(self, everything: Sequence[PartialRollout]) -> None:
        """Begin a file with all that is known, and delete older ones.  Raises as `append`."""
        with self._writing():
            self.close()
            files = numbered_files(self._directory, _NAME)
            path = self._directory / f"partials_{files[-1][0] + 1 if files else 0:06d}.bin"
            data = b"".join(self._records_of(everything))
            self._descriptor = make_file(path, len(data), [(0, data)], self._fence)
            self._num_bytes, self._most_bytes = len(data), max(LEAST_BYTES, GROWTH * len(data))
            self._delete([older for _, older in files])

    def discard(self) -> None:
        """Delete all files: nothing is running any more.  Raises as `append`."""
        with self._writing():
            self.close()
            self._delete(partial_paths(self._directory))

    def close(self) -> None:
        """Close the file.  Idempotent."""
        self._num_bytes = self._most_bytes = 0
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            if self._fence is not None:
                self._fence.check()
            yield
            if self._fence is not None:
                self._fence.check()  # after the write: a later owner will find it
        except OSError as error:
            self.close()
            if self._fence is not None:
                with contextlib.suppress(OSError):  # the same disk may refuse this, too
                    self._fence.check()  # the usual reason, where the staging directory is gone
            raise JournalError(
                f"{self._directory}: partial rollouts cannot be written: {error.strerror or error}"
            ) from error

    def _delete(self, paths: Sequence[Path]) -> None:
        if self._fence is not None:
            self._fence.check()
        for path in paths:
            path.unlink(missing_ok=True)

    def _records_of(self, pieces: Sequence[PartialRollout]) -> Iterator[bytes]:
        """Records of limited size each: a reader needs memory for one at a time."""
        for some in _cut(pieces):
            data, num_bytes = encode_partials(some)
            rest = struct.pack("<3I", self._attempt, len(data), num_bytes) + data
            yield _MAGIC + struct.pack("<I", crc32(rest)) + rest


def _cut(pieces: Sequence[PartialRollout]) -> list[list[PartialRollout]]:
    found, room = [list[PartialRollout]()], _TOKENS_A_RECORD
    for piece in pieces:
        if room <= 0:
            found.append([])
            room = _TOKENS_A_RECORD
        found[-1].append(piece)
        room -= len(piece.tokens.token_ids)
    return found


def _records(path: Path, data: bytes) -> Iterator[tuple[int, int, int, list[PartialRollout]]]:
    """(first byte, end, attempt, pieces) of every whole record.  Raises JournalError if one is not decodable."""
    at = data.find(_MAGIC)
    while 0 <= at <= len(data) - _HEAD.size:
        _, crc, attempt, length, num_bytes = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + length
        if end > len(data) or crc32(memoryview(data)[at + _CRC_END : end]) != crc:
            at = data.find(_MAGIC, at + 1)  # damaged, perhaps its length, too
            continue
        try:
            pieces = decode_partials(memoryview(data)[at + _HEAD.size : end], num_bytes)
        except ValueError as error:
            raise JournalError(f"{path}, byte {at}: {error}; is it of another version of rlhpc?") from error
        yield at, end, attempt, pieces
        at = data.find(_MAGIC, end)
