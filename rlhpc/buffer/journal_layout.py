"""The byte layout of a journal file: an HDF5 file of fixed size whose metadata are written once.

    bytes 0–4095      user block: the offsets of all columns, as JSON with a checksum
    metadata          HDF5's own, never touched again
    columns           contiguous, zeros until something is written

Rollouts are appended by plain writes into the columns' bytes, so that any HDF5 tool can open the file at any instant,
and a full disk is an ordinary error.  A row of `rollouts` or `prompts` counts if its checksum matches, which covers the
data that the row refers to; our reader uses only the user block and the rows, and never the HDF5 library.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import h5py
import numpy as np

from rlhpc.base.native import crc32
from rlhpc.protocol.errors import JournalError

SCHEMA = 1
USER_BLOCK_BYTES = 4096
MAGIC = b"rlhpc journal\n"
_BLOCK_BYTES = 4096

ROLLOUT_ROW = np.dtype(
    [
        ("sequence", "<i8"),  # number of the rollout in the run, from 1; 0: nothing was written here
        ("group_id", "<i8"),
        ("prompt_id", "<i8"),
        ("token_start", "<i8"),  # its tokens are [token_start, token_start + num_tokens) of the four token columns
        ("text_start", "<i8"),  # detail, then reward_parts and token_rewards as JSON, in `text`
        ("reward", "<f8"),
        ("sample_index", "<i4"),
        ("admitted_version", "<i4"),
        ("num_tokens", "<i4"),
        ("prompt_row", "<i4"),  # in `prompts` of this file
        ("detail_bytes", "<i4"),
        ("reward_parts_bytes", "<i4"),
        ("token_rewards_bytes", "<i4"),
        ("verdict", "S16"),
        ("finish_reason", "S16"),
        ("crc32", "<u4"),
    ]
)
PROMPT_ROW = np.dtype(
    [
        ("group_id", "<i8"),
        ("prompt_id", "<i8"),
        ("token_start", "<i8"),  # in `prompt_token_ids`
        ("text_start", "<i8"),  # task, then reference, in `text`
        ("num_tokens", "<i4"),
        ("task_bytes", "<i4"),
        ("reference_bytes", "<i4"),
        ("crc32", "<u4"),
    ]
)
TOKEN_COLUMNS = {"token_ids": "<i4", "behaviour_logprobs": "<f4", "versions": "<i4", "loss_mask": "u1"}
COLUMNS: Mapping[str, np.dtype[Any]] = {
    "rollouts": ROLLOUT_ROW,
    "prompts": PROMPT_ROW,
    "prompt_token_ids": np.dtype("<i4"),
    "text": np.dtype("u1"),
    **{name: np.dtype(kind) for name, kind in TOKEN_COLUMNS.items()},
}


class Sizes(NamedTuple):
    """Entries of each kind: what a file has room for, what is used of it, or what one rollout needs."""

    rollouts: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def plus(self, other: Sizes) -> Sizes:
        """What both need."""
        return Sizes(
            self.rollouts + other.rollouts,
            self.prompts + other.prompts,
            self.prompt_tokens + other.prompt_tokens,
            self.tokens + other.tokens,
            self.text_bytes + other.text_bytes,
        )

    def fits(self, room: Sizes) -> bool:
        """Whether a file with that room can hold this much."""
        return (  # spelt out for speed: it runs for every rollout
            self.rollouts <= room.rollouts
            and self.prompts <= room.prompts
            and self.prompt_tokens <= room.prompt_tokens
            and self.tokens <= room.tokens
            and self.text_bytes <= room.text_bytes
        )

    def or_more(self, other: Sizes) -> Sizes:
        """The larger one of each."""
        return Sizes(*map(max, self, other))

    def of(self, column: str) -> int:
        """Entries of a column."""
        kinds = {"prompt_token_ids": self.prompt_tokens, "text": self.text_bytes}
        kinds |= {"rollouts": self.rollouts, "prompts": self.prompts}
        return kinds.get(column, self.tokens)


DEFAULT_ROOM = Sizes(rollouts=8192, prompts=8192, prompt_tokens=1 << 19, tokens=1 << 21, text_bytes=1 << 22)


@dataclass(frozen=True, slots=True)
class JournalLayout:
    """The offsets of the columns of one file, and its metadata."""

    room: Sizes
    offsets: Mapping[str, int]  # byte of each column's first entry
    file_bytes: int
    first_sequence: int  # of the rollouts in it
    attempt: int  # of the run, that wrote it

    def place(self, column: str, index: int) -> int:
        """Byte at which an entry of a column begins."""
        return self.offsets[column] + index * COLUMNS[column].itemsize


class NewFile(NamedTuple):
    """What a file is made of."""

    layout: JournalLayout
    blocks: tuple[tuple[int, bytes], ...]  # (offset, bytes) of everything that is not zero


def new_file(room: Sizes, *, run_name: str, attempt: int, first_sequence: int, created_unix_s: float) -> NewFile:
    """A file without rollouts."""
    metadata = _metadata(room, run_name, attempt)
    layout = JournalLayout(room, metadata.offsets, metadata.file_bytes, first_sequence, attempt)
    block = _user_block(layout, run_name, created_unix_s)
    return NewFile(layout, ((0, block), *metadata.blocks))


class _Metadata(NamedTuple):
    offsets: Mapping[str, int]
    file_bytes: int
    blocks: tuple[tuple[int, bytes], ...]  # behind the user block


@functools.lru_cache(maxsize=8)  # HDF5 takes a millisecond for it, and it is the same for all files of an attempt
def _metadata(room: Sizes, run_name: str, attempt: int) -> _Metadata:
    """What HDF5 writes into a new file, and where its columns are."""
    image = _SparseImage()
    # libver "earliest": files of the latest format that were not closed in order refuse to open.  Columns begin at a
    # page, so that no page is shared by two columns, or by a column and metadata.
    with h5py.File(
        image,
        "w",
        libver="earliest",
        userblock_size=USER_BLOCK_BYTES,
        alignment_threshold=_BLOCK_BYTES,
        alignment_interval=_BLOCK_BYTES,
    ) as file:
        file.attrs["schema"], file.attrs["run_name"], file.attrs["attempt"] = SCHEMA, run_name, attempt
        offsets = {name: _allocate(file, name, room.of(name)) for name in COLUMNS}
    return _Metadata(offsets, image.size, tuple(image.runs()))


def read_layout(user_block: bytes) -> JournalLayout:
    """The layout that the first bytes of a file describe.  Raises JournalError if damaged, or not a journal's."""
    if not user_block.startswith(MAGIC):
        raise JournalError("is not a journal of rollouts")
    document, _, rest = user_block[len(MAGIC) :].partition(b"\n")
    if rest[:9] != f"{crc32(document):08x}\n".encode():
        raise JournalError("its first bytes are damaged: the checksum differs")
    try:
        facts = json.loads(document)
        if facts["schema"] != SCHEMA:
            raise JournalError(f"has schema {facts['schema']}; this version of rlhpc reads schema {SCHEMA}")
        room, offsets = Sizes(**facts["room"]), {name: int(facts["offsets"][name]) for name in COLUMNS}
        numbers = (int(facts[name]) for name in ("file_bytes", "first_sequence", "attempt"))
        return JournalLayout(room, offsets, *numbers)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"its first bytes are incomplete: {error!r}") from error


