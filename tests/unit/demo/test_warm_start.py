"""The warm start, with a model so small and steps so few that it learns nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.demo.task import EOS_ID, VOCAB_SIZE
from launch.demo.warm_start import MARKER, WarmStartRecipe, make_model

SHORT = WarmStartRecipe(
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_kv_heads=1,
    max_clean_steps=4,
    careless_steps=2,
    batch_size=4,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("warm")
    steps = []
    result = make_model(directory, SHORT, on_step=lambda phase, done, loss: steps.append((phase, done, loss)))
    return directory, result, steps


def test_the_checkpoint_loads_as_any_other(made):
    directory, result, _ = made
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.generation_config.eos_token_id == EOS_ID
    assert model.num_parameters() == result.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_every_step_is_reported_with_its_phase(made):
    _, _, steps = made
    assert [step[:2] for step in steps] == [
        *(("facts", i) for i in range(1, 5)),
        *(("carelessness", i) for i in (1, 2)),
    ]
    assert all(0 < loss < 10 for *_, loss in steps)


def test_a_finished_model_is_used_again(made):
    directory, result, _ = made
    before = (directory / "model.safetensors").stat().st_mtime_ns
    again = make_model(directory, SHORT)
    assert again == dataclasses.replace(result, is_reused=True)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_the_same_recipe_makes_the_same_weights_and_leaves_torch_as_it_was(made, tmp_path):
    directory, _, _ = made
    random_state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    make_model(tmp_path, SHORT)
    assert (tmp_path / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("damage", ["other recipe", "not JSON", "missing", "not ours"])
def test_a_directory_without_this_recipes_marker_is_made_anew(made, tmp_path, damage):
    recipe = dataclasses.replace(SHORT, max_clean_steps=1, careless_steps=0)
    if damage == "other recipe":
        make_model(tmp_path, dataclasses.replace(recipe, seed=1))
    elif damage != "missing":
        (tmp_path / MARKER).write_text({"not JSON": "{", "not ours": "[]"}[damage])
    assert not make_model(tmp_path, recipe).is_reused
    assert json.loads((tmp_path / MARKER).read_text())["fingerprint"] == recipe.fingerprint


def test_the_clean_phase_ends_once_the_facts_are_mastered(tmp_path):
    steps = []
    recipe = dataclasses.replace(SHORT, mastered_loss=100.0, careless_steps=1)  # any model has mastered that
    make_model(tmp_path, recipe, on_step=lambda phase, done, loss: steps.append(phase))
    assert steps == ["carelessness"]


def test_every_field_of_the_recipe_changes_its_fingerprint():
    for field in dataclasses.fields(WarmStartRecipe):
        changed = dataclasses.replace(SHORT, **{field.name: getattr(SHORT, field.name) + 1})
        assert changed.fingerprint != SHORT.fingerprint
