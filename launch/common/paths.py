"""Paths as users give them."""

from __future__ import annotations

from pathlib import Path


def without_dots(path: Path) -> Path:
    """Absolute path, with ".." resolved as the file system does: `link/..` is the parent of the link's target."""
    return path.resolve() if ".." in path.parts else path.absolute()
