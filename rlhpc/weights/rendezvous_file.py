"""Parse the address of a rendezvous file, and remove one."""

from __future__ import annotations

import logging
from pathlib import Path

from rlhpc.errors import GroupFailed

log = logging.getLogger("rlhpc.weights")
SCHEME = "file://"


def file_of(address: str) -> Path:
    """The path of file:///absolute/path.  Raises GroupFailed for any other address."""
    path = Path(address.removeprefix(SCHEME))
    if not address.startswith(SCHEME) or not path.is_absolute():
        raise GroupFailed(f"no rendezvous at {address!r}; legal here: file:// and an absolute path")
    return path


def remove_left_over(path: Path) -> None:
    """Remove a file that nobody reads any more; it stays if the filesystem does not let it go.

    Never fails: the reason for which a group is left would be lost.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: stays: %s", path, error)
