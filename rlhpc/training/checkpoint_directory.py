"""Checkpoints as directories that appear complete or not at all.

Input: a directory that all roles have written into.  Output: a checkpoint: `begin` gives a place to write, `complete`
makes it valid.  After a kill between any two operations the previous complete checkpoint still exists and is found.
An invalid one is never deleted but set aside under another name.  Loads without torch.

    checkpoints/step_000120/{trainer/…, controller.json, COMPLETE}     COMPLETE: {"files": {name: [bytes, crc32]}, …}
    checkpoints/.step_000120.tmp/…, .step_000120.removed/…             being written, being deleted
    checkpoints/step_000120.damaged, .undone, .damaged-2, …            set aside
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.base.files import is_absent, listing, rename, sync_directory, write_atomically
from rlhpc.base.native import crc32
from rlhpc.base.patience import seen
from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.errors import CheckpointError, DamagedCheckpoint

# ---------------------------------------------------------------------------------------------------------- file record
#
# Size and checksum by which a file is verified, and the reading of many files.  Loads without torch.

Found = TypeVar("Found")
READ_BYTES = 16 << 20
MANY_BYTES, NUM_READERS = 256 << 20, 8


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Recorded when the file was written."""

    num_bytes: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Read a file to its end.  Raises OSError."""
    num_bytes, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            num_bytes += len(block)
            crc = crc32(block, crc)
    return FileRecord(num_bytes, crc)


def check_file(path: Path, expected: FileRecord, *, verify_content: bool) -> None:
    """Raise DamagedCheckpoint unless the file has the recorded size and, if asked for, the recorded content.

    Raises CheckpointError if it cannot be read.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            raise DamagedCheckpoint(f"{path}: {num_bytes} bytes where {expected.num_bytes} were written")
        if verify_content and (found := record_of(path)) != expected:
            raise DamagedCheckpoint(
                f"{path}: its content is not what was written (checksum differs: "
                f"crc32 {found.crc32:08x} where {expected.crc32:08x} was written)"
            )
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def of_each_file(read: Callable[[str], Found], names: Iterable[str], num_bytes: int) -> list[Found]:
    """Return what `read` returns for each name; raise the error of the first name for which it raises one.

    num_bytes: of all files; from MANY_BYTES on, several files are read at once, since one reader alone does not use the
    bandwidth of a parallel filesystem.
    """
    if num_bytes < MANY_BYTES:
        return [read(name) for name in names]
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as readers:
        return list(readers.map(read, names))


# ------------------------------------------------------------------------------------------------------------- timeline
#
# Tell checkpoints of the run's current history from those of steps that a later resume has undone.
#
# Input: attempts.jsonl, with the first step of each attempt, and the number of the attempt that wrote a checkpoint.
# Output: the attempt that has undone it, if any.  Only this recognises a checkpoint that was set aside and restored by
# hand, or that a controller of an earlier attempt completes too late.  Loads without torch.


@dataclass(frozen=True, slots=True)
class AttemptTimeline:
    """The first step of every attempt."""

    begins: tuple[tuple[int, int], ...]  # (attempt, first step), in the order in which they began

    @classmethod
    def read(cls, attempts: Path) -> AttemptTimeline:
        """Read attempts.jsonl; lines that are not whole are left out.  Raises OSError if it cannot be read."""
        if is_absent(attempts):
            return cls(())
        lines = attempts.read_text(encoding="utf-8", errors="replace").splitlines()
        return cls(tuple(begin for begin in map(_begin_of, lines) if begin is not None))

    def undone_by(self, step: int, attempt: int | None) -> int | None:
        """The attempt that began before `step` after `attempt` had written its checkpoint; None if none did.

        attempt: None for a checkpoint that does not record its attempt; then the result is None.
        """
        if attempt is None:
            return None
        return next((later for later, begin in self.begins if later > attempt and begin < step), None)


def _begin_of(line: str) -> tuple[int, int] | None:
    try:
        document = json.loads(line)
        return int(document["index"]), int(document["resume_step"] or 0)
    except (ValueError, KeyError, TypeError):
        return None


