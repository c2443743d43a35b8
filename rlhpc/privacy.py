"""What other users of a machine can do to a run directory, and what a process that holds keys leaves behind.

Standard library.  Keys have rules of their own: loosened ones are refused (transport/keys.py).
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PRIVATE = 0o700
KEEP_CORE_FILES = "RLHPC_CORE_FILES"  # in the environment, not empty: leave the limit of core files as it is


@dataclass(frozen=True)
class Openness:
    """Rights of others in a directory; an access control list shows in the group's bits, too."""

    directory: Path
    mode: int

    @property
    def is_writable(self) -> bool:
        """Whether others may change it, and with it what the run starts."""
        return bool(self.mode & 0o022) and not self.mode & stat.S_ISVTX

    @property
    def text(self) -> str:
        """In words, with the command that mends it; "": private."""
        if self.is_writable:
            return (
                f"{self.directory} has mode {self.mode:04o}: others may change what the run starts and trains on; "
                f"`chmod go-w {self.directory}`, and on shared project space `umask 077` before files are made there"
            )
        if self.mode & 0o055:
            return (
                f"{self.directory} has mode {self.mode:04o}: others may read prompts, rollouts, weights and logs; "
                f"`chmod 700 {self.directory}`, and on shared project space `umask 077` before files are made there"
            )
        return ""


def openness(directory: Path) -> Openness:
    """Rights of others in a directory; none in one that does not exist.  Raises OSError."""
    try:
        return Openness(directory, stat.S_IMODE(directory.stat().st_mode))
    except FileNotFoundError:
        return Openness(directory, PRIVATE)


def leave_no_core_file(environment: Mapping[str, str] = os.environ) -> None:
    """Set the soft limit of core files to 0 for this process and those that it starts: memory holds keys.

    The hard limit stays, so that `prlimit --core=unlimited --pid PID` allows one, and debuggers may attach as before.
    """
    if not environment.get(KEEP_CORE_FILES):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