def _allocate(file: h5py.File, name: str, length: int) -> int:
    """Make a contiguous dataset; return the byte of the file at which it begins."""
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    space = h5py.h5s.create_simple((max(1, length),))
    kind = h5py.h5t.py_create(COLUMNS[name], logical=True)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, creation)
    return int(dataset.get_offset())


def _user_block(layout: JournalLayout, run_name: str, created_unix_s: float) -> bytes:
    facts = {
        "schema": SCHEMA,
        "run_name": run_name,
        "attempt": layout.attempt,
        "first_sequence": layout.first_sequence,
        "created_unix_s": created_unix_s,
        "room": layout.room._asdict(),
        "offsets": layout.offsets,
        "file_bytes": layout.file_bytes,
    }
    document = json.dumps(facts).encode()
    block = MAGIC + document + f"\n{crc32(document):08x}\n".encode()
    if len(block) > USER_BLOCK_BYTES:
        raise JournalError(f"the run's name is too long for a journal: {len(block)} bytes in all")
    return block.ljust(USER_BLOCK_BYTES, b"\0")


class _SparseImage(io.RawIOBase):
    """A file in memory of which only the blocks exist that were written: HDF5 writes metadata, columns stay zero."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self._position = 0
        self._blocks: dict[int, bytearray] = {}

    def runs(self) -> list[tuple[int, bytes]]:
        """(offset, bytes) of all blocks, adjacent ones joined."""
        found: list[tuple[int, bytearray]] = []
        for index in sorted(self._blocks):
            offset, block = index * _BLOCK_BYTES, self._blocks[index][: self.size - index * _BLOCK_BYTES]
            if found and found[-1][0] + len(found[-1][1]) == offset:
                found[-1][1].extend(block)
            else:
                found.append((offset, bytearray(block)))
        return [(offset, bytes(run)) for offset, run in found]

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, also beyond the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The next byte to read or write."""
        return self._position

    def truncate(self, size: int | None = None) -> int:
        """HDF5 makes files longer by this, never shorter."""
        self.size = max(self.size, self._position if size is None else size)
        return self.size

    def write(self, data: Any) -> int:
        """Write at the position."""
        view = memoryview(data).cast("B")
        for index, start, part in _cut(self._position, len(view)):
            block = self._blocks.setdefault(index, bytearray(_BLOCK_BYTES))
            block[start : start + part.stop - part.start] = view[part]
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def readinto(self, data: Any) -> int:
        """Read at the position; what was never written is zero."""
        view = memoryview(data).cast("B")
        count = max(0, min(len(view), self.size - self._position))
        for index, start, part in _cut(self._position, count):
            block = self._blocks.get(index, bytes(_BLOCK_BYTES))
            view[part] = block[start : start + part.stop - part.start]
        self._position += count
        return count


def _cut(position: int, count: int) -> Iterator[tuple[int, int, slice]]:
    """(block, first byte in it, part of the data) for a range of bytes."""
    done = 0
    while done < count:
        index, start = divmod(position + done, _BLOCK_BYTES)
        length = min(_BLOCK_BYTES - start, count - done)
        yield index, start, slice(done, done + length)
        done += length
