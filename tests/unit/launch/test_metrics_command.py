"""`rlhpc metrics`, `tensorboard` and W&B: a run's figures for other programs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, Self

import numpy as np
import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util

import rlhpc
from launch.cli import main
from launch.commands.show import EventView
from launch.commands.trackers import ExportedRun, records_of, rows_to_send
from launch.view.run import RunView
from rlhpc.base.ownership import Launcher
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.curves import Curve, tabulated
from rlhpc.metrics.tensorboard import Recorder, TensorBoardWriter
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError
from tests.full_disk import small_disk
from tests.patience import PATIENCE_S
from tests.unit.doc_pages import ROOT
from tests.unit.launch.runs_kit import TextRun
from tests.unit.launch.web_kit import WandbServer, serving

# ---------------------------- `rlhpc metrics`: a run's figures as CSV, Parquet, and as files of W&B, by its own package

NO_WANDB = "no wandb here: pip install 'rlhpc[wandb]'"
STEPS = 1_200  # so that wandb's blocks are more than one


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run directory of two attempts, the second from step 2 on, and one evaluation."""
    text_run = TextRun(tmp_path_factory.mktemp("metrics") / "first", "run.name=first", f"run.num_steps={STEPS}")
    _attempt(text_run.layout.tensorboard, range(5), 1e9)
    _attempt(text_run.layout.tensorboard, range(2, STEPS), 2e9, 2)
    curves = TensorBoardWriter(text_run.layout.evaluations / "tensorboard", lambda: 2e9)
    curves.scalars(2, {"evaluation/sums/pass@1": 0.25})
    curves.close()
    return text_run.layout.root


def _attempt(directory: Path, steps: range, begins_s: float, seam: int | None = None) -> None:
    now = begins_s
    recorder = Recorder(directory, seam=seam, wall_clock=lambda: now)
    for step in steps:
        now = begins_s + step
        reward = step / 10 if seam is not None else -1.0
        scalars = {"reward/mean": reward, "trainer/loss": 1.0} | ({"trainer/grad_norm": math.nan} if step == 3 else {})
        recorder.step(step, scalars)
    assert recorder.flush(60.0)
    recorder.close()


def test_metrics_are_printed_as_csv(run, capsys):
    assert main(["metrics", str(run), "--tag", "reward/*", "--tag", "evaluation/*", "--tag", "trainer/grad_norm"]) == 0
    names, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert names == ["step", "unix_time_s", "evaluation/sums/pass@1", "reward/mean", "trainer/grad_norm"]
    assert [row[0] for row in rows] == [str(step) for step in range(STEPS)]
    assert [row[2:] for row in rows[:5]] == [
        ["", "-1.0", ""], ["", "-1.0", ""], ["0.25", "0.2", ""], ["", "0.3", "nan"], ["", "0.4", ""]
    ]  # fmt: skip
    assert [float(row[1]) for row in rows[1:4]] == [1e9 + 1, 2e9, 2e9 + 3]


def test_figures_of_a_model_that_a_resume_has_undone_are_left_out(tmp_path):
    layout = TextRun(tmp_path / "back").layout
    layout.attempts.write_text("".join(json.dumps({"index": k, "resume_step": 50 * k}) + "\n" for k in range(2)))
    curves = TensorBoardWriter(layout.evaluations / "tensorboard")
    for step, attempt in ((50, 0), (60, 1), (100, 0)):
        curves.scalars(step, {"evaluation/sums/reward": step / 100})
        directory = layout.evaluations / f"back-step_{step:06d}-sums"
        directory.mkdir()
        figures = {"reward": {"value": step / 100, "low": 0.0, "high": 1.0}}
        (directory / "summary.json").write_text(json.dumps({"figures": figures, "attempt": attempt}))
    curves.close()
    (curve,) = RunView(layout).metric_table().curves.values()
    assert curve.steps.tolist() == [50, 60]


