"""Figures of a batch that show whether learning is healthy.

Input: RolloutGroup and the summed metrics of a step.  Output: numbers under their names of rlhpc/metrics/names.py, and
arrays for histograms.  No torch.  When to worry: docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhpc.algorithms.estimators import have_reward_variance
from rlhpc.protocol.types import (
    Bool,
    FinishReason,
    Float32,
    Int32,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    Verdict,
)


def reward_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and verdicts; `groups` may be those of a batch or all groups finished since the last one.

    correct_share is over members; mean, std and parts over members with a reward; the shares of groups over groups with
    a reward.  Empty without groups.
    """
    members = _members(groups)
    if not members:
        return {}
    figures = {"reward/correct_share": _share([m.verdict is Verdict.CORRECT for m in members])} | _part_means(members)
    if len(values := rewards(groups)):
        figures |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
        are_alike, are_right = _groups_without_variance(groups, values)
        figures["reward/zero_variance_share"] = _share(are_alike)
        figures["group/all_correct_share"] = _share(are_alike & are_right)
        figures["group/all_wrong_share"] = _share(are_alike & ~are_right)
    return figures


def length_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Tokens of completions and prompts, turns, rows, and the share of completions cut by a limit.

    Empty without groups.
    """
    if not groups:
        return {}
    lengths, rollouts = completion_lengths(groups), _rollouts(groups)
    num_sampled = [np.count_nonzero(rollout.loss_mask) for rollout in rollouts]
    pairs = zip(rollouts, num_sampled, strict=True)
    num_turns = [
        1 if count == len(rollout.loss_mask) and not len(rollout.row_starts) else _num_turns(rollout)
        for rollout, count in pairs
    ]
    num_rows = [1 + len(rollout.row_starts) for rollout in rollouts]
    return {
        "length/prompt_mean": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        "length/completion_mean": float(lengths.mean()),
        "length/completion_max": float(lengths.max()),
        "length/truncated_share": _share([r.finish_reason is FinishReason.LENGTH for r in rollouts]),
        "length/turns_mean": float(np.mean(num_turns)),
        "length/rows_mean": float(np.mean(num_rows)),
        "length/rows_max": float(max(num_rows)),
        "length/read_share": 1 - sum(num_sampled) / max(1, sum(len(rollout.token_ids) for rollout in rollouts)),
    }


def teacher_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reverse KL to the teacher over loss tokens; empty where no teacher was asked."""
    taught = [(member.rollout, member.teacher) for member in _members(groups) if member.teacher is not None]
    if not (num_tokens := sum(np.count_nonzero(rollout.loss_mask) for rollout, _ in taught)):
        return {}
    gaps = ((rollout.behaviour_logprobs - scores.logprobs)[rollout.loss_mask] for rollout, scores in taught)
    return {"teacher/kl": sum(float(gap.sum(dtype=np.float64)) for gap in gaps) / num_tokens}


def _num_turns(rollout: Rollout) -> int:
    """Number of contiguous spans of tokens that the policy sampled, in all rows."""
    mask, starts = rollout.loss_mask, rollout.row_starts
    begins = np.diff(mask.astype(np.int8), prepend=0) == 1
    begins[starts] = mask[starts]  # whatever stands before it belongs to another row
    return int(np.count_nonzero(begins))


def staleness_figures(groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    """Age in versions of the batch on which policy_version is about to be trained.  Empty without groups.

    staleness/mean and max: versions since admission, per rollout; bounded by admission.max_staleness.
    staleness/token_mean: since each token was sampled.  rollout/*: weights changed in flight.
    """
    if not groups:
        return {}
    rollouts = _rollouts(groups)
    ages, versions = staleness(groups, policy_version), [rollout.versions for rollout in rollouts]
    are_one = [each.is_of_one_version for each in rollouts]  # most are
    pairs = list(zip(versions, are_one, strict=True))
    num_versions = np.array([1 if is_one else len(np.unique(each)) for each, is_one in pairs])
    total = sum(each.item(0) * len(each) if is_one else int(each.sum(dtype=np.int64)) for each, is_one in pairs)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/token_mean": policy_version - total / sum(map(len, versions)),
        "rollout/spanning_update_share": _share(num_versions > 1),
        "rollout/num_versions_max": float(num_versions.max()),
    }


