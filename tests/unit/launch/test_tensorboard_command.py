"""`rlhpc tensorboard`: runs under their own names, once each."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util

from launch.cli import main
from launch.commands.show import EventView
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.tensorboard import Recorder, TensorBoardWriter
from rlhpc.protocol.errors import EXIT_CONFIG
from tests.unit.doc_pages import ROOT
from tests.unit.launch.seen_runs import TextRun


def made(root: Path, name: str) -> RunLayout:
    """A run of four steps with one evaluation."""
    layout = TextRun(root, f"run.name={name}").layout
    record(layout, range(4))
    curves = TensorBoardWriter(layout.evaluations / "tensorboard")
    curves.scalars(4, {"evaluation/sums/pass@1": 0.5})
    curves.close()
    layout.status.write_text("{}")
    return layout


def record(layout: RunLayout, steps: range, seam: int | None = None) -> None:
    recorder = Recorder(layout.tensorboard, seam=seam)
    for step in steps:
        recorder.step(step, {"reward/mean": float(step)})
    recorder.close()


def shown(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Run → points of its reward, as TensorBoard's own loader finds them."""
    loaded = EventMultiplexer().AddRunsFromDirectory(str(directory))
    loaded.Reload()
    return {run: points_of(loaded, run) for run in loaded.Runs()}


def points_of(loaded: EventMultiplexer, run: str) -> list[tuple[int, float]]:
    """The loader turns numbers into tensors; [] where there is no reward."""
    if "reward/mean" not in loaded.Runs()[run]["tensors"]:
        return []
    points = loaded.Tensors(run, "reward/mean")
    return [(point.step, float(tensor_util.make_ndarray(point.tensor_proto))) for point in points]


def test_every_run_is_shown_once_under_its_own_name(tmp_path: Path) -> None:
    made(tmp_path / "a", "first")
    made(tmp_path / "b", "second")
    made(tmp_path / "c", "first")
    view = EventView(tmp_path / "view", [tmp_path])
    view.find()
    view.update()
    assert view.names == ["first", "first (c/run)", "second"]
    reward = [(step, float(step)) for step in range(4)]
    runs = dict.fromkeys(view.names, reward) | {f"{name}/evaluations": [] for name in view.names}
    assert shown(tmp_path / "view") == runs


def test_what_happens_to_runs_meanwhile_is_seen_at_the_next_look(tmp_path: Path) -> None:
    layout = made(tmp_path / "a", "first")
    view = EventView(tmp_path / "view", [tmp_path])
    view.find()
    view.update()
    record(layout, range(2, 3), seam=2)  # a resume
    made(tmp_path / "b", "second")
    view.find()
    view.update()
    found = shown(tmp_path / "view")
    assert found["first"] == [(step, float(step)) for step in range(3)]
    assert found["second"] == [(step, float(step)) for step in range(4)]
    shutil.rmtree(layout.tensorboard)  # rlhpc run --fresh
    record(layout, range(1))
    view.update()
    assert shown(tmp_path / "view")["first"] == [(0, 0.0)]
    shutil.rmtree(layout.root)
    view.update()
    assert "second" in shown(tmp_path / "view")


def test_nothing_to_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tensorboard", str(tmp_path)]) == EXIT_CONFIG
    assert f"no run with metrics below {tmp_path}" in capsys.readouterr().err
    assert main(["tensorboard", str(tmp_path / "nowhere")]) == EXIT_CONFIG
    assert "nowhere: no such directory" in capsys.readouterr().err


@pytest.mark.starts
def test_tensorboard_itself_serves_these_runs_until_it_is_ended(tmp_path: Path) -> None:
    made(tmp_path / "a", "first")
    (tmp_path / ".tensorboard-info").touch()  # another user's, say, where it cannot write
    command = [sys.executable, "-m", "launch.cli", "tensorboard", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert served.stdout is not None
    try:
        assert "first: add #custom_scalars to the address" in served.stdout.readline()
        address = next(match[0] for line in served.stdout if (match := re.search(r"http://localhost:\d+/", line)))
        assert ask(f"{address}data/runs", lambda runs: len(runs) > 1) == ["first", "first/evaluations"]
        ask(f"{address}data/plugin/scalars/tags", lambda tags: "reward/mean" in tags["first"])
        scalars = f"{address}data/plugin/scalars/scalars?run=first&tag=reward/mean"
        points = ask(scalars, lambda points: len(points) >= 4)
        assert [point[1] for point in points] == [0, 1, 2, 3]
        layout = ask(f"{address}data/plugin/custom_scalars/layout")
        assert layout["category"][0]["title"] == "Reward"
    finally:
        served.send_signal(signal.SIGTERM)
        served.stdout.read()
    assert served.wait() == 0
    assert not [*tmp_path.glob("rlhpc-tensorboard-*")]


def ask(address: str, is_loaded: Callable[[Any], bool] = bool) -> Any:
    """Of a server on this machine.  It knows no run before it has loaded it all: until then it is asked again."""
    while True:
        with urllib.request.urlopen(address, timeout=120) as reply:
            found = json.loads(reply.read())
        if is_loaded(found):
            return found
