"""The checkpoint half of the trainer contract: what one layout saved, every layout of every backend continues."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.contracts.trainer_layouts import EVERYDAY_ACROSS, LENGTHS, MODELS, make_model, marks_of, packed, usual_model
from tests.contracts.trainer_scenarios import draw_over_a_resume, refuse_to_load, resume, save_midway
from tests.unit.training.packed_rows import draw_samples

SMALL = "reference-dp1"  # the layout that all others are compared with
TOO = "megatron-tp2_dp2"
ACROSS = [
    *((TOO, target) for target in ("megatron-dp1", "megatron-tp2_pp2", "megatron-pp2_dp2")),
    *((TOO, target) for target in ("deepspeed-zero2", "deepspeed-zero3")),
    ("deepspeed-zero3", "megatron-tp2"),
]


class Saved(NamedTuple):
    """A run that was saved after two of four steps."""

    directory: Path
    model: Path
    steps: list[Any]
    files: list[dict[str, int]]  # of every rank
    results: list[Any]  # of the steps after
    weights: dict[str, torch.Tensor]  # at the end


def steps_for(model: str) -> list[Any]:
    return [packed(draw_samples(LENGTHS, vocabulary=MODELS[model]["vocabulary"], seed=seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def saved(start, model_for, tmp_path_factory):
    """(layout, model) → the run saved there; each is made once."""
    made: dict[tuple[str, Path], Saved] = {}

    def make(layout: str, name: str, model: Path) -> Saved:
        if (layout, model) not in made:
            scratch, steps = tmp_path_factory.mktemp("saved"), steps_for(name)
            directory = scratch / "ckpt"
            answers = start(layout).run(save_midway, scratch, model=model, steps=steps, directory=directory)
            _, results, weights = answers[0]
            made[layout, model] = Saved(directory, model, steps, [files for files, *_ in answers], results, weights)
        return made[layout, model]

    return make


def continued(cluster: Any, run: Saved, scratch: Path) -> Any:
    """Results and weights of rank 0."""
    return cluster.run(resume, scratch, model=run.model, steps=run.steps, directory=run.directory)[0]


def assert_same_course(run: Saved, results: list[Any], weights: dict[str, torch.Tensor]) -> None:
    for there, here in zip(run.results, results, strict=True):
        # The second number is for a sum over about 115 tokens of either sign that comes to nearly nothing.
        assert here.metrics["loss"] == pytest.approx(there.metrics["loss"], rel=1e-5, abs=1e-5)
        assert here.grad_norm == pytest.approx(there.grad_norm, rel=1e-5)
    assert weights.keys() == run.weights.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], run.weights[name], atol=1e-5, rtol=0)


def test_a_saved_run_continues_bit_for_bit_in_the_same_layout(cluster, model, saved, tmp_path):
    run = saved(cluster.name, usual_model(cluster.name), model)
    on_disk = {path.name: path.stat().st_size for path in run.directory.iterdir()}
    assert run.files == [on_disk] + [{}] * (cluster.num_ranks - 1)
    results, weights = continued(cluster, run, tmp_path)
    assert results == run.results
    assert [name for name in weights if not torch.equal(weights[name], run.weights[name])] == []


@pytest.mark.parametrize("layout", ["reference-dp1", "megatron-pp2", "deepspeed-zero3"])
def test_random_numbers_go_on_where_the_checkpoint_was_taken(layout, start, model_for, tmp_path):
    model, directory = model_for(usual_model(layout), layout), tmp_path / "ckpt"
    for drawn, again in start(layout).run(draw_over_a_resume, tmp_path, model=model, directory=directory):
        assert drawn == again


def test_it_continues_in_the_reference_and_the_reference_in_it(cluster, model, saved, start, tmp_path):
    name = usual_model(cluster.name)
    run = saved(cluster.name, name, model)
    assert_same_course(run, *continued(start(SMALL), run, tmp_path / "small"))
    small = saved(SMALL, name, model)
    assert_same_course(small, *continued(cluster, small, tmp_path / "here"))


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=marks_of(pair in EVERYDAY_ACROSS)) for pair in ACROSS],
    ids=["-to-".join(pair) for pair in ACROSS],
)
def test_a_run_continues_in_another_layout_and_backend(source, target, saved, start, model_for, tmp_path):
    run = saved(source, "qwen3-untied", model_for("qwen3-untied", source))
    assert_same_course(run, *continued(start(target), run, tmp_path))


def test_damaged_and_foreign_checkpoints_are_refused_on_all_ranks_before_anything_changed(
    cluster, model, saved, tmp_path
):
    name = usual_model(cluster.name)
    damaged = shutil.copytree(saved(SMALL, name, model).directory, tmp_path / "damaged")
    victim = max(damaged.glob("exp_avg_sq-*"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)
    other = make_model(tmp_path / "other", "llama-odd")
    foreign = saved(SMALL, "llama-odd", other).directory
    answers = cluster.run(refuse_to_load, tmp_path / "b", model=model, directories=[damaged, foreign])
    assert all(is_unchanged for _, is_unchanged in answers)
    told_damage, _ = answers[0][0]
    assert victim.name in told_damage
    assert "checksum" in told_damage
    assert all("another model" in messages[1] for messages, _ in answers)
