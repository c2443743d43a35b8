from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms import guard
from rlhpc.protocol.types import FinishReason, Verdict

FIRST = group(
    scored(rollout(0, length=2), 1.0, format=0.5),
    scored(rollout(1, length=6, finish_reason=FinishReason.LENGTH), 0.0, format=0.0),
)
SECOND = group(scored(rollout(0, length=4), 0.0), scored(rollout(1, length=4), 0.0), admitted_version=1)
SOLVED = group(scored(rollout(0, length=4), 1.0), scored(rollout(1, length=4), 1.0))
FAILED = group(scored(rollout(0), 1.0), scored(rollout(1), 99.0, Verdict.VERIFIER_ERROR))


def test_reward_figures_count_members_and_groups() -> None:
    figures = guard.reward_figures([FIRST, SECOND, SOLVED])
    assert figures["reward/mean"] == 0.5
    assert figures["reward/correct_share"] == 0.5
    assert figures["reward/zero_spread_share"] == pytest.approx(2 / 3)
    assert figures["group/all_wrong_share"] == pytest.approx(1 / 3)
    assert figures["group/all_correct_share"] == pytest.approx(1 / 3)
    assert figures["reward_part/format"] == 0.25


def test_equal_rewards_for_wrong_answers_mean_that_prompts_are_too_hard() -> None:
    """A reward for parts of an answer is above 0 without any answer being correct."""
    partly = group(*(scored(rollout(index), 0.3, Verdict.WRONG) for index in range(2)))
    figures = guard.reward_figures([partly])
    assert (figures["group/all_wrong_share"], figures["group/all_correct_share"]) == (1, 0)


def test_a_failed_verifier_has_no_reward() -> None:
    figures = guard.reward_figures([FAILED])
    assert figures["reward/mean"] == 1.0
    assert figures["reward/std"] == 0.0


def test_length_figures_tell_truncation() -> None:
    figures = guard.length_figures([FIRST, SECOND])
    assert figures["length/completion_mean"] == 4
    assert figures["length/completion_max"] == 6
    assert figures["length/truncated_share"] == 0.25
    assert figures["length/prompt_mean"] == 2
    assert (figures["length/turns_mean"], figures["length/read_share"]) == (1, 0)


def test_turns_are_stretches_of_what_the_policy_said() -> None:
    talk = (
        replace(rollout(0, length=3), loss_mask=np.array([0, 1, 0], np.bool_)),
        replace(rollout(1, length=3), loss_mask=np.array([1, 0, 1], np.bool_)),
    )
    figures = guard.length_figures([group(*(scored(each, 1.0) for each in talk))])
    assert figures["length/turns_mean"] == 1.5
    assert figures["length/read_share"] == 0.5


def test_staleness_counts_from_admission_and_per_token_from_sampling() -> None:
    mixed = group(scored(rollout(0, versions=np.array([3, 3, 4], np.int32)), 1.0), scored(rollout(1), 0.0))
    figures = guard.staleness_figures([mixed], policy_version=5)
    assert figures["staleness/mean"] == 2
    assert figures["staleness/max"] == 2
    assert figures["staleness/token_mean"] == pytest.approx((2 + 2 + 1 + 1 + 1 + 1) / 6)
    assert figures["rollout/spanning_update_share"] == 0.5
    assert figures["rollout/num_versions_max"] == 2
    assert guard.staleness([mixed, SECOND], 5).tolist() == [2, 2, 4, 4]


def test_without_groups_there_is_nothing_to_say() -> None:
    assert guard.reward_figures([]) == {}
    assert guard.length_figures([]) == {}
    assert guard.staleness_figures([], 3) == {}


def test_effective_share_is_one_for_equal_weights_and_falls_with_their_spread() -> None:
    def share(weights: np.ndarray) -> float:
        sums = {"importance_weight": float(weights.sum()), "importance_weight_squared": float((weights**2).sum())}
        return guard.effective_sample_share(sums, len(weights))

    assert share(np.full(10, 0.3)) == pytest.approx(1.0)
    assert share(np.array([1.0] + [0.0] * 9)) == pytest.approx(0.1)
    assert share(np.zeros(3)) == 0.0
