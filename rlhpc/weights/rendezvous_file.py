"""Parse the address of a rendezvous file."""

from __future__ import annotations

from pathlib import Path

from rlhpc.errors import GroupFailed

SCHEME = "file://"


def file_of(address: str) -> Path:
    """The path of file:///absolute/path.  Raises GroupFailed for any other address."""
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise GroupFailed(f"no rendezvous at {address!r}; legal here: file:// and an absolute path")
    return path
