"""Paths: as users give them, when they were written, and how long those of temporary files may be."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

LONGEST_TEMPORARY_PATH = 60  # a unix socket's path has 107 bytes, and vLLM's names have 36


def as_typed(path: Path) -> Path:
    """The path as one would type it here; an absolute one as it is where the current directory is gone."""
    with suppress(FileNotFoundError, ValueError):
        return path.relative_to(Path.cwd())
    return path


def quoted(path: Path) -> str:
    """The path as a word of a command that somebody is to type."""
    return shlex.quote(str(path))


def without_dots(path: Path) -> Path:
    """Absolute path, with ".." resolved as the file system does: `link/..` is the parent of the link's target."""
    return path.resolve() if ".." in path.parts else path.absolute()


def written_unix_s(path: Path) -> float:
    """When a file or directory last changed; 0: it is not there, or may not be looked at."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
