from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.advantages import ESTIMATORS, grpo, grpo_no_std, has_reward_variance, make_estimator, rloo
from rlhpc.errors import ConfigError


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


groups = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16).map(lambda values: rewards(*values))


def test_grpo_divides_the_centred_reward_by_the_group_s_standard_deviation() -> None:
    np.testing.assert_allclose(grpo(rewards(1, 0, 0, 0)), [3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rtol=1e-6)


def test_grpo_without_std_only_centres() -> None:
    np.testing.assert_allclose(grpo_no_std(rewards(1, 0, 0, 0)), [0.75, -0.25, -0.25, -0.25])


def test_rloo_takes_the_mean_of_the_others_as_baseline() -> None:
    given_rewards = rewards(1, 0.5, 0, 0.25)
    others = [(given_rewards.sum() - r) / 3 for r in given_rewards]
    np.testing.assert_allclose(rloo(given_rewards), given_rewards - np.array(others), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(groups)
@settings(deadline=None, derandomize=True)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(name: str, group: np.ndarray) -> None:
    advantages = make_estimator(name)(group)
    assert advantages.dtype == np.float32
    assert advantages.shape == group.shape
    assert abs(float(advantages.sum(dtype=np.float64))) < 1e-4 * len(group) * max(1.0, float(np.abs(group).max()))
    if has_reward_variance(group):
        order = np.argsort(group, kind="stable")
        assert (np.diff(advantages[order]) >= 0).all()
        assert advantages[order[-1]] > 0 > advantages[order[0]]
    else:
        assert not advantages.any()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_rounding_noise_is_not_spread(name: str) -> None:
    """Divided by its standard deviation, the last bit of 0.1 + 0.2 would become advantages of ±1."""
    noisy = np.array([np.float32(0.1) + np.float32(0.7), 0.8, np.nextafter(np.float32(0.8), 1)], np.float32)
    assert len(set(noisy.tolist())) > 1
    assert not has_reward_variance(noisy)
    assert make_estimator(name)(noisy).tolist() == [0, 0, 0]


def test_a_small_but_real_difference_is_spread() -> None:
    assert has_reward_variance(rewards(0.5, 0.5001))
    assert has_reward_variance(rewards(1e6, 1e6 + 10))


def test_a_group_of_one_has_no_spread() -> None:
    assert rloo(rewards(1)).tolist() == [0]


@pytest.mark.parametrize("bad", [rewards(), rewards(1, float("nan")), rewards(1, float("inf")), rewards(1, 0)[:, None]])
def test_what_is_not_a_group_of_finite_rewards_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="rewards of a group"):
        has_reward_variance(bad)


def test_an_unknown_estimator_is_named_with_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match="advantage='gae'; legal: grpo, grpo_no_std, rloo"):
        make_estimator("gae")
