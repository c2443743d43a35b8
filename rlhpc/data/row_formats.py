"""Read the rows of one file: JSON lines, a JSON array, CSV, TSV, Parquet, Arrow; plain, gzip or Zstandard.

Input: a file.  Output: (fields, number) of each row; the number is a line's, or the row's where there are no lines.
Errors are DataErrors that name file and line, so that the user can correct them.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlhpc.data.dataset_files import form_of
from rlhpc.errors import DataError
from rlhpc.files import is_lfs_pointer

Rows = Iterator[tuple[dict[str, Any], int]]
_LONGEST_CELL = 64 << 20  # characters of one value in CSV; the library's own bound is 128 KiB


def read_rows(file: Path) -> Rows:
    """Raises DataError: it cannot be read, is damaged, or not what its name says."""
    readers: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_document,
        ".csv": _separated,
        ".tsv": _separated,
        ".parquet": _parquet,
        ".arrow": _arrow,
    }
    try:
        if is_lfs_pointer(file):
            raise DataError(f"{file}: a pointer of Git LFS, not the data; fetch it: git lfs pull")
        yield from readers[form_of(file)](file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return cast(BinaryIO, gzip.open(file, "rb"))
    if file.suffix == ".zst":
        from rlhpc.data.arrow_tables import open_zstandard  # loading pyarrow takes a while

        return open_zstandard(file)
    return file.open("rb")


# ---------------------------------------------------------------------------------------------------------------- JSON


def _json_lines(file: Path) -> Rows:
    with _open(file) as lines:
        yield from json_lines(lines, str(file))


def json_lines(lines: Iterable[bytes], name: str) -> Rows:
    """Objects, a line each; blank lines are left out.  Bytes, so that a wrong encoding is found on its line.

    Raises DataError, which names the line.
    """
    for number, line in enumerate(lines, start=1):
        source = f"{name}:{number}"
        try:
            text = line.decode(
                "utf-8-sig" if number == 1 else "utf-8"
            ).rstrip()  # otherwise an error at its end is in column 1 of the next line
            fields = json.loads(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise DataError(f"{source}: not UTF-8: {error.reason} at byte {error.start}") from error
        except json.JSONDecodeError as error:
            if error.msg == "Extra data" and "\r" in text[: error.pos]:
                legal = "legal: a line feed at the end of each, as Linux and Windows write it"
                raise DataError(f"{name}: lines end in a carriage return alone; {legal}") from error
            damage = "; the line has NUL bytes, as after a crash or a sparse copy" if b"\0" in line else ""
            wrong = f"{source}: malformed JSON: {error.msg} at column {error.colno}{damage}"
            raise DataError(f"{wrong}{_habit(text, error)}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of levels
            raise DataError(f"{source}: JSON that cannot be read: {error}") from error
        if text.strip():
            yield _object(fields, source, "the line"), number


def _habit(text: str, error: json.JSONDecodeError) -> str:
    """What would be legal in place of what people write who have other forms of JSON in mind, "" if not known."""
    rest = text[error.pos :].lstrip()
    if not rest:  # also the last line of a copy that was cut off
        return (
            ", where the line ends; legal: one record a line, not over several as an indented one (`jq -c .` writes it "
            "so); or an array [{…}, {…}] in a file named .json"
        )
    if rest.startswith("'"):
        return "; legal: double quotes, as json.dumps writes them"
    if text.lstrip().startswith(("//", "/*", "#")):
        return "; legal: records alone, JSON has no comments"
    return "; legal: one record a line, with nothing behind it" if rest.startswith(",") else ""


def _json_document(file: Path) -> Rows:
    """An array of objects, an object with exactly one list (of objects), any other object, or JSON lines."""
    with _open(file) as whole:
        content = whole.read()
    try:
        text = content.decode("utf-8-sig")
        document = json.loads(text) if text.strip() else []
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(file)
            return
        raise DataError(f"{file}:{error.lineno}: malformed JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # as above
        raise DataError(f"{file}: JSON that cannot be read: {error}") from error
    if isinstance(document, dict) and len(lists := [each for each in document.values() if isinstance(each, list)]) == 1:
        document = lists[0]
    if isinstance(document, dict):
        document = [document]
    if not isinstance(document, list):
        raise DataError(f"{file}: the document is {kind(document)}; legal: an array of objects")
    for number, item in enumerate(document, start=1):
        yield _object(item, f"{file}:{number}", f"item {number} of the array"), number


def _object(value: Any, source: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        several = (
            "; an array of records is a file named .json" if isinstance(value, list) and what == "the line" else ""
        )
        raise DataError(f'{source}: {what} is {kind(value)}; legal: an object, {{"question": …}}{several}')
    return value


# ----------------------------------------------------------------------------------------------------- separated values


def _separated(file: Path) -> Rows:
    """The first line names the columns; every value is text."""
    csv.field_size_limit(_LONGEST_CELL)
    number = 1
    with _open(file) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter="\t" if form_of(file) == ".tsv" else ",", strict=True)
        try:
            columns = next(reader, [])
            _refuse_columns(columns, file)
            for cells in reader:
                number = reader.line_num
                if not cells:
                    continue
                if len(cells) != len(columns):
                    raise DataError(
                        f"{file}:{number}: {len(cells)} values; the first line names {len(columns)} columns"
                    )
                yield dict(zip(columns, cells, strict=True)), number
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 after line {number}: {error.reason}") from error
        except csv.Error as error:
            raise DataError(f"{file}:{reader.line_num}: malformed: {error}") from error


def _refuse_columns(columns: list[str], file: Path) -> None:
    for mark, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(columns) == 1 and mark in columns[0]:
            legal = "commas, or tabs in a .tsv file"
            raise DataError(f"{file}:1: one column, {columns[0]!r}; are its values separated by {name}? legal: {legal}")
    for place, name in enumerate(columns):
        if not name and place == 0 and len(columns) > 1:
            raise DataError(
                f"{file}:1: the first column has no name: an index, as pandas writes it? legal: a name for each; "
                "to_csv(…, index=False) leaves it out"
            )
        if not name or name in columns[:place]:
            raise DataError(f"{file}:1: column {place + 1} is called {name!r}; legal: a name of its own for each")


# --------------------------------------------------------------------------------------------------------------- tables


def _parquet(file: Path) -> Rows:
    from rlhpc.data.arrow_tables import parquet_rows  # loading pyarrow takes longer than reading a small JSONL file

    yield from ((fields, number) for number, fields in enumerate(parquet_rows(file, _unpacked(file)), start=1))


def _arrow(file: Path) -> Rows:
    from rlhpc.data.arrow_tables import arrow_rows  # as above

    yield from ((fields, number) for number, fields in enumerate(arrow_rows(file, _unpacked(file)), start=1))


def _unpacked(file: Path) -> bytes | None:
    """The content of a compressed table; None: a plain file, which is read directly."""
    if form_of(file) == file.suffix:
        return None
    with _open(file) as content:
        return content.read()


def kind(value: Any) -> str:
    """What a value is, for people: "a list", "null"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
