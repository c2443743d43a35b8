"""Size and checksum by which a file is verified, and the reading of many files.  Loads without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhpc.crc import crc32
from rlhpc.errors import CheckpointError, DamagedCheckpoint

Found = TypeVar("Found")
READ_BYTES = 16 << 20
MANY_BYTES, NUM_READERS = 256 << 20, 8


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Recorded when the file was written."""

    num_bytes: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Read a file to its end.  Raises OSError."""
    num_bytes, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            num_bytes += len(block)
            crc = crc32(block, crc)
    return FileRecord(num_bytes, crc)


def check_file(path: Path, expected: FileRecord, *, verify_content: bool) -> None:
    """Raise DamagedCheckpoint unless the file has the recorded size and, if asked for, the recorded content.

    Raises CheckpointError if it cannot be read.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            raise DamagedCheckpoint(f"{path}: {num_bytes} bytes where {expected.num_bytes} were written")
        if verify_content and (found := record_of(path)) != expected:
            raise DamagedCheckpoint(
                f"{path}: its content is not what was written (checksum differs: "
                f"crc32 {found.crc32:08x} where {expected.crc32:08x} was written)"
            )
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def of_each_file(read: Callable[[str], Found], names: Iterable[str], num_bytes: int) -> list[Found]:
    """Return what `read` returns for each name; raise the error of the first name for which it raises one.

    num_bytes: of all files; from MANY_BYTES on, several files are read at once, since one reader alone does not use the
    bandwidth of a parallel filesystem.
    """
    if num_bytes < MANY_BYTES:
        return [read(name) for name in names]
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as readers:
        return list(readers.map(read, names))
