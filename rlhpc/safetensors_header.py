"""The header of a safetensors file: its tensors and their positions.

Input: a file.  Output: shapes, dtypes and byte ranges by name.  The numbers are not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REAL_DTYPES = ("F64", "F32", "F16", "BF16")  # of weights that are trained; others are packed or scaled numbers
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors library accepts


class NotSafetensors(Exception):
    """What is wrong with a file, without its name."""


@dataclass(frozen=True)
class StoredTensor:
    """Its bytes are begin … end − 1 of the file."""

    shape: list[int]
    dtype: str  # as the file spells it: F32, BF16, I8, …
    begin: int
    end: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Tensors by name, in the order of the header.  Raises NotSafetensors, OSError."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise NotSafetensors(f"{size:,} bytes that are not a safetensors file")
        header = content.read(length)
    try:
        entries = {str(name): entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return {name: _stored(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise NotSafetensors(f"its header is not that of a safetensors file: {error!r}") from error


def _stored(entry: dict[str, Any], data_begin: int) -> StoredTensor:
    begin, end = (data_begin + int(offset) for offset in entry["data_offsets"])
    return StoredTensor([*map(int, entry["shape"])], str(entry["dtype"]), begin, end)
