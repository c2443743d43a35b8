"""The directory of an evaluation: one command at a time, one kind of samples.

Input: settings, and what an earlier command has left.  Output: the directory, locked, ready to be continued.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.run_directory.directory_lock import DirectoryLock, LockHeld, lock_directory
from rlhpc.errors import ConfigError, RunDirectoryError
from rlhpc.evaluation.settings import NAME, EvaluationSettings, read_settings
from rlhpc.privacy import PRIVATE
from rlhpc.run_layout import RunLayout

LOCK = RunLayout(Path()).lock.name
_ADVICE = "--out DIRECTORY keeps both; --fresh deletes these samples"
LONGEST_VALUE = 80  # characters of a value in a message


class DirectoryInUse(RunDirectoryError):
    """Another command is at work there."""


@contextmanager
def evaluation_directory(
    directory: Path, settings: EvaluationSettings, *, is_fresh: bool, tell: Callable[[str], None]
) -> Iterator[DirectoryLock]:
    """Own the directory while the block runs, with these settings written to it.

    is_fresh: delete what is there.  Raises DirectoryInUse; RunDirectoryError: it holds something else, or samples of
    other settings; ConfigError: settings that cannot be read.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    unfinished = f".{NAME}."  # a command was killed while it wrote its settings
    names = {path.name for path in directory.iterdir() if not path.name.startswith(unfinished)}
    if names - {LOCK} and NAME not in names:
        raise RunDirectoryError(f"{directory}: not empty, and not an evaluation; choose another directory with --out")
    try:
        lock = lock_directory(RunLayout(directory))
    except LockHeld:
        raise DirectoryInUse(f"{directory}: another `rlhpc evaluate` is running there") from None
    try:
        if not is_fresh or not _is_ours(directory):
            _refuse_other_samples(directory, settings)
        elif (directory / NAME).exists():
            tell(f"{directory} is deleted, and the evaluation starts over")
            _clear(directory)
        settings.write(directory)
        yield lock
    finally:
        lock.close()


def _is_ours(directory: Path) -> bool:
    """Whether its settings are those of an evaluation, perhaps of another version, if there are some."""
    try:
        document = json.loads((directory / NAME).read_bytes())
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return isinstance(document, dict) and {"config", "samples_per_prompt"} <= document.keys()


def unlike_samples(directory: Path, settings: EvaluationSettings) -> set[str]:
    """By what samples that are there differ from those of these settings.  Raises ConfigError."""
    before = read_settings(directory)
    return set() if before is None else _unlike(before, settings)


def _unlike(before: EvaluationSettings, now: EvaluationSettings) -> set[str]:
    old, new = before.identity, now.identity
    return {key for key in {*old, *new} if old.get(key) != new.get(key)}


def _refuse_other_samples(directory: Path, now: EvaluationSettings) -> None:
    try:
        before = read_settings(directory)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{_ADVICE}" if _is_ours(directory) else str(error)) from error
    if before is None:
        return
    old, new = before.identity, now.identity
    lines = [
        f"  {key}: {_shown(new.get(key))}, of the samples {_shown(old.get(key))}"
        for key in sorted(_unlike(before, now))
    ]
    if lines:
        head = f"{directory}: holds samples of another evaluation:"
        raise RunDirectoryError("\n".join([head, *lines, _ADVICE]))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _clear(directory: Path) -> None:
    """All but the lock; the settings last, so that a directory that is cleared in part is still known as ours."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
