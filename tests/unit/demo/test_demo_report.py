"""The closing table and the picture."""

from __future__ import annotations

import numpy as np
import pytest

from launch.demo.task import draw_learning_curve, running_mean
from launch.run_files.run_state import figures_table

SUMMARY = {
    "steps": 160,
    "rollouts_trained": 15_360,
    "reward_first_tenth": 0.4296,
    "reward_last_tenth": 0.9164,
    "staleness_max": 4,
    "staleness_bound": 4,
    "rollouts_spanning_update": 0.418,
    "packing_fill": 0.847,
    "generator_tokens_per_s": 9758.8,
    "trainer_tokens_per_s": 8130.2,
    "generator_idle_ratio": 0.046,
    "trainer_idle_ratio": 0.255,
    "wall_s": 112.1,
}


def test_the_table_is_aligned_and_says_every_figure():
    lines = figures_table(SUMMARY).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == len(SUMMARY) + 2
    text = "\n".join(lines)
    for figure in ("160", "15,360", "0.430", "0.916", "42%", "85%", "9,759", "8,130", "5%", "26%", "112"):
        assert figure in text


@pytest.mark.parametrize("value", [None, float("nan"), "?"])
def test_a_figure_that_is_unknown_is_left_out(value):
    text = figures_table({**SUMMARY, "reward_last_tenth": value})
    assert "last tenth" not in text
    assert "first tenth" in text


def test_steps_that_were_skipped_are_in_the_table_and_zero_of_them_are_not():
    assert "skipped" not in figures_table({**SUMMARY, "skipped_steps": 0})
    (line,) = (each for each in figures_table({**SUMMARY, "skipped_steps": 4}).splitlines() if "skipped" in each)
    assert line.split()[-1] == "4"


def test_the_running_mean_is_shorter_at_both_ends():
    assert running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_the_picture_is_a_png(tmp_path):
    path = tmp_path / "learning_curve.png"
    rng = np.random.default_rng(0)
    versions = range(160)
    draw_learning_curve(path, versions, [0.9 - 0.6 * np.exp(-v / 40) + rng.normal(0, 0.03) for v in versions])
    assert path.read_bytes().startswith(b"\x89PNG")
