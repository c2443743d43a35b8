"""Turn the groups of a batch into training samples, one for each row: advantages, and the weight of each in the loss.

In this file: loss aggregation, as a factor of each sequence; minibatches; reward shaping; rewards of tokens; what a
teacher says of tokens; samples.

Input: RolloutGroup.  Output: TrainingSample.  Entry t of every array describes token t of prompt and row together
(types.py); no shift happens here or later.  Loads without torch.

Rows share all that is their rollout's: its advantage, its weight in the loss, its place in a minibatch.  A rollout
counts once, however many rows it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhpc.algorithms.estimators import make_estimator, normalization, normalize
from rlhpc.config.rules import Config
from rlhpc.config.tables_algorithm import AlgorithmConfig, RowCredit, ShapingConfig
from rlhpc.protocol.contracts import AdvantageEstimator
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.types import (
    FinishReason,
    Float32,
    Int32,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    TeacherScores,
    TrainingSample,
    Verdict,
)

# ---------------------------------------------------------------------------------------------------------- aggregation
#
# Loss aggregation: how token losses become one number, as a factor for each sequence, a rollout with all its rows.
#
# Input: samples of a batch.  Output: a factor for each, on all of its loss tokens.  The sum over tokens is divided by
# N, the loss tokens of the batch (contracts.PolicyLoss), so that factors of 1 are a mean over tokens.  With n_i loss
# tokens in a sequence, S sequences, P prompts, n_p loss tokens of a prompt, M = generation.max_completion_tokens:
#
#     token       1               every token alike (DAPO, arXiv:2503.14476)
#     sequence    N / (S · n_i)   every completion alike (GRPO, arXiv:2402.03300)
#     constant    N / (S · M)     a sum over tokens by a constant: no bias by length (Dr. GRPO, arXiv:2503.20783)
#     prompt      N / (P · n_p)   every prompt alike, its tokens alike
#
# Sequences and prompts without a loss token count for none of these.


def aggregate(samples: Sequence[TrainingSample], how: str, max_completion_tokens: int) -> list[TrainingSample]:
    """Return a batch's samples with their shares in its loss; `how`: algorithm.aggregation."""
    of_rows = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], np.float64)
    keys = np.array([(sample.group_id, sample.sample_index) for sample in samples], np.int64).reshape(-1, 2)
    of_rollouts, rollouts = np.unique(keys, axis=0, return_inverse=True)
    prompts = np.unique(of_rollouts[:, 0], return_inverse=True)[1]
    counts = np.bincount(rollouts, of_rows, len(of_rollouts)).astype(np.float64)
    weights = loss_weights(counts, prompts, how, max_completion_tokens)[rollouts]
    return [
        sample if weight == sample.loss_weight else replace(sample, loss_weight=weight)  # most have it: a copy is dear
        for sample, weight in zip(samples, weights.tolist(), strict=True)
    ]


def loss_weights(
    counts: NDArray[np.float64], prompts: NDArray[np.int64], how: str, max_completion_tokens: int
) -> NDArray[np.float64]:
    """Factors [S] of sequences with `counts` loss tokens [S] that are completions of `prompts` [S], from 0."""
    total, is_used = counts.sum(), counts > 0
    if not total:
        return np.zeros_like(counts)
    match how:
        case "sequence":
            weights = total / (is_used.sum() * counts.clip(min=1))
        case "constant":
            weights = np.full_like(counts, total / (is_used.sum() * max_completion_tokens))
        case "prompt":
            of_prompt = np.bincount(prompts, counts)
            weights = total / ((of_prompt > 0).sum() * of_prompt.clip(min=1))[prompts]
        case _:
            weights = np.ones_like(counts)
    return np.where(is_used, weights, 0.0)


# ---------------------------------------------------------------------------------------------------------- minibatches
#
# Several optimiser steps on one batch: the samples and the order of each step.
#
# Input: rollouts of a batch.  Output: minibatches, and the minibatch of every optimiser step.  A pure function of the
# seed of the run and the step, so that a repeated step is the same.  Rollouts, each with all its rows, are dealt out at
# random, not by groups, since advantages already are those of the whole batch, and a minibatch should resemble it (PPO,
# Schulman et al. 2017, arXiv:1707.06347).

