"""The files of a dataset, in order, and the rows that they hold.

In this file: writing records; the files of a dataset; their rows, as JSON, as separated values, as tables.

Input: a path, a split.  Output: files.  A directory may hold files side by side, a directory per split, or the
output of save_to_disk of `datasets` (dataset_dict.json, state.json).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from rlhpc.base.files import is_lfs_pointer, write_atomically
from rlhpc.base.near_names import near_hint
from rlhpc.config.tables import COMPRESSIONS
from rlhpc.data.tasks import TASK_FILE, files_of_tasks, is_task_file, record_of
from rlhpc.protocol.errors import DataError

# -------------------------------------------------------------------------------------------------------- record writer
#
# Write records as JSON lines or Parquet, whole or not at all.
#
# Input: fields.  Output: a file.

WRITTEN = (".jsonl", ".parquet")


def write_records(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in the format of the suffix.  Raises DataError for values that Parquet has no column for, OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        write_atomically(file, b"".join(map(_line, rows)))
        return
    from rlhpc.data.arrow_tables import as_parquet  # loading pyarrow takes a while

    try:
        write_atomically(file, as_parquet(rows))
    except ValueError as error:
        raise DataError(f"{file}: a column of Parquet has one type: {error}; legal: .jsonl") from error


def _line(row: dict[str, Any]) -> bytes:
    """One record as a line; half of a surrogate pair, which UTF-8 cannot encode, becomes a JSON escape."""
    try:
        return json.dumps(row, default=str, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=str).encode() + b"\n"


# -------------------------------------------------------------------------------------------------------- dataset files

FORMS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
ALL = "all"  # as a split
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "config.json")  # as hubs have them, beside data/ too
_STRING_OR_INTEGER = re.compile(r'"(?:\\.|[^"\\])*"|(\d+)')
_SHARD = re.compile(r"(\w+)-[0-9]{5}-of-[0-9]{5}\.")  # of a split, as `datasets` names its files
_SPLIT = re.compile(r"(train|training|validation|valid|val|dev|eval|test)(?![A-Za-z0-9])")
_CANONICAL = {
    "training": "train",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


def form_of(file: Path) -> str:
    """The suffix of a file's format, without that of the compression; "" for an unknown format."""
    suffix = Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix
    return suffix if suffix in FORMS else ""


def split_of(file: Path) -> str:
    """Split in a shard's name; for other files "train", "validation" or "test" if the name begins so, else "".

    Splits keep their whole names: train_sft and train_prefs of a dataset are not two parts of train.
    """
    found = _SHARD.match(file.name) or _SPLIT.match(file.name)
    return _CANONICAL.get(found[1], found[1]) if found else ""


def dataset_files(path: Path, split: str = "") -> list[Path]:
    """The files of a dataset, in the order of their names.

    Raises DataError: no file, no known format, no such split, or several splits and none is chosen.
    """
    if path.is_dir():
        return files_of_tasks(path) or _files_of_directory(path, split)
    if not path.exists():
        parent = next(p for p in path.absolute().parents if p.is_dir())
        raise DataError(f"data.path={path} does not exist; {_whats_in(parent)}{_meant(path, parent)}{_remedy(path)}")
    if not form_of(path):
        raise DataError(f"data.path={path}: legal: a file of {_forms()}, or a directory of them")
    if split not in ("", ALL):
        raise DataError(f"data.split={split!r}: data.path={path} is one file; legal: leave it out, or a directory")
    return [path]


def _files_of_directory(path: Path, split: str) -> list[Path]:
    if (path / "dataset_dict.json").is_file():
        return _saved_splits(path, split)
    if (path / "state.json").is_file() and "_data_files" in (state := _read_json(path / "state.json")):
        return _saved_dataset(path, state)
    there = [file for file in sorted(path.iterdir()) if form_of(file) and file.is_file() and file.name[0] not in "._"]
    found = [file for file in there if file.name not in _DESCRIPTIONS]
    # Beside data in another format, JSON documents are descriptions: dataset_infos.json, config.json.
    files = [file for file in found if form_of(file) != ".json"] or found
    if not files:
        return _deeper(path, split)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file), []).append(file)
    return [file for name in _chosen(path, split, sorted(by_split)) for file in by_split[name]]


def _deeper(path: Path, split: str) -> list[Path]:
    """Files of a directory per split, or of data/, as in a snapshot of a dataset from a hub."""
    splits = sorted(each for each in path.iterdir() if each.is_dir() and split_of(each))
    if splits:
        chosen = _chosen(path, split, sorted({*map(split_of, splits)}))
        return [file for each in splits if split_of(each) in chosen for file in dataset_files(each, ALL)]
    if (path / "data").is_dir():
        return _files_of_directory(path / "data", split)
    raise DataError(f"data.path={path} holds no file of {_forms()}; {_whats_in(path)}{_below(path)}")


