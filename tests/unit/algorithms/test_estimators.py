"""Estimators against the formulas of their papers, written as loops and as enumerations."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.estimators import (
    BY_GROUP,
    PassAtK,
    grpo,
    grpo_no_std,
    has_reward_variance,
    make_estimator,
    normalization,
    normalize,
    opo,
    packed_gae,
    rloo,
)
from rlhpc.algorithms.objectives import ValueLoss
from rlhpc.config.tables_algorithm import ADVANTAGES, OF_REWARDS, OVER_BATCH, AlgorithmConfig
from rlhpc.protocol.types import PackedMicrobatch
from rlhpc.training.logprob import token_row
from tests.unit.training.packed_rows import draw_samples, dummy_row, pack_row

# ------------------------------- Estimators against the formulas of their papers, written as loops and as enumerations

CENTRED = ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline")


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def lengths_of(group: np.ndarray) -> np.ndarray:
    return np.arange(1, len(group) + 1, dtype=np.int32)


groups = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16).map(lambda values: rewards(*values))


def test_grpo_and_rloo_are_their_formulas() -> None:
    group = rewards(1, 0, 0, 0)
    np.testing.assert_allclose(grpo(group, lengths_of(group)), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-6)
    group = rewards(1, 0, 0, 0)
    np.testing.assert_allclose(grpo_no_std(group, lengths_of(group)), [0.75, -0.25, -0.25, -0.25])
    group = rewards(1, 0.5, 0, 0.25)
    others = [(group.sum() - r) / 3 for r in group]
    np.testing.assert_allclose(rloo(group, lengths_of(group)), group - np.array(others), rtol=1e-6)


@given(groups)
@settings(derandomize=True)
def test_opo_s_baseline_is_the_mean_reward_of_a_token(group: np.ndarray) -> None:
    lengths = lengths_of(group)
    tokens = [float(r) for r, length in zip(group, lengths, strict=True) for _ in range(length)]
    expected = [float(r) - sum(tokens) / len(tokens) for r in group]
    if has_reward_variance(group):
        np.testing.assert_allclose(opo(group, lengths), expected, rtol=1e-5, atol=1e-6)
    else:
        assert not opo(group, lengths).any()


@pytest.mark.parametrize("k", [2, 3, 5])
@given(groups)
@settings(derandomize=True, max_examples=40)
def test_pass_at_k_is_the_mean_over_all_sets_that_a_member_is_in(k: int, group: np.ndarray) -> None:
    group = group[:9]
    found = PassAtK(k)(group, lengths_of(group))
    sets = list(combinations(range(len(group)), k))
    best = np.array([max(float(group[i]) for i in members) for members in sets])
    if len(group) <= k or not has_reward_variance(best.astype(np.float32)):
        assert not found.any()
        return
    for i in range(len(group)):
        with_it = [value for value, members in zip(best, sets, strict=True) if i in members]
        expected = (np.mean(with_it) - best.mean()) / best.std()
        assert found[i] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_pass_at_k_has_the_closed_form_of_its_paper_for_right_and_wrong() -> None:
    """Chen et al. 2025: with N samples of which M are wrong; here N = 8, M = 5, k = 4."""
    found = PassAtK(4)(rewards(1, 0, 0, 1, 0, 0, 1, 0), np.ones(8, np.int32))
    mean = 1 - 5 / 70  # C(5, 4) / C(8, 4)
    std = (mean * (1 - mean)) ** 0.5
    right, wrong = (1 - mean) / std, (1 - 4 / 35 - mean) / std  # C(4, 3) / C(7, 3)
    np.testing.assert_allclose(found, [right, wrong, wrong, right, wrong, wrong, right, wrong], rtol=1e-6)


@pytest.mark.parametrize("name", CENTRED)
@given(groups)
@settings(derandomize=True)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(name: str, group: np.ndarray) -> None:
    advantages = BY_GROUP[name](group, lengths_of(group))
    assert advantages.dtype == np.float32
    assert advantages.shape == group.shape
    assert abs(float(advantages.sum(dtype=np.float64))) < 1e-4 * len(group) * max(1.0, float(np.abs(group).max()))
    if has_reward_variance(group):
        order = np.argsort(group, kind="stable")
        assert (np.diff(advantages[order]) >= 0).all()
        assert advantages[order[-1]] > 0 > advantages[order[0]]
    else:
        assert not advantages.any()


@pytest.mark.parametrize("name", sorted({*BY_GROUP, "pass_at_k"}.difference(OF_REWARDS)))
def test_rounding_noise_is_no_variance(name: str) -> None:
    """Divided by its standard deviation, the last bit of 0.1 + 0.2 would become advantages of ±1."""
    noisy = np.array([np.float32(0.1) + np.float32(0.7), 0.8, np.nextafter(np.float32(0.8), 1)], np.float32)
    assert len(set(noisy.tolist())) > 1
    assert not has_reward_variance(noisy)
    estimator = make_estimator(AlgorithmConfig.model_validate({"advantage": name, "pass_k": 2}))
    assert estimator(noisy, lengths_of(noisy)).tolist() == [0, 0, 0]


def test_a_real_difference_is_variance_however_small_and_one_member_has_none() -> None:
    assert has_reward_variance(rewards(0.5, 0.5001))
    assert has_reward_variance(rewards(1e6, 1e6 + 10))
    assert rloo(rewards(1), np.ones(1, np.int32)).tolist() == [0]


@pytest.mark.parametrize("bad", [rewards(), rewards(1, float("nan")), rewards(1, float("inf")), rewards(1, 0)[:, None]])
@pytest.mark.parametrize("name", sorted(BY_GROUP))
def test_what_is_not_a_group_of_finite_rewards_is_refused(name: str, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="rewards of a group"):
        BY_GROUP[name](bad, lengths_of(bad))


def test_every_name_of_a_run_file_has_its_estimator() -> None:
    without = {*ADVANTAGES} - {*BY_GROUP, "pass_at_k"}  # whose k is a setting
    assert not without, f"add to BY_GROUP of rlhpc/algorithms/estimators.py: {sorted(without)}"
    unknown = {*BY_GROUP} - {*ADVANTAGES}
    assert not unknown, f"add to ADVANTAGES of rlhpc/config/tables_algorithm.py: {sorted(unknown)}"
    assert {*OVER_BATCH} <= {*ADVANTAGES}


# ------------------------------------------------------------------------------------------------------ over the batch


def test_over_the_batch_every_token_counts_once_and_each_task_has_its_own_scale() -> None:
    # REINFORCE++: mean and standard deviation of what the tokens of the batch carry.
    advantages = [rewards(1, 0), rewards(0, 0, 3)]
    counts = [np.array([2, 5]), np.array([1, 0, 4])]
    tokens = np.repeat([1.0, 0.0, 0.0, 0.0, 3.0], [2, 5, 1, 0, 4])
    expected = (np.array([1, 0, 0, 0, 3]) - tokens.mean()) / tokens.std()
    found = normalize(advantages, counts, ["", ""])
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
    assert [len(group) for group in found] == [2, 3]
    advantages = [rewards(1, 0), rewards(100, 0), rewards(1, 0)]
    counts = [np.array([1, 1])] * 3
    found = normalize(advantages, counts, ["a", "b", "a"])
    np.testing.assert_allclose(np.stack(found), [[1, -1], [1, -1], [1, -1]])
    found = normalize([rewards(2, 2), rewards(2, 5)], [np.array([1, 1]), np.array([1, 0])], ["", ""])
    assert not np.concatenate(found).any()


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_is_normalised_over_the_batch_whatever_else_is_said(name: str) -> None:
    assert normalization(AlgorithmConfig.model_validate({"advantage": name})) == "batch"
    assert normalization(AlgorithmConfig(advantage_normalization="task")) == "task"


# ---------------------------------- GAE and the value loss beside the formulas written out, token by token, in float64


def gae_of(row: PackedMicrobatch, values: np.ndarray, discount: float, trace: float) -> tuple[np.ndarray, np.ndarray]:
    return packed_gae(row.advantages, values, row.loss_mask, row.cu_seqlens, discount=discount, trace=trace)


def drawn_row(seed: int, longest: int = 30) -> tuple[PackedMicrobatch, np.ndarray]:
    """Ragged sequences with rewards at random tokens, holes in the loss mask, one without any; and values."""
    rng = np.random.default_rng(seed)
    samples = draw_samples([int(n) for n in rng.integers(3, longest, 7)], seed=seed)
    for place, sample in enumerate(samples):
        mask = sample.loss_mask & (rng.random(len(sample.loss_mask)) < (0.7 if place else 0.0))
        rewards = np.where(mask & (rng.random(len(mask)) < 0.3), rng.normal(0, 1, len(mask)), 0)
        samples[place] = replace(sample, loss_mask=mask, advantages=rewards.astype(np.float32))
    row = pack_row(samples)
    return row, rng.normal(0, 1, len(row.token_ids)).astype(np.float32)


def textbook(row: PackedMicrobatch, values: np.ndarray, discount: float, trace: float) -> np.ndarray:
    """Equation 16 as a double sum."""
    advantages = np.zeros(len(row.token_ids))
    for first, last in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False):
        tokens = [t for t in range(first, last) if row.loss_mask[t]]
        v = [float(values[t]) for t in tokens] + [0.0]
        delta = [float(row.advantages[t]) + discount * v[n + 1] - v[n] for n, t in enumerate(tokens)]
        for n, t in enumerate(tokens):
            advantages[t] = sum((discount * trace) ** k * delta[n + k] for k in range(len(tokens) - n))
    return advantages


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize(("seed", "longest"), [(0, 30), (1, 30), (2, 30), (3, 400), (4, 400)])
def test_advantages_are_the_double_sum_of_the_paper(seed: int, longest: int, discount: float, trace: float) -> None:
    row, values = drawn_row(seed, longest)
    advantages, returns = gae_of(row, values, discount, trace)
    expected = textbook(row, values, discount, trace)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, np.where(row.loss_mask, expected + values, 0), atol=1e-12)


def test_a_row_without_a_loss_token_has_none() -> None:
    advantages, returns = gae_of(dummy_row(), np.ones(1, np.float32), 1.0, 1.0)
    assert not advantages.any()
    assert not returns.any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_value_loss_and_its_gradient_are_the_formula(seed: int, clip: float | None) -> None:
    row, old = drawn_row(seed)
    rng = np.random.default_rng(seed)
    row = replace(row, loss_weights=rng.uniform(0.5, 2, len(row.loss_weights)).astype(np.float32))
    values = torch.tensor(old + rng.normal(0, 0.3, len(old)), dtype=torch.float32, requires_grad=True)
    loss, metrics = ValueLoss(clip)(values, token_row(row, torch.zeros(len(old)), proximal=torch.from_numpy(old)))
    loss.backward()
    expected, slopes, clipped = 0.0, np.zeros(len(old)), 0
    weights = np.repeat(row.loss_weights, np.diff(row.cu_seqlens)).astype(np.float64)
    for t in np.flatnonzero(row.loss_mask):
        v, v_old, r = float(values[t]), float(old[t]), float(row.advantages[t])
        plain, slope = (v - r) ** 2, v - r
        if clip is not None:
            bounded = v_old + min(max(v - v_old, -clip), clip)
            if (bounded - r) ** 2 > plain:
                clipped += 1
                plain, slope = (bounded - r) ** 2, 0.0 if abs(v - v_old) > clip else bounded - r
        expected += 0.5 * weights[t] * plain
        slopes[t] = weights[t] * slope
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(values.grad.numpy(), slopes, atol=2e-6)
    assert metrics["clipped"].item() == clipped


def test_what_is_not_finite_behind_the_mask_stays_there_and_before_it_shows() -> None:
    row, old = drawn_row(1)
    for where, is_finite in ((np.flatnonzero(~row.loss_mask)[0], True), (np.flatnonzero(row.loss_mask)[0], False)):
        values = torch.zeros(len(old))
        values[int(where)] = torch.nan
        values.requires_grad_()
        loss, _ = ValueLoss(None)(values, token_row(row, torch.zeros(len(old)), proximal=None))
        loss.backward()
        assert bool(loss.isfinite()) is bool(values.grad.isfinite().all()) is is_finite
