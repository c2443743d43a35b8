"""Whole files or none: write under a temporary name, fsync, rename, fsync the directory."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | bytearray, *, mode: int = 0o644) -> None:
    """Replace `path` by `content`; a reader sees the old file or the new one, also after a power cut.

    Raises OSError, in which case the old file, if any, is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # the umask may have taken bits away or left too many
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