def test_metrics_are_a_parquet_file_with_nulls_or_a_csv_file(run, tmp_path):
    for file in (tmp_path / "new" / "run.parquet", tmp_path / "run.csv"):
        assert main(["metrics", str(run), "--out", str(file)]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "new" / "run.parquet").to_pydict()
    assert [*table] == ["step", "unix_time_s", "evaluation/sums/pass@1", "reward/mean", "trainer/grad_norm",
                        "trainer/loss"]  # fmt: skip
    assert table["step"] == [*range(STEPS)]
    assert table["reward/mean"][:4] == [-1.0, -1.0, 0.2, 0.3]
    assert table["evaluation/sums/pass@1"][:4] == [None, None, 0.25, None]
    assert math.isnan(table["trainer/grad_norm"][3])
    rows = list(csv.DictReader((tmp_path / "run.csv").open()))
    assert [float(row["reward/mean"]) for row in rows] == table["reward/mean"]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_metrics_are_a_frame(run, library):
    pytest.importorskip(library, reason=f"no {library} here: pip install 'rlhpc[frames]'")
    frame = rlhpc.Run.load(run).metrics_frame(library, "reward/*", "evaluation/*")
    assert list(frame.columns) == ["step", "unix_time_s", "evaluation/sums/pass@1", "reward/mean"]
    assert list(frame["reward/mean"])[:4] == [-1.0, -1.0, 0.2, 0.3]
    missing = next(iter(frame["evaluation/sums/pass@1"]))
    assert missing is None or math.isnan(missing)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tag", "reward/meen"], "'reward/meen': no metric of this run matches (did you mean reward/mean?)"),
        (["--tag", "zzz"], "'zzz': no metric of this run matches; it has evaluation/*, reward/*, trainer/*"),
        (["--out", "run.xlsx"], "--out run.xlsx: legal: a name that ends in .csv or .parquet"),
    ],
)
def test_what_cannot_be_selected_or_written_is_refused(run, words, said, capsys):
    assert main(["metrics", str(run), *words]) == EXIT_CONFIG
    assert capsys.readouterr().err == f"rlhpc: {said}\n"


def test_a_run_without_metrics_and_a_directory_without_a_run_are_refused(tmp_path, capsys):
    new = TextRun(tmp_path / "new").layout.root
    assert main(["metrics", str(new)]) == EXIT_CONFIG
    assert "no metrics yet" in capsys.readouterr().err
    assert main(["metrics", str(tmp_path)]) == EXIT_CONFIG
    assert "not a run directory" in capsys.readouterr().err


def test_a_damaged_event_ends_its_file_and_no_more(tmp_path):
    made = TextRun(tmp_path / "damaged")
    _attempt(made.layout.tensorboard, range(5), 1e9)
    (path,) = made.layout.tensorboard.glob("events.*")
    content = bytearray(path.read_bytes())
    content[-40:-30] = b"\xff" * 10
    path.write_bytes(content)
    curve = rlhpc.Run.load(made.layout.root).figures["reward/mean"]
    assert 3 <= len(curve.steps) <= 5


def test_without_the_package_it_says_what_to_install(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["metrics", str(run), "--wandb", str(tmp_path / "wandb")]) == EXIT_CONFIG
    assert "pip install 'rlhpc[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "wandb").exists()


# ------------------------------------------------------------------------------------------------- Weights & Biases


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{(each.key or "/".join(each.nested_key)): json.loads(each.value_json) for each in item} for item in items]


