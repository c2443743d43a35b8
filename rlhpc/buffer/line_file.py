"""A file of JSON lines that belongs to a run: appended and synced, read whole, and never undone by a resume.

Input: frozen dataclasses of one kind.  Output: lines that are on disk.  A line that a crash cut off is skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlhpc.files import append_lines
from rlhpc.ownership import Fence

log = logging.getLogger("rlhpc.line_file")
Line = TypeVar("Line")


class LineFile(Generic[Line]):
    """A file of lines of one kind; only one thread at a time may append."""

    def __init__(self, path: Path, kind: type[Line], fence: Fence | None = None) -> None:
        """fence: checked before each change; a line that is being written may still land after a take-over."""
        self._path, self._kind, self._fence = path, kind, fence

    def read(self) -> list[Line]:
        """All lines, oldest first; none without a file.  Raises OSError."""
        return [*self.each()]

    def each(self) -> Iterator[Line]:
        """Like `read`, one by one."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                if not line.strip():
                    continue
                try:
                    found = self._kind(**json.loads(line))
                except (ValueError, TypeError):
                    log.warning("%s: skipped a malformed line: %r", self._path, line.rstrip(b"\n")[:80])
                else:
                    yield found

    def append(self, lines: Sequence[Any]) -> bool:
        """Write lines to disk.  False, with a warning: the disk refuses.  Raises OwnershipLost."""
        data = "".join(f"{json.dumps(asdict(line))}\n" for line in lines)
        try:
            if self._fence is not None:
                self._fence.check()
            append_lines(self._path, data.encode())
        except OSError as error:
            log.warning("%s not written: %s", self._path, error.strerror or error)
            return False
        return True