def _below(path: Path) -> str:
    """The directories below that hold data, as the configurations of a dataset of a hub do; "" for none."""
    below = [each for each in sorted(path.iterdir()) if each.is_dir() and any(map(form_of, each.iterdir()))]
    return f"; legal: data.path={' or '.join(map(str, below))}" if below else ""


def _saved_splits(path: Path, split: str) -> list[Path]:
    names = [str(name) for name in _read_json(path / "dataset_dict.json").get("splits", ())]
    files = []
    for name in _chosen(path, split, names):
        state = path / name / "state.json"
        if not state.is_file():
            raise DataError(f"{path / 'dataset_dict.json'} names the split {name!r}, and {state} does not exist")
        files += _saved_dataset(state.parent, _read_json(state))
    return files


def _saved_dataset(directory: Path, state: Mapping[str, Any]) -> list[Path]:
    if state.get("_indices_data_files"):
        raise DataError(f"{directory / 'state.json'}: saved with an index of rows; save flatten_indices() of it")
    files = [directory / str(each["filename"]) for each in state["_data_files"]]
    for file in files:
        if not file.is_file():
            raise DataError(f"{directory / 'state.json'} names {file.name}, which does not exist")
    return files


def _chosen(path: Path, split: str, names: list[str]) -> list[str]:
    """Splits to read: the only one, all, or the requested one."""
    named = [name for name in names if name]
    if split == ALL:
        return names
    if not split:
        if len(named) > 1 or (named and len(names) > 1):
            others = "" if len(named) > 1 else ", and files of none"
            raise DataError(
                f"data.path={path} has the splits {', '.join(named)}{others}; data.split says which is meant, "
                f'"{ALL}" means every file'
            )
        return names
    wanted = split if split in named else _CANONICAL.get(split, split)
    if wanted not in named:
        has = f"has the splits {', '.join(named)}" if named else "has no files named after a split"
        raise DataError(f"data.split={split!r}: data.path={path} {has}{near_hint(split, named)}")
    return [wanted]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{file} does not hold a JSON object")
    return document


def _forms() -> str:
    return f"{', '.join(FORMS[:-1])} or {FORMS[-1]} (plain, {' or '.join(COMPRESSIONS)})"


def _meant(path: Path, parent: Path) -> str:
    return near_hint(path.name, [each.name for each in parent.iterdir()]) if parent == path.absolute().parent else ""


def _remedy(path: Path) -> str:
    """Return advice for a path that is a pattern, a list, the name of a dataset on a hub, or an address."""
    if set("*?[]{},") & set(str(path)):
        return (
            "; patterns and lists are not expanded; legal: one file, a directory, of which every file is read (or "
            "those of data.split), or a table [[data]] for each file"
        )
    if path.absolute().parent.is_dir():
        return ""
    return (
        "; legal: files of this machine (download a dataset of a hub first: hf download NAME --repo-type dataset "
        "--local-dir DIRECTORY)"
    )


def _whats_in(directory: Path) -> str:
    names = sorted(entry.name + "/" * entry.is_dir() for entry in directory.iterdir())
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"{directory} holds {shown or 'nothing'}"


# ---------------------------------------------------------------------------------------------------------- row formats
#
# Read the rows of one file: JSON lines, a JSON array, CSV, TSV, Parquet, Arrow; plain, gzip or Zstandard.
#
# Input: a file.  Output: (fields, number) of each row; the number is that of the line, or of the row in formats
# without.  Errors are DataErrors that name file and line, so that the user can correct them.

Rows = Iterator[tuple[dict[str, Any], int]]
_LONGEST_CELL = 64 << 20  # characters of one value in CSV; the library's own bound is 128 KiB


