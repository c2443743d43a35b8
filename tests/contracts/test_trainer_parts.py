"""Steps that begin with a part of their batch, in every backend and layout, beside the same steps on whole batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.trainer_state import STATE_KINDS, read_checkpoint
from tests.contracts.part_scenarios import interrupt_a_step, lose_steps_in_parts, steps_in_parts, whole_steps
from tests.contracts.trainer_layouts import EACH_WAY, LENGTHS, MODELS, packed, usual_model
from tests.unit.training.packed_rows import draw_samples

Rows = list[PackedMicrobatch]


def draw(cluster: Any, seed: int = 0) -> Rows:
    vocabulary = MODELS[usual_model(cluster.name)]["vocabulary"]
    return packed(draw_samples(LENGTHS, vocabulary=vocabulary, seed=seed), per_row=1)


def in_parts(rows: Rows) -> list[Rows]:
    """Four parts, one of which has no token that counts in the loss."""
    silent = replace(rows[0], loss_mask=np.zeros_like(rows[0].loss_mask))
    return [rows[:4], [silent], rows[4:5], rows[5:]]


def poisoned(parts: list[Rows], value: float) -> list[Rows]:
    """One loss token of the first part gets this advantage."""
    row = parts[0][1]
    advantages = row.advantages.copy()
    advantages[np.flatnonzero(row.loss_mask)[0]] = value
    return [[parts[0][0], replace(row, advantages=advantages), *parts[0][2:]], *parts[1:]]


def tensors(directory: Path, kind: str) -> dict[str, Tensor]:
    return {name: tensor.clone() for _, name, tensor in read_checkpoint(directory, None).tensors(kind)}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_same_state(one: Path, other: Path, *, share: float) -> None:
    """share: of the length of a tensor as a vector, which is the length that the difference may have."""
    for kind in STATE_KINDS:
        left, right = tensors(one, kind), tensors(other, kind)
        assert left.keys() == right.keys()
        lengths = {name: (float((right[name] - left[name]).norm()), float(left[name].norm())) for name in left}
        assert {name: pair for name, pair in lengths.items() if not pair[0] <= share * pair[1]} == {}


def assert_parts_equal_the_whole(
    cluster: Any, model: Path, scratch: Path, *, share: float, num_steps: int = 3, **settings: Any
) -> None:
    """Each of the steps comes in another number of parts, the last one in the most."""
    steps = [draw(cluster, seed) for seed in range(num_steps)]
    divided = [[steps[0]], *([rows[:5], rows[5:]] for rows in steps[1:-1]), in_parts(steps[-1])][-num_steps:]
    whole = cluster.run(whole_steps, scratch / "whole", model=model, steps=steps, **settings)
    parts = cluster.run(steps_in_parts, scratch / "parts", model=model, steps=divided, **settings)
    assert all(results == parts[0] for results in parts)
    for one, other in zip(whole[0], parts[0], strict=True):
        assert one.applied
        assert other.applied
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=share)
        assert other.metrics == pytest.approx(one.metrics, rel=share, abs=share * one.metrics["entropy"])
    assert_same_state(scratch / "whole" / "state", scratch / "parts" / "state", share=share)


def test_parts_come_to_what_one_step_does(cluster, model, tmp_path):
    assert_parts_equal_the_whole(cluster, model, tmp_path, share=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("cluster", EACH_WAY, indirect=True)
def test_parts_in_bfloat16_come_to_what_one_step_does_within_its_rounding(cluster, model, tmp_path):
    assert_parts_equal_the_whole(cluster, model, tmp_path, share=4e-2, num_steps=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param("megatron-dp2", {}, id="dp2"),
        pytest.param("megatron-dp2_replicated", {}, id="replicated", marks=pytest.mark.long),
        pytest.param("megatron-pp2_dp2", {}, id="pp2_dp2", marks=pytest.mark.long),
        pytest.param("megatron-pp2_dp2", {"chunks_per_stage": 2}, id="vpp2_dp2", marks=pytest.mark.long),
    ],
)
def test_a_part_sends_no_sums_to_other_replicas_before_they_are_whole(layout, settings, start, model_for, tmp_path):
    """Where sums are sent while backward goes on: from the second step on, as soon as they seem complete."""
    model = model_for("qwen2-tied", "megatron-vpp2")
    assert_parts_equal_the_whole(start(layout), model, tmp_path, share=1e-5, overlap_grad_reduce=True, **settings)


def test_a_step_that_is_lost_leaves_nothing_behind_and_its_gate_is_asked_about_all_parts(cluster, model, tmp_path):
    assert_nothing_is_left_behind(cluster, model, tmp_path, np.nan)


@pytest.mark.long
@pytest.mark.parametrize("cluster", EACH_WAY, indirect=True)
def test_nothing_is_left_behind_by_an_infinite_loss_either(cluster, model, tmp_path):
    assert_nothing_is_left_behind(cluster, model, tmp_path, np.inf)


def assert_nothing_is_left_behind(cluster: Any, model: Path, tmp_path: Path, value: float) -> None:
    rows = draw(cluster)
    parts = in_parts(rows)
    arguments = {"parts": parts, "poisoned": poisoned(parts, value)}
    answers = cluster.run(lose_steps_in_parts, tmp_path / "lost", model=model, **arguments)
    expected = cluster.run(whole_steps, tmp_path / "whole", model=model, steps=[rows, rows])[0]
    for (first, refused, infinite, last), asked in answers:
        assert [step.applied for step in (first, refused, infinite, last)] == [True, False, False, True]
        assert asked == [(refused.metrics, refused.grad_norm)]
        assert refused.grad_norm == pytest.approx(expected[1].grad_norm, rel=1e-4)
        assert refused.metrics == pytest.approx(expected[1].metrics, rel=1e-4, abs=1e-3)
        assert not np.isfinite(infinite.grad_norm)
        assert last.grad_norm == pytest.approx(expected[1].grad_norm, rel=1e-4)
    assert files(tmp_path / "lost" / "first") == files(tmp_path / "lost" / "before")
    assert_same_state(tmp_path / "whole" / "state", tmp_path / "lost" / "state", share=1e-5)


def test_what_comes_between_two_parts_changes_nothing(cluster, model, tmp_path):
    parts = in_parts(draw(cluster))
    assert all(cluster.run(interrupt_a_step, tmp_path / "a", model=model, parts=parts))
    assert files(tmp_path / "a" / "within") == files(tmp_path / "a" / "before")
    cluster.run(steps_in_parts, tmp_path / "b", model=model, steps=[parts, parts])
    assert files(tmp_path / "a" / "state") == files(tmp_path / "b" / "state")
