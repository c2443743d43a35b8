"""A run is predicted from another one, and then takes about as long as was said."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from tests.ring.run_kit import rlhpc, summary_of
from tests.ring.timed_runs import TRAINED_TOKEN_S, make_timed_lab, slow_trainers, timed_run

pytestmark = [pytest.mark.ring, pytest.mark.long]
OFF_BY = 0.35  # of machines that are busy; what was recorded on quiet ones is in test_job_script.py


def step_s(layout: RunLayout) -> float:
    values = RunView(layout).curves["time/step_s"].values
    return float(values[len(values) // 4 :].mean())


@pytest.mark.timeout(900)
def test_a_run_takes_as_long_as_was_predicted_from_another_one(tmp_path: Path) -> None:
    """Both at once, so that what else the machine does slows both down; the second has other generators and S."""
    lab = make_timed_lab(tmp_path, slowness=2)
    settings = {"one": (1, 1), "two": (2, 3)}
    with slow_trainers(2 * TRAINED_TOKEN_S), ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(timed_run, lab, name, generators=generators, max_staleness=bound, num_steps=24)
            for name, (generators, bound) in settings.items()
        }
    one, two = (run.result() for run in runs.values())
    site = tmp_path / "site.toml"
    site.write_text("[trainer]\n[generation]\n")
    words = ("plan", str(tmp_path / "two.toml"), str(site), "--predict", "--from", str(one.root), "--json")
    said = rlhpc(*words, timeout_s=600)
    assert said.returncode == 0, said.stderr
    prediction = json.loads(said.stdout)
    assert not any(figure["source"].startswith("a guess: data") for figure in prediction["rates"].values())
    assert prediction["this_split"]["step_s"] == pytest.approx(step_s(two), rel=OFF_BY)
    assert prediction["this_split"]["step_s"] < 0.8 * step_s(one)
    assert prediction["seconds"] == pytest.approx(summary_of(two)["training_s"], rel=OFF_BY)
