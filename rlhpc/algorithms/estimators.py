"""Advantages: the estimators that algorithm.advantage can name, and the choice among them.

In this file: gae, for a critic; user-defined estimators; the variance of rewards; GRPO and RLOO, relative to
the group; normalising over a batch; OPO; pass@k; the reward itself; the choice by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import comb
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rlhpc.base.user_code import bound, load, try_out
from rlhpc.config.tables_algorithm import OVER_BATCH, AlgorithmConfig
from rlhpc.protocol.contracts import AdvantageEstimator
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import Bool, Float32, Int32

# ------------------------------------------------------------------------------------------------------------------ gae
#
# Advantages from a critic: generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).
#
#    δ_t = r_t + γ · V_{t+1} − V_t          A_t = Σ_k (γλ)^k · δ_{t+k}          R_t = A_t + V_t, which the critic learns
#
# t counts the loss tokens of a completion; V_t is the critic's value of the text before token t.  A completion ends
# with its last token: V is 0 after it, also where it was cut off.  λ = 1: A_t is the discounted sum of rewards less
# V_t.
#
# Input: arrays of a packed row.  Output: arrays like them.  float64 inside.  Loads without torch.

BLOCK = 128  # tokens


def packed_gae(
    rewards: Float32, values: Float32, loss_mask: Bool, cu_seqlens: Int32, *, discount: float, trace: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Advantages and returns of a packed row of T tokens in S sequences, float64 [T] each, 0 off the loss mask.

    rewards [T] of tokens; values [T] of the state before each; cu_seqlens [S + 1]; discount is γ, trace is λ.
    """
    places = _loss_tokens(loss_mask, cu_seqlens)
    is_there = places >= 0
    value, reward = (np.where(is_there, each[places], 0).astype(np.float64) for each in (values, rewards))
    later_value = np.pad(value, ((0, 0), (0, 1)))[:, 1:]
    advantage = discounted_sums(reward + discount * later_value - value, discount * trace)
    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    advantages[places[is_there]] = advantage[is_there]
    returns[places[is_there]] = (advantage + value)[is_there]
    return advantages, returns


def discounted_sums(terms: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    """Σ_k discount^k · terms[:, t + k] for every t, of terms [S, T]; discount from 0 to 1.

    By blocks: a loop over single tokens takes half a second for a row of 16,384.
    """
    num_rows, length = terms.shape
    num_blocks = -(-length // BLOCK)
    sums = np.zeros((num_rows, num_blocks, BLOCK))
    sums.reshape(num_rows, -1)[:, :length] = terms
    ahead = np.arange(BLOCK)[None, :] - np.arange(BLOCK)[:, None]  # [t, t + k]: k
    sums = sums @ np.where(ahead >= 0, discount ** np.maximum(ahead, 0).astype(np.float64), 0.0).T
    to_next = discount ** np.arange(BLOCK, 0, -1, dtype=np.float64)  # of each token, to the next block's first
    for block in range(num_blocks - 2, -1, -1):
        sums[:, block] += to_next * sums[:, block + 1, :1]
    return sums.reshape(num_rows, -1)[:, :length]


def _loss_tokens(loss_mask: Bool, cu_seqlens: Int32) -> NDArray[np.int64]:
    """Indices of the loss tokens of every sequence, [S, longest], right-aligned; −1 before them."""
    own = [first + np.flatnonzero(loss_mask[first:last]) for first, last in pairwise(cu_seqlens)]
    longest = max(map(len, own))
    return np.stack([np.concatenate([np.full(longest - len(places), -1), places]) for places in own]).astype(np.int64)


# ------------------------------------------------------------------------------------------------------------------ own
#
# A user-defined estimator: algorithm.advantage = "package.module:function".
#
# Tried when loaded, on small groups that include equal rewards and members without loss tokens, and checked at each
# use: wrong advantages would end in the weights.

ADVANTAGE_KEY = "algorithm.advantage"
_PAGE = "docs/algorithms.md, An advantage of your own"
_REWARDS, _LENGTHS = (1.0, 0.0, 0.5), (3, 1, 2)  # of the first members; larger groups repeat them
NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})
_SHOWN = 4  # members of a group that a message names
_NOTHING = 1e-3  # an advantage below it is one of rounding


