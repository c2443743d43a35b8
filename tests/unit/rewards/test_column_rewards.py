"""The demo's sums with a reward for every column: what bench/critic.py trains a critic on."""

from __future__ import annotations

import pytest

from bench.column_rewards import reward


@pytest.mark.parametrize(
    ("completion", "earned", "is_correct"),
    [
        ("7+6+0=13;2+5+1=08;8+3+0=11;4+9+1=14;14183", {9: 0.25, 18: 0.25, 27: 0.25, 36: 0.25}, True),
        ("7+6+0=12;2+5+1=08;8+3+0=11;4+9+1=14;14182", {18: 0.25, 27: 0.25, 36: 0.25}, False),  # a slip by one
        ("7+6+0=03;2+5+0=07;8+3+0=11;4+9+1=14;14173", {9: 0.25, 27: 0.25, 36: 0.25}, False),  # a carry that is lost
        ("7+6+0=13;2+5", {9: 0.25}, False),
        ("14183", {}, True),  # the answer alone
        ("", {}, False),
    ],
)
def test_columns_are_paid_for_where_they_end(completion: str, earned: dict[int, float], is_correct: bool) -> None:
    outcome = reward(completion, "14183")
    assert outcome.rewards_at == earned
    assert outcome.reward == pytest.approx(sum(earned.values()))
    assert outcome.is_correct is is_correct
