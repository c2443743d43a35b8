"""Curves as a table: a row a step, nothing where there is no point."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rlhpc.metrics.curves import read_curves, tabulated
from rlhpc.metrics.tensorboard import Recorder


def _recorded(directory: Path, steps: range, seam: int | None = None, begins_s: float = 1e9) -> None:
    times = iter(range(10_000))
    recorder = Recorder(directory, seam=seam, wall_clock=lambda: begins_s + next(times))
    for step in steps:
        scalars = {"reward/mean": 0.1 * step}
        if step % 2:
            scalars["time/checkpoint_s"] = float("nan") if step == 3 else 1.5
        recorder.step(step, scalars)
    recorder.close()


def test_missing_points_are_empty_and_differ_from_points_that_are_no_number(tmp_path: Path) -> None:
    _recorded(tmp_path, range(4))
    lines = list(tabulated(read_curves(tmp_path)).csv_lines())
    names, *rows = csv.reader(io.StringIO("".join(lines)))
    assert names == ["step", "unix_time_s", "reward/mean", "time/checkpoint_s"]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2] for row in rows] == ["0.0", "0.1", "0.2", "0.3"]  # not 0.10000000149011612: float32 holds no more
    assert [row[3] for row in rows] == ["", "1.5", "", "nan"]
    assert len(lines) == 5


def test_attempts_are_joined_and_what_a_resume_has_undone_is_left_out(tmp_path: Path) -> None:
    _recorded(tmp_path, range(6))
    _recorded(tmp_path, range(3, 5), 3, begins_s=2e9)
    table = tabulated(read_curves(tmp_path))
    assert table.steps.tolist() == [0, 1, 2, 3, 4]
    assert (table.unix_times_s > 1.5e9).tolist() == [False, False, False, True, True]
    assert [points for _, _, points in table.rows()][2] == {"reward/mean": 0.2}


def test_without_curves_there_are_no_rows() -> None:
    table = tabulated({})
    assert list(table.csv_lines()) == ["step,unix_time_s\n"]
    assert list(table.rows()) == []
