"""Append-only files of records: the format of rollouts, events and partial rollouts on disk.

    NAME_000000.log, NAME_000001.log …

    bytes 0–1023   "rlhpc log", newline, JSON of a FileHead, newline, its CRC32 as eight hexadecimal digits, zeros
    records        b"RLHP" or b"RLHS" │ crc32 u32 │ bytes u32 │ attempt u32 │ message, a multiple of 8 bytes

The checksum covers everything after it.  A message is a dataclass as transport/codec.py encodes it in one piece, with a
sequence number.  All numbers are little-endian.  The first 1,024 bytes are for people and for other versions: a file is
read even if they are damaged.
"RLHS" (synced) says that everything before it was on disk when it was written.  Every write begins with it; a record
without a message says it after a file's first records and at the end of a closed file.  Damage behind the last RLHS
is a write that a crash cut short, whose records were never reported as durable; any other damage came later.
Guarantees: records survive the death of this process and of its machine once `append` has returned.  A failed write
changes nothing that was durable, and the next write goes to the same place.  A damaged record costs itself alone: the
next whole one is found by its first four bytes, which begin at a multiple of 8.  No damaged record is returned.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.files import numbered_files, rename, sync_directory
from rlhpc.base.native import crc32
from rlhpc.base.ownership import Fence
from rlhpc.protocol.contracts import Clock
from rlhpc.protocol.errors import JournalError, ProtocolError
from rlhpc.transport.codec import Codec

SCHEMA = 2
MAGIC = b"rlhpc log\n"
HEAD_BYTES = 1024
MARK, SYNCED = b"RLHP", b"RLHS"  # neither a token id nor a log-probability looks like one of them
_LEAD = struct.Struct("<4s3I")  # mark, checksum, bytes of the message, attempt
_CRC = struct.Struct("<I")
_CRC_AT, _CRC_END = 4, 8
_MARK_WORD, _SYNCED_WORD = np.frombuffer(MARK + SYNCED, "<u4")
_MOST_BUFFERS = 512  # of one system call; the limit is 1,024


@dataclass(frozen=True, slots=True)
class FileHead:
    """Head of a log file: schema, kind, run, attempt."""

    kind: str
    run_name: str
    attempt: int  # of the run, that wrote it
    first: int = 0  # number of its first rollout in the run; 0: it is no file of rollouts
    created_unix_s: float = 0.0
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class LogKind:
    """A kind of log: file name, content in words, and types of its messages."""

    name: str  # of files
    content: str  # in words
    messages: tuple[type, ...]

    def paths(self, directory: Path) -> list[Path]:
        """The files in a directory, in order.  Raises OSError."""
        return [path for _, path in self.numbered(directory)]

    def numbered(self, directory: Path) -> list[tuple[int, Path]]:
        """(number, file), in order.  Raises OSError."""
        return numbered_files(directory, re.compile(rf"{self.name}_(\d{{6,}})\.log"))

    def path(self, directory: Path, number: int) -> Path:
        """The file with that number."""
        return directory / f"{self.name}_{number:06d}.log"


# --------------------------------------------------------------------------------------------------------------- writer


class FramedRecord(NamedTuple):
    """An encoded record: the pieces to write, in order."""

    head: bytearray
    pieces: Sequence[Any]
    num_bytes: int  # of all


class LogEncoder:
    """Makes records of messages.  One thread uses it."""

    def __init__(self, kind: LogKind, attempt: int) -> None:
        self._codec, self._attempt = Codec(kind.messages), attempt

    def encode(self, message: object, sequence: int) -> FramedRecord:
        """A record that shares memory with the message's arrays."""
        head = bytearray(_LEAD.size)
        pieces, num_bytes = self._codec.encode_whole(message, sequence, head)
        _LEAD.pack_into(head, 0, MARK, 0, num_bytes, self._attempt)
        crc = crc32(memoryview(head)[_CRC_END:])
        for piece in pieces:
            crc = crc32(piece, crc)
        _CRC.pack_into(head, _CRC_AT, crc)
        return FramedRecord(head, pieces, _LEAD.size + num_bytes)


def _one_write(records: Sequence[FramedRecord]) -> list[Any]:
    """The pieces of records for one write; the first record is marked SYNCED: everything before it is on disk."""
    if records:
        records[0].head[: len(SYNCED)] = SYNCED
    return [piece for record in records for piece in (record.head, *record.pieces)]


def _synced(attempt: int) -> bytes:
    """A SYNCED record without a message: everything before it is on disk."""
    lead = bytearray(_LEAD.pack(SYNCED, 0, 0, attempt))
    _CRC.pack_into(lead, _CRC_AT, crc32(memoryview(lead)[_CRC_END:]))
    return bytes(lead)


