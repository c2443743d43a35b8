"""Whole checkpoints as directories that are complete or ignored.

Eats a directory that all roles have written into, makes a checkpoint: `begin` gives a place to write, `complete` makes
it count.  Killed between any two operations, the previous complete checkpoint is still there and still found.
Loads without torch.

    checkpoints/step_000120/{trainer/…, controller.json, COMPLETE}     COMPLETE: {"files": {name: [bytes, crc32]}, …}
    checkpoints/.step_000120.tmp/…                                     being written
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rlhpc.errors import CheckpointError
from rlhpc.files import sync_directory, write_atomically
from rlhpc.training.file_record import FileRecord, check_file, record_of

COMPLETE = "COMPLETE"
_STEP_NAME = re.compile(r"step_(\d+)")
_TEMPORARY_NAME = re.compile(r"\.step_(\d+)\.tmp")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What one checkpoint directory is."""

    step: int
    path: Path
    problem: str  # "" if complete and sound, else the file and the reason


def begin(final: Path) -> Path:
    """Return an empty directory to write the checkpoint `final` into, on the same filesystem.

    Raises CheckpointError if `final` is complete already, or on a write error.
    """
    if final.exists() and not _problem_of(final, verify_content=True):
        raise CheckpointError(f"{final}: a complete checkpoint of this step is there already")
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{temporary}: cannot be made: {error}") from error
    return temporary


def complete(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Make what was written into `temporary` the checkpoint `final`.  Durable when it returns.

    manifest: what else COMPLETE shall say, JSON; sizes and checksums of all files are added under "files".
    An incomplete `final` is replaced.  Raises CheckpointError; then `final` does not count.  Reads every byte once.
    """
    try:
        files = {}
        for name in _files_below(temporary):
            _sync_file(temporary / name)
            files[name] = astuple(record_of(temporary / name))
        for directory in sorted({(temporary / name).parent for name in files} | {temporary}):
            sync_directory(directory)
        if final.exists():
            _remove(final)
        temporary.replace(final)
        sync_directory(final.parent)
        write_atomically(final / COMPLETE, json.dumps({**manifest, "files": files}, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"{final}: cannot be completed: {error}") from error


def discard(temporary: Path, final: Path) -> None:
    """Delete what is left of a checkpoint that could not be completed, as far as the filesystem lets us.

    A `final` that is complete stays.
    """
    if not temporary.exists() and not (final / COMPLETE).exists():
        shutil.rmtree(final, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint; return what COMPLETE says.

    Raises CheckpointError naming the file and the reason if it is incomplete or damaged.
    """
    if problem := _problem_of(path, verify_content=True):
        raise CheckpointError(problem)
    return _read_complete(path)


def latest_complete(checkpoints: Path) -> tuple[int, Path] | None:
    """Return (step, path) of the newest checkpoint that verifies, or None.  Others are ignored; describe names them."""
    for step, path in reversed(_steps_below(checkpoints)):
        if not _problem_of(path, verify_content=True):
            return step, path
    return None


def describe(checkpoints: Path) -> list[CheckpointState]:
    """Return every checkpoint, oldest first, with what is wrong with it."""
    return [
        CheckpointState(step, path, _problem_of(path, verify_content=True)) for step, path in _steps_below(checkpoints)
    ]


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` (at least 2) complete checkpoints, and what older unfinished ones have left.

    Returns what was deleted.  Nothing newer than the newest complete one is touched, and nothing at all if there is
    none.  Here complete means COMPLETE and the sizes it gives: contents are read when a checkpoint is used.
    Raises CheckpointError if keep is below 2 or on a write error.
    """
    if keep < 2:
        raise CheckpointError(f"{checkpoints}: keep={keep} complete checkpoints; legal: 2 or more")
    steps = _steps_below(checkpoints)
    complete_steps = [step for step, path in steps if not _problem_of(path, verify_content=False)]
    if not complete_steps:
        return []
    kept, newest = set(complete_steps[-keep:]), complete_steps[-1]
    doomed = [path for step, path in steps if step < newest and step not in kept]
    doomed += [path for step, path in _steps_below(checkpoints, _TEMPORARY_NAME) if step <= newest]
    try:
        for path in doomed:
            _remove(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoints}: cannot delete old checkpoints: {error}") from error
    return doomed


def _remove(path: Path) -> None:
    """Delete a checkpoint, COMPLETE first: one that is half deleted must not count."""
    (path / COMPLETE).unlink(missing_ok=True)
    sync_directory(path)
    shutil.rmtree(path)


def _problem_of(path: Path, *, verify_content: bool) -> str:
    """Return "" or the file at fault and the reason."""
    try:
        for name, (num_bytes, crc32) in _read_complete(path)["files"].items():
            check_file(path / name, FileRecord(num_bytes, crc32), verify_content=verify_content)
    except CheckpointError as error:
        return str(error)
    return ""


def _read_complete(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / COMPLETE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: has no {COMPLETE}: it was never finished") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / COMPLETE}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise CheckpointError(f"{path / COMPLETE}: is not a checkpoint manifest")
    return content


def _steps_below(checkpoints: Path, pattern: re.Pattern[str] = _STEP_NAME) -> list[tuple[int, Path]]:
    """Return (step, path) of directories whose name matches, oldest first."""
    if not checkpoints.is_dir():
        return []
    matches = ((pattern.fullmatch(path.name), path) for path in checkpoints.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
