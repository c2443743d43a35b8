"""Find run directories below a directory, fast on a slow filesystem and safe in an unknown one.

Input: a directory.  Output: one RunFiles for each run, with the names its directory lists.  Guarantees: no directory is
read twice, whatever the symbolic links; run directories are not searched for other runs; depth and number are bounded,
and what was skipped is reported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.common.paths import without_dots
from launch.run_files.run_state import run_name
from rlhpc.errors import ConfigError
from rlhpc.run_layout import RunLayout

DEPTH = 4  # levels below the directory that is given
MOST_DIRECTORIES = 50_000
_AT_ONCE = 16  # a directory on NFS takes a millisecond, most of it waiting
# Entries that a run directory has, with config.json beside them.  One alone proves nothing: a model has config.json,
# another program checkpoints.
_MARKS = frozenset(("attempts.jsonl", "checkpoints", "jobs", "job_plan.json", "launcher.json", "rendezvous",
                    "rollouts", "status.json"))  # fmt: skip
_LOST_ITS_CONFIG = 3  # this many of them mark a run directory without config.json
Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run directory, as it was listed."""

    root: Path
    identity: Identity  # device and inode
    owner: int  # uid
    names: frozenset[str]
    config: dict[str, Any]  # of config.json, {} if it is damaged
    damage: str = ""

    @property
    def layout(self) -> RunLayout:
        """The run's paths."""
        return RunLayout(self.root)

    @property
    def name(self) -> str:
        """The run's."""
        return run_name(self.config, self.root)


@dataclass(slots=True)
class Found:
    """The runs found, and remarks on the search."""

    runs: list[RunFiles] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Listing:
    path: Path
    identity: Identity
    run: RunFiles | None = None
    below: tuple[Path, ...] = ()
    trouble: str = ""


def find_runs(tops: Iterable[Path], depth: int = DEPTH) -> Found:
    """Look at directories and `depth` levels below them, a level at a time.

    Passes over hidden directories.  Raises nothing: what cannot be read is a remark.
    """
    found, seen, num_looked_at = Found(), set[Identity](), 0
    unreadable: list[str] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        level = list(tops)
        for _ in range(depth + 1):
            if len(level) > MOST_DIRECTORIES - num_looked_at:
                level = level[: MOST_DIRECTORIES - num_looked_at]
                found.remarks.append(f"stopped after {MOST_DIRECTORIES} directories: give a directory further down")
            num_looked_at += len(level)
            following: list[Path] = []
            for listing in pool.map(_list, level):
                if listing.trouble:
                    unreadable.append(listing.trouble)
                elif listing.identity not in seen:
                    seen.add(listing.identity)
                    following += listing.below
                    found.runs += [listing.run] if listing.run else []
            level = following
    if unreadable:
        more = f", and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
        found.remarks.append(f"not read: {unreadable[0]}{more}")
    return found


def directories_to_search(given: Sequence[Path]) -> list[Path]:
    """Those that are given, or runs/ if it exists, or the current one.  Raises ConfigError: no such directory.

    Absolute, so that it equals the queue's name of the directory.
    """
    for directory in given:
        if not directory.is_dir():
            raise ConfigError(f"{directory}: no such directory; `rlhpc list` shows the runs below runs/")
    default = Path("runs") if Path("runs").is_dir() else Path()
    return [without_dots(directory) for directory in given or [default]]


def run_at(root: Path) -> RunFiles | None:
    """The run in this very directory; None if there is none."""
    return _list(root).run


def _list(path: Path) -> _Listing:
    try:
        stat = path.stat()
        identity = (stat.st_dev, stat.st_ino)
        with os.scandir(path) as entries:
            listed = list(entries)
    except OSError as error:
        return _Listing(path, (0, 0), trouble=f"{path}: {error.strerror}")
    names = frozenset(entry.name for entry in listed)
    read = _config_of(path, names)
    if read is not None:
        return _Listing(path, identity, RunFiles(path, identity, stat.st_uid, names, *read))
    return _Listing(path, identity, below=tuple(_directories(path, listed)))


def _directories(path: Path, entries: Iterable[os.DirEntry[str]]) -> Iterator[Path]:
    """Real ones before links: of two names of a run the real one is shown."""
    links = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        with suppress(OSError):  # a link that leads nowhere, or in a circle
            if not entry.is_dir():
                continue
            if entry.is_symlink():
                links.append(path / entry.name)
            else:
                yield path / entry.name
    yield from links


def _config_of(path: Path, names: frozenset[str]) -> tuple[dict[str, Any], str] | None:
    """Settings and damage of a run directory; None: it is none."""
    num_marks = len(names & _MARKS)
    if "config.json" not in names:
        return ({}, "config.json is missing") if num_marks >= _LOST_ITS_CONFIG else None
    if not num_marks:
        return None
    trouble = "config.json is not that of a run"
    try:
        document = json.loads((path / "config.json").read_bytes())
    except OSError as error:
        document, trouble = None, f"config.json: {error.strerror}"
    except ValueError:
        document, trouble = None, "config.json is damaged"
    if isinstance(document, dict) and isinstance(document.get("config"), dict) and "hash" in document:
        return document["config"], ""
    return ({}, trouble) if num_marks >= _LOST_ITS_CONFIG else None
