"""Read back what wandb has written: its package reports success on a full disk, too.

Input: a .wandb file, which is a log of records (the log format of LevelDB: blocks of 32 KiB, a head of seven bytes a
piece) after seven bytes of its own; a record is one of wandb's protobuf messages.  Output: these.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAGIC, _FILE_HEAD = b":W&B", 7
_BLOCK = 32_768
_HEAD = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _LAST = 1, 4


def records_of(file: Path) -> Iterator[Any]:
    """Whole ones, in order; a file that was cut off ends with the last of these.  Raises OSError."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, part = file.read_bytes(), _FILE_HEAD, b""
    if not data.startswith(_MAGIC):
        return
    while at + _HEAD.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left
            continue
        _, length, kind = _HEAD.unpack_from(data, at)
        at += _HEAD.size + length
        if kind == 0 or at > len(data):
            return
        part += data[at - length : at]
        if kind in (_WHOLE, _LAST):
            yield messages.Record.FromString(part)
            part = b""


def num_steps_in(file: Path) -> int:
    """Rows of its history.  Raises OSError."""
    return sum(record.WhichOneof("record_type") == "history" for record in records_of(file))
