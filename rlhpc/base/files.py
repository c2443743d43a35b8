"""Atomic file writes: write under a temporary name, fsync, rename, fsync the directory."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import resource
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

# -------------------------------------------------------------------------------------------------------------- privacy
#
# What other users of a machine can do to a run directory, and core files of processes with keys in memory.
#
# Standard library.  Keys have stricter rules: they are refused if others can read them (transport/security.py).


PRIVATE = 0o700
KEEP_CORE_FILES = "RLHPC_CORE_FILES"  # environment variable; if not empty, the core file limit is unchanged


@dataclass(frozen=True)
class Openness:
    """Access rights of others in a directory; access control lists show in the group bits, too."""

    directory: Path
    mode: int
    inside: Path | None = None  # entry that others may change, although not the directory itself
    mode_inside: int = PRIVATE

    @property
    def is_writable(self) -> bool:
        """True if others may change the directory or something in it, and so the code that the run starts.

        Also with the sticky bit, under which others may add files: a judge's replies, a checkpoint.
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

    looks_inside: check its content too, if others may enter it.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except FileNotFoundError:
        return Openness(directory, PRIVATE)
    # Rights inside do not matter for a class of users that cannot enter the directory.
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
    """Set the umask: new files of this process and its children are writable for their user alone.

    Many libraries create directories in a run directory, and others may be allowed to read it.
    """
    os.umask(os.umask(0o077) | 0o022)


def leave_no_core_file(environment: Mapping[str, str] = os.environ) -> None:
    """Set the soft limit for core files to 0 for this process and its children, since their memory contains keys.

    The hard limit is unchanged: `prlimit --core=unlimited --pid PID` allows a core file, and debuggers can attach.
    """
    if not environment.get(KEEP_CORE_FILES):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# ---------------------------------------------------------------------------------------------------------------- files


_LFS_POINTER = b"version https://git-lfs"
# Hard links, modes and fsync of a directory are missing on SMB, FUSE, and NFS with access control lists.
_UNSUPPORTED = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM))


