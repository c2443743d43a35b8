"""What a dev cluster needs from its machine besides Slurm.  Writes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rlhpc.errors import RunDirectoryError


def check_owner(root: Path) -> None:
    """Raises RunDirectoryError: the directory belongs to somebody else, who could change what runs in it."""
    if root.exists() and root.stat().st_uid != os.getuid():
        raise RunDirectoryError(f"{root}: belongs to user {root.owner()}; take a directory of your own")


def check_own_name(slurm_version: tuple[int, int]) -> None:
    """Raises RunDirectoryError: this machine does not know its own name, and that Slurm would ask for it."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        # Since 23.11 the controller looks itself up for every job, and each look-up blocks it for 10 to 20 s.
        if slurm_version >= (23, 11):
            raise RunDirectoryError(
                f"this machine's own name {name!r} does not resolve, so every job would wait 10 s and more: "
                f"an administrator adds the line '127.0.1.1 {name}' to /etc/hosts"
            ) from None