Sample = TypeVar("Sample")


def split(samples: Sequence[Sample], num_minibatches: int, seed: tuple[int, int]) -> list[list[Sample]]:
    """Split into parts whose sizes differ by one at most; in each, samples keep their order."""
    if num_minibatches == 1:
        return [list(samples)]
    shuffled = np.random.default_rng(seed).permutation(len(samples))
    return [[samples[i] for i in np.sort(part)] for part in np.array_split(shuffled, num_minibatches)]


def optimiser_steps(num_minibatches: int, num_epochs: int, seed: tuple[int, int]) -> tuple[int, ...]:
    """The minibatch of each optimiser step: in order in the first epoch, shuffled in every later one."""
    rng = np.random.default_rng((*seed, 1))
    further = [rng.permutation(num_minibatches) for _ in range(num_epochs - 1)]
    return (*range(num_minibatches), *(int(place) for epoch in further for place in epoch))


# -------------------------------------------------------------------------------------------------------------- shaping
#
# Reward shaping: the reward of a rollout as advantages are computed from it.
#
#     r' = Σ weight · part                                    by part_weights; without any, the function's own reward
#        − overlong_penalty · clip((|y| − (M − C)) / C, 0, 1)   C = overlong_tokens, M = max_completion_tokens
#        + length_weight · |y| / M                            |y|: tokens of the completion, without those at the
#                                                             beginning of a row that an earlier row has, too
#
# Soft overlong punishment, and completions that were cut off kept out of the loss ("overlong filtering"): DAPO, Yu et
# al. 2025, §3.4 (arXiv:2503.14476).
#
# The journal keeps the reward function's result.  Shaping is a pure function of it: the same after a restart.
# Input: RolloutGroup.  Output: a number per member.  Loads without torch.


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """The rules of [shaping]; an empty table leaves rewards unchanged."""

    settings: ShapingConfig = field(default_factory=ShapingConfig)
    max_completion_tokens: Callable[[int], int] = lambda _: 1  # by the id of the prompt

    @classmethod
    def of(cls, config: Config) -> RewardShaping:
        """Return the shaping that the run file asks for."""
        return cls(config.shaping, config.max_completion_tokens)

    def rewards(self, group: RolloutGroup) -> Float32:
        """Shaped, float32 [G].  Raises RoleFailed if a verdict lacks a part that has a weight."""
        return np.array(
            [self._total(member) + self._for_length(member.rollout) for member in group.members], np.float32
        )

    def judged(self, group: RolloutGroup) -> Float32:
        """Rewards whose variance decides whether a group is trained on, float32 [G]; all 0 if all are masked."""
        if self.is_all_masked(group):
            return np.zeros(len(group.members), np.float32)
        if self.settings.variance == "shaped":
            return self.rewards(group)
        return np.array([self._total(member) for member in group.members], np.float32)

    def is_masked(self, rollout: Rollout) -> bool:
        """True if no token of a rollout counts in the loss; its reward still counts for the rest of its group."""
        return self.settings.truncated == "masked" and rollout.finish_reason is FinishReason.LENGTH

    def is_all_masked(self, group: RolloutGroup) -> bool:
        """True if no rollout of a group counts in the loss."""
        return all(self.is_masked(member.rollout) for member in group.members)

    def check_token_rewards(self, group: RolloutGroup) -> None:
        """Raise RoleFailed for token rewards with part_weights: they are parts of a reward that is then not used."""
        if self.settings.part_weights and any(member.token_rewards for member in group.members):
            raise RoleFailed(
                f"task {group.prompt.task!r} says by rewards_at which parts of its reward are earned before the end, "
                "but shaping.part_weights makes another reward; legal: no part_weights, or no rewards_at"
            )

    def _total(self, member: ScoredRollout) -> float:
        weights = self.settings.part_weights
        if not weights:
            return member.reward
        if missing := sorted(set(weights) - set(member.reward_parts)):
            raise RoleFailed(
                f"shaping.part_weights has a weight for {missing[0]!r}, which the reward function did not name; its "
                f"parts: {', '.join(sorted(member.reward_parts)) or 'none'}"
            )
        return sum(weight * member.reward_parts[name] for name, weight in weights.items())

    def _for_length(self, rollout: Rollout) -> float:
        if not (self.settings.length_weight or self.settings.overlong_tokens):
            return 0.0
        length, longest = rollout.num_distinct_tokens, self.max_completion_tokens(rollout.prompt_id)
        bonus = self.settings.length_weight * length / longest
        if not (cushion := self.settings.overlong_tokens):
            return bonus
        return bonus - self.settings.overlong_penalty * min(max((length - (longest - cushion)) / cushion, 0.0), 1.0)


