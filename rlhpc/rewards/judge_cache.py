"""Replies of a judge in the run directory, by what was asked: a completion is not paid for twice.

Input: digests of requests.  Output: replies.  Each worker appends JSON lines to a file of its own and reads those of
all; a line that was cut off by a death is passed over.  A cache that cannot be written costs money and nothing else.
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

log = logging.getLogger("rlhpc.rewards")


def digest_of(request: Mapping[str, Any]) -> str:
    """Of everything that the reply depends on."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class JudgeCache:
    """One worker's view of the directory."""

    def __init__(self, directory: Path) -> None:
        """Makes nothing before the first reply is kept."""
        self._directory = directory
        self._own = directory / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._replies: dict[str, str] = {}
        self._read_bytes: dict[Path, int] = {}

    def get(self, digest: str) -> str | None:
        """The reply to a request, also one that another worker has got meanwhile."""
        if digest not in self._replies:
            self._refresh()
        return self._replies.get(digest)

    def keep(self, digest: str, reply: str) -> None:
        """Remember a reply, and write it down if that is possible."""
        self._replies[digest] = reply
        line = json.dumps({"digest": digest, "reply": reply}).encode() + b"\n"
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._own.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            log.warning("%s: a judge's reply cannot be kept: %s", self._own, error.strerror)

    def _refresh(self) -> None:
        try:
            files = [entry for entry in os.scandir(self._directory) if entry.name.endswith(".jsonl")]
        except OSError:
            return  # not there yet
        for entry in files:
            path = Path(entry.path)
            try:
                if entry.stat().st_size > self._read_bytes.get(path, 0):
                    self._read_on(path)
            except OSError:
                continue

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            whole, _, _rest = file.read().rpartition(b"\n")
        if whole:
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
        for line in whole.split(b"\n"):
            try:
                found = json.loads(line)
                self._replies[str(found["digest"])] = str(found["reply"])
            except (ValueError, KeyError, TypeError):
                continue
