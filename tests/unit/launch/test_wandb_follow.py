"""A run is sent to Weights & Biases while it goes on: each step once, across interruptions and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from launch.cli import main
from launch.commands.trackers import rows_to_send
from launch.run_directory.owner import register_launcher
from rlhpc.metrics.curves import Curve, tabulated
from rlhpc.metrics.tensorboard import Recorder, TensorBoardWriter
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED
from tests.patience import PATIENCE_S
from tests.unit.launch.seen_runs import TextRun
from tests.unit.launch.wandb_server import WandbServer, serving

ROOT = Path(__file__).parents[3]


def curve(steps: list[int], times: list[float], worth: float = 0.5) -> Curve:
    return Curve(np.array(steps), np.full(len(steps), worth), np.array(times))


def test_the_newest_step_waits_until_it_is_whole_and_an_evaluation_goes_with_the_step_that_follows_it() -> None:
    table = tabulated(
        {
            "reward/mean": curve([0, 1, 2, 3], [10.0, 20.0, 30.0, 40.0]),
            "evaluation/sums/pass@1": curve([0, 2], [25.0, 45.0]),
        }
    )
    sent = list(rows_to_send(table, 0, is_last=False, is_complete=False))
    assert [step for step, _, _ in sent] == [0, 1, 2]
    assert sent[2][2] == {"reward/mean": 0.5, "evaluation/sums/pass@1": 0.5, "evaluation/step": 0.0}
    assert all("evaluation/step" not in points for _, _, points in sent[:2])
    assert [step for step, _, _ in rows_to_send(table, 2, is_last=True, is_complete=False)] == [2, 3]
    *_, behind = rows_to_send(table, 2, is_last=True, is_complete=True)  # nothing else will carry the last one
    assert behind == (4, 45.0, {"evaluation/sums/pass@1": 0.5, "evaluation/step": 2.0})


def test_two_evaluations_that_come_together_keep_their_own_steps() -> None:
    table = tabulated(
        {
            "reward/mean": curve([0, 1, 2], [10.0, 20.0, 30.0]),
            "evaluation/sums/pass@1": curve([0, 1], [11.0, 12.0]),
        }
    )
    sent = list(rows_to_send(table, 0, is_last=True, is_complete=False))
    assert [points.get("evaluation/step") for _, _, points in sent] == [None, 0.0, 1.0]


class Run:
    """A run directory that a test writes as a controller does."""

    def __init__(self, directory: Path) -> None:
        self.layout = TextRun(directory / "first", "run.name=first", "run.num_steps=9").layout
        self._now_s = 1e9

    def attempt(self, steps: range, seam: int | None = None) -> None:
        recorder = Recorder(self.layout.tensorboard, seam=seam, wall_clock=lambda: self._now_s)
        for step in steps:
            self._now_s += 10.0
            recorder.step(step, {"reward/mean": step / 10, "trainer/loss": 1.0})
        assert recorder.flush(60.0)
        recorder.close()

    def evaluation(self, step: int) -> None:
        curves = TensorBoardWriter(self.layout.evaluations / "tensorboard", lambda: self._now_s + 1.0)
        curves.scalars(step, {"evaluation/sums/pass@1": 0.25})
        curves.close()


class Follower:
    """`rlhpc metrics RUN --wandb DIR --follow` as a process."""

    def __init__(self, run: Run, directory: Path, server: WandbServer) -> None:
        words = ["metrics", str(run.layout.root), "--wandb", str(directory), "--follow", "--tag", "reward/*"]
        self._server, self._log = server, (directory.parent / "follower.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", *words, "--tag", "evaluation/*"],
            cwd=ROOT,
            env={**os.environ, **server.environment},
            stderr=self._log,
        )

    def wait_until(self, holds: Callable[[list[dict[str, float]]], bool]) -> None:
        server = self._server
        with server.grown:
            assert server.grown.wait_for(lambda: holds(server.history), PATIENCE_S), server.history

    def interrupted(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def steps_of(history: list[dict[str, float]]) -> list[int]:
    return [int(row["_step"]) for row in history]


@pytest.mark.starts
def test_a_run_is_followed_across_an_interruption_and_a_resume_and_every_step_is_sent_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="no wandb here: pip install 'rlhpc[wandb]'")
    run, directory = Run(tmp_path), tmp_path / "wandb-files"
    register_launcher(run.layout)  # this process: the run is alive
    with serving() as server:
        run.attempt(range(4))
        with Follower(run, directory, server) as follower:
            follower.wait_until(lambda history: steps_of(history) == [0, 1, 2])  # 3 may not be whole yet
            run.evaluation(2)
            run.attempt(range(4, 6))
            follower.wait_until(lambda history: steps_of(history) == [0, 1, 2, 3, 4])
            assert follower.interrupted() == EXIT_INTERRUPTED
        run.attempt(range(3, 9), seam=3)  # a resume trains 3, 4 and 5 again
        run.evaluation(8)
        run.layout.summary.write_text("{}")
        with Follower(run, directory, server) as follower:
            assert follower.process.wait(PATIENCE_S) == 0
    assert steps_of(server.history) == [*range(10)]
    assert [row.get("reward/mean") for row in server.history] == [*(step / 10 for step in range(9)), None]
    evaluated = {int(row["_step"]): row["evaluation/step"] for row in server.history if "evaluation/step" in row}
    assert evaluated == {4: 2, 9: 8}
    assert not any("trainer/loss" in row for row in server.history)
    assert len({*server.ids}) == 1
    assert "the run is left alone" in (tmp_path / "follower.log").read_text()


@pytest.mark.starts
def test_whoever_is_not_logged_in_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason="no wandb here: pip install 'rlhpc[wandb]'")
    run = Run(tmp_path)
    run.attempt(range(2))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["metrics", str(run.layout.root), "--wandb", str(tmp_path / "out"), "--follow"]) == EXIT_CONFIG
    assert "`wandb login` or WANDB_API_KEY" in capsys.readouterr().err


def test_only_wandb_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    assert main(["metrics", str(run.layout.root), "--follow"]) == EXIT_CONFIG
    assert "legal only beside --wandb" in capsys.readouterr().err
