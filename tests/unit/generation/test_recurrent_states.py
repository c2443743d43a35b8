"""States of Gated DeltaNet layers, step by step, beside the same layer on each whole row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhpc.generation.recurrent_states import RecurrentStates
from rlhpc.models.layer_forms import is_delta_net
from tests.tiny_models import make_tiny_checkpoint

HIDDEN, LENGTHS = 64, {"a": 9, "b": 150, "c": 3, "d": 70}
# Parts of the rows in each step; a row ends where it has no part any more.
STEPS = [{"a": 7, "b": 64}, {"a": 1, "b": 1, "c": 1}, {"b": 1, "a": 1, "c": 2, "d": 3}, {"d": 66, "b": 84}, {"d": 1}]


@pytest.fixture
def layer(tmp_path: Path) -> Any:
    module = AutoModelForCausalLM.from_pretrained(make_tiny_checkpoint(tmp_path, "qwen3_5_text", HIDDEN))
    return next(each for each in module.modules() if is_delta_net(each))


@torch.no_grad()
def test_each_request_goes_on_from_its_own_state_also_if_more_run_than_there_was_room_for(layer: Any) -> None:
    rows = {name: torch.randn(1, length, HIDDEN) for name, length in LENGTHS.items()}
    expected = {name: layer(row) for name, row in rows.items()}
    states, done = RecurrentStates(layer, 1), dict.fromkeys(rows, 0)
    for step in STEPS:
        running = [name for name, number in done.items() if 0 < number < LENGTHS[name]] + list(step)
        states.begin_step(running, list(step), list(step.values()), [not done[name] for name in step])
        parts = {name: slice(done[name], done[name] + number) for name, number in step.items()}
        queries = torch.cat([rows[name][:, part] for name, part in parts.items()], 1)
        found = layer(queries, cache="paged").split(list(step.values()), 1)
        for (name, part), output in zip(parts.items(), found, strict=True):
            torch.testing.assert_close(output, expected[name][:, part], atol=1e-5, rtol=1e-5)
            done[name] += step[name]
    assert done == LENGTHS


@torch.no_grad()
def test_a_request_that_is_begun_again_has_no_state_of_its_first_try(layer: Any) -> None:
    row, states = torch.randn(1, 12, HIDDEN), RecurrentStates(layer, 2)
    expected = layer(row)
    for length in (5, 12):
        states.begin_step(["a"], ["a"], [length], [True])
        torch.testing.assert_close(layer(row[:, :length], cache="paged"), expected[:, :length], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_slots_of_requests_that_have_ended_are_taken_by_others(layer: Any) -> None:
    states = RecurrentStates(layer, 2)
    size = next(iter(states._layers.values())).recurrent.shape
    for number in range(6):
        states.begin_step([str(number)], [str(number)], [1], [True])
    assert next(iter(states._layers.values())).recurrent.shape == size