# ------------------------------------------------------------------------------------------------------------ directory

log = logging.getLogger("rlhpc.checkpoint")
COMPLETE = "COMPLETE"
# As RunLayout.checkpoint writes it: a user's own `step_20` beside step_000020 is left alone.
_STEP_NAME = re.compile(r"step_(\d{6}|[1-9]\d{6,})")
_LEFTOVER_NAME = re.compile(r"\.step_(\d{6}|[1-9]\d{6,})\.(?:tmp|removed)")
_ASIDE_NAME = re.compile(r"step_\d+\.(?:damaged|undone)(?:-\d+)?")


class Fate(enum.Enum):
    """Condition of a checkpoint: a run may resume from SOUND ones."""

    SOUND = "sound"
    DAMAGED = "damaged"  # a file is missing or is not what was written
    UNDONE = "undone"  # its steps were undone: a later attempt resumed before them
    UNREADABLE = "unreadable"  # no permission, an error of the disk: it may be intact


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """State of one checkpoint directory."""

    step: int
    path: Path
    problem: str  # "" if intact, else what is wrong: the file, what was expected and what was found
    fate: Fate


class KnownCheckpoints:
    """Verifies checkpoints; keeps track of those that were read completely and are unchanged since."""

    def __init__(self, checkpoints: Path, *, read_up_to_bytes: float = math.inf) -> None:
        """read_up_to_bytes: for larger checkpoints only sizes are compared."""
        self._checkpoints, self._read_up_to_bytes = checkpoints, read_up_to_bytes
        self._read: dict[Path, tuple[object, ...]] = {}  # stamps of files when they were read

    def newest_first(self, is_wanted: Callable[[int], bool] = lambda step: True) -> Iterator[CheckpointState]:
        """Verify the checkpoints of wanted steps, newest first; a caller that stops iterating leaves older ones unread.

        Raises OSError if attempts.jsonl or the directory cannot be read.
        """
        timeline = AttemptTimeline.read(RunLayout(self._checkpoints.parent).attempts)
        for step, path in reversed(_steps_below(self._checkpoints)):
            if is_wanted(step):
                yield self._state_of(step, path, timeline)

    def steps(self) -> list[tuple[int, Path]]:
        """(step, path) of all checkpoints, oldest first, whether verified or not."""
        return _steps_below(self._checkpoints)

    def note_sound(self, path: Path) -> None:
        """Record that every byte of this checkpoint has just been read."""
        with suppress(CheckpointError, OSError):  # then it is read again, which reports the error
            self._read[path] = _stamps(path)

    def _state_of(self, step: int, path: Path, timeline: AttemptTimeline) -> CheckpointState:
        try:
            attempt = _read_complete(path).get("attempt")
            undone_by = timeline.undone_by(step, attempt if isinstance(attempt, int) else None)
            if undone_by is not None:
                text = f"{path}: of attempt {attempt}; attempt {undone_by} resumed before it and undid its steps"
                return CheckpointState(step, path, text, Fate.UNDONE)
            if self._read.get(path) is None or self._read[path] != _stamps(path):
                _verify_files(path, self._read_up_to_bytes)
                self.note_sound(path)
        except (CheckpointError, OSError) as error:
            return CheckpointState(step, path, str(error), _fate_of(error))
        return CheckpointState(step, path, "", Fate.SOUND)


def begin(final: Path, staging: Path | None = None) -> Path:
    """Return an empty directory to write the checkpoint `final` into, on the same filesystem.

    staging: directory in which it is made; default: beside `final`, with parents.
    Raises CheckpointError if `final` is complete already, of this timeline and sound, or if the disk refuses.
    """
    temporary = (staging or final.parent) / f".{final.name}.tmp"
    try:
        if final.exists() and _fate(final) is Fate.SOUND:
            raise CheckpointError(f"{final}: a complete checkpoint of this step exists already")
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=staging is None)
    except OSError as error:
        raise CheckpointError(f"{temporary}: cannot be created: {error}") from error
    return temporary