def write_atomically(path: Path, content: bytes | bytearray, *, mode: int = 0o644) -> None:
    """Replace `path` by `content`; a reader sees the old file or the new one, also after a power cut.

    Raises OSError, in which case the old file, if any, is untouched.
    """
    # Not named by process: those of two containers may have the same number, and threads always do.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        write_synced(temporary, content, mode=mode)
        rename(temporary, path)
    except BaseException as error:  # a signal, too
        with suppress(OSError):  # the same disk may refuse this, too
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a failed rename names the temporary file, which nobody knows
        raise
    sync_directory(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file's name to OSErrors of the block that have none, such as those of write and fsync."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_synced(path: Path, content: bytes | bytearray, *, mode: int = 0o644, is_synced: bool = True) -> None:
    """Write a file in place, with fsync if `is_synced`.  Raises OSError; the file may then be incomplete."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with naming(path), os.fdopen(descriptor, "wb") as file:
        set_mode(file.fileno(), mode)  # the umask may have taken bits away or left too many
        file.write(content)
        file.flush()
        if is_synced:
            os.fsync(file.fileno())


def set_mode(file: int | Path, mode: int) -> None:
    """Give a file or directory a mode; where modes cannot be changed, one that allows others no more is accepted.

    Raises OSError, also if the unchangeable mode allows others more.
    """
    try:
        os.chmod(file, mode)  # noqa: PTH101 - of a descriptor too
    except OSError as error:
        found = stat.S_IMODE(os.stat(file).st_mode)  # noqa: PTH116 - as above
        if error.errno not in _UNSUPPORTED or found & 0o066 & ~mode:
            said = f"its mode is {found:04o}, and cannot be changed to {mode:04o} here ({error.strerror})"
            raise OSError(error.errno, said, error.filename) from error


def make_private(directory: Path) -> None:
    """Make a directory, and what is missing above it, mode 0700.  Raises OSError."""
    for place in reversed([place for place in (directory, *directory.parents) if not place.exists()]):
        place.mkdir(mode=0o700, exist_ok=True)


def link_new(source: Path, name: Path) -> None:
    """Give a complete file a second name.  Raises FileExistsError if it is taken; OSError.

    Where there are no hard links the file is copied, and for a moment is there in part.
    """
    try:
        name.hardlink_to(source)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stat.S_IMODE(source.stat().st_mode))
        with naming(name), os.fdopen(descriptor, "wb") as file:
            file.write(source.read_bytes())
            file.flush()
            os.fsync(file.fileno())


def append_lines(path: Path, lines: bytes, *, is_synced: bool = True) -> None:
    """Append whole lines or none of them, on a new line if a crash cut the last one off.

    is_synced: on disk when this returns, the name of a new file too.  Raises OSError.
    """
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    with naming(path), os.fdopen(descriptor, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        is_cut_off = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"
        left = memoryview(b"\n" * is_cut_off + lines)
        try:
            while left:
                left = left[file.write(left) :]
            if is_synced:
                os.fsync(file.fileno())
        except OSError:  # else bytes written before the error would be there twice after another try
            with suppress(OSError):
                file.truncate(end)
            raise
    if is_new and is_synced:
        sync_directory(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename, replacing `target`; a rename that the file server has done counts, even if it reports an error.

    An NFS client that gets no answer asks again, and a server that has lost the first request (a restart, a failover)
    no longer finds the source.  Raises OSError; then `target` is unchanged.
    """
    before = _identity(source)
    try:
        source.replace(target)
    except FileNotFoundError:
        with suppress(OSError):
            if is_listed(target) and _identity(target) == before:
                return
        raise


def _identity(path: Path) -> tuple[int, ...]:
    """Identity of a file: more than its inode number, which is soon reused after a deletion."""
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def is_listed(file: Path) -> bool:
    """True if a file exists, according to the file server.  Raises FileNotFoundError if its directory does not.

    An NFS client may cache for half a minute that a file is missing; listing its directory makes it ask again.
    """
    return file.name in os.listdir(file.parent)  # noqa: PTH208 - names are enough


def listing(directory: Path) -> list[str]:
    """Names of a directory's entries; none if it does not exist, which its parent has to confirm.

    glob and is_dir would return "nothing" for an error.  Raises OSError.
    """
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        if directory.parent == directory or directory.name in listing(directory.parent):
            raise
        return []


def matching(directory: Path, pattern: str) -> list[Path]:
    """Entries of a directory whose names match, sorted by name; see `listing`."""
    return sorted(directory / name for name in fnmatch.filter(listing(directory), pattern))


def is_absent(path: Path) -> bool:
    """True if the file or directory does not exist, according to its parent directory.  Raises OSError."""
    try:
        return path.name not in listing(path.parent)
    except NotADirectoryError:  # nothing is below a file
        return True


def names_in(directory: Path) -> set[str]:
    """Names of the existing files, as in is_listed; none while the directory cannot be listed.

    If the directory is missing, its parent is listed, so that the next call finds it.
    """
    try:
        return set(os.listdir(directory))  # noqa: PTH208 - names are enough
    except OSError:
        with suppress(OSError):
            os.listdir(directory.parent)  # noqa: PTH208 - as above
        return set()


def is_lfs_pointer(file: Path) -> bool:
    """True for a Git LFS pointer, which stands in for a file until it is fetched.  Raises OSError."""
    with file.open("rb") as content:
        return content.read(len(_LFS_POINTER)) == _LFS_POINTER


def numbered_files(directory: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """(number, path) of the files whose full name matches, sorted by the number in its first group.

    As `listing` does.
    """
    matches = map(name.fullmatch, listing(directory))
    return sorted((int(match[1]), directory / match[0]) for match in matches if match)


def move_durably(paths: Iterable[Path], directory: Path) -> list[Path]:
    """Move files, in this order, to a directory, created if needed; return the new paths.  Raises OSError."""
    directory.mkdir(exist_ok=True)
    moved, sources = [], set[Path]()
    for path in paths:
        rename(path, directory / path.name)
        moved.append(directory / path.name)
        sources.add(path.parent)
    for each in (directory, *sources):
        sync_directory(each)
    return moved


def leave_deleted_directory(other: Path) -> None:
    """Work in `other` if this process's working directory is gone: libraries cannot be loaded there, and srun fails."""
    try:
        os.getcwd()  # noqa: PTH109 - no path is needed
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            return  # a passing error
        try:
            os.chdir(other)
        except OSError:
            os.chdir("/")  # any existing directory is better


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable, as far as its filesystem can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with naming(directory):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
