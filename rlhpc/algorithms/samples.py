"""Turn the groups of a batch into training samples: advantages, and the weight of each sample in the loss.

Input: RolloutGroup.  Output: TrainingSample.  Entry t of every array describes token t of prompt and completion
together (types.py); no shift happens here or later.  Loads without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
_NONE = np.empty(0, np.float32)  # numpy concatenates no arrays only if there is one


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
            make_estimator(algorithm, config.admission.group_size),
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
        rollouts = [member.rollout for group in groups for member in group.members]
        return _samples(rollouts, self._on_tokens(groups, counts, advantages)) if rollouts else []

    def _on_tokens(
        self, groups: Sequence[RolloutGroup], counts: Sequence[Int32], advantages: Sequence[Float32]
    ) -> Values:
        """What all loss tokens have, normalised, in the order of members."""
        tasks = [group.prompt.task if self.normalization == "task" else "" for group in groups]
        is_earned_early = any(member.token_rewards for group in groups for member in group.members)
        if self.spread == "alike" or not (is_earned_early or self.spread == "earned"):
            scaled = advantages if self.normalization == "off" else normalize(advantages, counts, tasks)
            return np.repeat(np.concatenate([*scaled, _NONE]), np.concatenate([*counts, _NONE]).astype(np.int64))
        found = [np.concatenate(self._by_token(*of_group)) for of_group in zip(groups, advantages, strict=True)]
        if self.normalization == "off":
            return np.concatenate([*found, _NONE])
        each_once = [np.ones(len(values), np.int32) for values in found]
        return np.concatenate([*normalize(found, each_once, tasks), _NONE])

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
        if not any(self.shaping.is_masked(member.rollout) for member in group.members):
            return group
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


def _samples(rollouts: Sequence[Rollout], advantages: Values) -> list[TrainingSample]:
    """advantages: of all loss tokens.  The arrays of samples are views of arrays over all of them.

    Rows are made a batch at a time: a call of numpy costs as much as what it does to a short rollout.
    """
    num_prompt_tokens = [len(rollout.prompt.token_ids) for rollout in rollouts]
    longest = max(num_prompt_tokens)

    def behind(value: Any, of_completions: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
        """`value` on every token of a prompt, and what its completion has."""
        on_prompts: NDArray[Any] = np.full(longest, value, dtype)
        pairs = zip(num_prompt_tokens, of_completions, strict=True)
        return np.concatenate([part for length, values in pairs for part in (on_prompts[:length], values)])

    token_ids = np.concatenate([part for each in rollouts for part in (each.prompt.token_ids, each.token_ids)])
    loss_mask = behind(False, [rollout.loss_mask for rollout in rollouts], np.bool_)
    versions = behind(-1, [rollout.versions for rollout in rollouts], np.int32)
    behaviour_logprobs = behind(0, [rollout.behaviour_logprobs for rollout in rollouts], np.float32)
    behaviour_logprobs[~loss_mask] = 0
    on_tokens = np.zeros(len(loss_mask), np.float32)
    on_tokens[loss_mask] = advantages
    columns: list[Any] = [token_ids.astype(np.int32, copy=False), loss_mask, behaviour_logprobs, on_tokens, versions]
    samples, start = list[TrainingSample](), 0
    for rollout, length in zip(rollouts, num_prompt_tokens, strict=True):
        end = start + length + len(rollout.token_ids)
        own = [column[start:end] for column in columns]
        samples.append(TrainingSample(rollout.group_id, rollout.sample_index, *own))
        start = end
    return samples


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
