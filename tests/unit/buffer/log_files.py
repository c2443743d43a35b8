"""Logs that tests write anew, and records in which they turn a bit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rlhpc.buffer.log import LogEncoder, LogKind, LogWriter, read_head, read_log


def place_of(path: Path, kind: LogKind, index: int) -> tuple[int, int]:
    """First byte and end of a whole record, by its place in the file."""
    return read_log(path, kind).places[index]


def flip_in_record(path: Path, kind: LogKind, index: int) -> None:
    """Turn a bit in the middle of a record."""
    first, end = place_of(path, kind, index)
    flip_at(path, (first + end) // 2)


def flip_at(path: Path, place: int) -> None:
    """Turn a bit of a byte."""
    with path.open("r+b") as file:
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 1]))


def reopen(path: Path) -> None:
    """Take the record away that closed a file, as if its process had been killed."""
    os.truncate(path, path.stat().st_size - 16)


def write_anew(path: Path, kind: LogKind, messages: Iterable[object]) -> None:
    """Write a file that exists anew, with other messages, also of types that the kind has not; numbers from 1."""
    head, messages = read_head(path, kind), list(messages)
    wider = replace(kind, messages=tuple(dict.fromkeys((*kind.messages, *map(type, messages)))))
    number = int(path.stem.rpartition("_")[2])
    path.unlink()
    writer = LogWriter(kind, path.parent, run_name=head.run_name, attempt=head.attempt)
    encoder = LogEncoder(wider, head.attempt)
    writer.begin(number, head.first)
    writer.append([encoder.encode(message, place) for place, message in enumerate(messages, start=1)])
    writer.close()