class LogWriter:
    """The only writer of an attempt's files of a kind.  One thread at a time."""

    def __init__(
        self,
        kind: LogKind,
        directory: Path,
        *,
        run_name: str,
        attempt: int,
        fence: Fence | None = None,
        wall_clock: Clock = time.time,
    ) -> None:
        """Create no file until `begin`."""
        self._kind, self._directory, self._fence, self._wall_clock = kind, directory, fence, wall_clock
        self._run_name, self._attempt = run_name, attempt
        self._descriptor: int | None = None
        self.num_bytes = 0  # of the file that are on disk; 0: none is open
        self._has_failed = False  # the last write failed: its records may stand behind those bytes

    def begin(self, number: int | None = None, first: int = 0, records: Sequence[FramedRecord] = ()) -> None:
        """Make a file that begins with these records; its number is `number`, or the one after the last file's.

        first: see FileHead.

        Raises JournalError (none of the records counts then), OwnershipLost.
        """
        self.close()
        with self.writing():
            self.refuse_if_lost()
            if number is None:
                files = self._kind.numbered(self._directory)
                number = files[-1][0] + 1 if files else 0
            head = FileHead(self._kind.name, self._run_name, self._attempt, first, self._wall_clock())
            block = b"".join([_head_block(head), *_one_write(records), _synced(self._attempt)])
            self._descriptor = make_file(self._kind.path(self._directory, number), block, self._fence)
            self.refuse_if_lost()
        self.num_bytes = len(block)

    def append(self, records: Sequence[FramedRecord]) -> None:
        """Write records behind those on disk; return once the new ones are on disk, too.

        Raises JournalError: the next call writes to the same place.  OwnershipLost: another attempt owns the run
        directory, and none of these records counts.
        """
        num_bytes = sum([record.num_bytes for record in records])
        with self.writing():
            if self._descriptor is None:
                raise OSError("there is no file to append to")
            self._has_failed = True
            write_at(self._descriptor, self.num_bytes, _one_write(records), num_bytes)
            os.fdatasync(self._descriptor)
            self.refuse_if_lost()  # after the write: a later owner will find it
        self._has_failed = False
        self.num_bytes += num_bytes

    def close(self) -> None:
        """Close the file.  Idempotent.

        After a failed write nothing more is written: another attempt may have read the records of the failed write.
        """
        if self._descriptor is not None:
            if not self._has_failed:
                with contextlib.suppress(OSError):  # without it, damage in the last write looks like a crash
                    os.pwrite(self._descriptor, _synced(self._attempt), self.num_bytes)
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
        self.num_bytes, self._has_failed = 0, False

    def refuse_if_lost(self) -> None:
        """Raise OwnershipLost if another attempt owns the run directory; OSError if the owner cannot be read."""
        if self._fence is not None:
            self._fence.check()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn OSErrors of the block into JournalErrors."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):  # the same disk may refuse this, too
                self.refuse_if_lost()  # the usual reason for a missing staging directory
            what = f"{self._directory}: {self._kind.content} cannot be written"
            raise JournalError(f"{what}: {error.strerror or error}") from error


def make_file(path: Path, content: bytes, fence: Fence | None) -> int:
    """Make a file that is complete and on disk before it gets its name; return a descriptor to write to it.

    Raises OSError; then there is no such file.
    """
    staging = path.parent if fence is None else fence.staging(path.parent)
    partial = staging / f"{path.name}.partial"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_at(descriptor, 0, [content], len(content))
        os.fsync(descriptor)
        rename(partial, path)
        sync_directory(path.parent)
    except OSError:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return descriptor


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


# --------------------------------------------------------------------------------------------------------------- reader


@dataclass(frozen=True, slots=True)
class LogContent:
    """The records of a file with a correct checksum, and the places of all other bytes."""

    path: Path
    head: FileHead
    places: list[tuple[int, int]]  # (first byte, end) of each record
    damage: list[tuple[int, int]]  # (first byte, end) of everything that is no record
    is_torn: bool  # whether all damage is within the last write, as when its writer died while writing
    _data: memoryview
    _first: int  # byte of the file at which the data begin
    _codec: Codec
    _is_verified: bool

    def messages(self) -> Iterator[tuple[int, Any]]:
        """(sequence number, message) of each record.  Raises JournalError: one is of another version."""
        for at, end in self.places:
            try:
                found = self.message(at, end)
            except JournalError:
                if self._is_verified:
                    raise
                continue  # half written
            yield found

    def message(self, at: int, end: int) -> tuple[int, Any]:
        """(sequence number, message) of the record at a place.  Raises JournalError: it is of another version."""
        try:
            return self._codec.decode_whole(self._data, at + _LEAD.size - self._first, end - self._first)
        except ProtocolError as error:
            why = f"{error.field}: {error.why}"
            raise JournalError(f"{self.path}, byte {at}: {why}; is it of another version of rlhpc?") from error


def damage_in_words(damage: Sequence[tuple[int, int]]) -> str:
    """Describe bytes of a file that are damaged: "bytes 1024 to 1100, 1200 to 1300"."""
    places = [f"{first} to {end}" for first, end in damage[:10]]
    return f"bytes {', '.join(places)}{', …' * (len(damage) > len(places))}"


