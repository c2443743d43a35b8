"""Rows of Parquet and Arrow files, a batch in memory at a time.

The only module that imports pyarrow, which takes longer than reading a small JSONL file.  In a table every object of a
column has the keys of all its objects, and null for a missing key.  Such nulls are left out; a null field of the row
itself stays, and so do nulls in objects with equal keys in files written here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow
import pyarrow.parquet

from rlhpc.protocol.errors import DataError

_NULLS_ARE_VALUES = {b"rlhpc": b"nulls in objects are values"}  # of a column whose objects all have the same keys


def parquet_rows(file: Path, content: bytes | None) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file; content: of a compressed file, unpacked, else None.  Raises DataError, OSError."""
    return _rows(file, "Parquet", lambda: pyarrow.parquet.ParquetFile(_source(file, content)).iter_batches())


def arrow_rows(file: Path, content: bytes | None) -> Iterator[dict[str, Any]]:
    """Rows of a stream, as of `datasets`, or of a file of batches; content: as above.  Raises DataError, OSError."""

    def batches() -> Iterator[Any]:
        try:
            yield from pyarrow.ipc.open_stream(_source(file, content))
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(_source(file, content))
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))

    return _rows(file, "Arrow", batches)


def open_zstandard(file: Path) -> BinaryIO:
    """Open the content of a .zst file.  Raises OSError."""
    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(file, compression="zstd")))


def _source(file: Path, content: bytes | None) -> Any:
    return pyarrow.memory_map(str(file)) if content is None else pyarrow.BufferReader(content)


def _rows(file: Path, what: str, batches: Callable[[], Iterator[Any]]) -> Iterator[dict[str, Any]]:
    try:
        for batch in batches():
            names = batch.schema.names
            if twice := [name for place, name in enumerate(names) if name in names[:place]]:
                raise DataError(f"{file}: two columns are called {twice[0]!r}; legal: a name of its own for each")
            columns = [_values(file, *each) for each in zip(batch.schema, batch.columns, strict=True)]
            yield from (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable {what} file: {error}") from error


def _values(file: Path, field: Any, column: Any) -> Sequence[Any]:
    """A column as Python values; times with nanoseconds, which Python lacks, as text.  Raises DataError."""
    try:
        values = cast(Sequence[Any], column.to_pylist())
    except (ValueError, OverflowError) as error:
        if pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_duration(column.type):
            return cast(Sequence[Any], column.cast(pyarrow.string()).to_pylist())
        raise DataError(f"{file}: column {field.name!r}, of type {column.type}, cannot be read: {error}") from error
    as_written = _as_written(column.type, keeps_nulls=_NULLS_ARE_VALUES.items() <= (field.metadata or {}).items())
    return values if as_written is None else [None if value is None else as_written(value) for value in values]


def _as_written(kind: Any, *, keeps_nulls: bool = False) -> Callable[[Any], Any] | None:
    """Function that restores the original form of a value that is not null; None if values need none.

    A float of 16 or 32 bits becomes the shortest decimal that it represents: 0.1, and not 0.10000000149011612.
    """
    if pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind):
        narrow = kind.to_pandas_dtype()
        return lambda value: float(str(narrow(value)))
    if pyarrow.types.is_struct(kind):
        fields = {field.name: _as_written(field.type, keeps_nulls=keeps_nulls) or _same for field in kind}
        return lambda value: {
            name: each if each is None else fields[name](each)
            for name, each in value.items()
            if keeps_nulls or each is not None
        }
    if pyarrow.types.is_map(kind):
        item = _as_written(kind.item_type, keeps_nulls=keeps_nulls)
        return item and (lambda value: [(key, each if each is None else item(each)) for key, each in value])
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _as_written(kind.storage_type, keeps_nulls=keeps_nulls)
    inner = getattr(kind, "value_type", None)
    each_as_written = None if inner is None else _as_written(inner, keeps_nulls=keeps_nulls)
    if each_as_written is None:
        return None
    if pyarrow.types.is_dictionary(kind) or pyarrow.types.is_run_end_encoded(kind):
        return each_as_written
    return lambda value: [each if each is None else each_as_written(each) for each in value]


def _same(value: Any) -> Any:
    return value


def as_parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as a Parquet file.  Raises ValueError for a field of several types, or values that would change."""
    names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes those of the first row only
    columns = {name: [row.get(name) for row in rows] for name in names}
    for name, cells in columns.items():
        if {int, float} <= {type(cell) for cell in cells}:
            raise ValueError(
                f"field {name!r} has whole numbers, and others that are not: all would be written as these"
            )
    return columns_as_parquet(columns)


def _field_of(name: str, column: Any, cells: Sequence[Any]) -> Any:
    """A field of the schema, marked if nulls in its objects are values.  Raises ValueError if only some are."""
    field = pyarrow.field(name, column.type)
    if not pyarrow.types.is_nested(column.type):
        return field
    for metadata in (_NULLS_ARE_VALUES, None):
        marked = field.with_metadata(metadata)
        again = _values(Path(name), marked, column)
        differ = [pair for pair in zip(cells, again, strict=True) if _spelled(pair[0]) != _spelled(pair[1])]
        if not differ:
            return marked
    raise ValueError(f"field {name!r}: {_spelled(differ[0][0])[:80]} would be read as {_spelled(differ[0][1])[:80]}")


def _spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def columns_as_parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    """Columns of equal lengths as a Parquet file; None is null.  Raises ValueError: a column has several types."""
    sink = pyarrow.BufferOutputStream()
    try:
        table = pyarrow.table(dict(columns))
        fields = [_field_of(name, table.column(name), cells) for name, cells in columns.items()]
        pyarrow.parquet.write_table(table.cast(pyarrow.schema(fields)), sink)
    except (pyarrow.ArrowException, OverflowError) as error:  # a column of numbers has 64 bits
        raise ValueError(str(error)) from error
    return bytes(sink.getvalue())
