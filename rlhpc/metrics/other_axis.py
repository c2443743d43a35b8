"""A run's events over another axis than steps: over trained tokens, or over the run's seconds.

Input: the event files of a run, which may still be active.  Output: a copy in which the step of every event is the
value of the axis metric at that time; every step has that metric.  The next update() adds later points, resumes and
restarts from the beginning.  The metric is stored as float32, so that it is exact to a relative 1e-7.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary.writer.record_writer import RecordWriter

from rlhpc.metrics.curves import EVENT_FILES, events_in

_END = 1 << 62  # of what is taken for a place on an axis: more is damage, and no step of an event
AXES: Mapping[str, str] = MappingProxyType({"tokens": "tokens/trained_total", "seconds": "wall_s"})  # name → metric


class OtherAxis:
    """The copy of one directory of event files."""

    def __init__(self, source: Path, copy: Path, metric: str) -> None:
        """copy: a directory that is made, and deleted when the run is begun anew."""
        self._source, self._copy, self._metric = source, copy, metric
        self._read = dict[Path, int]()  # bytes of each file that are copied
        self._steps, self._places = list[int](), list[int]()  # ascending; what the run had come to at each step

    def update(self) -> None:
        """Copy what is new.  Raises OSError."""
        files = sorted(self._source.glob(EVENT_FILES))
        if any(file not in files for file in self._read):
            shutil.rmtree(self._copy, ignore_errors=True)
            self._read, self._steps, self._places = {}, [], []
        for file in files:
            self._copy_from(file)

    def _copy_from(self, file: Path) -> None:
        self._copy.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as source, (self._copy / file.name).open("ab") as copy:
            source.seek(self._read.get(file, 0))
            writer = RecordWriter(copy)
            for event, end in events_in(source):
                self._move(event)
                writer.write(event.SerializeToString())
                self._read[file] = end

    def _move(self, event: Event) -> None:
        if event.session_log.status == SessionLog.START:  # everything from this step on is void
            kept = bisect_right(self._steps, event.step - 1)
            del self._steps[kept:], self._places[kept:]
            event.step = self._places[-1] + 1 if self._places else 0
            return
        for value in event.summary.value:
            is_later = not self._steps or event.step > self._steps[-1]
            if value.tag == self._metric and is_later and 0 <= value.simple_value < _END:
                self._steps.append(event.step)
                self._places.append(int(value.simple_value))
        known = bisect_right(self._steps, event.step)
        event.step = self._places[known - 1] if known else 0
