"""Rows of Parquet and Arrow files, a batch in memory at a time.

The module that imports pyarrow, which takes longer than reading a small JSONL file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from rlhpc.errors import DataError


def parquet_rows(file: Path, content: bytes | None) -> Iterator[dict[str, Any]]:
    """content: what a compressed file contains, else None.  Raises DataError, OSError."""
    return _rows(file, "Parquet", lambda: pyarrow.parquet.ParquetFile(_source(file, content)).iter_batches())


def arrow_rows(file: Path, content: bytes | None) -> Iterator[dict[str, Any]]:
    """A stream, as `datasets` writes it, or a file of batches; content: as above.  Raises DataError, OSError."""

    def batches() -> Iterator[Any]:
        try:
            yield from pyarrow.ipc.open_stream(_source(file, content))
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(_source(file, content))
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))

    return _rows(file, "Arrow", batches)


def open_zstandard(file: Path) -> BinaryIO:
    """What is in a .zst file.  Raises OSError."""
    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(file, compression="zstd")))


def _source(file: Path, content: bytes | None) -> Any:
    return pyarrow.memory_map(str(file)) if content is None else pyarrow.BufferReader(content)


def _rows(file: Path, what: str, batches: Callable[[], Iterator[Any]]) -> Iterator[dict[str, Any]]:
    try:
        for batch in batches():
            names = batch.schema.names
            if twice := [name for place, name in enumerate(names) if name in names[:place]]:
                raise DataError(f"{file}: two columns are called {twice[0]!r}; legal: a name of its own for each")
            columns = [_values(file, name, column) for name, column in zip(names, batch.columns, strict=True)]
            yield from (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable {what} file: {error}") from error


def _values(file: Path, name: str, column: Any) -> Sequence[Any]:
    """Python's, of a column; times that Python has none for, between two microseconds, as text.  Raises DataError.

    A number of 16 or 32 bits is the shortest one that it stands for: 0.1, and not 0.10000000149011612.
    """
    try:
        values = cast(Sequence[Any], column.to_pylist())
    except (ValueError, OverflowError) as error:
        if pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_duration(column.type):
            return cast(Sequence[Any], column.cast(pyarrow.string()).to_pylist())
        raise DataError(f"{file}: column {name!r}, of type {column.type}, cannot be read: {error}") from error
    if pyarrow.types.is_float16(column.type) or pyarrow.types.is_float32(column.type):
        narrow = column.type.to_pandas_dtype()
        return [value if value is None else float(str(narrow(value))) for value in values]
    return values


def as_parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """A Parquet file.  Raises ValueError where values of a field are of several types."""
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes those of the first row only
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name, cells in columns.items():
        if {int, float} <= {type(cell) for cell in cells}:
            raise ValueError(
                f"field {name!r} has whole numbers, and others that are not: all would be written as these"
            )
    return columns_as_parquet(columns)


def columns_as_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """A Parquet file of columns of equal lengths; None is null.  Raises ValueError: a column has several types."""
    sink = pyarrow.BufferOutputStream()
    try:
        pyarrow.parquet.write_table(pyarrow.table(dict(columns)), sink)
    except (pyarrow.ArrowException, OverflowError) as error:  # a column of numbers has 64 bits
        raise ValueError(str(error)) from error
    return bytes(sink.getvalue())
