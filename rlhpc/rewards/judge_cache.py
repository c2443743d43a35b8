"""Replies of a judge in the run directory, by what was asked: a completion is not paid for twice.

Input: digests of requests.  Output: replies.  Each worker appends JSON lines to a file of its own and looks into those
of all; a line that was cut off by a death is skipped.  A worker remembers where a reply is, in about 150 bytes, and not
the reply: a node has many workers.  A cache that cannot be written costs money and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhpc.files import append_lines

log = logging.getLogger("rlhpc.rewards")

_BEGIN = b'{"digest": "'  # of every line
_KEY_DIGITS = 16  # of a digest's 64: enough to find a line, which has the others
_READ_BYTES = 1 << 20


def digest_of(request: Mapping[str, Any]) -> str:
    """Digest of everything that the reply depends on."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """One worker's view of the directory."""

    def __init__(self, directory: Path) -> None:
        """Creates nothing until the first reply is kept."""
        self._directory = directory
        self._own = directory / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._files: dict[str, _File] = {}  # by name
        self._unwritten: dict[str, str] = {}  # replies that could not be written, by digest

    def get(self, digest: str) -> str | None:
        """The reply to a request, also one that another worker has got meanwhile."""
        if digest in self._unwritten:
            return self._unwritten[digest]
        reply = self._find(digest)
        if reply is None:
            self._refresh()
            reply = self._find(digest)
        return reply

    def keep(self, digest: str, reply: str) -> None:
        """Write a reply to disk, or remember it if that is not possible."""
        line = json.dumps({"digest": digest, "reply": reply}).encode() + b"\n"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            append_lines(self._own, line, is_synced=False)
        except OSError as error:
            self._unwritten[digest] = reply
            log.warning("%s: a judge's reply cannot be cached: %s", self._own, error.strerror)

    def _find(self, digest: str) -> str | None:
        return next((reply for file in self._files.values() if (reply := file.get(digest)) is not None), None)

    def _refresh(self) -> None:
        try:
            entries = [entry for entry in os.scandir(self._directory) if entry.name.endswith(".jsonl")]
        except OSError:
            return  # not there yet
        for entry in entries:
            file = self._files.setdefault(entry.name, _File(Path(entry.path)))
            try:
                if entry.stat().st_size > file.read_bytes:
                    file.read_on()
            except OSError:
                continue


class _File:
    """Where each reply in one file begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[bytes, int] = {}  # the first digits of a digest → bytes before its line
        self.read_bytes = 0

    def read_on(self) -> None:
        """Look through what has been appended, up to the last whole line.  Raises OSError."""
        with self._path.open("rb", buffering=_READ_BYTES) as file:
            file.seek(self.read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or cut off
                if line.startswith(_BEGIN):
                    self._places[line[len(_BEGIN) : len(_BEGIN) + _KEY_DIGITS]] = self.read_bytes
                self.read_bytes += len(line)

    def get(self, digest: str) -> str | None:
        """The reply; None: it is not here, or cannot be read."""
        place = self._places.get(digest[:_KEY_DIGITS].encode())
        if place is None:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(place)
                found = json.loads(file.readline())
            return str(found["reply"]) if found["digest"] == digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
