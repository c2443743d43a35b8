from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.rewards.outcomes import NoReward, as_outcome, fault_of


@pytest.mark.parametrize(
    ("returned", "reward", "is_correct"),
    [
        (np.array([1, 2]).sum() == 3, 1.0, True),  # numpy's own truth, which is no bool
        (np.isclose(1.0, 2.0), 0.0, False),
        (np.float32(0.5), 0.5, False),
        (np.array(1.0), 1.0, True),
        (torch.tensor(0.5), 0.5, False),
        (torch.tensor([1, 2]).sum() == 3, 1.0, True),
        ({"score": np.True_, "acc": np.False_}, 1.0, False),
        ({"score": torch.tensor(0.25), "acc": torch.tensor(True)}, 0.25, True),
    ],
    ids=str,
)
def test_numbers_and_truths_may_be_numpys_or_torchs(returned, reward, is_correct):
    outcome = as_outcome(returned)
    assert (outcome.reward, outcome.is_correct) == (reward, is_correct)
    assert type(outcome.reward) is float
    assert type(outcome.is_correct) is bool


def test_what_verls_function_for_dapo_returns_is_a_reward_with_its_answer():
    assert as_outcome({"score": -1.0, "acc": False, "pred": "41"}) == RewardOutcome(-1.0, False, answer="41")
    assert as_outcome({"score": -1.0, "acc": False, "pred": None}) == RewardOutcome(-1.0, False)


def test_other_texts_and_what_is_absent_are_no_parts():
    returned = {"reward": 1, "format": np.int64(1), "judge": "fine", "bonus": None, "detail": None, "rewards_at": None}
    assert as_outcome(returned) == RewardOutcome(1.0, True, {"format": 1.0})


def test_a_share_that_is_right_is_correct_where_it_is_all():
    assert not as_outcome({"score": 0.3, "acc": 0.3}).is_correct
    assert not as_outcome({"score": 0.3, "acc": math.nan}).is_correct
    assert as_outcome({"score": 0.3, "acc": 1}).is_correct


@pytest.mark.parametrize(("returned", "said"), [
    (np.array([1.0, 0.0]), "not ndarray"),
    ((1.0, True), "not tuple"),
    ({"score": 1.0, "acc": "no"}, "is_correct must be True, False or a number, not str 'no'"),
])  # fmt: skip
def test_what_is_no_reward_is_named(returned, said):
    with pytest.raises(NoReward, match=said):
        as_outcome(returned)


@pytest.mark.parametrize("number", [0, 1, -3, 0.5, 1e30, -(10**30)])
def test_a_whole_number_is_as_good_as_a_float(number: float) -> None:
    assert fault_of("reward", number) == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "reward must be a finite number, not bool True"),
        (float("nan"), "reward must be a finite number, not float nan"),
        (float("-inf"), "reward must be a finite number, not float -inf"),
        ("1", "reward must be a finite number, not str 1"),
        (2e30, "reward must lie within ±1e+30, not 2e+30"),
        (10**40, "reward must lie within ±1e+30, not 1e+40"),
        (10**400, "reward must lie within ±1e+30, not a number beyond 1.8e308"),
    ],
)
def test_what_is_no_reward_is_told_why(value: object, why: str) -> None:
    assert fault_of("reward", value) == why
