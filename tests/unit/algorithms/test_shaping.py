"""What a reward becomes, and who is learnt from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms.estimators import grpo_no_std
from rlhpc.algorithms.samples import RewardShaping, SampleMaker
from rlhpc.config.tables_algorithm import ShapingConfig
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import FinishReason, RolloutGroup, ScoredRollout

LONGEST = 100


def member(index: int, length: int, reward: float = 1.0, **parts: float) -> ScoredRollout:
    reason = FinishReason.LENGTH if length == LONGEST else FinishReason.STOP
    return scored(rollout(index, length=length, finish_reason=reason), reward, **parts)


def shaping(**settings: object) -> RewardShaping:
    return RewardShaping(ShapingConfig.model_validate(settings), lambda _: LONGEST)


def of_lengths(*lengths: int) -> RolloutGroup:
    return group(*(member(index, length) for index, length in enumerate(lengths)))


def test_without_settings_rewards_are_those_of_the_function() -> None:
    rewards = shaping().rewards(group(member(0, 100, 1.0), member(1, 3, -0.5)))
    assert rewards.tolist() == [1.0, -0.5]
    assert rewards.dtype == np.float32


def test_the_soft_overlong_penalty_is_dapos() -> None:
    """0 up to M − C, then linear to −1 at M: with M = 100, C = 20."""
    found = shaping(overlong_tokens=20).rewards(of_lengths(1, 80, 81, 90, 99, 100))
    np.testing.assert_allclose(found, 1 + np.array([0, 0, -0.05, -0.5, -0.95, -1.0]), rtol=1e-6)
    doubled = shaping(overlong_tokens=20, overlong_penalty=2.0).rewards(of_lengths(90, 100))
    np.testing.assert_allclose(doubled, [0, -1], atol=1e-6)


def test_length_may_be_rewarded_or_cost() -> None:
    np.testing.assert_allclose(shaping(length_weight=0.5).rewards(of_lengths(10, 100)), [1.05, 1.5], rtol=1e-6)
    np.testing.assert_allclose(shaping(length_weight=-0.5).rewards(of_lengths(10, 100)), [0.95, 0.5], rtol=1e-6)


def test_parts_count_by_their_weights_and_the_function_s_own_sum_does_not() -> None:
    one = group(member(0, 5, 99.0, answer=1.0, form=0.0), member(1, 5, 99.0, answer=0.0, form=1.0))
    rule = shaping(part_weights={"answer": 2.0, "form": 0.25})
    assert rule.rewards(one).tolist() == rule.judged(one).tolist() == [2.0, 0.25]


def test_a_part_that_is_not_there_is_named_beside_those_that_are() -> None:
    one = group(member(0, 5, answer=1.0, form=0.0))
    with pytest.raises(RoleFailed, match=r"part_weights has a weight for 'frm', .*its parts: answer, form$"):
        shaping(part_weights={"answer": 1.0, "frm": 0.1}).rewards(one)


def test_variance_is_judged_before_lengths_count_unless_asked_otherwise() -> None:
    alike = of_lengths(85, 95)
    assert shaping(overlong_tokens=20).judged(alike).tolist() == [1.0, 1.0]
    assert shaping(overlong_tokens=20, variance="shaped").judged(alike).tolist() == pytest.approx([0.75, 0.25])


def test_what_was_cut_off_is_not_learnt_from_and_counts_for_the_others() -> None:
    mixed = group(member(0, 100, 0.0), member(1, 10, 1.0))
    maker = SampleMaker(grpo_no_std, aggregation="sequence", shaping=shaping(truncated="masked"))
    [samples] = maker.minibatches([mixed], 0)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [0, 10]
    assert samples[1].advantages[-1] == 0.5, "the mean of the group is still 0.5"
    assert [sample.loss_weight for sample in samples] == [0.0, 1.0]
    assert shaping(truncated="masked").judged(mixed).tolist() == [0.0, 1.0]


def test_a_group_that_nothing_is_learnt_from_has_no_variance() -> None:
    cut_off = group(member(0, 100, 0.0), member(1, 100, 1.0))
    assert shaping(truncated="masked").judged(cut_off).tolist() == [0.0, 0.0]
    assert shaping().judged(cut_off).tolist() == [0.0, 1.0]


def test_a_rollout_itself_is_not_changed() -> None:
    cut_off = member(0, 100)
    mask = cut_off.rollout.loss_mask.copy()
    SampleMaker(grpo_no_std, shaping=shaping(truncated="masked"))([group(cut_off, replace(cut_off, reward=0.0))])
    np.testing.assert_array_equal(cut_off.rollout.loss_mask, mask)


def test_length_is_measured_by_the_limit_of_the_prompt_s_own_dataset() -> None:
    """Two datasets: prompts of odd numbers may have 50 tokens, the others 100."""
    rule = RewardShaping(ShapingConfig(overlong_tokens=20), lambda prompt_id: 50 if prompt_id % 2 else 100)
    for prompt_id, expected in ((4, 1.0), (5, 0.5)):
        scored_one = member(0, 40)
        asked = replace(scored_one.rollout, prompt=replace(scored_one.rollout.prompt, prompt_id=prompt_id))
        assert rule.rewards(group(replace(scored_one, rollout=asked))).tolist() == [expected]