def read_rows(file: Path) -> Rows:
    """Yield the rows of a file.  Raises DataError: it cannot be read, is damaged, or does not match its suffix."""
    readers: dict[str, Callable[[Path], Rows]] = {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json_document,
        ".csv": _separated,
        ".tsv": _separated,
        ".parquet": _parquet,
        ".arrow": _arrow,
    }
    if is_task_file(file):
        if file.name == TASK_FILE:
            yield record_of(file), 1
        return
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
    """Objects, one per line; blank lines are left out.  Takes bytes, so that a wrong encoding is found on its line.

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
            raise DataError(f"{source}: {_encoding(error)}") from error
        except json.JSONDecodeError as error:
            if number == 1 and _is_utf16(line):
                raise DataError(f"{source}: {_UTF16}") from error
            if error.msg == "Extra data" and "\r" in text[: error.pos]:
                legal = "legal: a line feed at the end of each, as Linux and Windows write it"
                raise DataError(f"{name}: lines end in a carriage return alone; {legal}") from error
            damage = "; the line has NUL bytes, as after a crash or a sparse copy" if b"\0" in line else ""
            wrong = f"{source}: {_malformed(error)}{damage}"
            raise DataError(f"{wrong}{_habit(text, error)}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source}: {_excess(error)}") from error
        if text.strip():
            yield _object(fields, source, "the line"), number


_UTF16 = "UTF-16; legal: UTF-8 (iconv -f utf-16 -t utf-8 FILE > OTHER)"


def _encoding(error: UnicodeDecodeError) -> str:
    """Say what a text that is not UTF-8 may be, and how to make it so."""
    if _is_utf16(error.object):
        return _UTF16
    remedy = "legal: UTF-8 (iconv -f latin1 -t utf-8 FILE > OTHER, if it is Latin-1)"
    return f"not UTF-8: {error.reason} at byte {error.start}; {remedy}"


def _is_utf16(start: bytes) -> bool:
    """True for the first bytes of a text in UTF-16: its mark, or a Latin letter, which has a zero byte."""
    return start[:2] in (b"\xff\xfe", b"\xfe\xff") or (
        len(start) > 2 and start[:2].count(0) == 1 == start[2:4].count(0)
    )


def _malformed(error: json.JSONDecodeError) -> str:
    """ "malformed JSON: …", with the column; some of the library's messages end in "at", for a place."""
    return f"malformed JSON: {error.msg.removesuffix(' at')} at column {error.colno}"


def _habit(text: str, error: json.JSONDecodeError) -> str:
    """Advice on a common mistake in JSON lines (indentation, single quotes, comments, commas), "" for any other."""
    rest = text[error.pos :].lstrip()
    if not rest:  # also the last line of a truncated copy
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
        raise DataError(f"{file}: {_encoding(error)}") from error
    except json.JSONDecodeError as error:
        if _is_utf16(content):
            raise DataError(f"{file}: {_UTF16}") from error
        if error.msg == "Extra data":
            yield from _json_lines(file)
            return
        raise DataError(f"{file}:{error.lineno}: {_malformed(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}{_line_of_excess(text, error)}: {_excess(error)}") from error
    if isinstance(document, dict):
        _refuse_several(document, file)
        lists = [each for each in document.values() if isinstance(each, list)]
        document = lists[0] if len(lists) == 1 else [document]
    if not isinstance(document, list):
        raise DataError(f"{file}: the document is {kind(document)}; legal: an array of objects")
    for number, item in enumerate(document, start=1):
        yield _object(item, f"{file}:{number}", f"item {number} of the array"), number


def _excess(error: ValueError | RecursionError) -> str:
    """Reason why Python reads no JSON that is well formed: an integer of thousands of digits, thousands of levels."""
    if isinstance(error, RecursionError):
        return "lists and objects within one another, deeper than Python reads; legal: some hundred levels"
    return (
        f"an integer of more than {sys.get_int_max_str_digits():,} digits; legal: fewer, or the number as a "
        'string, "123…"'
    )


def _line_of_excess(text: str, error: ValueError | RecursionError) -> str:
    """ ":LINE" of the integer that has too many digits; "" for too many levels."""
    if isinstance(error, RecursionError):
        return ""
    parts = _STRING_OR_INTEGER.finditer(text)
    starts = (each.start(1) for each in parts if len(each[1] or "") > sys.get_int_max_str_digits())
    return next((f":{text.count(chr(10), 0, start) + 1}" for start in starts), "")


def _refuse_several(document: dict[str, Any], file: Path) -> None:
    """Raise DataError for several arrays of records in one document: of which a run trains, it would have to guess.

    An object with messages is a record, also beside tools.
    """
    arrays = {
        name: value
        for name, value in document.items()
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
    }
    if len(arrays) > 1 and not any({"role", "from"} & value[0].keys() for value in arrays.values()):
        raise DataError(
            f"{file}: holds {len(arrays)} arrays of objects, {', '.join(map(repr, arrays))}; legal: one, or a file for "
            "each; a single record goes into a file named .jsonl"
        )


def _object(value: Any, source: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        several = (
            "; an array of records is a file named .json" if isinstance(value, list) and what == "the line" else ""
        )
        raise DataError(f'{source}: {what} is {kind(value)}; legal: an object, {{"question": …}}{several}')
    return value


# ----------------------------------------------------------------------------------------------------- separated values


def _separated(file: Path) -> Rows:
    """Rows of a CSV or TSV file: the first line names the columns; every value is text."""
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
                        f"{file}:{number}: {len(cells)} value{'s' * (len(cells) != 1)}; the first line names "
                        f"{len(columns)} column{'s' * (len(columns) != 1)}"
                    )
                yield dict(zip(columns, cells, strict=True)), number
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: after line {number}: {_encoding(error)}") from error
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
    """Type of a value, for people: "a list", "null"."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "an integer",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")
