"""Parts of tensors in safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhpc.protocol.errors import CheckpointError, ConfigError
from rlhpc.training.checkpoint_tensors import INDEX_FILE, MAX_OPEN_FILES, TensorSource
from tests.tiny_models import make_tiny_checkpoint

MATRIX = torch.arange(24.0).view(4, 6)


@pytest.fixture
def model(tmp_path):
    """A checkpoint of two files with an index."""
    save_file({"matrix": MATRIX}, tmp_path / "one.safetensors")
    save_file({"halves": MATRIX.bfloat16(), "scalar": torch.tensor(3.0)}, tmp_path / "two.safetensors")
    index = {"matrix": "one.safetensors", "halves": "two.safetensors", "scalar": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return tmp_path


def resident_bytes_of_files():
    """Of this process, in pages of mapped files."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssFile"))


def test_rows_columns_and_all_of_a_tensor_come_as_asked_for(model):
    with TensorSource.of_model(model) as source:
        assert set(source.names) == {"matrix", "halves", "scalar"}
        assert source.shape("matrix") == (4, 6)
        assert source.shape("scalar") == ()
        assert torch.equal(source.read("matrix"), MATRIX)
        assert torch.equal(source.read("matrix", index=(slice(1, 3),)), MATRIX[1:3])
        assert torch.equal(source.read("matrix", index=(slice(None), slice(2, 5))), MATRIX[:, 2:5])
        assert source.read("matrix", index=(slice(2, 2),)).shape == (0, 6)
        assert source.read("scalar").item() == 3.0


def test_a_tensor_keeps_its_dtype_unless_another_is_asked_for(model):
    source = TensorSource.of_model(model)
    assert source.read("halves").dtype == torch.bfloat16
    assert torch.equal(source.read("halves", dtype=torch.float32), MATRIX)


@pytest.mark.parametrize("files", [1, 2])
def test_a_model_without_an_index_is_all_its_safetensors_files(model, files):
    (model / INDEX_FILE).unlink()
    if files == 1:
        (model / "two.safetensors").unlink()
    source = TensorSource.of_model(model)
    assert set(source.names) == ({"matrix"} if files == 1 else {"matrix", "halves", "scalar"})
    assert torch.equal(source.read("matrix"), MATRIX)


@pytest.mark.parametrize("has_index", [True, False])
def test_of_two_saves_in_one_directory_the_one_file_is_the_model_as_for_transformers(tmp_path, has_index):
    model = make_tiny_checkpoint(tmp_path)
    (name, shape), *_ = ((name, each.shape) for name, each in load_file(model / "model.safetensors").items())
    save_file({name: torch.full(shape, 9.0)}, model / "older.safetensors")
    if has_index:
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": {name: "older.safetensors"}}))
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()[name]
    assert torch.equal(TensorSource.of_model(model).read(name, torch.float32), expected)


def test_only_the_rows_that_are_looked_at_are_read_from_the_disk(tmp_path):
    num_rows, row_bytes = 2048, 4 * 4096
    save_file({"large": torch.ones(num_rows, 4096)}, tmp_path / "model.safetensors")
    source = TensorSource.of_model(tmp_path)
    source.shape("large")
    before = resident_bytes_of_files()
    assert source.read("large", index=(slice(100, 110),)).sum() == 10 * 4096
    assert resident_bytes_of_files() - before < num_rows * row_bytes / 4


def test_few_files_are_open_at_once_and_none_after_closing(tmp_path):
    files = {}
    for number in range(3 * MAX_OPEN_FILES):
        files[f"t{number}"] = tmp_path / f"{number}.safetensors"
        save_file({f"t{number}": torch.full((2,), float(number))}, files[f"t{number}"])

    def num_mapped():
        with Path("/proc/self/maps").open() as maps:
            return len({line.split()[-1] for line in maps if str(tmp_path) in line})

    with TensorSource.of_files(files) as source:
        for _ in range(2):
            for number, name in enumerate(files):
                assert source.read(name)[0] == number
                assert num_mapped() <= MAX_OPEN_FILES
        assert num_mapped() == MAX_OPEN_FILES
    assert num_mapped() == 0


def test_a_name_that_is_not_there_is_refused_by_name(model):
    source = TensorSource.of_model(model)
    with pytest.raises(ConfigError, match=f"model.path={model}: there is no tensor bias"):
        source.read("bias")
    with pytest.raises(ConfigError, match="there is no tensor bias"):
        source.require("bias", (4,))


def test_a_tensor_of_another_shape_is_refused_by_name(model):
    source = TensorSource.of_model(model)
    source.require("matrix", (4, 6))
    with pytest.raises(ConfigError, match=r"model.path=.*one.safetensors: matrix is \(4, 6\), not \(6, 4\)"):
        source.require("matrix", (6, 4))


def test_a_tensor_of_integers_is_refused_by_name(tmp_path):
    save_file({"matrix": MATRIX.to(torch.int8)}, tmp_path / "model.safetensors")
    with (
        TensorSource.of_model(tmp_path) as source,
        pytest.raises(ConfigError, match=r"matrix is stored as I8.*quantised.*legal: F64"),
    ):
        source.require("matrix", (4, 6))


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"model.path={tmp_path}: no .*safetensors file"):
        TensorSource.of_model(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"weight_map": [1]}'])
def test_an_index_that_says_nothing_is_refused(model, content):
    (model / INDEX_FILE).write_text(content)
    with pytest.raises(ConfigError, match=f"model.path=.*{INDEX_FILE} cannot be read"):
        TensorSource.of_model(model)


def test_a_file_that_the_index_names_and_that_is_missing_is_named(model):
    (model / "two.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path=.*two.safetensors is missing"):
        TensorSource.of_model(model)


def test_a_file_of_another_format_is_named(model):
    (model / INDEX_FILE).unlink()
    (model / "two.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"model.path=.*two.safetensors: is no safetensors file"):
        TensorSource.of_model(model)


def test_a_file_cut_short_is_found_when_it_is_opened(model):
    os.truncate(model / "one.safetensors", (model / "one.safetensors").stat().st_size - 8)
    with pytest.raises(ConfigError, match=r"one.safetensors: cannot read matrix"):
        TensorSource.of_model(model).read("matrix")


def test_the_error_of_given_files_is_the_callers(tmp_path):
    source = TensorSource.of_files({"weight": tmp_path / "gone.safetensors"}, error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"gone.safetensors: cannot read weight"):
        source.read("weight")


def test_a_tensor_that_is_not_in_the_file_it_should_be_in_is_the_callers_error_too(model):
    source = TensorSource.of_files({"bias": model / "one.safetensors"}, error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"one.safetensors: cannot read bias"):
        source.shape("bias")