def load_own_estimator(
    path: str, group_size: int | None = None, arguments: Mapping[str, object] = NO_ARGUMENTS
) -> OwnEstimator:
    """Import and try an estimator.  Raises ConfigError if it cannot be imported, raises, or returns wrong values.

    group_size: members of the groups on which it is tried; None: a few.  arguments: algorithm.advantage_arguments.
    """
    function = bound(ADVANTAGE_KEY, path, load(ADVANTAGE_KEY, path), ("rewards", "lengths"), arguments)
    rewards, lengths = _group(group_size or len(_REWARDS))
    only_first = np.where(np.arange(len(rewards)) == 0, lengths, np.int32(0))
    for group in (
        (rewards, lengths),
        (np.zeros_like(rewards), lengths),
        (np.ones_like(rewards), lengths),
        (rewards, only_first),  # completions that were cut off have no loss tokens with shaping.truncated = "masked"
        (rewards, np.zeros_like(lengths)),
    ):
        on = _described(*group)
        with np.errstate(all="ignore"):
            problem = try_out(ADVANTAGE_KEY, path, on, partial(_advantage_problem, function, *group))
        if problem:
            raise ConfigError(f"{ADVANTAGE_KEY}={path!r}, tried on {on}: it {problem} ({_PAGE})")
    return OwnEstimator(path, function)


def doubts_of_advantage(estimator: OwnEstimator, group_size: int) -> list[str]:
    """Return warnings about an estimator that has passed its trial: legal behaviour that is seldom intended."""
    rewards, lengths = _group(group_size)
    first, again = (_called(estimator.function, rewards.copy(), lengths.copy()) for _ in range(2))
    where = f"{ADVANTAGE_KEY}={estimator.path!r}, tried on {_described(rewards, lengths)}"
    if not np.array_equal(first, again):
        return [f"{where} twice: {_shown(first)} and {_shown(again)}; usual: the same advantages for the same rewards"]
    if np.abs(first).max() <= _NOTHING and group_size > 1:
        return [f"{where}: {_shown(first)}, no advantage though rewards differ: nothing would be learnt from it"]
    if np.dot(first, rewards - rewards.mean()) < 0:
        return [f"{where}: {_shown(first)}, the lower the higher the reward: better answers would become rarer"]
    return []


@dataclass(frozen=True, slots=True)
class OwnEstimator:
    """An AdvantageEstimator."""

    path: str
    function: AdvantageEstimator

    def __call__(self, rewards: Float32, lengths: Int32) -> Float32:
        """Raises ConfigError: the function raises, or returns something else than a finite number for each member."""
        on = f"{len(rewards)} rewards of a run"
        advantages = try_out(ADVANTAGE_KEY, self.path, on, partial(_called, self.function, rewards, lengths))
        if problem := _advantage_misfit(advantages, rewards):
            raise ConfigError(f"{ADVANTAGE_KEY}={self.path!r} {problem} ({_PAGE})")
        return advantages


def _group(size: int) -> tuple[Float32, Int32]:
    return np.resize(np.array(_REWARDS, np.float32), size), np.resize(np.array(_LENGTHS, np.int32), size)


def _shown(advantages: Float32) -> str:
    return np.array2string(advantages, threshold=8)


def _called(function: AdvantageEstimator, rewards: Float32, lengths: Int32) -> Float32:
    return np.asarray(function(rewards, lengths), np.float32)


def _advantage_misfit(advantages: Float32, rewards: Float32) -> str:
    """Return what is wrong with these advantages, "" if nothing."""
    if advantages.shape == rewards.shape and np.isfinite(advantages).all():
        return ""
    return (
        f"returned {_shown(advantages)} for {len(rewards)} rewards; legal: one finite number for "
        "each, and zeros where all rewards are equal"
    )


def _advantage_problem(function: AdvantageEstimator, rewards: Float32, lengths: Int32) -> str:
    """Return what is wrong with the function's result on this group, "" if nothing."""
    given: tuple[Float32, Int32] = rewards.copy(), lengths.copy()
    advantages = _called(function, *given)
    if problem := _advantage_misfit(advantages, rewards):
        return problem
    for name, before, after in zip(("rewards", "lengths"), (rewards, lengths), given, strict=True):
        if not np.array_equal(before, after):
            return f"changes {name} in place; legal: to leave its arguments as they are"
    if rewards.min() == rewards.max() and np.abs(advantages).max() > _NOTHING:
        return (
            f"returned {_shown(advantages)} where all rewards are equal, so that a group without "
            "a better answer would be learnt from; legal: zeros there"
        )
    return ""


def _described(rewards: Float32, lengths: Int32) -> str:
    more = ", …" if len(rewards) > _SHOWN else ""
    shown, tokens = (", ".join(f"{each:g}" for each in values[:_SHOWN]) for values in (rewards, lengths))
    return f"rewards {shown}{more} of {tokens}{more} tokens"


# --------------------------------------------------------------------------------------------------------------- spread
#
# Zero-variance groups: groups whose rewards are all equal.  Loads without torch.

