"""Append events to one TensorBoard event file, from a thread, without ever stopping the run.

Input: serialised tensorboard Event messages.  Output: events.out.tfevents.*.  A slow file system does not block the
caller; a full one loses the current events and logs one warning; later events are written once there is space.  The
file is valid at every moment: a record that did not fit is cut off again, since readers would stop at it.  Events are
synced, because NFS and Lustre may take bytes that their quota refuses later, and leave zeros in their place.

Why not tensorboard's EventFileWriter: its thread ends at the first error, which it then raises from every later call,
and the half-written record stays.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter

from rlhpc.errors import RunDirectoryError
from rlhpc.files import numbered_files

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
_MAX_QUEUED = 10_000  # events; a few hundred steps, for a file system that hangs
_Item = bytes | threading.Event | None  # a serialised event, a flush to be answered, or the end


class EventFile:
    """One file of one attempt; a later attempt makes a later file in the same directory."""

    def __init__(self, directory: Path, wall_clock: Callable[[], float]) -> None:
        """Create the file.  Raises RunDirectoryError if that fails."""
        self._wall_clock = wall_clock
        try:
            directory.mkdir(parents=True, exist_ok=True)
            time = _later_than_all(directory, int(wall_clock()))
            self.path = directory / f"events.out.tfevents.{time:010d}.{socket.gethostname()}.{os.getpid()}"
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            raise RunDirectoryError(f"cannot create an event file in {directory}: {error}") from error
        self._queue: queue.Queue[_Item] = queue.Queue(_MAX_QUEUED)
        self._is_closed = False
        self._is_failing = False  # read by others, written by the thread only
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write_until_closed, name="event-file", daemon=True)
        self._thread.start()
        source = SourceMetadata(writer="rlhpc")
        self.append(Event(file_version="brain.Event:2", source_metadata=source))

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed."""
        return self._is_failing

    @property
    def num_lost(self) -> int:
        """Events that could not be written so far."""
        return self._num_lost

    def append(self, event: Event) -> None:
        """Stamp and queue an event; returns at once.  No effect after close()."""
        event.wall_time = self._wall_clock()
        if self._is_closed:
            return
        try:
            self._queue.put_nowait(event.SerializeToString())
        except queue.Full:
            self._num_lost += 1

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until what was queued is written or lost; False if that took longer than `timeout_s`."""
        if self._is_closed:
            return True
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close; give up after `timeout_s`, since a file system may hang.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_until_closed(self) -> None:
        while True:
            first = self._queue.get()
            items = [first, *self._take_the_rest()]
            self._write([item for item in items if isinstance(item, bytes)])
            for item in items:
                if isinstance(item, threading.Event):
                    item.set()
            if None in items:
                self._file.close()
                return

    def _take_the_rest(self) -> list[_Item]:
        items: list[_Item] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def _write(self, events: list[bytes]) -> None:
        """Write whole records or nothing of them."""
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event)
        end = self._file.tell()
        try:
            _write_all(self._file, records.getbuffer())
            os.fdatasync(self._file.fileno())
        except OSError as error:
            self._num_lost += len(events)
            self._cut_off(end)
            if not self._is_failing:
                _logger.warning("metrics: cannot write %s (%s); the run goes on, metrics are lost", self.path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _cut_off(self, end: int) -> None:
        try:
            self._file.truncate(end)
            self._file.seek(end)
        except OSError as error:
            # Readers will stop at the torn record; nothing better can be done.
            _logger.warning("metrics: cannot cut %s back to %d bytes: %s", self.path, end, error)


def _write_all(file: io.FileIO, data: memoryview) -> None:
    """A raw write may take only a part, just before the disk is full."""
    while data:
        data = data[file.write(data) or 0 :]


def _later_than_all(directory: Path, now: int) -> int:
    """Now, or a second after the newest file: the clock was set back, or that of another node is ahead.

    Readers take files in the order of their names, and TensorBoard ignores one that sorts before what it has read.
    """
    files = numbered_files(directory, _NAME)
    return max(now, files[-1][0] + 1 if files else 0)
