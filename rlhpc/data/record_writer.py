"""Write records as JSON lines or Parquet, whole or not at all.

Input: fields.  Output: a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.errors import DataError
from rlhpc.files import write_atomically

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
    """As people read it; half of a surrogate pair, which UTF-8 has not, as JSON spells it."""
    try:
        return f"{json.dumps(row, default=str, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(row, default=str)}\n".encode()
