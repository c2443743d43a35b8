"""What the demo says of a run that was stopped: the model is not what this is about, and is not made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.demo import run as demo
from launch.plan.gpu_map import VisibleGpus, map_gpus
from rlhpc.config.file import load_config


def test_a_demo_that_was_stopped_in_good_order_says_so_instead_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "make_model", lambda *_, **__: SimpleNamespace(num_parameters=1, accuracy=0.3))
    overrides = [f"run.directory={tmp_path / 'run'}", f"data.path={tmp_path / 'train.jsonl'}"]
    assert demo.run_demo(lambda config: 0, overrides=overrides) == 0
    said = capsys.readouterr().err
    assert "stopped early" in said
    assert "3/3  results" not in said


@pytest.mark.parametrize("words", [(), ("0",), ("0", "1"), ("GPU-1", "GPU-2", "GPU-3", "GPU-4")])
def test_the_demo_finds_a_place_on_any_number_of_gpus(words: tuple[str, ...]) -> None:
    gpus = VisibleGpus(words, None)
    plan = map_gpus(load_config(demo.RUN_FILE), gpus)
    assert len(plan.devices) == (2 if words else 0), plan
