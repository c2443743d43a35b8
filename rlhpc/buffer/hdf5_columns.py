"""Write flat columns to an HDF5 file in memory, and read them back, through HDF5's low-level API.

Input: named arrays and attributes; the bytes of a file, or its path.  Output: the bytes of a file; arrays.
A segment has thirty columns, for which h5py's high-level API takes four times as long.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t
from numpy.typing import NDArray

from rlhpc.buffer.deflated_chunks import deflated_chunks

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
    """How a dataset is stored; chunk: entries per chunk; 0: contiguous and not compressed."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    if chunk:
        creation.set_chunk((chunk,))
        creation.set_shuffle()
        creation.set_deflate(1)  # tells readers the filter; deflated_chunks.py compresses
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
