"""Files of a large checkpoint are read several at once; what is said of damage is what a lone reader would say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlhpc.protocol.errors import CheckpointError
from rlhpc.protocol.types import TensorSpec
from rlhpc.training import checkpoint_directory, trainer_state
from rlhpc.training.checkpoint_directory import begin, complete, verify
from rlhpc.training.trainer_state import read_checkpoint, write_checkpoint
from tests.patience import PATIENCE_S

SPECS = (TensorSpec("t", "float32", (3,)),)
FILES = ("exp_avg-00001.safetensors", "exp_avg_sq-00001.safetensors", "weights-00001.safetensors")


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "MANY_BYTES", 0)


def write(place: Path) -> None:
    def tensors_of(_: str):
        return iter([torch.ones(3)])

    write_checkpoint(place, SPECS, tensors_of, num_steps_applied=1, rng={})


def two_at_once(read: Callable[..., object], names: list[str]) -> Callable[..., object]:
    """`read`, of which two have begun before either goes on; notes the names."""
    both = threading.Barrier(2)

    def meet(path: Path, *words: object, **options: object) -> object:
        names.append(path.name)
        if len(names) <= 2:
            both.wait(PATIENCE_S)
        return read(path, *words, **options)

    return meet


def test_a_trainers_files_are_checked_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    names: list[str] = []
    monkeypatch.setattr(trainer_state, "check_file", two_at_once(trainer_state.check_file, names))
    checkpoint = read_checkpoint(tmp_path, SPECS)
    assert sorted(names) == sorted(checkpoint.shards) == sorted(FILES)


def test_files_of_a_new_checkpoint_are_read_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "checkpoints" / "step_000003"
    temporary = begin(final)
    write(temporary)
    names: list[str] = []
    monkeypatch.setattr(checkpoint_directory, "record_of", two_at_once(checkpoint_directory.record_of, names))
    complete(temporary, final, {})
    assert sorted(names) == sorted([*FILES, "trainer.json"])
    assert verify(final)["files"].keys() == set(names)


def test_the_first_damaged_file_is_named_whichever_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    first, *others = trainer_state.read_manifest(tmp_path / trainer_state.STATE_FILE)["files"]
    for name in (first, *others):
        (tmp_path / name).write_bytes(b"short")
    found = threading.Event()
    check = trainer_state.check_file

    def last_file_first(path: Path, *words: object, **options: object) -> None:
        if path.name == first:
            assert found.wait(PATIENCE_S)
        try:
            check(path, *words, **options)
        finally:
            if path.name == others[-1]:
                found.set()

    monkeypatch.setattr(trainer_state, "check_file", last_file_first)
    with pytest.raises(CheckpointError, match=f"{first}: 5 bytes"):
        read_checkpoint(tmp_path, SPECS)
