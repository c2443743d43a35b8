"""What a dev cluster needs from its machine besides Slurm.  Writes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rlhpc.errors import RunDirectoryError


def check_owner(root: Path) -> None:
    """Raises RunDirectoryError: the directory belongs to another user, who could change the programs in it."""
    if root.exists() and root.stat().st_uid != os.getuid():
        raise RunDirectoryError(f"{root}: belongs to user {root.owner()}; choose a directory of your own")


def check_own_name(slurm_version: tuple[int, int]) -> None:
    """Raises RunDirectoryError: this machine cannot resolve its own name, which Slurm would look up."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        # Since 23.11 the controller looks itself up for every job, and each look-up blocks it for 10 to 20 s.
        if slurm_version >= (23, 11):
            raise RunDirectoryError(
                f"this machine's own name {name!r} does not resolve, so every job would wait 10 s or more: "
                f"ask an administrator to add the line '127.0.1.1 {name}' to /etc/hosts"
            ) from None
