"""The contract of TrainerBackend, held against every backend and layout, and against plain HF on unpacked samples."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.algorithms.objectives import PreferenceLoss
from rlhpc.algorithms.packing import FlopCost
from rlhpc.data.demonstrations import Demonstration
from rlhpc.protocol.types import PackedMicrobatch, TrainingSample
from rlhpc.roles.controller.batch_maker import pack_demonstrations
from rlhpc.training.logprob import plain_row
from tests.contracts.trainer_layouts import EVERYDAY, LENGTHS, MODELS, PAIRS, has_experts, marks_of, packed, usual_model
from tests.contracts.trainer_scenarios import (
    decay_only,
    look,
    odd_reference,
    refuse_a_step,
    refused_steps,
    score,
    skip_poisoned_steps,
    supervised_step,
    take_steps,
    threads_after_a_step,
)
from tests.contracts.trainer_textbook import (
    hf_cross_entropy,
    hf_logprobs,
    hf_losses,
    hf_preferences,
    hf_training,
    load_hf,
    weights_on_disk,
)
from tests.tiny_models import make_tiny_checkpoint
from tests.unit.training.packed_rows import draw_samples, pack_row

FEW_THREADS = 16  # a backend of two ranks that is open has 7 to 60

every_model_in_every_layout = pytest.mark.parametrize(
    ("cluster", "any_model"),
    [pytest.param(*pair, marks=marks_of(pair[1] in EVERYDAY.get(pair[0], ()))) for pair in PAIRS],
    ids=["/".join(pair) for pair in PAIRS],
    indirect=["cluster"],
)


def draw(model: str, seed: int = 0) -> list[TrainingSample]:
    return draw_samples(LENGTHS, vocabulary=MODELS[model]["vocabulary"], seed=seed)


@pytest.fixture(scope="module")
def textbook(model_for):
    """(model, layout) → samples of five steps, what they come to in plain HF; worked out once for each model."""

    @cache
    def work_out(model: str, directory: Any) -> Any:
        steps = [draw(model, seed) for seed in range(5)]
        return steps, *hf_training(directory, steps, temperature=0.7)

    return lambda model, layout: work_out(model, model_for(model, layout))


@pytest.fixture
def rows(cluster) -> list[PackedMicrobatch]:
    return packed(draw(usual_model(cluster.name)))


@pytest.fixture(scope="module")
def one_step(model_for, tmp_path_factory):
    """cluster → results and weights of one step on `rows`, from every rank; taken once in each layout."""
    taken: dict[str, Any] = {}

    def take(cluster):
        if cluster.name not in taken:
            name = usual_model(cluster.name)
            model, scratch = model_for(name, cluster.name), tmp_path_factory.mktemp("step")
            taken[cluster.name] = cluster.run(take_steps, scratch, model=model, steps=[packed(draw(name))])
        return taken[cluster.name]

    return take


# ------------------------------------------------------------------------------------------------------------- numbers


@every_model_in_every_layout
def test_packed_logprobs_are_those_of_hf_and_weights_its_checkpoint(cluster, any_model, model_for, tmp_path):
    directory, samples = model_for(any_model, cluster.name), draw(any_model)
    answers = cluster.run(look, tmp_path, model=directory, rows=packed(samples), temperature=0.7)
    hf = load_hf(directory)
    assert_logprobs_of_hf(answers, hf, samples, temperature=0.7)
    assert_checkpoint_of_hf(answers, hf)


def test_bfloat16_weights_and_temperature_one_are_those_of_hf_too(cluster, model, tmp_path):
    samples = draw(usual_model(cluster.name))
    answers = cluster.run(look, tmp_path / "a", model=model, rows=packed(samples), temperature=1.0)
    assert_logprobs_of_hf(answers, load_hf(model), samples, temperature=1.0)
    answers = cluster.run(look, tmp_path / "b", model=model, rows=packed(samples), dtype="bfloat16")
    assert_checkpoint_of_hf(answers, load_hf(model, torch.bfloat16))


def test_a_row_that_is_scored_at_temperature_one_is_scored_so_on_every_rank(cluster, model, tmp_path):
    sample = draw(usual_model(cluster.name))[0]
    row = [plain_row(sample.token_ids)]
    hf = load_hf(model)
    with torch.no_grad():
        expected = [hf_logprobs(hf, sample, t) for t in (1.0, 0.7)]
    for found in cluster.run(score, tmp_path, model=model, row=row, temperature=0.7):
        for logprobs, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)


def assert_logprobs_of_hf(answers: list[Any], hf: Any, samples: list[TrainingSample], temperature: float) -> None:
    with torch.no_grad():
        expected = [torch.cat([hf_logprobs(hf, s, temperature) for s in samples[i : i + 3]]) for i in range(0, 9, 3)]
    dp_size = 1 + max(dp_rank for dp_rank, *_ in answers)
    for dp_rank, found, *_ in answers:  # every rank of a replica has whole rows
        wanted = expected[dp_rank::dp_size]
        assert len(found) == -(-len(expected) // dp_size)
        for row, logprobs in zip(wanted, found[: len(wanted)], strict=True):
            assert logprobs.dtype == torch.float32
            torch.testing.assert_close(logprobs, row, atol=1e-5, rtol=0)


def assert_checkpoint_of_hf(answers: list[Any], hf: Any) -> None:
    """Bit for bit, on rank 0 alone; every rank announces it."""
    assert [bool(weights) for *_, weights in answers] == [True] + [False] * (len(answers) - 1)
    *_, specs, weights = answers[0]
    assert all(announced == specs for *_, announced, _ in answers)
    assert [(spec.name, spec.shape) for spec in specs] == [(name, tuple(tensor.shape)) for name, tensor in weights]
    assert {spec.dtype for spec in specs} == {str(hf.dtype).removeprefix("torch.")}
    expected = weights_on_disk(hf)
    assert dict(weights).keys() == expected.keys()
    assert [name for name, tensor in weights if not torch.equal(tensor, expected[name])] == []


@every_model_in_every_layout
def test_five_steps_equal_textbook_training_on_unpacked_samples(cluster, any_model, model_for, textbook, tmp_path):
    steps, history, expected = textbook(any_model, cluster.name)
    directory = model_for(any_model, cluster.name)
    answers = cluster.run(take_steps, tmp_path, model=directory, steps=[packed(s) for s in steps], temperature=0.7)
    for results, _ in answers:
        for result, (loss, norm) in zip(results, history, strict=True):
            assert result.applied
            assert result.metrics["loss"] == pytest.approx(loss, abs=1e-3)  # a sum over about 115 tokens
            assert result.grad_norm == pytest.approx(norm, abs=1e-5)
    for name, tensor in answers[0][1].items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["deepspeed-zero3", pytest.param("deepspeed-zero2", marks=pytest.mark.soak)])
def test_gated_delta_nets_take_textbook_steps_though_each_rank_has_other_segments(start, layout, tmp_path):
    """In ZeRO-3 ranks gather the weights of each module together: none may call a module more often than others."""
    directory = make_tiny_checkpoint(tmp_path / "model", "qwen3_5_moe_text", hidden=32)
    steps = [draw_samples(LENGTHS, vocabulary=100, seed=seed) for seed in range(3)]
    history, expected = hf_training(directory, steps, temperature=0.7)
    answers = start(layout).run(
        take_steps, tmp_path / "run", model=directory, steps=[packed(each) for each in steps], temperature=0.7
    )
    for results, _ in answers:
        for result, (_, norm) in zip(results, history, strict=True):
            assert result.applied
            assert result.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, tensor in answers[0][1].items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: name + text)


# Over tokens, over sequences, with weights and masks of either; each is its paper's in tests/unit/algorithms.
ALGORITHMS: list[dict[str, Any]] = [
    {"loss": "ppo", "proximal": "loglinear", "dual_clip": 1.5, "max_token_age": 2},
    {"loss": "cispo", "proximal": "behaviour", "importance_cap": "off"},
    {"loss": "gspo", "proximal": "behaviour", "importance_cap": "off", "clip_low": 0.3, "clip_high": 0.4},
    {"loss": "gmpo", "proximal": "loglinear", "importance_level": "sequence", "importance_cap": 3.0},
    {"loss": "sapo", "proximal": "loglinear", "importance_level": "geometric", "veto_below": 0.05},
]


@pytest.mark.long
def test_every_loss_is_that_of_unpacked_samples_in_every_layout(cluster, model, tmp_path):
    draw_weight = np.random.default_rng(3)
    samples = [
        replace(
            sample,
            loss_weight=float(draw_weight.uniform(0.5, 2)),
            versions=np.where(sample.loss_mask, draw_weight.integers(3, 8, len(sample.versions)), -1).astype(np.int32),
        )
        for sample in draw(usual_model(cluster.name))
    ]
    answers = cluster.run(
        refused_steps, tmp_path, model=model, rows=packed(samples), algorithms=ALGORITHMS, policy_version=7,
        temperature=0.7,
    )  # fmt: skip
    expected = hf_losses(model, samples, ALGORITHMS, policy_version=7, temperature=0.7)
    for found in answers:
        for (loss, norm), (wanted, wanted_norm), algorithm in zip(found, expected, ALGORITHMS, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-4, abs=1e-3), algorithm
            assert norm == pytest.approx(wanted_norm, rel=1e-4, abs=1e-5), algorithm


def test_supervised_loss_and_gradients_are_those_of_cross_entropy_in_float64(cluster, model, tmp_path):
    """Packed conversations of several turns, to 1e-6; so layouts agree with each other, too."""
    samples = [
        replace(sample, loss_mask=(np.arange(len(sample.token_ids)) // (2 + index % 3)) % 2 == 1)
        for index, sample in enumerate(draw(usual_model(cluster.name)))
    ]
    loss, gradients = hf_cross_entropy(model, samples)
    assert_gradients(cluster.run(supervised_step, tmp_path, model=model, rows=packed(samples)), loss, gradients)


def test_preference_loss_and_gradients_are_those_of_dpo_in_float64(cluster, model, tmp_path):
    """Pairs of unlike lengths in rows, to 1e-6."""
    samples = draw(usual_model(cluster.name))[:8]
    answers = [Demonstration(each.token_ids, each.loss_mask) for each in samples]
    pairs = [replace(chosen, rejected=other) for chosen, other in zip(answers[::2], answers[1::2], strict=True)]
    rows = list(pack_demonstrations(pairs, token_budget=80, num_ranks=1, cost=FlopCost(1.0, 0.0)).rows)
    assert len(rows) > 1
    loss, gradients = hf_preferences(model, samples, 0.2, odd_reference)
    found = cluster.run(supervised_step, tmp_path, model=model, rows=rows, loss=PreferenceLoss(0.2))
    assert_gradients(found, loss, gradients)


def assert_gradients(answers: Any, loss: float, gradients: dict[str, torch.Tensor]) -> None:
    assert [found for found, _ in answers] == [pytest.approx(loss, rel=1e-6)] * len(answers)
    assert answers[0][1].keys() == gradients.keys()
    for name, gradient in answers[0][1].items():
        torch.testing.assert_close(
            gradient, gradients[name], atol=1e-6, rtol=0, msg=lambda text, name=name: name + text
        )


def test_every_rank_gets_the_same_result(cluster, one_step):
    answers = one_step(cluster)
    assert all(results == answers[0][0] for results, _ in answers)


# ------------------------------------------------------------------------------------- what must not change the result


def assert_same_training(one: Any, other: Any) -> None:
    (left,), (right,) = one[0], other[0]
    assert left.grad_norm == pytest.approx(right.grad_norm, abs=1e-6)
    assert left.metrics == pytest.approx(right.metrics, abs=1e-3, rel=1e-5)
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name], atol=1e-5, rtol=0)


def test_splitting_a_batch_into_micro_batches_changes_nothing(cluster, model, one_step, tmp_path):
    samples = draw(usual_model(cluster.name))
    for per_row in (9, 1):
        scratch = tmp_path / str(per_row)
        split = cluster.run(take_steps, scratch, model=model, steps=[packed(samples, per_row)])
        assert_same_training(one_step(cluster)[0], split[0])


def test_recomputing_activations_changes_nothing(cluster, model, rows, one_step, tmp_path):
    for what in ("full", "selective") if cluster.layout["backend"] == "megatron" else ("full",):
        again = cluster.run(take_steps, tmp_path / what, model=model, steps=[rows], recompute_activations=what)
        assert_same_training(one_step(cluster)[0], again[0])


def test_rows_without_loss_tokens_change_nothing(cluster, model, rows, one_step, tmp_path):
    silent = replace(rows[0], loss_mask=np.zeros_like(rows[0].loss_mask))
    padded = cluster.run(take_steps, tmp_path, model=model, steps=[[*rows, silent, silent, silent]])
    assert_same_training(one_step(cluster)[0], padded[0])


def test_a_segment_cannot_influence_another(cluster, model, tmp_path):
    name = usual_model(cluster.name)
    row = pack_row(draw(name))
    start, end = row.cu_seqlens[3], row.cu_seqlens[5]
    disturbed = row.token_ids.copy()
    disturbed[start:end] = (disturbed[start:end] + 1) % MODELS[name]["vocabulary"]
    both = [row, replace(row, token_ids=disturbed)]
    # One after the other on the same replica: dealt out alternately, each with a row to spare.
    dealt = [copy for copy in both for _ in range(2)]
    plain, changed = _logprobs_of_first_replica(cluster.run(look, tmp_path, model=model, rows=dealt), dealt)
    elsewhere = np.ones(len(disturbed), dtype=bool)
    elsewhere[start:end] = False
    assert not torch.equal(plain, changed)
    # An expert gets the tokens of all segments in one product, whose rounding depends on how many they are.
    tolerance = 1e-6 if has_experts(cluster.name) else 0.0
    torch.testing.assert_close(plain[elsewhere], changed[elsewhere], atol=tolerance, rtol=0)


def _logprobs_of_first_replica(answers: list[Any], dealt: list[PackedMicrobatch]) -> tuple[Any, Any]:
    dp_size = 1 + max(dp_rank for dp_rank, *_ in answers)
    return answers[0][1][0], answers[0][1][len(dealt) // dp_size // 2]


# ----------------------------------------------------------------------------------------------------------- the step


def test_what_is_not_finite_on_one_rank_skips_the_step_on_all_and_changes_no_bit(cluster, model, rows, tmp_path):
    poisoned = []
    for field in ("behaviour_logprobs", "advantages"):
        values = getattr(rows[1], field).copy()
        values[np.flatnonzero(rows[1].loss_mask)[0]] = np.nan
        poisoned.append([rows[0], replace(rows[1], **{field: values}), rows[2]])
    answers = cluster.run(skip_poisoned_steps, tmp_path, model=model, rows=rows, poisoned=poisoned)
    assert answers == [(True, [False] * 3, 1)] * cluster.num_ranks
    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert len(names) >= 4  # weights, two moments, and the rest
    for name in names:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name


def test_a_step_that_is_not_allowed_is_skipped_on_all_ranks_and_changes_no_bit(cluster, model, rows, tmp_path):
    answers = cluster.run(refuse_a_step, tmp_path, model=model, rows=rows)
    for applied, asked, told, steps_applied in answers:
        assert applied == [True, False, True]
        assert steps_applied == 2
        assert (
            asked == told[:2] == answers[0][1]
        )  # the norm of a refused step is told, and every rank was asked the same
        assert told[1] == pytest.approx(told[2], rel=1e-5)  # what was refused has left no gradient behind
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("layout", ["deepspeed-zero2", "deepspeed-zero2_offload"])
def test_what_was_refused_in_bfloat16_leaves_no_gradient_behind(layout, start, model_for, tmp_path):
    """DeepSpeed then sums gradients in buffers of their own, and an offloaded optimiser keeps them."""
    arguments = {"model": model_for("qwen2-tied", layout), "rows": packed(draw("qwen2-tied")), "dtype": "bfloat16"}
    for applied, _, told, _ in start(layout).run(refuse_a_step, tmp_path, **arguments):
        assert applied == [True, False, True]
        assert told[1] == pytest.approx(told[2], rel=1e-5)


def test_weight_decay_shrinks_matrices_only(cluster, model, rows, tmp_path):
    before, after = cluster.run(decay_only, tmp_path, model=model, rows=rows)[0]
    for name in before:
        factor = 1 - 0.1 * 0.5 if before[name].ndim >= 2 else 1.0
        torch.testing.assert_close(after[name], before[name] * factor)


# ------------------------------------------------------------------------------------------------------------- the end


def test_closing_a_mixture_lets_go_of_its_process_groups_and_their_threads(start, model_for, tmp_path):
    """Their layers keep what they dispatched last, and through its graph all groups: 45 threads a backend."""
    cluster = start("megatron-sp_ep2")
    name = usual_model(cluster.name)
    arguments = {"model": model_for(name, cluster.name), "rows": packed(draw(name))}
    first = max(cluster.run(threads_after_a_step, tmp_path / "0", **arguments, most=FEW_THREADS))
    second = max(cluster.run(threads_after_a_step, tmp_path / "1", **arguments, most=first))
    assert second <= first