RELATIVE_TOLERANCE = 1e-6
"""Rewards closer than this, relative to the largest (or to 1), are one reward.

Exact equality would be a trap with rewards that are sums of parts: 0.1 + 0.2 and 0.3 differ in the last bit, and
dividing by the standard deviation blows that bit up to advantages of ±1.  About eight units in the last place of a
float32; verifiable rewards are coarser by far.
"""


def has_reward_variance(rewards: Float32) -> bool:
    """True if the rewards [G] of a group differ.  Raises ValueError if there is no reward or one is not finite."""
    return bool(have_reward_variance(rewards, np.zeros(1, np.int64))[0])


def have_reward_variance(rewards: Float32, starts: NDArray[np.int64]) -> Bool:
    """has_reward_variance of G groups: rewards [N] of all groups concatenated, starts [G] of each."""
    if rewards.ndim != 1 or len(rewards) == 0 or not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group: {rewards.tolist()}; legal: one finite number per member")
    highest = np.maximum.reduceat(rewards, starts).astype(np.float64)
    lowest = np.minimum.reduceat(rewards, starts).astype(np.float64)
    scales = np.maximum(1.0, np.maximum(np.abs(highest), np.abs(lowest)))
    return np.asarray(highest - lowest > RELATIVE_TOLERANCE * scales, np.bool_)


def centred(rewards: Float32) -> NDArray[np.float64]:
    """r_i − mean r, float64."""
    return np.asarray(rewards - rewards.mean(dtype=np.float64), np.float64)


# ------------------------------------------------------------------------------------------------------- group relative
#
# Advantages relative to the rewards of the same group: GRPO, with and without its standard deviation, and RLOO.
#
# Differs from GRPO (arXiv:2402.03300, §4.1.2): (1) the standard deviation divides by G, not G − 1, so that advantages
# of a group have mean square 1 whatever G is; the paper does not say which, and code that takes torch.std gets values
# smaller by √((G−1)/G); (2) nothing is added to the standard deviation: a zero-variance group is recognised as such
# instead of being divided by a small number.


