"""Curves as a table: one row per step, one column per metric, as text or as columns for a Parquet file or data frame.

Input: curves, as read from a run's event files.  Output: columns of plain numbers, or CSV.  Where a metric has no
point, its cell is None, in CSV empty; a point that is not a number is `nan`, and both differ on purpose.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.metrics.curves import Curve

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

        Values are on disk as float32; here they are the shortest decimal numbers that stand for these.
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
        """A line with the names, then one for each step (RFC 4180, with the line ends of Unix)."""
        columns = self.columns()
        line = io.StringIO()
        writer = csv.writer(line, lineterminator="\n")
        for row in ([*columns], *zip(*columns.values(), strict=True)):
            writer.writerow(row)  # None is written as nothing
            yield line.getvalue()
            line.seek(0)
            line.truncate()

    def rows(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """Step, unix time in seconds, and the points that there are, for programs that take a step at a time."""
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
    """Return the shortest decimal number that stands for a value of float32."""
    return float(str(np.float32(value)))
