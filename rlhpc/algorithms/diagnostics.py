"""Figures of a batch that say whether learning is healthy.

Input: RolloutGroup and the summed metrics of a step.  Output: named numbers and arrays for histograms.  No torch.
What the figures mean and when to worry: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.algorithms.advantages import has_reward_variance
from rlhpc.types import FinishReason, Float32, Int32, Rollout, RolloutGroup, ScoredRollout, Verdict


def reward_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and verdicts; `groups` may be those of a batch or all groups finished since the last one.

    Shares of verdicts are over members; mean, std, min, max and parts over members with a reward; group figures over
    groups, zero_spread_share and group_std being about the rewards there are.  Empty without groups.
    """
    members = _members(groups)
    if not members:
        return {}
    figures = {f"reward/{verdict.value}_share": _share(m.verdict is verdict for m in members) for verdict in Verdict}
    figures |= _summary("reward", rewards(groups)) | _part_means(members)
    per_group = [values for values in (rewards([group]) for group in groups) if len(values)]
    if per_group:
        figures["reward/group_std"] = float(np.mean([values.std() for values in per_group]))
        figures["reward/zero_spread_share"] = _share(not has_reward_variance(values) for values in per_group)
    figures["reward/solved_group_share"] = _share(
        any(member.verdict is Verdict.CORRECT for member in group.members) for group in groups
    )
    return figures


def length_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens of completions and prompts, and the share of completions cut at max_tokens.  Empty without groups."""
    if not groups:
        return {}
    prompt_lengths = np.array([len(group.prompt.token_ids) for group in groups])
    truncated = _share(rollout.finish_reason is FinishReason.LENGTH for rollout in _rollouts(groups))
    return (
        _summary("completion_length", completion_lengths(groups))
        | _summary("prompt_length", prompt_lengths)
        | {"completion_length/truncated_share": truncated}
    )


def staleness_figures(groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    """How old a batch is that policy_version is about to be trained on.  Empty without groups.

    staleness/*: versions since admission, per rollout: what admission.max_staleness bounds.  staleness/token_*: since
    each token was sampled, never more than that.  staleness/spanning_share: of rollouts that two or more versions
    sampled, because weights changed in flight.
    """
    if not groups:
        return {}
    token_ages = policy_version - np.concatenate([rollout.versions for rollout in _rollouts(groups)])
    spanning = _share(rollout.versions[0] != rollout.versions[-1] for rollout in _rollouts(groups))
    return (
        _summary("staleness", staleness(groups, policy_version))
        | {"staleness/token_mean": float(token_ages.mean()), "staleness/token_max": float(token_ages.max())}
        | {"staleness/spanning_share": spanning}
    )


def effective_sample_share(metrics: Mapping[str, float], num_loss_tokens: int) -> float:
    """(Σw)² / (n · Σw²) of the importance weights, 0–1: 1 when all are equal (Kish 1965; Owen 2013, §9.3).

    metrics: as a policy loss sums them, over all micro-batches and ranks.  0 when there is no weight at all.
    """
    squares = num_loss_tokens * metrics["importance_weight_squared"]
    return metrics["importance_weight"] ** 2 / squares if squares > 0 else 0.0


# Arrays for histograms.


def rewards(groups: Sequence[RolloutGroup]) -> Float32:
    """Reward of every member that has one, float32."""
    judged = [m.reward for m in _members(groups) if m.verdict is not Verdict.VERIFIER_ERROR]
    return np.array(judged, np.float32)


def completion_lengths(groups: Sequence[RolloutGroup]) -> Int32:
    """Tokens of every completion, int32."""
    return np.array([len(rollout.token_ids) for rollout in _rollouts(groups)], np.int32)


def staleness(groups: Sequence[RolloutGroup], policy_version: int) -> Int32:
    """policy_version − version at admission of every rollout, int32."""
    ages = [policy_version - group.admitted_version for group in groups for _ in group.members]
    return np.array(ages, np.int32)


def _members(groups: Sequence[RolloutGroup]) -> list[ScoredRollout]:
    return [member for group in groups for member in group.members]


def _rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    return [member.rollout for member in _members(groups)]


def _part_means(members: Sequence[ScoredRollout]) -> dict[str, float]:
    judged = [member.reward_parts for member in members if member.verdict is not Verdict.VERIFIER_ERROR]
    names = sorted({name for parts in judged for name in parts})
    return {f"reward/part/{name}": float(np.mean([parts[name] for parts in judged if name in parts])) for name in names}


def _summary(name: str, values: NDArray[Any]) -> dict[str, float]:
    """Mean, standard deviation, minimum and maximum; empty if there are no values."""
    if not len(values):
        return {}
    figures = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {f"{name}/{key}": float(value) for key, value in figures.items()}


def _share(truths: Iterable[bool | np.bool_]) -> float:
    """Share that is true; at least one."""
    return float(np.mean([bool(truth) for truth in truths]))