def route_figures(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Share of tokens with routes, of all but the last of each row, which no engine computes."""
    pairs = [(len(group.prompt.token_ids), member.rollout) for group in groups for member in group.members]
    total = sum(len(rollout.token_ids) + (length - 1) * len(rollout.rows) for length, rollout in pairs)
    known = sum(rollout.routes.num_tokens for _, rollout in pairs if rollout.routes is not None)
    return {"rollout/routed_share": known / total} if total else {}


def effective_sample_share(metrics: Mapping[str, float], num_loss_tokens: float) -> float:
    """(Σw)² / (n · Σw²) of the importance weights, 0–1: 1 when all are equal (Kish 1965; Owen 2013, §9.3).

    metrics: as a policy loss sums them, over all micro-batches and ranks.  0 when there is no weight at all.
    """
    squares = num_loss_tokens * metrics["importance_weight_squared"]
    return metrics["importance_weight"] ** 2 / squares if squares > 0 else 0.0


def age_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Figures per age of tokens; sums: "age_FIGURE/AGE" of algorithms/policy_loss.py, over one denominator.

    An age without tokens is left out.
    """
    figures: dict[str, float] = {}
    for age in sorted(name.partition("/")[2] for name in sums if name.startswith("age_tokens/")):
        share = sums[f"age_tokens/{age}"]
        if share <= 0:
            continue
        figures[f"age_tokens_share/{age}"] = share
        of_age = {name.partition("/")[0]: value for name, value in sums.items() if name.endswith(f"/{age}")}
        weights = {name: of_age[f"age_{name}"] for name in ("importance_weight", "importance_weight_squared")}
        figures[f"age_ess/{age}"] = effective_sample_share(weights, share)
        for name, shown in (("importance_weight", "importance_weight"), ("mismatch_kl", "mismatch_kl"),
                            ("kl_k3", "kl_k3"), ("clipped", "clipped_share")):  # fmt: skip
            figures[f"age_{shown}/{age}"] = of_age[f"age_{name}"] / share
    return figures


# Arrays for histograms.


def rewards(groups: Sequence[RolloutGroup]) -> Float32:
    """Reward of every member that has one, float32."""
    judged = [m.reward for m in _members(groups) if m.verdict is not Verdict.VERIFIER_ERROR]
    return np.array(judged, np.float32)


def completion_lengths(groups: Sequence[RolloutGroup]) -> Int32:
    """Tokens of every completion, int32; a beginning that its rows share counts once."""
    return np.array([rollout.num_distinct_tokens for rollout in _rollouts(groups)], np.int32)


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
    return {f"reward_part/{name}": float(np.mean([parts[name] for parts in judged if name in parts])) for name in names}


def _groups_without_variance(groups: Sequence[RolloutGroup], values: Float32) -> tuple[Bool, Bool]:
    """True if all rewards of a group are equal, and True if its first answer is correct, for groups with a reward.

    values: rewards of all members that have one.  Correctness is not read from them: partial answers earn rewards, too.
    """
    verdicts = [[m.verdict for m in group.members if m.verdict is not Verdict.VERIFIER_ERROR] for group in groups]
    judged = [each for each in verdicts if each]
    starts = np.cumsum([0, *(len(each) for each in judged)])[:-1]
    are_correct = np.array([each[0] is Verdict.CORRECT for each in judged], np.bool_)
    return ~have_reward_variance(values, starts), are_correct


def _share(truths: Sequence[bool] | Bool) -> float:
    """Share of True; `values` is not empty."""
    return float(np.mean(truths))
