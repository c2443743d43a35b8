"""`rlhpc metrics`: a run's figures as CSV, Parquet, and as files of W&B, by its own package."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pyarrow.parquet
import pytest

import rlhpc
from launch.cli import main
from launch.commands.trackers import ExportedRun, records_of
from launch.view.run import RunView
from rlhpc.base.run_directory import RunLayout
from rlhpc.metrics.tensorboard import Recorder, TensorBoardWriter
from rlhpc.protocol.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError
from tests.full_disk import small_disk
from tests.unit.launch.seen_runs import TextRun

NO_WANDB = "no wandb here: pip install 'rlhpc[wandb]'"
STEPS = 1_200  # so that wandb's blocks are more than one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_metrics_are_printed_as_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(run), "--tag", "reward/*", "--tag", "evaluation/*", "--tag", "trainer/grad_norm"]) == 0
    names, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert names == ["step", "unix_time_s", "evaluation/sums/pass@1", "reward/mean", "trainer/grad_norm"]
    assert [row[0] for row in rows] == [str(step) for step in range(STEPS)]
    assert [row[2:] for row in rows[:5]] == [
        ["", "-1.0", ""], ["", "-1.0", ""], ["0.25", "0.2", ""], ["", "0.3", "nan"], ["", "0.4", ""]
    ]  # fmt: skip
    assert [float(row[1]) for row in rows[1:4]] == [1e9 + 1, 2e9, 2e9 + 3]


def test_figures_of_a_model_that_a_resume_has_undone_are_left_out(tmp_path: Path) -> None:
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


def test_metrics_are_a_parquet_file_with_nulls_or_a_csv_file(run: Path, tmp_path: Path) -> None:
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
def test_metrics_are_a_frame(run: Path, library: Any) -> None:
    pytest.importorskip(library, reason=f"no {library} here: pip install 'rlhpc[frames]'")
    frame = rlhpc.Run.load(run).metrics_frame(library, "reward/*", "evaluation/*")
    assert list(frame.columns) == ["step", "unix_time_s", "evaluation/sums/pass@1", "reward/mean"]
    assert list(frame["reward/mean"])[:4] == [-1.0, -1.0, 0.2, 0.3]
    missing = next(iter(frame["evaluation/sums/pass@1"]))
    assert missing is None or math.isnan(missing)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tag", "reward/meen"], "--tag 'reward/meen': no metric of this run matches (did you mean reward/mean?)"),
        (["--tag", "zzz"], "--tag 'zzz': no metric of this run matches; it has evaluation/*, reward/*, trainer/*"),
        (["--out", "run.xlsx"], "--out run.xlsx: legal: a name that ends in .csv or .parquet"),
    ],
)
def test_what_cannot_be_selected_or_written_is_refused(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", str(run), *words]) == EXIT_CONFIG
    assert capsys.readouterr().err == f"rlhpc: {said}\n"


def test_a_run_without_metrics_and_a_directory_without_a_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = TextRun(tmp_path / "new").layout.root
    assert main(["metrics", str(new)]) == EXIT_CONFIG
    assert "no metrics yet" in capsys.readouterr().err
    assert main(["metrics", str(tmp_path)]) == EXIT_CONFIG
    assert "not a run directory" in capsys.readouterr().err


def test_a_damaged_event_ends_its_file_and_no_more(tmp_path: Path) -> None:
    made = TextRun(tmp_path / "damaged")
    _attempt(made.layout.tensorboard, range(5), 1e9)
    (path,) = made.layout.tensorboard.glob("events.*")
    content = bytearray(path.read_bytes())
    content[-40:-30] = b"\xff" * 10
    path.write_bytes(content)
    curve = rlhpc.Run.load(made.layout.root).figures["reward/mean"]
    assert 3 <= len(curve.steps) <= 5


def test_without_the_package_it_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["metrics", str(run), "--wandb", str(tmp_path / "wandb")]) == EXIT_CONFIG
    assert "pip install 'rlhpc[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "wandb").exists()


# ------------------------------------------------------------------------------------------------- Weights & Biases


def history_of(records: list[Any]) -> list[dict[str, Any]]:
    items = [record.history.item for record in records if record.WhichOneof("record_type") == "history"]
    return [{(each.key or "/".join(each.nested_key)): json.loads(each.value_json) for each in item} for item in items]


@pytest.mark.starts
def test_wandb_s_files_hold_every_step_with_its_own_time_and_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_steps_that_wandb_loses_without_a_word_are_an_error_and_an_earlier_export_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb", reason=NO_WANDB)
    table = RunView(RunLayout(run)).metric_table()
    (tmp_path / "wandb").mkdir()
    with small_disk(tmp_path, 64 << 10):
        earlier = (
            tmp_path / "wandb" / f"offline-run-20200101_000000-{ExportedRun(RunView(RunLayout(run)), table).identity}"
        )
        earlier.mkdir()
        assert main(["metrics", str(run), "--wandb", str(tmp_path)]) == EXIT_CONFIG
        assert "steps could be written: is the disk full?" in capsys.readouterr().err
        assert [path.name for path in earlier.parent.glob("*offline-run-*")] == [earlier.name]


def test_an_interrupted_export_leaves_the_earlier_one_in_its_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_run_is_the_same_run_whichever_of_its_metrics_are_exported(run: Path) -> None:
    layout = RunLayout(run)
    tables = [RunView(layout).metric_table(tags) for tags in ((), ("evaluation/*",), ("trainer/grad_norm",))]
    assert len({float(table.unix_times_s[0]) for table in tables}) > 1
    assert len({ExportedRun(RunView(layout), table).identity for table in tables}) == 1


def test_a_frame_of_metrics_names_what_it_lacks(run: Path) -> None:
    with pytest.raises(ConfigError, match="legal: pandas, polars"):
        rlhpc.Run.load(run).metrics_frame("excel")  # type: ignore[arg-type]