def read_log(
    path: Path, kind: LogKind, *, start: int = 0, is_mapped: bool = False, is_verified: bool = True
) -> LogContent:
    """The undamaged records of a file, from a byte on at which a record begins.

    is_mapped: for callers that keep many files at once.  The verified copy is freed; arrays are views of the mapped
    file, whose pages the system reads on access and may evict.  The file may be deleted meanwhile.
    is_verified: False: checksums are not compared, and only the accessed bytes of a mapped file are read.
    Raises JournalError: the file is not a log of this kind, is of another version, or cannot be read.
    """
    with _opened(path) as descriptor:
        head = _read_head(path, descriptor, kind)
        first = max(start, HEAD_BYTES)
        mapped = _mapping(descriptor) if is_mapped else None
        data = _read_from(descriptor, first) if mapped is None or is_verified else mapped[first:]
        places, damage, synced = _find_records(data, first, is_verified=is_verified)
        if head is None:
            damage.insert(0, (0, HEAD_BYTES))
            head = FileHead(kind.name, "", _attempt_of(path, data, places, first))
        is_torn = bool(damage) and damage[0][0] >= synced
        if mapped is not None:
            data, first = mapped, 0
        return LogContent(path, head, places, damage, is_torn, data.data, first, Codec(kind.messages), is_verified)


def read_head(path: Path, kind: LogKind) -> FileHead:
    """Head of a file.  Raises as read_log, and if the head is damaged."""
    with _opened(path) as descriptor:
        head = _read_head(path, descriptor, kind)
    if head is None:
        raise JournalError(f"{path}: its first bytes are damaged: the checksum differs")
    return head


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Descriptor of an open file; JournalErrors of the block name the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error


def _head_block(head: FileHead) -> bytes:
    document = json.dumps(asdict(head)).encode()
    block = MAGIC + document + f"\n{crc32(document):08x}\n".encode()
    if len(block) > HEAD_BYTES:
        raise JournalError(f"the run's name is too long for a log: {len(block)} bytes in all")
    return block.ljust(HEAD_BYTES, b"\0")


def _read_head(path: Path, descriptor: int, kind: LogKind) -> FileHead | None:
    """Head of an open file; None if it is damaged."""
    block = os.pread(descriptor, HEAD_BYTES, 0)
    document, _, rest = block[len(MAGIC) :].partition(b"\n")
    if not block.startswith(MAGIC) or rest[:9] != f"{crc32(document):08x}\n".encode():
        return None
    facts = json.loads(document)
    if facts.get("schema") != SCHEMA:
        raise JournalError(f"{path} has schema {facts.get('schema')}; this version of rlhpc reads schema {SCHEMA}")
    if facts.get("kind") != kind.name:
        raise JournalError(f"{path} is a log of {facts.get('kind')}, expected {kind.name}")
    try:
        return FileHead(**facts)
    except TypeError as error:
        raise JournalError(f"{path}: its first bytes are incomplete: {error}") from error


def _attempt_of(path: Path, data: NDArray[np.uint8], places: Sequence[tuple[int, int]], first: int) -> int:
    """The attempt that wrote the first record, where the head of the file is damaged."""
    if not places:
        raise JournalError(f"{path} is not a log, or its first bytes are damaged")
    return int(_LEAD.unpack_from(data.data, places[0][0] - first)[3])


def _read_from(descriptor: int, start: int) -> NDArray[np.uint8]:
    """The bytes of a file from a place on."""
    # numpy's own memory: it asks for large pages, and faults on small ones cost as much as the reading.
    data = np.empty(max(0, os.fstat(descriptor).st_size - start), np.uint8)
    left, offset = data.data, start
    while left and (count := os.preadv(descriptor, [left[: 1 << 30]], offset)):
        left, offset = left[count:], offset + count
    data.flags.writeable = False
    return data[: len(data) - len(left)]


def _find_records(
    data: NDArray[np.uint8], start: int, *, is_verified: bool
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Find the records from byte `start` on, the bytes that are none, and the end of what was synced."""
    view, at, known, synced = data.data, 0, 0, 0  # known: the end of the last record
    places, damage = list[tuple[int, int]](), list[tuple[int, int]]()
    marks: Iterator[int] = iter(())
    while at + _LEAD.size <= len(view):
        mark, crc, length, _ = _LEAD.unpack_from(view, at)
        end = at + _LEAD.size + length
        is_whole = mark in (MARK, SYNCED) and length % 8 == 0 and end <= len(view)
        if is_whole and (not is_verified or crc32(view[at + _CRC_END : end]) == crc):
            if at > known:
                damage.append((start + known, start + at))
            if mark == SYNCED:
                synced = at
            if length:
                places.append((start + at, start + end))
            at = known = end
            continue
        if at == known:
            words = data[known : len(data) // 8 * 8].view("<u4")[::2]
            is_mark = (words[1:] == _MARK_WORD) | (words[1:] == _SYNCED_WORD)
            marks = iter((known + 8 * np.flatnonzero(is_mark) + 8).tolist())
        at = next(marks, len(view))
    if data[known:].any():  # zeros: the file's length was on disk before its bytes
        damage.append((start + known, start + len(data)))
    return places, damage, start + synced


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
