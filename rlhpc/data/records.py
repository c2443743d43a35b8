"""Read a dataset: JSONL or Parquet, a file or a directory of them.

Input: paths.  Output: Record.  Errors are DataErrors that name file and line, so that the user can correct them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhpc.errors import DataError

SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a dataset."""

    fields: dict[str, Any]
    source: str  # "train.jsonl:17", for messages; of Parquet it is the row

    def text(self, name: str) -> str:
        """A field as text for a prompt: a string, or a number in JSON's spelling.  Raises DataError otherwise."""
        return self._as_text(name, "data.prompt_template")

    def reference(self, name: str) -> str:
        """A field as a reference: text as it is, lists and objects (test cases) as JSON.  Raises DataError."""
        if isinstance(value := self.fields.get(name), list | dict):
            return json.dumps(value)
        return self._as_text(name, "data.reference_field")

    def whole(self) -> str:
        """All fields as JSON."""
        return json.dumps(self.fields, default=str)

    def number(self, name: str, key: str) -> float:
        """A field as a number; `key` of the run file names the field.  Raises DataError otherwise."""
        value = self._value(name, key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise DataError(f"{self.source}: field {name!r}, which {key} names, is {value!r}; legal: a number")

    def _value(self, name: str, key: str) -> Any:
        if name not in self.fields:
            has = ", ".join(map(repr, self.fields)) or "none"
            raise DataError(f"{self.source}: no field {name!r}, which {key} names; the record has {has}")
        return self.fields[name]

    def _as_text(self, name: str, key: str) -> str:
        """`key` of the run file names the field."""
        value = self._value(name, key)
        if isinstance(value, str):
            if not _is_unicode(value):
                raise DataError(f"{self.source}: field {name!r} holds half of a surrogate pair, which is no character")
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        raise DataError(f"{self.source}: field {name!r} is {_kind(value)}; legal: a string or a number")


def reference_of(text: str, reference_field: str) -> str:
    """The reference in what Record.whole() made; "" where the record has none."""
    record = Record(json.loads(text), "the record of a prompt")
    return record.reference(reference_field) if reference_field in record.fields else ""


def read_records(path: Path) -> list[Record]:
    """All records, files of a directory in the order of their names.

    Raises DataError: nothing there, not a format known here, malformed, or no record at all.
    """
    records = [record for file in _dataset_files(path) for record in _read_file(file)]
    if not records:
        raise DataError(f"data.path={path} holds no record")
    return records


def _dataset_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"data.path={path} holds no {' or '.join(SUFFIXES)} file; {_whats_in(path)}")
        return files
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.is_dir())
        raise DataError(f"data.path={path} does not exist; {_whats_in(parent)}")
    if path.suffix not in SUFFIXES:
        raise DataError(f"data.path={path}: legal are a {' or '.join(SUFFIXES)} file, or a directory of them")
    return [path]


def _read_file(file: Path) -> Iterator[Record]:
    try:
        yield from _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:  # bytes, so that a wrong encoding is found on its line
        for number, line in enumerate(lines, start=1):
            source = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                fields = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise DataError(f"{source}: not UTF-8: {error.reason} at byte {error.start}") from error
            except json.JSONDecodeError as error:
                raise DataError(f"{source}: malformed JSON: {error.msg} at column {error.colno}") from error
            if not text.strip():
                continue
            if not isinstance(fields, dict):
                raise DataError(f'{source}: the line is {_kind(fields)}; legal: an object, {{"question": …}}')
            yield Record(fields, source)


def _read_parquet(file: Path) -> Iterator[Record]:
    # Imported here because loading it takes longer than reading a small JSONL file.
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a readable Parquet file: {error}") from error
    for number, fields in enumerate(rows, start=1):
        yield Record(fields, f"{file}:{number}")


def _is_unicode(text: str) -> bool:
    """JSON can spell lone surrogates; neither tokenizers nor the wire can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _whats_in(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"{directory} holds {shown or 'nothing'}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