@pytest.mark.starts
def test_wandb_s_files_hold_every_step_with_its_own_time_and_once(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=NO_WANDB)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.setenv("WANDB_MODE", "online")  # no variable makes it speak to anyone
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    for _ in range(2):  # the second export takes the first one's place
        assert main(["metrics", str(run), "--wandb", str(tmp_path / "out")]) == 0
    (file,) = (tmp_path / "out").glob("wandb/offline-run-*/run-*.wandb")
    records = list(records_of(file))
    history = history_of(records)
    assert [row["_step"] for row in history] == [*range(STEPS)]
    assert [row["reward/mean"] for row in history[:4]] == [-1.0, -1.0, 0.2, 0.3]
    assert [row["_timestamp"] for row in history[1:4]] == [1e9 + 1, 2e9, 2e9 + 3]
    assert [row.get("evaluation/sums/pass@1") for row in history[1:4]] == [None, 0.25, None]
    assert "trainer/grad_norm" not in history[2]
    assert "trainer/grad_norm" in history[3]
    (of_run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (of_run.project, of_run.display_name) == ("rlhpc", "first")
    config = {each.key: json.loads(each.value_json) for each in of_run.config.update}
    assert config["run"]["num_steps"] == STEPS
    assert not (run / "wandb").exists()


@pytest.mark.starts
def test_steps_that_wandb_loses_without_a_word_are_an_error_and_an_earlier_export_stays(run, tmp_path, capsys):
    pytest.importorskip("wandb", reason=NO_WANDB)
    table = RunView(RunLayout(run)).metric_table()
    (tmp_path / "wandb").mkdir()
    with small_disk(tmp_path, 64 << 10):
        earlier = (
            tmp_path / "wandb" / f"offline-run-20200101_000000-{ExportedRun(RunView(RunLayout(run)), table).identity}"
        )
        earlier.mkdir()
        assert main(["metrics", str(run), "--wandb", str(tmp_path)]) == EXIT_CONFIG
        # Which one depends on whether wandb's own log finds a page that its file of the run has left.
        said = re.search("steps could be written: is the disk full|No space left on device", capsys.readouterr().err)
        assert said
        assert [path.name for path in earlier.parent.glob("*offline-run-*")] == [earlier.name]


def test_an_interrupted_export_leaves_the_earlier_one_in_its_place(run, tmp_path, monkeypatch):
    def interrupted(**_: object) -> NoReturn:
        raise KeyboardInterrupt

    package: Any = ModuleType("wandb")  # in the place of wandb's own, which writes for minutes
    package.init, package.Settings, package.errors = interrupted, dict, SimpleNamespace(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    identity = ExportedRun(RunView(RunLayout(run)), RunView(RunLayout(run)).metric_table()).identity
    earlier = tmp_path / "wandb" / f"offline-run-20200101_000000-{identity}"
    earlier.mkdir(parents=True)
    assert main(["metrics", str(run), "--wandb", str(tmp_path)]) == EXIT_INTERRUPTED
    assert [path.name for path in earlier.parent.iterdir()] == [earlier.name]


def test_a_run_is_the_same_run_whichever_of_its_metrics_are_exported(run):
    layout = RunLayout(run)
    tables = [RunView(layout).metric_table(tags) for tags in ((), ("evaluation/*",), ("trainer/grad_norm",))]
    assert len({float(table.unix_times_s[0]) for table in tables}) > 1
    assert len({ExportedRun(RunView(layout), table).identity for table in tables}) == 1


def test_a_frame_of_metrics_names_what_it_lacks(run):
    with pytest.raises(ConfigError, match=r"^'zzz': no metric of this run matches"):
        rlhpc.Run.load(run).metrics_frame("pandas", "zzz")
    with pytest.raises(ConfigError, match="library='excel'; legal: pandas, polars"):
        rlhpc.Run.load(run).metrics_frame("excel")  # type: ignore[arg-type]


# ----------------------------------------------------------- `rlhpc tensorboard`: runs under their own names, once each


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


def test_every_run_is_shown_once_under_its_own_name(tmp_path):
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


def test_what_happens_to_runs_meanwhile_is_seen_at_the_next_look(tmp_path):
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


def test_nothing_to_show_is_said(tmp_path, capsys):
    assert main(["tensorboard", str(tmp_path)]) == EXIT_CONFIG
    assert f"no run with metrics below {tmp_path}" in capsys.readouterr().err
    assert main(["tensorboard", str(tmp_path / "nowhere")]) == EXIT_CONFIG
    assert "nowhere: no such directory" in capsys.readouterr().err


@pytest.mark.starts
def test_tensorboard_itself_serves_these_runs_until_it_is_ended(tmp_path):
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


# ----------------- A run is sent to Weights & Biases while it goes on: each step once, across interruptions and resumes


def curve(steps: list[int], times: list[float], worth: float = 0.5) -> Curve:
    return Curve(np.array(steps), np.full(len(steps), worth), np.array(times))


def test_the_newest_step_waits_until_it_is_whole_and_an_evaluation_goes_with_the_step_that_follows_it():
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


def test_two_evaluations_that_come_together_keep_their_own_steps():
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
def test_a_run_is_followed_across_an_interruption_and_a_resume_and_every_step_is_sent_once(tmp_path):
    pytest.importorskip("wandb", reason="no wandb here: pip install 'rlhpc[wandb]'")
    run, directory = Run(tmp_path), tmp_path / "wandb-files"
    Launcher.register(run.layout)  # this process: the run is alive
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
def test_whoever_is_not_logged_in_is_told_how(tmp_path, monkeypatch, capsys):
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


def test_only_wandb_can_be_followed(tmp_path, capsys):
    run = Run(tmp_path)
    assert main(["metrics", str(run.layout.root), "--follow"]) == EXIT_CONFIG
    assert "legal only beside --wandb" in capsys.readouterr().err
