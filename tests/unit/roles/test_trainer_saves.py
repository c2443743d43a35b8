"""What the trainer does with SaveCheckpoint: answer when the state is copied, tell later how the writing ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.base.run_directory import RunLayout
from rlhpc.protocol.messages import SaveCheckpoint, SaveReport, SnapshotTaken
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.roles.trainer.trainer import TRAINER_DIRECTORY, Trainer
from rlhpc.training.factory import open_backend
from rlhpc.training.ranks import RankContext
from rlhpc.training.trainer_state import STATE_FILE, read_checkpoint
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import tiny_config


class Ear:
    """Hears what the trainer says, on the channel and with its heartbeats."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.told: list[Any] = []
        self.was_told = threading.Event()

    def send(self, message: object, timeout_s: float = 10.0) -> None:
        self.answers.append(message)

    def now(self, state: str, waits_for: str, policy_version: int) -> None:
        pass

    def tell(self, message: SaveReport) -> None:
        self.told.append(message)
        self.was_told.set()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Any]:
    config = tiny_config(make_tiny_checkpoint(tmp_path / "model", hidden=32, layers=1))
    backend = open_backend(config, RankContext())
    yield backend
    backend.close()


def trainer_of(backend: Any, ear: Any, root: Path, *, is_rank_zero: bool = True) -> Trainer:
    config = tiny_config(root / "model")
    context = RoleContext("trainer", 0, 1, 0, None, "first", RunLayout(root), config, "hash")
    return Trainer(context, backend, ear if is_rank_zero else None, ear)


def slow_disk(directory: Path) -> Path:
    """Nothing is written into the first file before somebody reads it."""
    (directory / TRAINER_DIRECTORY).mkdir(parents=True)
    pipe = directory / TRAINER_DIRECTORY / ".weights-00001.safetensors.tmp"
    os.mkfifo(pipe)
    return pipe


def test_the_answer_comes_with_the_snapshot_and_the_report_when_all_is_written(backend, tmp_path):
    ear, pipe = Ear(), slow_disk(tmp_path / "save")
    trainer = trainer_of(backend, ear, tmp_path)
    assert trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    assert [(type(answer), answer.step) for answer in ear.answers] == [(SnapshotTaken, 4)]
    assert ear.told == []
    reading = threading.Thread(target=pipe.read_bytes)  # what went into the pipe is gone: only its course matters here
    reading.start()
    assert ear.was_told.wait(PATIENCE_S)
    reading.join()
    (report,) = ear.told
    assert report.step == 4
    assert report.seconds > ear.answers[0].seconds


def test_a_sound_checkpoint_is_reported_without_an_error(backend, tmp_path):
    ear = Ear()
    trainer_of(backend, ear, tmp_path).obey(SaveCheckpoint(4, str(tmp_path / "save")))
    assert ear.was_told.wait(PATIENCE_S)
    assert ear.told[0].error == ""
    assert read_checkpoint(tmp_path / "save" / TRAINER_DIRECTORY, backend.tensor_specs()).num_steps_applied == 0


def test_a_place_that_cannot_be_written_is_reported_with_the_reason(backend, tmp_path):
    ear = Ear()
    (tmp_path / "save").write_text("")
    trainer_of(backend, ear, tmp_path).obey(SaveCheckpoint(4, str(tmp_path / "save")))
    assert ear.was_told.wait(PATIENCE_S)
    assert "cannot be written" in ear.told[0].error


def test_a_rank_that_does_not_lead_logs_a_failure_and_tells_nobody(backend, tmp_path, caplog):
    ear = Ear()
    (tmp_path / "save").write_text("")
    trainer_of(backend, ear, tmp_path, is_rank_zero=False).obey(SaveCheckpoint(4, str(tmp_path / "save")))
    backend.close()
    assert "the checkpoint of step 4 could not be written" in caplog.text
    assert ear.answers == ear.told == []


def test_a_trainer_in_haste_gives_the_write_up_and_reports_nothing(backend, tmp_path):
    ear, pipe = Ear(), slow_disk(tmp_path / "save")
    trainer = trainer_of(backend, ear, tmp_path)
    trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    trainer.close(in_haste=True)
    reading = threading.Thread(target=pipe.read_bytes)
    reading.start()
    backend.close()
    reading.join()
    assert ear.told == []
    assert not (tmp_path / "save" / TRAINER_DIRECTORY / STATE_FILE).exists()


def test_a_trainer_that_is_asked_to_stop_finishes_the_write(backend, tmp_path):
    ear = Ear()
    trainer = trainer_of(backend, ear, tmp_path)
    trainer.obey(SaveCheckpoint(4, str(tmp_path / "save")))
    trainer.close(in_haste=False)
    backend.close()
    assert [report.error for report in ear.told] == [""]
    assert (tmp_path / "save" / TRAINER_DIRECTORY / STATE_FILE).exists()
