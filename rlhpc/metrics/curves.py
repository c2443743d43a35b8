"""Read a run's scalars from its TensorBoard files.

Input: the event files of one directory.  Output: a Curve for each metric.  Steps that a later attempt has undone are
left out, as TensorBoard leaves them out.  A file that is being written, or was cut off by a kill, is read up to there.
"""

from __future__ import annotations

import csv
import io
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

# --------------------------------------------------------------------------------------------------------------- curves

EVENT_FILES = "events.out.tfevents.*"  # in a directory; names begin with the time, so that they sort as they were made
_HEAD = struct.Struct("<QI")  # length of the record, checksum of the length
_CRC_BYTES = 4  # behind the record
_LARGEST = 64 << 20  # of a record: a larger length is damage


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over optimiser steps; equal lengths.

    Steps and times are read-only: metrics that are always written together share them.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    unix_times_s: NDArray[np.float64]  # when each was written

    @property
    def last(self) -> float:
        """The newest finite value; nan if there is none."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if finite.size else float("nan")

    @property
    def growth(self) -> float:
        """Total growth of a counter that restarts from 0 now and then."""
        finite = self.values[np.isfinite(self.values)]
        return float(np.maximum(np.diff(finite, prepend=0.0), 0.0).sum())


def read_curves(directory: Path) -> dict[str, Curve]:
    """Curves by name; {} where there are no files.  Raises OSError."""
    written = _Written()
    for path in sorted(directory.glob(EVENT_FILES)):
        with path.open("rb") as file:
            for event in _events_in(file):
                if event.session_log.status == SessionLog.START:
                    written.undo(event.step)
                written.add(event)
    return written.curves()


def merged(curves: Mapping[str, Curve], names: list[str]) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Union of the steps of these curves, and each curve's values there; nan where it has none."""
    known = [name for name in names if name in curves]
    if not known:
        return np.zeros(0, np.int64), {}
    steps = np.unique(np.concatenate([curves[name].steps for name in known]))
    found = {}
    for name in known:
        found[name] = np.full(len(steps), np.nan)
        found[name][np.searchsorted(steps, curves[name].steps)] = curves[name].values
    return steps, found


def _events_in(file: BinaryIO) -> Iterator[Event]:
    """Whole events of a file, up to the first torn or damaged one."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, _ = _HEAD.unpack(head)
        record = file.read(length + _CRC_BYTES) if length <= _LARGEST else b""
        if len(record) < length + _CRC_BYTES:
            return  # it is being written, or was cut off
        try:
            event = Event.FromString(record[:length])
        except DecodeError:
            return  # damaged: TensorBoard stops there, too
        yield event


class _Written:
    """Points of all metrics as they were written: 8 bytes each, since a long run has ten million."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")  # of all events
        self._points: dict[str, tuple[array[int], array[float]]] = {}  # metric → events by number, values

    def add(self, event: Event) -> None:
        number = len(self._steps)
        self._steps.append(event.step)
        self._times.append(event.wall_time)
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                if (of_metric := self._points.get(value.tag)) is None:
                    of_metric = self._points[value.tag] = array("I"), array("f")
                of_metric[0].append(number)
                of_metric[1].append(value.simple_value)

    def undo(self, step: int) -> None:
        """Forget the points of this step and later ones."""
        is_before = np.array(self._steps) < step
        for name, (events, values) in self._points.items():
            kept = is_before[np.array(events)]
            if not kept.all():
                self._points[name] = (
                    array("I", np.array(events)[kept].tobytes()),
                    array("f", np.array(values)[kept].tobytes()),
                )

    def curves(self) -> dict[str, Curve]:
        """Curves by name, with the newer point of a step that was written twice.  Hands the points over."""
        steps, times = np.array(self._steps), np.array(self._times)
        shared: dict[bytes, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        found: dict[str, Curve] = {}
        for name in [*self._points]:
            events, values = map(np.array, self._points.pop(name))
            if len(events):
                _, from_behind = np.unique(steps[events[::-1]], return_index=True)
                newest = len(events) - 1 - from_behind
                when = events[newest]
                if (known := shared.get(when.tobytes())) is None:
                    known = shared[when.tobytes()] = steps[when], times[when]
                    for each in known:
                        each.flags.writeable = False
                found[name] = Curve(known[0], values[newest].astype(np.float64), known[1])
        return found


# ---------------------------------------------------------------------------------------------------------- curve table
#
# Curves as a table: one row per step, one column per metric, as text or as columns for a Parquet file or data frame.
#
# Input: curves, as read from a run's event files.  Output: columns of plain numbers, or CSV.  Where a metric has no
# point, its cell is None, in CSV empty; a point that is not a number is `nan`, and both differ on purpose.

STEP, UNIX_TIME_S = "step", "unix_time_s"


@dataclass(frozen=True, slots=True)
class CurveTable:
    """Metrics over the same steps."""

    steps: NDArray[np.int64]  # [S], ascending
    unix_times_s: NDArray[np.float64]  # [S], when the first of a step's points was written
    places: Mapping[str, NDArray[np.int64]]  # metric → its points' rows
    curves: Mapping[str, Curve]

    def columns(self) -> dict[str, list[Any]]:
        """Lists of int, float or None, equally long: `step`, `unix_time_s`, and the metrics in order of their names.

        Values are float32 on disk; here they are the shortest decimal numbers that represent these.
        """
        found: dict[str, list[Any]] = {
            STEP: [int(step) for step in self.steps],
            UNIX_TIME_S: [float(at) for at in self.unix_times_s],
        }
        for name, curve in self.curves.items():
            cells: list[float | None] = [None] * len(self.steps)
            for row, value in zip(self.places[name], curve.values, strict=True):
                cells[row] = shortest(value)
            found[name] = cells
        return found

    def csv_lines(self) -> Iterator[str]:
        """A line with the names, then a line per step (RFC 4180, with the line ends of Unix)."""
        columns = self.columns()
        line = io.StringIO()
        writer = csv.writer(line, lineterminator="\n")
        for row in ([*columns], *zip(*columns.values(), strict=True)):
            writer.writerow(row)  # None is written as nothing
            yield line.getvalue()
            line.seek(0)
            line.truncate()

    def rows(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Yield step, unix time in seconds, and the step's points by metric."""
        columns = self.columns()
        names = [*self.curves]
        for step, at, *cells in zip(*columns.values(), strict=True):
            points = {name: value for name, value in zip(names, cells, strict=True) if value is not None}
            yield step, at, points


def tabulated(curves: Mapping[str, Curve]) -> CurveTable:
    """Lay curves beside each other; without curves there are no rows."""
    ordered = dict(sorted(curves.items()))
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(curve.steps for curve in ordered.values())]))
    times, places = np.full(len(steps), np.inf), dict[str, NDArray[np.int64]]()
    for name, curve in ordered.items():
        places[name] = np.searchsorted(steps, curve.steps)
        times[places[name]] = np.minimum(times[places[name]], curve.unix_times_s)
    return CurveTable(steps, times, places, ordered)


def shortest(value: float) -> float:
    """Return the shortest decimal number that represents a float32."""
    return float(str(np.float32(value)))
