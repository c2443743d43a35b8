"""Estimators against the formulas of their papers, written as loops and as enumerations."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
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
    rloo,
)
from rlhpc.config.tables_algorithm import AlgorithmConfig

CENTRED = ("grpo", "grpo_no_std", "rloo", "reinforce_pp_baseline")


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def lengths_of(group: np.ndarray) -> np.ndarray:
    return np.arange(1, len(group) + 1, dtype=np.int32)


groups = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16).map(lambda values: rewards(*values))


def test_grpo_divides_the_centred_reward_by_the_group_s_standard_deviation() -> None:
    group = rewards(1, 0, 0, 0)
    np.testing.assert_allclose(grpo(group, lengths_of(group)), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-6)


def test_grpo_without_std_only_centres() -> None:
    group = rewards(1, 0, 0, 0)
    np.testing.assert_allclose(grpo_no_std(group, lengths_of(group)), [0.75, -0.25, -0.25, -0.25])


def test_rloo_takes_the_mean_of_the_others_as_baseline() -> None:
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


@pytest.mark.parametrize("name", [*CENTRED, "opo", "pass_at_k"])
def test_rounding_noise_is_not_spread(name: str) -> None:
    """Divided by its standard deviation, the last bit of 0.1 + 0.2 would become advantages of ±1."""
    noisy = np.array([np.float32(0.1) + np.float32(0.7), 0.8, np.nextafter(np.float32(0.8), 1)], np.float32)
    assert len(set(noisy.tolist())) > 1
    assert not has_reward_variance(noisy)
    estimator = make_estimator(AlgorithmConfig.model_validate({"advantage": name, "pass_k": 2}))
    assert estimator(noisy, lengths_of(noisy)).tolist() == [0, 0, 0]


def test_a_small_but_real_difference_is_spread() -> None:
    assert has_reward_variance(rewards(0.5, 0.5001))
    assert has_reward_variance(rewards(1e6, 1e6 + 10))


def test_a_group_of_one_has_no_spread() -> None:
    assert rloo(rewards(1), np.ones(1, np.int32)).tolist() == [0]


@pytest.mark.parametrize("bad", [rewards(), rewards(1, float("nan")), rewards(1, float("inf")), rewards(1, 0)[:, None]])
@pytest.mark.parametrize("name", sorted(BY_GROUP))
def test_what_is_not_a_group_of_finite_rewards_is_refused(name: str, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="rewards of a group"):
        BY_GROUP[name](bad, lengths_of(bad))


# ------------------------------------------------------------------------------------------------------ over the batch


def test_over_the_batch_every_token_counts_once() -> None:
    """REINFORCE++: mean and standard deviation of what the tokens of the batch carry."""
    advantages = [rewards(1, 0), rewards(0, 0, 3)]
    counts = [np.array([2, 5]), np.array([1, 0, 4])]
    tokens = np.repeat([1.0, 0.0, 0.0, 0.0, 3.0], [2, 5, 1, 0, 4])
    expected = (np.array([1, 0, 0, 0, 3]) - tokens.mean()) / tokens.std()
    found = normalize(advantages, counts, ["", ""])
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-6)
    assert [len(group) for group in found] == [2, 3]


def test_each_task_has_its_own_scale() -> None:
    advantages = [rewards(1, 0), rewards(100, 0), rewards(1, 0)]
    counts = [np.array([1, 1])] * 3
    found = normalize(advantages, counts, ["a", "b", "a"])
    np.testing.assert_allclose(np.stack(found), [[1, -1], [1, -1], [1, -1]])


def test_what_has_no_spread_over_the_batch_is_zero() -> None:
    found = normalize([rewards(2, 2), rewards(2, 5)], [np.array([1, 1]), np.array([1, 0])], ["", ""])
    assert not np.concatenate(found).any()


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_is_normalised_over_the_batch_whatever_else_is_said(name: str) -> None:
    assert normalization(AlgorithmConfig.model_validate({"advantage": name})) == "batch"
    assert normalization(AlgorithmConfig(advantage_normalization="task")) == "task"
