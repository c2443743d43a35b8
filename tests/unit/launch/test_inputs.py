"""Model and dataset of a run are those that it began with, wherever they lie; what differs is refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import launch.run_directory.inputs
from launch.demo.task import write_dataset
from launch.run_directory.begin_attempt import main
from launch.run_directory.inputs import look_at_inputs, read_inputs
from launch.run_directory.prepare import prepare_run_dir, prepare_run_dir_for_jobs
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import override, read_resolved
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import EXIT_CONFIG, RunDirectoryError
from tests.unit.launch.site_kit import config_of
from tests.unit.launch.test_checkpoint_choice import content_of

pytestmark = pytest.mark.starts

TENSORS = {"a": 3000, "b": 5000, "c": 2}


def write_model(directory: Path, change: str = "") -> None:
    """Two shards, of which one tensor's last number differs if asked for."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(f'{{"name": "{name}"}}')
    for shard in (1, 2):
        tensors = {f"{name}{shard}": np.arange(size, dtype=np.float32) for name, size in TENSORS.items()}
        if change in tensors:
            tensors[change][-1] += 1
        save_file(tensors, directory / f"model-0000{shard}-of-00002.safetensors")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_model(tmp_path / "model")
    write_dataset(tmp_path / "train.jsonl", 50, seed=0)
    return config_of(
        f"run.directory={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", f"data.path={tmp_path / 'train.jsonl'}"
    )


