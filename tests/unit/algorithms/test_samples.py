from __future__ import annotations

import numpy as np
import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms.advantages.group_relative import grpo_no_std
from rlhpc.algorithms.advantages.reward_itself import reward_itself
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.types import FinishReason, Rollout, Verdict

make_samples = SampleMaker(grpo_no_std)


def test_entry_t_of_every_array_describes_token_t_of_prompt_and_completion() -> None:
    members = (scored(rollout(0), 1.0), scored(rollout(1, length=2), 0.0))
    first, second = make_samples([group(*members)])
    assert first.token_ids.tolist() == [100, 101, 0, 1, 2]
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert first.behaviour_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert first.versions.tolist() == [-1, -1, 4, 4, 4]
    assert second.token_ids.tolist() == [100, 101, 10, 11]
    assert second.advantages.tolist() == [0, 0, -0.5, -0.5]
    assert (second.group_id, second.sample_index) == (5, 1)
    assert [first.token_ids.dtype, first.versions.dtype] == [np.int32, np.int32]
    assert [first.behaviour_logprobs.dtype, first.advantages.dtype] == [np.float32, np.float32]


def test_tokens_of_a_tool_carry_no_advantage_and_no_log_probability() -> None:
    mask = np.array([True, False, True])
    unset = np.array([-1.0, np.nan, -3.0], np.float32)
    members = (scored(rollout(0, loss_mask=mask, behaviour_logprobs=unset), 1.0), scored(rollout(1), 0.0))
    sample = make_samples([group(*members)])[0]
    assert sample.loss_mask.tolist() == [False, False, True, False, True]
    assert sample.behaviour_logprobs.tolist() == [0, 0, -1, 0, -3]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0, 0.5]
    assert sample.versions.tolist() == [-1, -1, 4, 4, 4]


def test_a_group_without_spread_gives_samples_with_zero_advantages() -> None:
    samples = make_samples([group(scored(rollout(0), 1.0), scored(rollout(1), 1.0))])
    assert len(samples) == 2
    assert not any(sample.advantages.any() for sample in samples)


def test_a_group_with_a_failed_verifier_is_refused() -> None:
    members = (scored(rollout(0), 1.0), scored(rollout(1), 0.0, Verdict.VERIFIER_ERROR))
    with pytest.raises(ValueError, match="sample 1 of group 5: its verifier failed"):
        make_samples([group(*members)])


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (rollout(0, finish_reason=FinishReason.ABORT), "it was aborted"),
        (rollout(0, prompt_length=0), "prompt 7 has no tokens"),
        (rollout(0, versions=np.zeros(2, np.int32)), r"arrays of shapes \[\(3,\), \(2,\), \(3,\)\]"),
        (rollout(0, length=0), r"for \(0,\) tokens"),
    ],
)
def test_what_must_not_be_trained_on_is_refused(broken: Rollout, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_samples([group(scored(broken, 1.0), scored(rollout(1), 0.0))])


def test_a_critic_gets_the_reward_of_a_completion_on_its_last_loss_token() -> None:
    mask = np.array([True, True, False])
    members = (scored(rollout(0, loss_mask=mask), 1.0), scored(rollout(1, length=2), 1.0))
    first, second = SampleMaker(reward_itself, at_the_end=True)([group(*members)])
    assert first.advantages.tolist() == [0, 0, 0, 1, 0]
    assert second.advantages.tolist() == [0, 0, 0, 1]
