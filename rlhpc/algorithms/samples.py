"""The groups of a batch into training samples: advantages, and the share of each sample in the loss.

Input: RolloutGroup.  Output: TrainingSample.  Entry t of every array describes token t of prompt and completion
together (types.py); no shift happens here or later.  Loads without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np

from rlhpc.algorithms.advantages.choice import make_estimator, normalization
from rlhpc.algorithms.advantages.normalize import normalize
from rlhpc.algorithms.aggregation import aggregate
from rlhpc.algorithms.minibatches import split
from rlhpc.algorithms.shaping import RewardShaping
from rlhpc.algorithms.token_rewards import earned, still_to_come
from rlhpc.config import Config
from rlhpc.contracts import AdvantageEstimator
from rlhpc.types import FinishReason, Float32, Int32, Rollout, RolloutGroup, TrainingSample, Verdict

Values: TypeAlias = Float32  # of the loss tokens of one member

# What the loss tokens of a completion have: all of them its advantage; each what it has earned of the reward, of which
# a critic makes advantages; each what is still to come of it, its own part included.
Spread: TypeAlias = Literal["alike", "earned", "to_come"]


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """The rules of [algorithm] for a whole batch; a pure function of the batch's groups."""

    estimator: AdvantageEstimator
    normalization: str = "off"
    aggregation: str = "token"
    max_completion_tokens: int = 1  # counts with aggregation = "constant"
    shaping: RewardShaping = field(default_factory=RewardShaping)
    num_minibatches: int = 1
    seed: int = 0  # of the run
    spread: Spread = "alike"

    @classmethod
    def of(cls, config: Config) -> SampleMaker:
        """As the run file says."""
        algorithm = config.algorithm
        return cls(
            make_estimator(algorithm),
            normalization(algorithm),
            algorithm.aggregation,
            config.generation.max_completion_tokens,
            RewardShaping.of(config),
            algorithm.minibatches,
            config.run.seed,
            "earned" if config.has_critic else "to_come" if algorithm.advantage == "reinforce_pp" else "alike",
        )

    def minibatches(self, groups: Sequence[RolloutGroup], step: int) -> list[list[TrainingSample]]:
        """The samples of a batch, one list for each minibatch, with their shares in the loss of that.

        Raises ValueError as __call__.
        """
        parts = split(self(groups), self.num_minibatches, (self.seed, step))
        return [aggregate(part, self.aggregation, self.max_completion_tokens) for part in parts]

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[TrainingSample]:
        """One sample per member, in the order of groups and members, with advantages as `spread` says.

        A zero-variance group gives samples whose advantages are zero: whether to train on them is the caller's choice
        (advantages/spread.py).
        Raises ValueError for what must not be trained on: a member without a verdict or cut off, arrays that do not
        match, an empty prompt.  Raises RoleFailed if [shaping] does not fit the verdicts.
        """
        for group in groups:
            _check_group(group)
        groups = [self._learnt(group) for group in groups]
        rewards = [self.shaping.rewards(group) for group in groups]
        counts = [_num_loss_tokens(group) for group in groups]
        advantages = [self.estimator(*of_group) for of_group in zip(rewards, counts, strict=True)]
        return [
            _sample(member.rollout, values)
            for group, of_group in zip(groups, self._on_tokens(groups, counts, advantages), strict=True)
            for member, values in zip(group.members, of_group, strict=True)
        ]

    def _on_tokens(
        self, groups: Sequence[RolloutGroup], counts: Sequence[Int32], advantages: Sequence[Float32]
    ) -> list[list[Values]]:
        """What the loss tokens of every member have, normalised."""
        tasks = [group.prompt.task if self.normalization == "task" else "" for group in groups]
        is_earned_early = any(member.token_rewards for group in groups for member in group.members)
        if self.spread == "alike" or not (is_earned_early or self.spread == "earned"):
            scaled = advantages if self.normalization == "off" else normalize(advantages, counts, tasks)
            return [list(map(np.full, *of_group)) for of_group in zip(counts, scaled, strict=True)]
        found = [self._by_token(*of_group) for of_group in zip(groups, advantages, strict=True)]
        if self.normalization == "off":
            return found
        of_groups = [np.concatenate(of_group) for of_group in found]
        each_once = [np.ones(len(values), np.int32) for values in of_groups]
        ends = [np.cumsum(list(map(len, of_group)))[:-1] for of_group in found]
        return list(map(np.split, normalize(of_groups, each_once, tasks), ends))

    def _by_token(self, group: RolloutGroup, rewards: Float32) -> list[Values]:
        """What each loss token of each member has earned, or may still expect, float32."""
        self.shaping.check_token_rewards(group)
        pairs = zip(group.members, rewards, strict=True)
        of_members = [earned(member, float(reward)) for member, reward in pairs]
        if self.spread == "to_come":
            of_members = list(map(still_to_come, of_members))
        return [values.astype(np.float32) for values in of_members]

    def _learnt(self, group: RolloutGroup) -> RolloutGroup:
        """The group, with nothing to be learnt from members that [shaping] masks."""
        return replace(
            group,
            members=tuple(
                replace(member, rollout=_masked(member.rollout)) if self.shaping.is_masked(member.rollout) else member
                for member in group.members
            ),
        )


def _masked(rollout: Rollout) -> Rollout:
    return replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))


def _num_loss_tokens(group: RolloutGroup) -> Int32:
    return np.array([np.count_nonzero(member.rollout.loss_mask) for member in group.members], np.int32)


def _sample(rollout: Rollout, advantages: Values) -> TrainingSample:
    """advantages: of the loss tokens."""
    prompt, completion = rollout.prompt.token_ids, rollout.token_ids
    start, length = len(prompt), len(prompt) + len(completion)
    loss_mask, versions = np.zeros(length, np.bool_), np.full(length, -1, np.int32)
    behaviour_logprobs, on_tokens = np.zeros(length, np.float32), np.zeros(length, np.float32)
    loss_mask[start:], versions[start:] = rollout.loss_mask, rollout.versions
    behaviour_logprobs[start:] = np.where(rollout.loss_mask, rollout.behaviour_logprobs, 0)
    on_tokens[loss_mask] = advantages
    return TrainingSample(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        token_ids=np.concatenate((prompt, completion)).astype(np.int32, copy=False),
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour_logprobs,
        advantages=on_tokens,
        versions=versions,
    )


def _check_group(group: RolloutGroup) -> None:
    for member in group.members:
        _check(member.rollout)
        if member.verdict is Verdict.VERIFIER_ERROR:
            raise ValueError(f"{_name(member.rollout)}: its verifier failed, so it has no reward: {member.detail}")


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