@pytest.fixture
def layout(config: Config) -> RunLayout:
    layout = RunLayout(config.run_directory)
    prepare_run_dir(config, layout, resume=False, fresh=False)
    (layout.rollouts / "segment_000000.h5").touch()
    return layout


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda root: append(root / "model" / "tokenizer.json", " "),
            "model.path: .*/tokenizer.json has changed",
        ),
        (lambda root: append(root / "model" / "config.json", " "), "model.path: .*/config.json has changed"),
        (lambda root: (root / "model" / "chat_template.jinja").write_text("x"), "chat_template.jinja is new"),
        (lambda root: (root / "model" / "tokenizer_config.json").unlink(), "tokenizer_config.json is missing"),
        (lambda root: write_model(root / "model", "b2"), "model-00002-of-00002.safetensors has changed"),
        (lambda root: append(root / "train.jsonl", "\n"), "data.path: .*/train.jsonl has changed"),
    ],
)
def test_another_model_or_dataset_is_refused_before_anything_moves(
    config: Config, layout: RunLayout, tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    change(tmp_path)
    before = content_of(layout)
    longer = override(config, ["run.num_steps=999"])
    for take_up in (prepare_run_dir, prepare_run_dir_for_jobs):
        with pytest.raises(
            RunDirectoryError, match=rf"(?s)differ from those this run started with.*{named}.*restore them"
        ):
            take_up(longer, layout, resume=True, fresh=False)
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == EXIT_CONFIG
    assert content_of(layout) == before


@pytest.mark.parametrize("change", ["a1", "b1", "c1", "a2", "b2", "c2"])
def test_of_large_weights_samples_of_every_tensor_are_compared(
    config: Config, layout: RunLayout, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.run_directory.inputs, "FULL_BYTES", 1000)
    monkeypatch.setattr(launch.run_directory.inputs, "SAMPLE_BYTES", 16)
    sampled = look_at_inputs(config)
    write_model(tmp_path / "model", change)
    now = look_at_inputs(config)
    other = {name for name, entry in now.model.items() if entry.digest != sampled.model[name].digest}
    assert other == {f"model-0000{change[1]}-of-00002.safetensors"}


def test_a_model_and_a_dataset_that_were_moved_are_the_same(config: Config, layout: RunLayout, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "model", tmp_path / "elsewhere" / "model")
    (tmp_path / "train.jsonl").rename(tmp_path / "elsewhere" / "sums.jsonl")
    shutil.rmtree(tmp_path / "model")
    moved = override(
        config,
        [f"model.path={tmp_path / 'elsewhere' / 'model'}", f"data.path={tmp_path / 'elsewhere' / 'sums.jsonl'}"],
    )
    attempt = prepare_run_dir(moved, layout, resume=True, fresh=False)
    assert len(attempt.changed) == 2
    assert read_resolved(layout)[0].model.path == tmp_path / "elsewhere" / "model"


def test_a_run_that_has_noted_nothing_notes_what_is_there_and_may_not_move(
    config: Config, layout: RunLayout, tmp_path: Path
) -> None:
    layout.inputs.unlink()
    write_model(tmp_path / "other")
    with pytest.raises(RunDirectoryError, match=r"cannot change on resume: model\.path"):
        prepare_run_dir(override(config, [f"model.path={tmp_path / 'other'}"]), layout, resume=True, fresh=False)
    prepare_run_dir(config, layout, resume=True, fresh=False)
    assert read_inputs(layout) == look_at_inputs(config)


def test_files_that_nobody_touched_are_not_read_again(
    config: Config, layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = read_inputs(layout)
    read: list[Path] = []
    blocks_of = launch.run_directory.inputs._blocks_of
    monkeypatch.setattr(launch.run_directory.inputs, "_blocks_of", lambda path: read.append(path) or blocks_of(path))
    assert look_at_inputs(config, noted) == noted
    assert not read
    shard = tmp_path / "model" / "model-00001-of-00002.safetensors"
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # same inode, same size, same time
    assert look_at_inputs(config, noted).model[shard.name] != noted.model[shard.name]
    assert read == [shard]


def test_a_node_without_weights_compares_the_rest(config: Config, layout: RunLayout, tmp_path: Path) -> None:
    for shard in (tmp_path / "model").glob("*.safetensors"):
        shard.unlink()
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == 0
    append(tmp_path / "model" / "tokenizer.json", " ")
    assert main(["--run-dir", str(layout.root), "--job-id", "1"]) == EXIT_CONFIG


def test_what_is_no_safetensors_file_is_read_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.run_directory.inputs, "FULL_BYTES", 1)
    write_dataset(tmp_path / "train.jsonl", 5, seed=0)
    config = config_of(f"model.path={tmp_path}", f"data.path={tmp_path / 'train.jsonl'}")
    digests = set()
    for content in (b"", b"short", b"\xff" * 4000, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]" + b"x" * 99):
        (tmp_path / "model.safetensors").write_bytes(content)
        digests.add(look_at_inputs(config).model["model.safetensors"].digest)
    assert len(digests) == 5


def test_a_damaged_note_says_what_to_do(config: Config, layout: RunLayout) -> None:
    layout.inputs.write_text("{")
    with pytest.raises(RunDirectoryError, match=r"inputs\.json: damaged .*delete it"):
        prepare_run_dir(config, layout, resume=True, fresh=False)


def test_fresh_deletes_nothing_through_a_link(config: Config, layout: RunLayout, tmp_path: Path) -> None:
    layout.root.rename(tmp_path / "scratch")
    layout.root.symlink_to(tmp_path / "scratch")
    with pytest.raises(RunDirectoryError, match=rf"is a link to {tmp_path / 'scratch'}: --fresh deletes nothing"):
        prepare_run_dir(config, layout, resume=False, fresh=True)
    assert layout.config.exists()
    prepare_run_dir(config, layout, resume=True, fresh=False)
    (tmp_path / "scratch").rename(tmp_path / "gone")
    with pytest.raises(RunDirectoryError, match=rf"is a link to {tmp_path / 'scratch'}, which does not exist"):
        prepare_run_dir(config, layout, resume=False, fresh=False)


def test_files_of_several_datasets_may_have_one_name_and_each_is_compared(
    config: Config, layout: RunLayout, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    write_dataset(tmp_path / "more" / "train.jsonl", 20, seed=1)
    paths = (tmp_path / "train.jsonl", tmp_path / "more" / "train.jsonl")
    tables = (f'{{path="{path}", task="integer_arithmetic", name="d{n}"}}' for n, path in enumerate(paths))
    mixed = override(config, [f"data=[{', '.join(tables)}]", f"run.directory={tmp_path / 'mixed'}"])
    place = RunLayout(mixed.run_directory)
    prepare_run_dir(mixed, place, resume=False, fresh=False)
    (place.rollouts / "segment_000000.h5").touch()
    assert list(look_at_inputs(mixed).data) == ["0/train.jsonl", "1/train.jsonl"]
    prepare_run_dir(mixed, place, resume=True, fresh=False)
    append(paths[1], "\n")
    with pytest.raises(RunDirectoryError, match=r"data.path: .*more/train.jsonl has changed"):
        prepare_run_dir(mixed, place, resume=True, fresh=False)
