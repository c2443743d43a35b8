"""All that a power cut may leave of files: a record of what was written and synced, and states that agree with it.

What a file system promises: bytes that were synced are there; of bytes that were not, any 4 KiB block may be there or
not, in any order, and one may be torn at a sector; a name is there once its directory was synced, and may be before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

BLOCK, SECTOR = 4096, 512


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)  # in the order of writing, cut into blocks

    def write(self, offset: int, data: bytes) -> None:
        while data:
            length = min(len(data), BLOCK - offset % BLOCK)
            self.pending.append((offset, data[:length]))
            offset, data = offset + length, data[length:]

    def resize(self, size: int) -> None:
        if size:
            self.pending.append((size - 1, b"\0"))  # the last byte: files only grow

    def sync(self) -> None:
        self.durable = self.after(self.pending)
        self.pending = []

    def after(self, writes: list[tuple[int, bytes]]) -> bytearray:
        image = bytearray(self.durable)
        for offset, data in writes:
            if len(image) < offset + len(data):
                image.extend(bytes(offset + len(data) - len(image)))
            image[offset : offset + len(data)] = data
        return image


class _Disk:
    """Files as they were at one moment of the record."""

    def __init__(self) -> None:
        self.acknowledged: list[Any] = []
        self._files: dict[int, _File] = {}
        self._names: dict[str, int] = {}  # on disk
        self._names_now: dict[str, int] = {}
        self._renames: list[tuple[str, str]] = []  # that are not on disk yet

    def apply(self, kind: str, facts: list[Any]) -> None:
        match kind, facts:
            case "ack", [what]:
                self.acknowledged.append(what)
            case "open", [name, number]:
                self._names_now[name], self._files[number] = number, _File()
            case "write", [number, offset, data]:
                self._files[number].write(offset, data)
            case "resize", [number, size]:
                self._files[number].resize(size)
            case "sync", [number]:
                self._files[number].sync()
            case "rename", [old, new]:
                self._names_now[new] = self._names_now.pop(old)
                self._renames.append((old, new))
            case "sync names", []:
                self._names, self._renames = dict(self._names_now), []

    def after_power_cut(self, rng: random.Random) -> dict[str, bytes]:
        for old, new in self._renames:
            if rng.random() < 0.5:
                self._names.pop(old, None)
                self._names[new] = self._names_now[new]
        images = {number: bytes(file.after(_some(file.pending, rng))) for number, file in self._files.items()}
        return {name: images[number] for name, number in self._names.items()}


class RecordedDisk:
    """Notes what is done to the files below a directory while real files are written."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, forgets_syncs: bool = False) -> None:
        """forgets_syncs: a disk that lies, for a control."""
        self._root, self._log, self._forgets = root, list[tuple[Any, ...]](), forgets_syncs
        self._paths: dict[int, str] = {}  # descriptor → path at its opening
        self._real = {
            name: getattr(os, name) for name in ("open", "pwritev", "ftruncate", "fsync", "fdatasync", "replace")
        }
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))

    def acknowledge(self, what: Any) -> None:
        """From now on every state must hold this."""
        self._log.append(("ack", what))

    def states(self, count: int, rng: random.Random) -> Iterator[tuple[dict[str, bytes], list[Any]]]:
        """(files by name, what was acknowledged) of `count` moments and choices."""
        for _ in range(count):
            yield self._state(rng.randrange(len(self._log) + 1), rng)

    def _state(self, moment: int, rng: random.Random) -> tuple[dict[str, bytes], list[Any]]:
        disk = _Disk()
        for kind, *facts in self._log[:moment]:
            disk.apply(kind, facts)
        return disk.after_power_cut(rng), disk.acknowledged

    # ------------------------------------------------------------------------------------------------- system calls

    def _is_mine(self, path: Any) -> bool:
        return self._root in Path(path).parents or Path(path) == self._root

    def _open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        descriptor = self._real["open"](path, flags, *rest, **more)
        if self._is_mine(path):
            self._paths[descriptor] = str(path)
            if flags & os.O_CREAT:
                self._log.append(("open", str(Path(path).relative_to(self._root)), self._inode(descriptor)))
        return descriptor

    def _pwritev(self, descriptor: int, pieces: Any, offset: int) -> int:
        written = self._real["pwritev"](descriptor, pieces, offset)
        data = b"".join(bytes(piece) for piece in pieces)[:written]
        self._note(descriptor, "write", offset, data)
        return written

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self._real["ftruncate"](descriptor, size)
        self._note(descriptor, "resize", size)

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        self._synced(descriptor)

    def _fdatasync(self, descriptor: int) -> None:
        self._real["fdatasync"](descriptor)
        if not self._forgets:
            self._synced(descriptor)

    def _synced(self, descriptor: int) -> None:
        if self._paths.get(descriptor) == str(self._root):
            self._log.append(("sync names",))
        else:
            self._note(descriptor, "sync")

    def _replace(self, old: Any, new: Any) -> None:
        self._real["replace"](old, new)
        if self._is_mine(new):
            self._log.append(("rename", *(str(Path(path).relative_to(self._root)) for path in (old, new))))

    def _note(self, descriptor: int, kind: str, *facts: Any) -> None:
        if descriptor in self._paths:
            self._log.append((kind, self._inode(descriptor), *facts))

    def _inode(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_ino


def _some(writes: list[tuple[int, bytes]], rng: random.Random) -> list[tuple[int, bytes]]:
    """Those that reached the disk: often all or none, else any; one of them perhaps in part."""
    share = rng.choice((0.0, 1.0, rng.random()))
    kept = [write for write in writes if rng.random() < share]
    if kept and rng.random() < 0.5:
        index = rng.randrange(len(kept))
        offset, data = kept[index]
        kept[index] = (offset, data[: rng.randrange(0, len(data) // SECTOR + 1) * SECTOR])
    return kept


def put(directory: Path, files: dict[str, bytes]) -> None:
    """Lay a state out."""
    for name, data in files.items():
        (directory / name).write_bytes(data)
