"""What other users of a machine can do to a run directory, and core files of processes with keys in memory.

Standard library.  Keys have stricter rules: they are refused if others can read them (transport/keys.py).
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PRIVATE = 0o700
KEEP_CORE_FILES = "RLHPC_CORE_FILES"  # environment variable; if not empty, the core file limit is unchanged


@dataclass(frozen=True)
class Openness:
    """Access rights of others in a directory; access control lists show in the group bits, too."""

    directory: Path
    mode: int
    inside: Path | None = None  # what others may change in it, although not the directory itself
    mode_inside: int = PRIVATE

    @property
    def is_writable(self) -> bool:
        """Whether others may change it or something in it, and so what the run starts.

        Also with the sticky bit, under which they may add what is not there yet: replies of a judge, a checkpoint.
        """
        return bool(self.mode & 0o022) or self.inside is not None

    @property
    def text(self) -> str:
        """A description with the command that fixes it; "": private."""
        if self.is_writable:
            found, mode = (self.inside, self.mode_inside) if self.inside else (self.directory, self.mode)
            return (
                f"{found} has mode {mode:04o}: others may change what the run starts and trains on; "
                f"`chmod -R go-w {self.directory}`, and on shared project space `umask 077` before files are made there"
            )
        if self.mode & 0o055:
            return (
                f"{self.directory} has mode {self.mode:04o}: others may read prompts, rollouts, weights and logs; "
                f"`chmod 700 {self.directory}`, and on shared project space `umask 077` before files are made there"
            )
        return ""


def openness(directory: Path, *, looks_inside: bool = False) -> Openness:
    """Access rights of others in a directory; none if it does not exist.  Raises OSError.

    looks_inside: at everything in it too, if others may enter it.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except FileNotFoundError:
        return Openness(directory, PRIVATE)
    # Of a class that cannot enter the directory, no right inside matters.
    writes = (mode & 0o011) << 1
    for path in _everything_in(directory) if looks_inside and writes and not mode & 0o022 else ():
        with suppress(OSError):  # deleted meanwhile, or a link to nothing
            its = stat.S_IMODE(path.stat().st_mode)
            if its & writes:
                return Openness(directory, mode, path, its)
    return Openness(directory, mode)


def _everything_in(directory: Path) -> Iterator[Path]:
    """Yield files and directories, the upper ones first; links in the directory itself are followed."""
    above = [directory, *(path for path in sorted(directory.iterdir()) if path.is_symlink() and path.is_dir())]
    for top in above:
        for place, directories, files in os.walk(top):
            yield from (Path(place, name) for name in sorted([*directories, *files]))


def keep_others_from_writing() -> None:
    """What this process and its children make from now on is writable for their user alone, whatever the umask was.

    A run directory that others may read has directories in it that are made by many libraries.
    """
    os.umask(os.umask(0o077) | 0o022)


def leave_no_core_file(environment: Mapping[str, str] = os.environ) -> None:
    """Set the soft limit for core files to 0 for this process and its children, since their memory contains keys.

    The hard limit is unchanged: `prlimit --core=unlimited --pid PID` allows a core file, and debuggers can attach.
    """
    if not environment.get(KEEP_CORE_FILES):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