def complete(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Turn the files in `temporary` into the checkpoint `final`.  Durable when it returns.

    manifest: further content of COMPLETE, JSON; sizes and checksums of all files are added under "files".
    An invalid `final` is set aside.  Raises CheckpointError; the new one is then invalid.  Reads every byte once.
    """
    try:
        names = _files_below(temporary)
        num_bytes = sum((temporary / name).stat().st_size for name in names)
        records = of_each_file(lambda name: _synced_record_of(temporary / name), names, num_bytes)
        files = {name: astuple(record) for name, record in zip(names, records, strict=True)}
        for directory in sorted({(temporary / name).parent for name in files}):
            sync_directory(directory)
        # Before the rename, so that a step_NNNNNN without COMPLETE has lost it and was not merely interrupted.
        write_atomically(temporary / COMPLETE, json.dumps({**manifest, "files": files}, indent=1).encode())
        if final.is_dir():
            _clear_the_way(final)
        rename(temporary, final)  # it appears and becomes valid atomically
        try:
            sync_directory(final.parent)
        except OSError:  # it would block another try
            with suppress(OSError):
                rename(final, temporary)
            raise
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be completed: {error}") from error


def discard(temporary: Path) -> None:
    """Delete the remains of a checkpoint that could not be completed, as far as the filesystem allows."""
    shutil.rmtree(temporary, ignore_errors=True)


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint; return the content of COMPLETE.

    Raises CheckpointError naming the file and the reason if it is incomplete or damaged.
    """
    _verify_files(path)
    return _read_complete(path)


def policy_version_of(path: Path) -> int:
    """Policy version of a complete checkpoint's weights.  Raises CheckpointError if it is not recorded."""
    version = _read_complete(path).get("policy_version")
    if not isinstance(version, int):
        raise CheckpointError(f"{path / COMPLETE}: has no policy version")
    return version


def latest_complete(checkpoints: Path) -> tuple[int, Path] | None:
    """Return (step, path) of the newest checkpoint that verifies; None if there are no checkpoints.

    Raises CheckpointError naming all faults if there are some and none verifies.
    """
    skipped = []
    for state in KnownCheckpoints(checkpoints).newest_first():
        if state.fate is Fate.SOUND:
            return state.step, state.path
        skipped.append(state.problem)
    if skipped:
        raise CheckpointError(f"{checkpoints}: no usable checkpoint: {'; '.join(skipped)}")
    return None


def describe(checkpoints: Path) -> list[CheckpointState]:
    """Return the state of every checkpoint, oldest first."""
    return [*KnownCheckpoints(checkpoints).newest_first()][::-1]


def set_aside(path: Path, why: Fate) -> Path:
    """Rename a checkpoint durably, so that it is never used again; returns its new path.  Raises OSError."""
    number = 1
    while (target := path.with_name(f"{path.name}.{why.value}{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    path.rename(target)
    sync_directory(path.parent)
    return target


def what_was_set_aside(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that set_aside has renamed, sorted by name."""
    return sorted(path for path in _entries_of(checkpoints) if _ASIDE_NAME.fullmatch(path.name))


def prune(
    checkpoints: Path, keep: int, known: KnownCheckpoints | None = None, spared: Collection[int] = ()
) -> list[Path]:
    """Delete checkpoints older than the newest `keep` (at least 2) intact ones; returns the deleted ones.

    spared: steps whose checkpoints stay, however old they are.
    Every byte of the kept ones is read, except of those in `known` that are unchanged since they were read.
    Damaged ones between them are set aside.  With fewer than `keep` intact ones nothing is deleted.  Nothing newer than
    the newest intact one is touched.  Remains of interrupted saves and deletions are deleted, too.
    Raises CheckpointError if keep is below 2 or on a write error.
    """
    if keep < 2:
        raise CheckpointError(f"{checkpoints}: keep={keep} complete checkpoints; legal: 2 or more")
    kept: list[CheckpointState] = []
    try:
        for state in (known or KnownCheckpoints(checkpoints)).newest_first():
            if state.fate is Fate.SOUND:
                kept.append(state)
            elif state.fate is Fate.UNREADABLE:
                log.warning("%s; it does not count towards the kept checkpoints", state.problem)
            elif kept:
                log.warning("%s; set aside as %s", state.problem, set_aside(state.path, state.fate).name)
            if len(kept) == keep:
                break
        oldest = kept[-1].step if len(kept) == keep else -1
        deleted = [path for step, path in _steps_below(checkpoints) if step < oldest and step not in spared]
        for path in deleted:
            _remove(path)
        leftovers = [path for step, path in _steps_below(checkpoints, _LEFTOVER_NAME) if kept and step <= kept[0].step]
        for path in leftovers:
            shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoints}: cannot delete old checkpoints: {error}") from error
    return deleted + leftovers


def leftovers_of(checkpoints: Path) -> list[Path]:
    """Return directories of writes and deletions under way, or interrupted by a death."""
    return [path for _, path in _steps_below(checkpoints, _LEFTOVER_NAME)]


def _remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, since a partly deleted one must not look like a damaged one."""
    doomed = path.with_name(f".{path.name}.removed")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    sync_directory(path.parent)
    shutil.rmtree(doomed)


def _clear_the_way(final: Path) -> None:
    """Set aside an existing checkpoint with the name of a new one.  Raises CheckpointError if it may be intact."""
    fate = _fate(final)
    if fate in (Fate.SOUND, Fate.UNREADABLE):
        raise CheckpointError(f"{final}: another checkpoint of this step has appeared meanwhile")
    set_aside(final, fate)


def _fate(final: Path) -> Fate:
    """Condition of an existing checkpoint with the name of a new one."""
    match = _STEP_NAME.fullmatch(final.name)
    assert match is not None, final
    step = int(match[1])
    return next((each.fate for each in KnownCheckpoints(final.parent).newest_first(step.__eq__)), Fate.DAMAGED)


def _verify_files(path: Path, read_up_to_bytes: float = math.inf) -> None:
    """Raise CheckpointError naming the file, what was expected and what was found."""
    files = {name: FileRecord(*numbers) for name, numbers in _read_complete(path)["files"].items()}
    num_bytes = sum(record.num_bytes for record in files.values())

    def check(name: str) -> None:
        check_file(path / name, files[name], verify_content=num_bytes <= read_up_to_bytes)

    of_each_file(check, files, num_bytes)


def _fate_of(error: CheckpointError | OSError) -> Fate:
    cause = error.__cause__ if isinstance(error, CheckpointError) else error
    if not isinstance(cause, OSError) or isinstance(cause, NotADirectoryError | IsADirectoryError):
        return Fate.DAMAGED
    is_missing = isinstance(cause, FileNotFoundError) and seen(lambda: is_absent(Path(str(cause.filename))), False)
    return Fate.DAMAGED if is_missing else Fate.UNREADABLE


def _stamps(path: Path) -> tuple[object, ...]:
    """A stamp that changes when a file of a checkpoint is written to or replaced, even if its size and times do not."""
    states = [(path / name).stat() for name in [*_read_complete(path)["files"], COMPLETE]]
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for state in states)


def _read_complete(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / COMPLETE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: has no {COMPLETE}, so it is not a complete checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / COMPLETE}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not _is_table_of_files(content.get("files")):
        raise CheckpointError(f"{path / COMPLETE}: is not a checkpoint manifest")
    return content


def _is_table_of_files(files: Any) -> bool:
    """True for {name: [bytes, crc32]}."""
    return isinstance(files, dict) and all(
        isinstance(numbers, list) and len(numbers) == 2 and all(isinstance(number, int) for number in numbers)
        for numbers in files.values()
    )


def _steps_below(checkpoints: Path, pattern: re.Pattern[str] = _STEP_NAME) -> list[tuple[int, Path]]:
    """Return (step, path) of directories whose name matches, oldest first."""
    matches = ((pattern.fullmatch(path.name), path) for path in _entries_of(checkpoints))
    return sorted((int(match[1]), path) for match, path in matches if match)


def _entries_of(checkpoints: Path) -> list[Path]:
    return [checkpoints / name for name in listing(checkpoints)]


def _files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _synced_record_of(path: Path) -> FileRecord:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return record_of(path)
