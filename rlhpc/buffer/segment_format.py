"""Lay groups out as flat columns, and read them back: a rollout segment without the file around it.

In this file: chunks, deflated; flat columns in an HDF5 file; groups as columns.

Input: ResolvedGroup.  Output: named numpy arrays; and the reverse.  README.md beside it is the description for
people; it changes with this file.  Ragged columns are values end to end with offsets, since HDF5's own variable-length
types are slow, are not compressed and do not survive a torn write.  Text is UTF-8 bytes in the same manner, so that NUL
and lone surrogates in a model's output are no special case.
Every row carries a CRC32 of its content.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from rlhpc.base.native import crc32
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.protocol.errors import SegmentError
from rlhpc.protocol.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Routes,
    ScoredRollout,
    TeacherScores,
    Verdict,
)

# ------------------------------------------------------------------------------------------------------ deflated chunks
#
# Chunks of a column as HDF5's filters shuffle and gzip would produce them, in a fraction of the time.
#
# Input: an array.  Output: the bytes of its chunks, which any HDF5 library reads with these two filters.
# Bytes that differ from entry to entry hardly compress: the two low bytes of token ids, all bytes of floats but the one
# with the exponent.  These are stored as they are.  zlib-ng compresses the others: runs of bytes for integers, byte
# frequencies for floats; neither has longer repeats.
#
# A chunk is one zlib stream (RFC 1950, 1951): its header, stored blocks, then blocks that begin with no history, and
# the checksum of all.


LEVEL = 1
_HEADER = b"\x78\x01"
_MOST_STORED = 0xFFFF  # bytes of a stored block
_STORED = struct.Struct("<BHH")  # 0: not the last block; length, its complement
_ADLER = struct.Struct(">I")
_STRATEGIES = {"i": zlib_ng.Z_RLE, "f": zlib_ng.Z_HUFFMAN_ONLY}  # by kind of dtype


def deflated_chunks(values: NDArray[Any], chunk: int) -> Iterator[bytes]:
    """The chunks of a column [N], `chunk` entries each; the last one is filled up with zeros."""
    for start in range(0, len(values), chunk):
        part = values[start : start + chunk]
        if len(part) < chunk:
            part = np.concatenate([part, np.zeros(chunk - len(part), values.dtype)])
        shuffled = np.ascontiguousarray(part.view(np.uint8).reshape(len(part), -1).T).reshape(-1)
        yield _deflated(shuffled, len(part) * _num_stored_planes(values.dtype), _STRATEGIES.get(values.dtype.kind, 0))


def _num_stored_planes(kind: np.dtype[Any]) -> int:
    """Number of bytes of an entry, the low ones first, that are stored uncompressed."""
    if kind.kind == "f":
        return kind.itemsize - 1
    return 2 if kind.kind == "i" and kind.itemsize == 4 else 0


def _deflated(data: NDArray[np.uint8], num_stored: int, strategy: int) -> bytes:
    """A zlib stream, its first bytes stored unless they are all alike."""
    if num_stored and (data[:num_stored] == data[0]).all():  # e.g. of versions
        num_stored, strategy = 0, zlib_ng.Z_RLE
    pieces: list[Any] = [_HEADER]
    for start in range(0, num_stored, _MOST_STORED):
        block = data[start : min(start + _MOST_STORED, num_stored)]
        pieces += (_STORED.pack(0, len(block), len(block) ^ 0xFFFF), block)
    deflater = zlib_ng.compressobj(LEVEL, zlib_ng.DEFLATED, -15, 9, strategy)
    pieces += (deflater.compress(data[num_stored:]), deflater.flush(), _ADLER.pack(zlib_ng.adler32(data)))
    return b"".join(pieces)


# --------------------------------------------------------------------------------------------------------- hdf5 columns
#
# Write flat columns to an HDF5 file in memory, and read them back, through HDF5's low-level API.
#
# Input: named arrays and attributes; the bytes of a file, or its path.  Output: the bytes of a file; arrays.
# A segment has almost forty columns, for which h5py's high-level API takes four times as long.


Attributes = Mapping[str, str | int | float]

_CHUNK_BYTES = 1 << 20  # HDF5's chunk cache holds one chunk of this size
_COMPRESS_FROM_BYTES = 4096


def hdf5_image(
    columns: Mapping[str, NDArray[Any]], attributes: Attributes, *, user_block_bytes: int, compress: bool
) -> io.BytesIO:
    """A file with these columns, "table/name", and attributes; the user block is zeros.

    compress: compress columns of 4 KiB or more.
    """
    image, creation = io.BytesIO(), h5p.create(h5p.FILE_CREATE)
    creation.set_userblock(user_block_bytes)
    file = h5f.create(_name_of(image), h5f.ACC_TRUNC, creation, _access(image))
    try:
        for key, value in attributes.items():
            _write_attribute(file, key, value)
        tables = {table: h5g.create(file, table.encode()) for table in dict.fromkeys(map(_table_of, columns))}
        for column, values in columns.items():
            _write_column(tables[_table_of(column)], column.partition("/")[2], values, compress)
    finally:
        file.close()
    return image


def _access(image: io.BytesIO | None = None) -> h5p.PropFAID:
    """image: the file in memory; None: the file is on a file system."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    if image is None:
        access.set_file_locking(False, True)  # sealed files do not change; NFS and Lustre often refuse locks
    else:
        # libver "earliest": files of the latest format that were not closed in order refuse to open.
        access.set_libver_bounds(h5f.LIBVER_EARLIEST, h5f.LIBVER_LATEST)
        access.set_fileobj_driver(h5fd.fileobj_driver, image)
    return access


