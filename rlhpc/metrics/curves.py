"""Read a run's scalars back from its TensorBoard files.

Input: the event files of one directory.  Output: a Curve for each metric.  Steps that a later attempt has undone are
left out, as TensorBoard leaves them out.  A file that is being written, or was cut off by a kill, is read up to there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

EVENT_FILES = "events.out.tfevents.*"  # in a directory; names begin with the time, so that they sort as they were made
_HEAD = struct.Struct("<QI")  # length of the record, checksum of the length
_CRC_BYTES = 4  # behind the record
_LARGEST = 64 << 20  # of a record: more is no length but damage


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over optimiser steps; equal lengths."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    unix_times_s: NDArray[np.float64]  # when each was written

    @property
    def last(self) -> float:
        """The newest value that is finite; nan if there is none."""
        finite = self.values[np.isfinite(self.values)]
        return float(finite[-1]) if finite.size else float("nan")


def read_curves(directory: Path) -> dict[str, Curve]:
    """Curves by name; {} where there are no files.  Raises OSError."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(directory.glob(EVENT_FILES)):
        for event, _ in events_in(path.read_bytes()):
            if event.session_log.status == SessionLog.START:
                _undo(points, event.step)
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    points.setdefault(value.tag, []).append((event.step, value.simple_value, event.wall_time))
    return {name: _curve(of_name) for name, of_name in points.items() if of_name}


def merged(curves: Mapping[str, Curve], names: list[str]) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Steps of any of these, and each one's values there; nan where it has none."""
    known = [name for name in names if name in curves]
    if not known:
        return np.zeros(0, np.int64), {}
    steps = np.unique(np.concatenate([curves[name].steps for name in known]))
    found = {}
    for name in known:
        found[name] = np.full(len(steps), np.nan)
        found[name][np.searchsorted(steps, curves[name].steps)] = curves[name].values
    return steps, found


def events_in(data: bytes) -> Iterator[tuple[Event, int]]:
    """Whole events, each with the place behind it; ends at what is torn or damaged."""
    place = 0
    while place + _HEAD.size <= len(data):
        length, _ = _HEAD.unpack_from(data, place)
        start = place + _HEAD.size
        place = start + length + _CRC_BYTES
        if length > _LARGEST or place > len(data):
            return  # it is being written, or was cut off
        try:
            yield Event.FromString(data[start : start + length]), place
        except DecodeError:
            return  # damaged: TensorBoard stops there, too


def _undo(points: dict[str, list[tuple[int, float, float]]], step: int) -> None:
    for name, of_name in points.items():
        points[name] = [point for point in of_name if point[0] < step]


def _curve(points: list[tuple[int, float, float]]) -> Curve:
    newest = {step: (value, at) for step, value, at in points}
    steps = sorted(newest)
    values, times = zip(*(newest[step] for step in steps), strict=True)
    return Curve(np.array(steps, np.int64), np.array(values, np.float64), np.array(times, np.float64))
