"""Curves of a run: read, thinned, drawn, and as tables."""

from __future__ import annotations

import csv
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhpc.metrics.curves import merged, read_curves, tabulated
from rlhpc.metrics.tensorboard import Recorder, TensorBoardWriter


def _write(directory: Path, steps: range, offset: float, seam: int | None = None, begins_s: float = 1e9) -> None:
    clock = iter(begins_s + np.arange(10_000))
    recorder = Recorder(directory, seam=seam, wall_clock=lambda: float(next(clock)))
    for step in steps:
        recorder.step(step, {"reward/mean": step + offset, "trainer/loss": -step})
        recorder.histogram("reward/histogram", step, [0.0, 1.0])
    recorder.close()


def test_a_resume_undoes_what_tensorboard_does_not_show_either(tmp_path: Path) -> None:
    _write(tmp_path, range(8), 0.0)
    _write(tmp_path, range(5, 12), 0.5, 5, begins_s=2e9)
    curves = read_curves(tmp_path)
    shown = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    shown.Reload()
    for name in ("reward/mean", "trainer/loss"):
        points = shown.Scalars(name)
        assert curves[name].steps.tolist() == [point.step for point in points] == list(range(12))
        assert curves[name].values.tolist() == [point.value for point in points]
        assert curves[name].unix_times_s.tolist() == [point.wall_time for point in points]


def test_a_resume_from_the_start_leaves_nothing_of_before(tmp_path: Path) -> None:
    _write(tmp_path, range(8), 0.0)
    _write(tmp_path, range(3), 0.5, 0, begins_s=2e9)
    assert read_curves(tmp_path)["reward/mean"].values.tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("cut", [1, 7, 20, 60])
def test_a_file_that_is_being_written_is_read_up_to_there(tmp_path: Path, cut: int) -> None:
    _write(tmp_path, range(8), 0.0)
    (path,) = tmp_path.glob("events.out.tfevents.*")
    path.write_bytes(path.read_bytes()[:-cut])
    steps = read_curves(tmp_path)["reward/mean"].steps.tolist()
    assert steps == list(range(len(steps)))
    assert 6 <= len(steps) <= 8


def test_curves_of_different_steps_share_an_axis(tmp_path: Path) -> None:
    _write(tmp_path, range(3), 0.0)
    curves = read_curves(tmp_path)
    steps, values = merged(curves, ["reward/mean", "not/there"])
    assert steps.tolist() == [0, 1, 2]
    assert [*values] == ["reward/mean"]
    assert curves["reward/mean"].last == 2.0
    assert read_curves(tmp_path / "nowhere") == {}


def test_of_a_step_that_was_written_twice_the_newer_point_counts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, seam=None)
    for step, value in ((0, 0.0), (2, 2.0), (1, 1.0), (2, 2.5)):
        recorder.step(step, {"reward/mean": value})
    recorder.close()
    curve = read_curves(tmp_path)["reward/mean"]
    assert (curve.steps.tolist(), curve.values.tolist()) == ([0, 1, 2], [0.0, 1.0, 2.5])


def test_a_long_run_is_read_with_few_bytes_a_point(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path)
    for step in range(500):
        writer.scalars(step, {f"some/metric_{number}": step for number in range(100)})
    writer.close()
    read_curves(tmp_path)  # what is imported and made once
    tracemalloc.start()
    try:
        curves = read_curves(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_points = sum(len(curve.steps) for curve in curves.values())
    assert num_points >= 500 * 100
    assert peak < 32 * num_points


# ---------------------------------------------------- Curves as a table: a row a step, nothing where there is no point


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