# -------------------------------------------------------------------------------------------------------- token rewards
#
# Token-level rewards: the reward earned with each token of a completion, and the return from it on.
#
# Rows are one after the other.  A critic judges each by itself: to it, what later rows earn is earned by the last loss
# token of a row, undiscounted, since it leads to them.
#
# A reward function may report parts of a completion's reward that were earned before its end (RewardOutcome); the rest
# of the reward goes to the last loss token, so that the sum is the shaped reward.  A part on a token that the policy
# did not choose goes to the last chosen token before it, or to the first one.
#
# Input: ScoredRollout.  Output: a number per loss token.  float64.  Loads without torch.


def earned(member: ScoredRollout, reward: float) -> NDArray[np.float64]:
    """Reward earned by each of the n loss tokens, [n]; the sum is `reward` if n > 0."""
    mask = member.rollout.loss_mask
    found = np.zeros(np.count_nonzero(mask))
    if len(found):
        num_chosen = np.cumsum(mask)  # loss tokens up to each token
        for place, value in member.token_rewards.items():
            found[max(0, num_chosen[place] - 1)] += value
        found[-1] += reward - found.sum()
    return found


def earned_by_rows(member: ScoredRollout, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rewards [n] of loss tokens, and on the last one of each row what later rows earn."""
    ends = np.cumsum([np.count_nonzero(member.rollout.loss_mask[row]) for row in member.rollout.rows])
    later = rewards.sum() - np.cumsum(rewards)
    found = rewards.copy()
    for end in np.unique(ends[(ends > 0) & (ends < len(rewards))]):
        found[end - 1] += later[end - 1]
    return found


def still_to_come(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The return of each token [n]: its own reward and all later ones, undiscounted."""
    return np.cumsum(rewards[::-1])[::-1]


# -------------------------------------------------------------------------------------------------------------- teacher
#
# On-policy distillation: what a teacher says of each loss token, in its advantage and beside it.
#
#     advantage of a token = A + c · (log π_teacher − log π_behaviour)      algorithm.distillation_coefficient
#
# The difference is clipped at algorithm.distillation_clip.
#
# The mean of the difference over samples of π_behaviour is −KL(π_behaviour ‖ π_teacher), the reverse KL (Agarwal et al.
# 2023, arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543).  "distillation" is that alone: A = 0, c = 1.  Differs from
# Gu et al.: (1) a token answers for its own divergence only, not for that of later tokens; (2) no mixed sampling.
#
# Input: ScoredRollout.teacher.  Output: numbers of loss tokens.  Loads without torch.


@dataclass(frozen=True, slots=True)
class Teaching:
    """The use of a teacher's log-probabilities."""

    factor: float = 0.0  # c
    clip: float = math.inf  # nats
    is_reference: bool = False  # the KL term of the trainer is towards the teacher
    top_k: int = 0  # number of the teacher's most likely tokens for the trainer; 0: none

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Teaching:
        """Return what the run file asks for."""
        top_k = algorithm.teacher_top_k if algorithm.forward_kl_coefficient else 0
        clip = math.inf if algorithm.distillation_clip == "off" else algorithm.distillation_clip
        return cls(algorithm.distillation_factor, clip, algorithm.has_teacher_reference, top_k)

    @property
    def is_needed(self) -> bool:
        """Whether samples need what a teacher says."""
        return bool(self.factor or self.is_reference or self.top_k)

    def scores(self, member: ScoredRollout) -> TeacherScores:
        """Return the teacher's scores of the loss tokens alone.  Raises RoleFailed if they are missing or unfit."""
        rollout, scores, wanted = member.rollout, member.teacher, self.top_k
        mask = rollout.loss_mask
        if scores is None:
            if mask.any():
                raise RoleFailed(
                    f"{_name(rollout)}: no teacher was asked about it, and [algorithm] needs one, as in a run that is "
                    "resumed with rollouts of before it had a teacher; legal: a run of its own, or no teacher"
                )
            none = np.zeros(0, np.float32)
            return TeacherScores(none, none.astype(np.int32), none)
        num_tokens = len(rollout.token_ids)
        if scores.logprobs.shape != (num_tokens,) or len(scores.top_ids) != len(scores.top_logprobs):
            raise RoleFailed(
                f"{_name(rollout)}: {scores.logprobs.shape} log-probabilities of a teacher for {num_tokens} tokens"
            )
        logprobs = scores.logprobs[mask]
        if not np.isfinite(logprobs).all():
            raise RoleFailed(f"{_name(rollout)}: a log-probability of its teacher is not finite")
        ids: Int32 = scores.top_ids.reshape(num_tokens, -1)[mask, :wanted]
        of_them: Float32 = scores.top_logprobs.reshape(num_tokens, -1)[mask, :wanted]
        if ids.shape[1] < wanted:
            raise RoleFailed(
                f"{_name(rollout)}: its teacher gave the {ids.shape[1]} most likely tokens of each place; "
                f"algorithm.teacher_top_k={wanted}"
            )
        return TeacherScores(logprobs, ids, of_them)


# -------------------------------------------------------------------------------------------------------------- samples

Values: TypeAlias = Float32  # of the loss tokens of one member

# Value of each loss token of a completion: the completion's advantage ("alike"); the reward earned by the token, from
# which a critic makes advantages ("earned"); or its return, the rewards from this token on ("to_come").
Spread: TypeAlias = Literal["alike", "earned", "to_come"]
_NONE = np.empty(0, np.float32)  # np.concatenate needs at least one array


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
    teaching: Teaching = Teaching()
    row_credit: RowCredit = "rollout"

    @classmethod
    def of(cls, config: Config) -> SampleMaker:
        """Return the SampleMaker that the run file asks for."""
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
            Teaching.of(algorithm),
            algorithm.row_credit,
        )

    def minibatches(self, groups: Sequence[RolloutGroup], step: int) -> list[list[TrainingSample]]:
        """The samples of a batch, one list per minibatch, with their shares in the minibatch's loss.

        Raises as __call__.
        """
        rollouts = [list(rows) for _, rows in groupby(self(groups), lambda each: (each.group_id, each.sample_index))]
        parts = split(rollouts, self.num_minibatches, (self.seed, step))
        return [
            aggregate([row for rows in part for row in rows], self.aggregation, self.max_completion_tokens)
            for part in parts
        ]

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[TrainingSample]:
        """One sample per row, in the order of groups, members and rows, with advantages as `spread` says.

        A row without loss tokens is left out, unless no row of its rollout has any: its first one stays.
        A zero-variance group gives samples whose advantages are zero: whether to train on them is the caller's choice
        (algorithms/estimators.py).
        Raises ValueError for samples that must not be trained on: without a verdict, aborted, with arrays that do not
        match, or with an empty prompt.  Raises RoleFailed if [shaping] does not fit the verdicts, or a teacher's
        scores are missing.
        """
        for group in groups:
            _check_group(group)
        groups = [self._learnt(group) for group in groups]
        rewards = [self.shaping.rewards(group) for group in groups]
        counts = [_num_loss_tokens(group) for group in groups]
        advantages = [self.estimator(*of_group) for of_group in zip(rewards, counts, strict=True)]
        if not any(map(len, counts)):
            return []
        values = self._on_tokens(groups, counts, advantages)
        if not self.teaching.is_needed:
            return _samples(groups, values)
        members = [member for group in groups for member in group.members]
        scores = [each for member in members for each in _of_rows(self.teaching.scores(member), member.rollout)]
        return _taught(_samples(groups, values), scores, self.teaching)

    def _on_tokens(
        self, groups: Sequence[RolloutGroup], counts: Sequence[Int32], advantages: Sequence[Float32]
    ) -> Values:
        """Values of all loss tokens, normalised, in the order of members."""
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
        """Rewards of each loss token of each member, or its returns with spread "to_come", float32."""
        self.shaping.check_token_rewards(group)
        pairs = zip(group.members, rewards, strict=True)
        of_members = [earned(member, float(reward)) for member, reward in pairs]
        if self.spread == "to_come":
            of_members = list(map(still_to_come, of_members))
        else:
            of_members = list(map(earned_by_rows, group.members, of_members))
        return [values.astype(np.float32) for values in of_members]

    def _learnt(self, group: RolloutGroup) -> RolloutGroup:
        """The group, its loss masks False where [shaping] or row_credit says so."""
        starts = [self._learnt_from(member.rollout) for member in group.members]
        if not any(starts):
            return group
        pairs = zip(group.members, starts, strict=True)
        members = [replace(each, rollout=_masked(each.rollout, start)) if start else each for each, start in pairs]
        return replace(group, members=tuple(members))

    def _learnt_from(self, rollout: Rollout) -> int:
        """The token from which on the loss mask counts."""
        if self.shaping.is_masked(rollout):
            return len(rollout.token_ids)
        if self.row_credit == "last" and len(rollout.row_starts):
            return max((row.start for row in rollout.rows if rollout.loss_mask[row].any()), default=0)
        return 0


