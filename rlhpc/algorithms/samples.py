"""A finished group into training samples.

Input: RolloutGroup.  Output: TrainingSample.  Entry t of every array describes token t of prompt and completion
together (types.py); no shift happens here or later.  Loads without torch.
"""

from __future__ import annotations

import numpy as np

from rlhpc.contracts import AdvantageEstimator
from rlhpc.types import FinishReason, Rollout, RolloutGroup, TrainingSample, Verdict


def to_samples(group: RolloutGroup, estimator: AdvantageEstimator) -> list[TrainingSample]:
    """One sample per member, in the order of members; every loss token carries its member's advantage.

    A zero-variance group gives samples whose advantages are zero: whether to train on them is the caller's choice
    (advantages.has_reward_variance).
    Raises ValueError for what must not be trained on: a member without a verdict or cut off, arrays that do not match,
    an empty prompt.
    """
    for member in group.members:
        _check(member.rollout)
        if member.verdict is Verdict.VERIFIER_ERROR:
            raise ValueError(f"{_name(member.rollout)}: its verifier failed, so it has no reward: {member.detail}")
    advantages = estimator(np.array([member.reward for member in group.members], np.float32))
    return [_sample(member.rollout, advantage) for member, advantage in zip(group.members, advantages, strict=True)]


def _sample(rollout: Rollout, advantage: np.float32) -> TrainingSample:
    prompt, completion = rollout.prompt.token_ids, rollout.token_ids
    start, length = len(prompt), len(prompt) + len(completion)
    loss_mask, versions = np.zeros(length, np.bool_), np.full(length, -1, np.int32)
    behaviour_logprobs = np.zeros(length, np.float32)
    loss_mask[start:], versions[start:] = rollout.loss_mask, rollout.versions
    behaviour_logprobs[start:] = np.where(rollout.loss_mask, rollout.behaviour_logprobs, 0)
    return TrainingSample(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        token_ids=np.concatenate((prompt, completion)).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour_logprobs,
        advantages=np.where(loss_mask, np.float32(advantage), np.float32(0)),
        versions=versions,
    )


def _check(rollout: Rollout) -> None:
    arrays = (rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    if len(rollout.token_ids) == 0 or any(array.shape != rollout.token_ids.shape for array in arrays):
        shapes = [array.shape for array in arrays]
        raise ValueError(f"{_name(rollout)}: arrays of shapes {shapes} for {rollout.token_ids.shape} tokens")
    if len(rollout.prompt.token_ids) == 0:
        raise ValueError(f"{_name(rollout)}: prompt {rollout.prompt.prompt_id} has no tokens to start from")
    if rollout.finish_reason is FinishReason.ABORT:
        raise ValueError(f"{_name(rollout)}: it was aborted, not finished")


def _name(rollout: Rollout) -> str:
    return f"sample {rollout.sample_index} of group {rollout.group_id}"