def grpo(rewards: Float32, lengths: Int32) -> Float32:
    """(r_i − mean r) / std r: group-relative advantage (Shao et al. 2024, arXiv:2402.03300, §4.1.2).

    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    values = centred(rewards)
    return np.asarray(values / np.sqrt(np.mean(values**2)), np.float32)


def grpo_no_std(rewards: Float32, lengths: Int32) -> Float32:
    """r_i − mean r: without the bias towards groups of small variance (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    return centred(rewards).astype(np.float32) if has_reward_variance(rewards) else np.zeros_like(rewards)


def rloo(rewards: Float32, lengths: Int32) -> Float32:
    """r_i − mean of the others' rewards: REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

    Equals grpo_no_std times G / (G − 1); the baseline does not depend on the member, so that the gradient has no bias.
    See AdvantageEstimator.  Raises ValueError as has_reward_variance.
    """
    if not has_reward_variance(rewards):
        return np.zeros_like(rewards)
    size = len(rewards)
    return (centred(rewards) * (size / (size - 1))).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ normalize
#
# Advantages of a whole batch to mean 0 and standard deviation 1.
#
# Over loss tokens, not over rollouts: a long completion counts as often as its advantage is used.  REINFORCE++ (Hu
# 2025, arXiv:2501.03262) normalises the batch in this way, its "baseline" variant after subtracting the group's mean.
#
# Differs from REINFORCE++: (1) divided by N, and nothing is added to the variance; a batch of zero variance has zeros;
# (2) no KL cost in the rewards: the KL term is part of the loss (algorithms/policy_loss.py).


def normalize(
    advantages: Sequence[Float32], num_tokens: Sequence[NDArray[np.integer]], tasks: Sequence[str]
) -> list[Float32]:
    """Normalise advantages [G] of every group, given its members' loss tokens [G] and its task: one scale per task."""
    results = list(advantages)
    for task in set(tasks):
        members = [i for i, of_group in enumerate(tasks) if of_group == task]
        scaled = _normalized(
            np.concatenate([advantages[i] for i in members]), np.concatenate([num_tokens[i] for i in members])
        )
        ends = np.cumsum([len(advantages[i]) for i in members])
        for i, values in zip(members, np.split(scaled, ends[:-1]), strict=True):
            results[i] = values
    return results


def _normalized(advantages: Float32, num_tokens: NDArray[np.integer]) -> Float32:
    if not num_tokens.any() or not has_reward_variance(advantages[num_tokens > 0]):
        return np.zeros_like(advantages)
    values = advantages - np.average(advantages.astype(np.float64), weights=num_tokens)
    return np.asarray(values / np.sqrt(np.average(values**2, weights=num_tokens)), np.float32)


# ------------------------------------------------------------------------------------------------------------------ opo
#
# OPO: the baseline with the smallest variance of the gradient, if the gradient's square grows with the length.
#
#     A_i = r_i − Σ_j l_j · r_j / Σ_j l_j            l: tokens of a completion
#
# Hao et al. 2025 (arXiv:2505.23585).


def opo(rewards: Float32, lengths: Int32) -> Float32:
    """Reward less the mean of rewards weighted by lengths.  See AdvantageEstimator; sums to 0 over tokens."""
    if not has_reward_variance(rewards) or not lengths.any():
        return np.zeros_like(rewards)
    baseline = np.average(rewards.astype(np.float64), weights=lengths)
    return (rewards - baseline).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ pass at k
#
# Pass@k as the objective: the advantage of a sample is its contribution to sets of k samples of its group.
#
# The reward of a set of k members is that of its best one.  R and σ are its mean and standard deviation over all sets;
# the advantage of a member is the mean over the sets that it is in:
#
#     A_i = (E[max r of a set | i is in it] − R) / σ
#
# "Pass@k training", Chen et al. 2025 (arXiv:2508.10751), who have a closed form for rewards of 0 and 1.  Written with
# order statistics, as Walder & Karkhanis 2025 (arXiv:2505.15201) do for their estimators, it holds for any rewards.


@dataclass(frozen=True, slots=True)
class PassAtK:
    """An AdvantageEstimator; k is 2 or more (with 1 it would be GRPO).  A group of k members would have one set."""

    k: int

    def __call__(self, rewards: Float32, lengths: Int32) -> Float32:
        """Advantages, float32 [G]; all zero also if every set has the same best reward (fewer than k below it)."""
        if not has_reward_variance(rewards) or len(rewards) <= self.k:
            return np.zeros_like(rewards)
        size, values = len(rewards), rewards.astype(np.float64)
        ordered = np.sort(values)
        # The j-th smallest is the best of C(j, k − 1) sets, counted from 0.
        shares = np.array([comb(j, self.k - 1) for j in range(size)]) / comb(size, self.k)
        mean = float(shares @ ordered)
        variance = float(shares @ (ordered - mean) ** 2)
        if not has_reward_variance(ordered[self.k - 1 :].astype(np.float32)):
            return np.zeros_like(rewards)
        return np.array([(self._with(values, i) - mean) / variance**0.5 for i in range(size)], np.float32)

    def _with(self, values: np.ndarray, member: int) -> float:
        """Mean best reward of the sets that a member is in."""
        others = np.sort(np.delete(values, member))
        shares = np.array([comb(j, self.k - 2) for j in range(len(others))]) / comb(len(others), self.k - 1)
        return float(shares @ np.maximum(others, values[member]))


# -------------------------------------------------------------------------------------------------------- reward itself
#
# The unchanged reward: for estimators whose only baseline is that of the batch (REINFORCE++).


def nothing(rewards: Float32, lengths: Int32) -> Float32:
    """Return 0: with "distillation" all of a token's advantage comes from the teacher (samples.py).  Raises as grpo."""
    has_reward_variance(rewards)
    return np.zeros_like(rewards)


def reward_itself(rewards: Float32, lengths: Int32) -> Float32:
    """r_i.  The only AdvantageEstimator that is not zero in a zero-variance group.  Raises ValueError as the others."""
    has_reward_variance(rewards)
    return rewards


# --------------------------------------------------------------------------------------------------------------- choice

BY_GROUP: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "grpo": grpo,
        "grpo_no_std": grpo_no_std,
        "rloo": rloo,
        "opo": opo,
        "reinforce_pp": reward_itself,
        "distillation": nothing,
        "gae": reward_itself,  # the trainer's critic turns it into advantages
        "reinforce_pp_baseline": grpo_no_std,
    }
)


def make_estimator(config: AlgorithmConfig, group_size: int | None = None) -> AdvantageEstimator:
    """Return the estimator of algorithm.advantage.  Raises ConfigError if its function is missing or unfit.

    group_size: members of the groups on which a user-defined one is tried; None: a few.
    """
    if config.advantage == "pass_at_k":
        return PassAtK(config.pass_k)
    of_ours = BY_GROUP.get(config.advantage)
    return of_ours or load_own_estimator(config.advantage, group_size, config.advantage_arguments)


def normalization(config: AlgorithmConfig) -> str:
    """The scope in which advantages are normalised before they are packed: "off", "batch", "task"."""
    if config.advantage == "gae":
        return "off"  # the trainer normalises
    return "batch" if config.advantage in OVER_BATCH else config.advantage_normalization