def on_completion(rollout: Rollout, samples: Iterable[TrainingSample]) -> Float32:
    """Advantages [Lc] of a completion's tokens, from those of its samples; 0 where nothing is trained."""
    found, rows = np.zeros(len(rollout.token_ids), np.float32), rollout.rows
    for sample in samples:
        row = rows[sample.row]
        found[row] = sample.advantages[len(sample.advantages) - (row.stop - row.start) :]
    return found


def _masked(rollout: Rollout, start: int) -> Rollout:
    """The rollout with no loss token before `start`."""
    mask = rollout.loss_mask.copy()
    mask[:start] = False
    return replace(rollout, loss_mask=mask)


def _trained_rows(rollout: Rollout) -> list[tuple[int, slice]]:
    """The rows that become samples, with their numbers."""
    if not len(rollout.row_starts):
        return [(0, slice(None))]
    rows = [(number, row) for number, row in enumerate(rollout.rows) if rollout.loss_mask[row].any()]
    return rows or [(0, rollout.rows[0])]


def _num_loss_tokens(group: RolloutGroup) -> Int32:
    return np.array([np.count_nonzero(member.rollout.loss_mask) for member in group.members], np.int32)


def _samples(groups: Sequence[RolloutGroup], advantages: Values) -> list[TrainingSample]:
    """advantages: of all loss tokens.  The arrays of samples are views of arrays over all of them.

    Made for a whole batch at once: a numpy call costs as much as its work on a short rollout.
    """
    parts = [
        (group.prompt.token_ids, member.rollout, number, row)
        for group in groups
        for member in group.members
        for number, row in _trained_rows(member.rollout)
    ]
    num_prompt_tokens = [len(prompt) for prompt, *_ in parts]
    longest = max(num_prompt_tokens)

    def behind(value: Any, of_rows: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
        """`value` on every prompt token, then the row's own values."""
        on_prompts: NDArray[Any] = np.full(longest, value, dtype)
        pairs = zip(num_prompt_tokens, of_rows, strict=True)
        return np.concatenate([part for length, values in pairs for part in (on_prompts[:length], values)])

    token_ids = np.concatenate([ids for prompt, each, _, row in parts for ids in (prompt, each.token_ids[row])])
    loss_mask = behind(False, [each.loss_mask[row] for _, each, _, row in parts], np.bool_)
    versions = behind(-1, [each.versions[row] for _, each, _, row in parts], np.int32)
    behaviour_logprobs = behind(0, [each.behaviour_logprobs[row] for _, each, _, row in parts], np.float32)
    behaviour_logprobs[~loss_mask] = 0
    on_tokens = np.zeros(len(loss_mask), np.float32)
    on_tokens[loss_mask] = advantages
    columns = {
        "token_ids": token_ids.astype(np.int32, copy=False),
        "loss_mask": loss_mask,
        "behaviour_logprobs": behaviour_logprobs,
        "advantages": on_tokens,
        "versions": versions,
    }
    samples, start = list[TrainingSample](), 0
    for prompt, rollout, number, row in parts:
        end = start + len(prompt) + len(rollout.token_ids[row])
        own: dict[str, Any] = {name: column[start:end] for name, column in columns.items()}
        routes = rollout.routes if number == 0 else None
        samples.append(TrainingSample(rollout.group_id, rollout.sample_index, **own, routes=routes, row=number))
        start = end
    return samples


def _of_rows(scores: TeacherScores, rollout: Rollout) -> list[TeacherScores]:
    """Cut scores of the loss tokens of a rollout up into those of its samples."""
    rows = _trained_rows(rollout)
    if len(rows) == 1:
        return [scores]
    borders = np.cumsum([0, *(np.count_nonzero(rollout.loss_mask[row]) for _, row in rows)])
    return [
        TeacherScores(scores.logprobs[first:end], scores.top_ids[first:end], scores.top_logprobs[first:end])
        for first, end in pairwise(borders)
    ]


def _taught(
    samples: Sequence[TrainingSample], scores: Sequence[TeacherScores], teaching: Teaching
) -> list[TrainingSample]:
    """The samples with their share of what a teacher says of their loss tokens."""
    found = list[TrainingSample]()
    for sample, each in zip(samples, scores, strict=True):
        mask, changed = sample.loss_mask, dict[str, Any]()
        if teaching.factor:
            advantages = sample.advantages.copy()
            difference = each.logprobs - sample.behaviour_logprobs[mask]
            advantages[mask] += teaching.factor * difference.clip(-teaching.clip, teaching.clip)
            changed["advantages"] = advantages
        if teaching.is_reference:
            changed["teacher_logprobs"] = np.zeros(len(mask), np.float32)
            changed["teacher_logprobs"][mask] = each.logprobs
        if teaching.top_k:
            changed["teacher_top_ids"] = each.top_ids.astype(np.int32).ravel()
            changed["teacher_top_logprobs"] = each.top_logprobs.astype(np.float32).ravel()
        found.append(replace(sample, **changed))
    return found


def _check_group(group: RolloutGroup) -> None:
    if len(group.prompt.token_ids) == 0:
        raise ValueError(f"group {group.group_id}: prompt {group.prompt.prompt_id} has no tokens to start from")
    for member in group.members:
        _check(member.rollout)
        if member.rollout.prompt_id != group.prompt.prompt_id:
            raise ValueError(f"{_name(member.rollout)}: it answers another prompt, {member.rollout.prompt_id}")
        if member.verdict is Verdict.VERIFIER_ERROR:
            raise ValueError(f"{_name(member.rollout)}: its verifier failed, so it has no reward: {member.detail}")


def _check(rollout: Rollout) -> None:
    arrays = (rollout.behaviour_logprobs, rollout.versions, rollout.loss_mask)
    if len(rollout.token_ids) == 0 or any(array.shape != rollout.token_ids.shape for array in arrays):
        shapes = [array.shape for array in arrays]
        raise ValueError(f"{_name(rollout)}: arrays of shapes {shapes} for {rollout.token_ids.shape} tokens")
    if fault := rollout.row_fault:
        raise ValueError(f"{_name(rollout)}: {fault}")
    if rollout.finish_reason is FinishReason.ABORT:
        raise ValueError(f"{_name(rollout)}: it was aborted, not finished")


def _name(rollout: Rollout) -> str:
    return f"sample {rollout.sample_index} of group {rollout.group_id}"