def _name_of(image: io.BytesIO) -> bytes:
    return repr(image).encode()  # as h5py does it: two open files need different names


def _table_of(column: str) -> str:
    return column.partition("/")[0]


def _write_attribute(file: h5f.FileID, key: str, value: str | float) -> None:
    kind = h5py.string_dtype() if isinstance(value, str) else np.asarray(value).dtype
    values = np.array(value, kind)
    h5a.create(file, key.encode(), _type_of(kind), _scalar()).write(values)


def _write_column(table: h5g.GroupID, name: str, values: NDArray[Any], compress: bool) -> None:
    values = np.ascontiguousarray(values)
    is_compressed = compress and values.nbytes >= _COMPRESS_FROM_BYTES
    chunk = min(len(values), max(1, _CHUNK_BYTES // values.itemsize)) if is_compressed else 0
    kind = _type_of(values.dtype)
    dataset = h5d.create(table, name.encode(), kind, h5s.create_simple((len(values),)), _layout(chunk))
    if chunk:
        for index, data in enumerate(deflated_chunks(values, chunk)):
            dataset.write_direct_chunk((index * chunk,), data)
    elif len(values):
        dataset.write(h5s.ALL, h5s.ALL, values, kind)


@lru_cache(maxsize=32)  # types are immutable, and making one takes as long as writing a column
def _type_of(kind: np.dtype[Any]) -> h5t.TypeID:
    return h5t.py_create(kind, logical=True)


@lru_cache(maxsize=1)
def _scalar() -> h5s.SpaceID:
    return h5s.create(h5s.SCALAR)


@lru_cache(maxsize=32)
def _layout(chunk: int) -> h5p.PropDCID:
    """Layout of a dataset; chunk: entries per chunk; 0: contiguous and not compressed."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    if chunk:
        creation.set_chunk((chunk,))
        creation.set_shuffle()
        creation.set_deflate(1)  # tells readers the filter; segment_format.py compresses
    return creation


class Hdf5Columns:
    """An open file.  Missing items raise KeyError, malformed ones OSError, ValueError, TypeError…"""

    def __init__(self, file: h5f.FileID) -> None:
        self._file = file

    def attributes(self) -> dict[str, Any]:
        """All attributes of the file: str and numpy numbers."""
        names: list[bytes] = []
        h5a.iterate(self._file, lambda name, *_: names.append(name))
        return {name.decode(): self.attribute(name.decode()) for name in names}

    def attribute(self, name: str) -> Any:
        """One attribute of the file."""
        attribute = h5a.open(self._file, name.encode())
        values = np.empty(attribute.shape, attribute.dtype)
        attribute.read(values)
        value: Any = values[()]
        return value.decode() if isinstance(value, bytes) else value

    def names(self, table: str) -> list[str]:
        """Names of a table's columns, as "table/name"."""
        return [f"{table}/{name.decode()}" for name in h5g.open(self._file, table.encode())]

    def column(self, name: str) -> NDArray[Any]:
        """All entries of a column."""
        dataset = h5d.open(self._file, name.encode())
        values = np.empty(dataset.shape, dataset.dtype)
        if values.size:
            dataset.read(h5s.ALL, h5s.ALL, values)
        return values


@contextmanager
def opened_image(data: bytes) -> Iterator[Hdf5Columns]:
    """A file in memory."""
    image = io.BytesIO(data)
    file = h5f.open(_name_of(image), h5f.ACC_RDONLY, _access(image))
    try:
        yield Hdf5Columns(file)
    finally:
        file.close()


@contextmanager
def opened_file(path: Path) -> Iterator[Hdf5Columns]:
    """A file that does not change any more."""
    file = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, _access())
    try:
        yield Hdf5Columns(file)
    finally:
        file.close()


# ------------------------------------------------------------------------------------------------------ segment columns


Columns = dict[str, NDArray[Any]]

SCHEMA = 5
READABLE = (2, 3, 4, SCHEMA)  # earlier files lack some columns, LATER_COLUMNS
ROLLOUT_TEXTS = ("detail", "reward_parts", "token_rewards")
TEXT_COLUMNS = ("groups/task", "groups/reference", *(f"rollouts/{name}" for name in ROLLOUT_TEXTS))
WORD_COLUMNS = ("groups/drop_reason", "rollouts/verdict", "rollouts/finish_reason")  # fixed-length ASCII

_TOKEN_COLUMNS: dict[str, np.dtype[Any]] = {
    "rollouts/token_ids": np.dtype("<i4"),
    "rollouts/behaviour_logprobs": np.dtype("<f4"),
    "rollouts/versions": np.dtype("<i4"),
    "rollouts/loss_mask": np.dtype("u1"),
}
_TEACHER_COLUMNS: dict[str, tuple[np.dtype[Any], str]] = {  # dtype, the offsets that cut it up
    "rollouts/teacher_logprobs": (np.dtype("<f4"), "rollouts/teacher_offsets"),
    "rollouts/teacher_top_ids": (np.dtype("<i4"), "rollouts/teacher_top_offsets"),
    "rollouts/teacher_top_logprobs": (np.dtype("<f4"), "rollouts/teacher_top_offsets"),
}
TEACHER_COLUMNS = (*_TEACHER_COLUMNS, "rollouts/teacher_offsets", "rollouts/teacher_top_offsets")
ROUTE_COLUMNS = ("rollouts/routes", "rollouts/routes_offsets")
ROW_COLUMNS = ("rollouts/row_starts", "rollouts/row_offsets")
LATER_COLUMNS = (  # column → its first schema
    dict.fromkeys(TEACHER_COLUMNS, 3) | dict.fromkeys(ROUTE_COLUMNS, 4) | dict.fromkeys(ROW_COLUMNS, 5)
)
_ROUTES_HEAD = struct.Struct("<3i")  # tokens, layers and experts a token, before the packed ids
_GROUP_SCALARS: dict[str, np.dtype[Any]] = {
    "group_id": np.dtype("<i8"),
    "prompt_id": np.dtype("<i8"),
    "admitted_version": np.dtype("<i8"),
    "consumed_step": np.dtype("<i8"),
    "attempts": np.dtype("<i4"),
    "drop_reason": np.dtype("S16"),
    "trained_version": np.dtype("<i8"),
    "applied": np.dtype("<i1"),
    "group_size": np.dtype("<i4"),
}
_ROLLOUT_SCALARS: dict[str, np.dtype[Any]] = {
    "group_id": np.dtype("<i8"),
    "sample_index": np.dtype("<i4"),
    "reward": np.dtype("<f8"),
    "verdict": np.dtype("S16"),
    "finish_reason": np.dtype("S16"),
}


@dataclass(frozen=True, slots=True)
class _GroupRow:
    """One row of groups/, as it is stored."""

    group_id: int
    prompt_id: int
    admitted_version: int
    consumed_step: int
    attempts: int
    drop_reason: bytes
    num_rollouts: int
    prompt_token_ids: NDArray[Any]
    task: bytes
    reference: bytes
    trained_version: int
    applied: int
    group_size: int

    def crc32(self) -> int:
        numbers = (self.group_id, self.prompt_id, self.admitted_version, self.consumed_step, self.attempts)
        crc = crc32(struct.pack("<7q", *numbers, self.num_rollouts, len(self.prompt_token_ids)))
        crc = crc32(self.prompt_token_ids.data, crc)
        crc = _crc_of_texts(crc, self.drop_reason, self.task, self.reference)
        return crc32(struct.pack("<3q", self.trained_version, self.applied, self.group_size), crc)


@dataclass(frozen=True, slots=True)
class _RolloutRow:
    """One row of rollouts/, as it is stored."""

    group_id: int
    sample_index: int
    reward: float
    verdict: bytes
    finish_reason: bytes
    detail: bytes
    reward_parts: bytes
    token_rewards: bytes
    tokens: tuple[NDArray[Any], ...]  # in the order of _TOKEN_COLUMNS
    teacher: tuple[NDArray[Any], ...]  # in the order of _TEACHER_COLUMNS; empty: no teacher was asked
    routes: NDArray[Any]  # uint8; empty: it has none
    row_starts: NDArray[Any]

    def crc32(self) -> int:
        crc = crc32(struct.pack("<3qd", self.group_id, self.sample_index, len(self.tokens[0]), self.reward))
        for values in self.tokens:
            crc = crc32(values.data, crc)
        texts = (self.verdict, self.finish_reason, self.detail, self.reward_parts, self.token_rewards)
        crc = _crc_of_texts(crc, *texts)
        if len(self.teacher[0]):  # without a teacher as in schema 2
            crc = crc32(struct.pack("<2q", *map(len, self.teacher[:2])), crc)
            for values in self.teacher:
                crc = crc32(values.data, crc)
        crc = crc32(self.routes.data, crc) if len(self.routes) else crc  # without routes as in schema 3
        if len(self.row_starts):  # of one row as in schema 4
            crc = crc32(self.row_starts.data, crc32(struct.pack("<q", len(self.row_starts)), crc))
        return crc


def to_columns(groups: Sequence[ResolvedGroup]) -> Columns:
    """Return the columns "groups/…" and "rollouts/…" of these groups, in their order.

    Raises SegmentError when the arrays of a rollout differ in length, its rows do not fit, or its teacher's numbers are
    not finite.
    """
    group_rows = [_group_row(resolved) for resolved in groups]
    rows = [_rollout_row(member) for resolved in groups for member in resolved.group.members]
    columns: Columns = {
        f"groups/{name}": np.array([getattr(row, name) for row in group_rows], dtype=dtype)
        for name, dtype in _GROUP_SCALARS.items()
    }
    columns["groups/rollout_offsets"] = _offsets(row.num_rollouts for row in group_rows)
    columns["groups/prompt_offsets"] = _offsets(len(row.prompt_token_ids) for row in group_rows)
    columns["groups/prompt_token_ids"] = _concatenate([row.prompt_token_ids for row in group_rows], np.dtype("<i4"))
    columns["groups/crc32"] = np.array([row.crc32() for row in group_rows], dtype="<u4")
    for name, dtype in _ROLLOUT_SCALARS.items():
        columns[f"rollouts/{name}"] = np.array([getattr(row, name) for row in rows], dtype=dtype)
    columns["rollouts/token_offsets"] = _offsets(len(row.tokens[0]) for row in rows)
    for position, (name, dtype) in enumerate(_TOKEN_COLUMNS.items()):
        columns[name] = _concatenate([row.tokens[position] for row in rows], dtype)
    for position, (name, (dtype, offsets)) in enumerate(_TEACHER_COLUMNS.items()):
        columns[name] = _concatenate([row.teacher[position] for row in rows], dtype)
        columns[offsets] = _offsets(len(row.teacher[position]) for row in rows)
    columns["rollouts/routes"] = _concatenate([row.routes for row in rows], np.dtype("u1"))
    columns["rollouts/routes_offsets"] = _offsets(len(row.routes) for row in rows)
    columns["rollouts/row_starts"] = _concatenate([row.row_starts for row in rows], np.dtype("<i4"))
    columns["rollouts/row_offsets"] = _offsets(len(row.row_starts) for row in rows)
    columns["rollouts/crc32"] = np.array([row.crc32() for row in rows], dtype="<u4")
    for column in TEXT_COLUMNS:
        table, name = column.split("/")
        texts = [getattr(row, name) for row in (group_rows if table == "groups" else rows)]
        columns[column] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        columns[f"{column}_offsets"] = _offsets(map(len, texts))
    return columns


def empty_column(name: str, num_rollouts: int) -> NDArray[Any]:
    """Return what a column of LATER_COLUMNS holds if no rollout has such numbers, as in files of earlier schemas."""
    if name.endswith("_offsets"):
        return np.zeros(num_rollouts + 1, "<i8")
    if name == "rollouts/row_starts":
        return np.empty(0, "<i4")
    return np.empty(0, _TEACHER_COLUMNS[name][0] if name in _TEACHER_COLUMNS else "u1")


def teachers_of(columns: Columns) -> Iterator[tuple[int, TeacherScores]]:
    """Iterate over (row of rollouts/, what its teacher has said), without checking it.  Raises ValueError."""
    said = [_slices(columns[name], columns[cut]) for name, (_, cut) in _TEACHER_COLUMNS.items()]
    for row, arrays in enumerate(zip(*said, strict=True)):
        if any(map(len, arrays)):
            yield row, TeacherScores(*arrays)


def routes_of(columns: Columns) -> Iterator[tuple[int, Routes]]:
    """Iterate over (row of rollouts/, its routes), without unpacking them.  Raises ValueError."""
    for row, data in enumerate(_slices(columns["rollouts/routes"], columns["rollouts/routes_offsets"])):
        if (routes := _to_routes(data)) is not None:
            yield row, routes


def _to_routes(data: NDArray[Any]) -> Routes | None:
    if not len(data):
        return None
    if len(data) < _ROUTES_HEAD.size:
        raise ValueError(f"routes of {len(data)} bytes")
    num_tokens, num_layers, top_k = _ROUTES_HEAD.unpack_from(data.data)
    return Routes(num_tokens, num_layers, top_k, data[_ROUTES_HEAD.size :])


def _of_routes(routes: Routes | None) -> NDArray[np.uint8]:
    if routes is None:
        return np.empty(0, np.uint8)
    head = _ROUTES_HEAD.pack(routes.num_tokens, routes.num_layers, routes.top_k)
    return np.concatenate([np.frombuffer(head, np.uint8), routes.packed])


def from_columns(columns: Columns, source: str) -> list[ResolvedGroup]:
    """Undo to_columns, verifying the CRC32 of every row; arrays of the result are views of the columns.

    Raises SegmentError naming `source` and the row.
    """
    members = list(_read_rollouts(columns, source))
    texts = {name: texts_of(columns, f"groups/{name}") for name in ("task", "reference")}
    prompts = _slices(columns["groups/prompt_token_ids"], columns["groups/prompt_offsets"])
    borders = pairwise(columns["groups/rollout_offsets"].tolist())
    resolved = []
    for index, (prompt_token_ids, (first, last)) in enumerate(zip(prompts, borders, strict=True)):
        row = _GroupRow(
            num_rollouts=last - first,
            prompt_token_ids=prompt_token_ids,
            **_row_fields(columns, "groups", _GROUP_SCALARS, texts, index),
        )
        if row.crc32() != columns["groups/crc32"][index]:
            raise SegmentError(f"{source}: groups row {index} (group {row.group_id}): checksum differs")
        resolved.append(_to_resolved(row, members[first:last]))
    return resolved


def texts_of(columns: Columns, name: str) -> list[bytes]:
    """The entries of a text column, as UTF-8 bytes."""
    return [values.tobytes() for values in _slices(columns[name], columns[f"{name}_offsets"])]


def decode_text(text: bytes) -> str:
    """Undo encode_text."""
    return text.decode("utf-8", "surrogatepass")


def encode_text(text: str) -> bytes:
    """UTF-8, as in text columns; lone surrogates are allowed."""
    return text.encode("utf-8", "surrogatepass")


def encode_token_rewards(token_rewards: Mapping[int, float]) -> bytes:
    """JSON, token → reward, every number to its last bit; nothing if there are none."""
    return json.dumps(token_rewards).encode() if token_rewards else b""


def decode_token_rewards(text: bytes) -> dict[int, float]:
    """Undo encode_token_rewards."""
    return {int(place): value for place, value in json.loads(text).items()} if text else {}


def _group_row(resolved: ResolvedGroup) -> _GroupRow:
    group, prompt = resolved.group, resolved.group.prompt
    return _GroupRow(
        group_id=group.group_id,
        prompt_id=prompt.prompt_id,
        admitted_version=group.admitted_version,
        consumed_step=resolved.consumed_step,
        attempts=resolved.attempts,
        drop_reason=(resolved.drop_reason or "").encode(),
        num_rollouts=len(group.members),
        prompt_token_ids=np.ascontiguousarray(prompt.token_ids, dtype="<i4"),
        task=encode_text(prompt.task),
        reference=encode_text(prompt.reference),
        trained_version=resolved.trained_version,
        applied=-1 if resolved.applied is None else int(resolved.applied),
        group_size=resolved.group_size,
    )


def _rollout_row(scored: ScoredRollout) -> _RolloutRow:
    rollout = scored.rollout
    arrays = (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    if len({len(array) for array in arrays}) != 1:
        raise SegmentError(
            f"rollout {rollout.group_id}:{rollout.sample_index}: token_ids, behaviour_logprobs, versions and loss_mask "
            f"have lengths {[len(array) for array in arrays]}"
        )
    if fault := rollout.row_fault:
        raise SegmentError(f"rollout {rollout.group_id}:{rollout.sample_index}: {fault}")
    kinds = [dtype for dtype, _ in _TEACHER_COLUMNS.values()]
    said: tuple[Any, ...] = ((), (), ())
    if scored.teacher is not None:
        if fault := scored.teacher.fault(len(rollout.token_ids)):
            raise SegmentError(f"rollout {rollout.group_id}:{rollout.sample_index}: {fault}")
        said = scored.teacher.logprobs, scored.teacher.flat_top_ids, scored.teacher.flat_top_logprobs
    return _RolloutRow(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        reward=float(scored.reward),
        verdict=scored.verdict.encode(),
        finish_reason=rollout.finish_reason.encode(),
        detail=encode_text(scored.detail),
        reward_parts=encode_text(json.dumps(scored.reward_parts)),
        token_rewards=encode_token_rewards(scored.token_rewards),
        tokens=tuple(np.ascontiguousarray(a, dtype=t) for a, t in zip(arrays, _TOKEN_COLUMNS.values(), strict=True)),
        teacher=tuple(np.ascontiguousarray(a, dtype=t).reshape(-1) for a, t in zip(said, kinds, strict=True)),
        routes=_of_routes(rollout.routes),
        row_starts=np.ascontiguousarray(rollout.row_starts, dtype="<i4"),
    )


def _read_rollouts(columns: Columns, source: str) -> Iterable[_RolloutRow]:
    texts = {name: texts_of(columns, f"rollouts/{name}") for name in ROLLOUT_TEXTS}
    offsets = columns["rollouts/token_offsets"]
    tokens = zip(*(_slices(columns[name], offsets) for name in _TOKEN_COLUMNS), strict=True)
    said = zip(*(_slices(columns[name], columns[cut]) for name, (_, cut) in _TEACHER_COLUMNS.items()), strict=True)
    chosen = _slices(columns["rollouts/routes"], columns["rollouts/routes_offsets"])
    begin = _slices(columns["rollouts/row_starts"], columns["rollouts/row_offsets"])
    for index, (arrays, teacher, routes, row_starts) in enumerate(zip(tokens, said, chosen, begin, strict=True)):
        fields = _row_fields(columns, "rollouts", _ROLLOUT_SCALARS, texts, index)
        row = _RolloutRow(tokens=arrays, teacher=teacher, routes=routes, row_starts=row_starts, **fields)
        if row.crc32() != columns["rollouts/crc32"][index]:
            where = f"rollout {row.group_id}:{row.sample_index}"
            raise SegmentError(f"{source}: rollouts row {index} ({where}): checksum differs")
        yield row


def _row_fields(
    columns: Columns, table: str, scalars: Iterable[str], texts: dict[str, list[bytes]], index: int
) -> dict[str, Any]:
    numbers = {name: columns[f"{table}/{name}"][index].item() for name in scalars}
    return numbers | {name: values[index] for name, values in texts.items()}


def _to_resolved(row: _GroupRow, members: Sequence[_RolloutRow]) -> ResolvedGroup:
    prompt = Prompt(row.prompt_id, decode_text(row.task), row.prompt_token_ids, decode_text(row.reference))
    return ResolvedGroup(
        group=RolloutGroup(
            group_id=row.group_id,
            prompt=prompt,
            admitted_version=row.admitted_version,
            members=tuple(_to_scored(member, row.prompt_id) for member in members),
        ),
        consumed_step=row.consumed_step,
        drop_reason=DropReason(row.drop_reason.decode()) if row.drop_reason else None,
        attempts=row.attempts,
        trained_version=row.trained_version,
        applied=None if row.applied < 0 else bool(row.applied),
        group_size=row.group_size,
    )


def _to_scored(row: _RolloutRow, prompt_id: int) -> ScoredRollout:
    token_ids, behaviour_logprobs, versions, loss_mask = row.tokens
    return ScoredRollout(
        rollout=Rollout(
            group_id=row.group_id,
            sample_index=row.sample_index,
            prompt_id=prompt_id,
            token_ids=token_ids,
            behaviour_logprobs=behaviour_logprobs,
            versions=versions,
            loss_mask=loss_mask.view(np.bool_),
            finish_reason=FinishReason(row.finish_reason.decode()),
            routes=_to_routes(row.routes),
            row_starts=row.row_starts,
        ),
        reward=row.reward,
        verdict=Verdict(row.verdict.decode()),
        reward_parts=json.loads(row.reward_parts),
        detail=decode_text(row.detail),
        token_rewards=decode_token_rewards(row.token_rewards),
        teacher=TeacherScores(*row.teacher) if len(row.teacher[0]) else None,
    )


def _crc_of_texts(crc: int, *texts: bytes) -> int:
    for text in texts:  # the length first: "ab", "c" is not "a", "bc"
        crc = crc32(text, crc32(struct.pack("<q", len(text)), crc))
    return crc


def _offsets(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype("<i8")


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _slices(values: NDArray[Any], offsets: NDArray[Any]) -> list[NDArray[Any]]:
    """Cut a ragged column up.  Raises ValueError when the offsets are not a partition of the values."""
    borders = offsets.tolist()
    if borders[:1] != [0] or borders[-1] != len(values) or any(a > b for a, b in pairwise(borders)):
        raise ValueError("offsets do not partition the values without gap or overlap")
    return [values[first:last] for first, last in pairwise(borders)]
