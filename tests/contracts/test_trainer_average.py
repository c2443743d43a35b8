"""A moving average of float32 weights, in every backend and layout, beside an independent one in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.training.backends import AVERAGE
from rlhpc.training.trainer_state import STATE_KINDS, read_checkpoint
from tests.contracts.average_scenarios import average_steps, drop_an_average
from tests.contracts.trainer_layouts import (
    LENGTHS,
    MODELS,
    in_bfloat16_everywhere_and_in_float32_once_each_way,
    packed,
    usual_model,
)
from tests.contracts.trainer_textbook import load_hf, weights_on_disk
from tests.unit.training.packed_rows import draw_samples

DECAY = 0.75


def steps_for(cluster: Any) -> list[Any]:
    vocabulary = MODELS[usual_model(cluster.name)]["vocabulary"]
    return [packed(draw_samples(LENGTHS, vocabulary=vocabulary, seed=seed)) for seed in range(4)]


def tensors(directory: Path, kind: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for _, name, tensor in read_checkpoint(directory, None).tensors(kind)}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


@in_bfloat16_everywhere_and_in_float32_once_each_way()
def test_it_is_that_of_float64_and_goes_on_from_a_checkpoint_bit_for_bit(cluster, dtype, model, tmp_path):
    steps, whole, resumed = steps_for(cluster), tmp_path / "whole", tmp_path / "resumed"
    arguments = {"model": model, "decay": DECAY, "dtype": dtype}
    cluster.run(average_steps, whole, steps=steps, memory="host", **arguments)
    expected = {name: tensor.double() for name, tensor in weights_on_disk(load_hf(model)).items()}
    for number in range(1, len(steps) + 1):
        weights, average = (tensors(whole / str(number), kind) for kind in ("weights", AVERAGE))
        assert weights.keys() == average.keys() == expected.keys()
        for name, tensor in weights.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * tensor.double()
            torch.testing.assert_close(average[name].double(), expected[name], atol=1e-7, rtol=1e-6)
    assert any(not torch.equal(average[name], weights[name]) for name in weights)
    cluster.run(average_steps, resumed, steps=steps[2:], memory="device", saved=whole / "2", **arguments)
    for number in range(3):
        assert files(resumed / str(number)) == files(whole / str(number + 2)), number


def test_one_that_is_switched_on_begins_at_the_weights_and_one_that_is_switched_off_is_dropped(
    cluster, model, tmp_path
):
    steps = steps_for(cluster)
    cluster.run(average_steps, tmp_path / "a", steps=steps[:1], memory="host", model=model, decay=DECAY)
    cluster.run(drop_an_average, tmp_path / "b", model=model, saved=tmp_path / "a" / "1")
    without = tmp_path / "b" / "without"
    assert read_checkpoint(without, None).kinds == set(STATE_KINDS)
    cluster.run(average_steps, tmp_path / "c", steps=[], memory="host", model=model, decay=DECAY, saved=without)
    weights, average = (tensors(tmp_path / "c" / "0", kind) for kind in ("weights", AVERAGE))
    trained = tensors(tmp_path / "a" / "1", "weights")
    assert all(torch.equal(average[name], weights[name]) for name in weights)
    assert all(torch.equal(trained[name], weights[name]) for name in weights)
