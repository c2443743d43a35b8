"""The metrics of a step, under the stable names of docs/metrics.md.

Input: StepRecord and the rollouts since the previous step.  Output: scalars.  No decisions are made from these.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhpc.algorithms.advantages import has_reward_variance
from rlhpc.algorithms.diagnostics import (
    completion_lengths,
    effective_sample_share,
    length_figures,
    reward_figures,
    rewards,
    staleness_figures,
)
from rlhpc.packing.layout import packing_fill
from rlhpc.roles.controller.rollout_sink import IntakeStats
from rlhpc.roles.controller.train_loop import StepRecord
from rlhpc.types import RolloutGroup

_TRAINER = {"loss": "trainer/loss", "grad_norm": "trainer/grad_norm", "entropy": "trainer/entropy",
            "learning_rate": "trainer/learning_rate", "step_s": "trainer/step_s",
            "wait_for_batch_s": "time/wait_for_batch_s"}  # fmt: skip
_POLICY = {"clip_low": "policy/clip_low_share", "clip_high": "policy/clip_high_share", "ratio": "policy/ratio_mean",
           "importance_weight": "policy/importance_weight_mean", "importance_capped": "policy/importance_capped_share",
           "kl_k1": "policy/kl_k1", "kl_k3": "policy/kl_k3", "mismatch_abs": "policy/mismatch_abs_mean",
           "mismatch_kl": "policy/mismatch_kl"}  # fmt: skip
_LENGTH = {"prompt_length/mean": "length/prompt_mean", "completion_length/mean": "length/completion_mean",
           "completion_length/max": "length/completion_max",
           "completion_length/truncated_share": "length/truncated_share"}  # fmt: skip
_STALENESS = {"staleness/mean": "staleness/mean", "staleness/max": "staleness/max",
              "staleness/token_mean": "staleness/token_mean",
              "staleness/spanning_share": "rollout/spanning_update_share"}  # fmt: skip
_REWARD = ("reward/mean", "reward/std", "reward/correct_share", "reward/zero_spread_share")


def training_figures(record: StepRecord, token_budget: int) -> dict[str, float]:
    """Metrics of the batch and of the optimiser step."""
    report, groups = record.report.metrics, record.groups
    figures = _renamed(report, _TRAINER) | _renamed(report, _POLICY)
    if "importance_weight_squared" in report:  # the report holds means: n of each cancels in the ratio
        figures["policy/ess"] = effective_sample_share(report, 1)
    figures |= _renamed(staleness_figures(groups, record.trained_version), _STALENESS)
    versions = [len(np.unique(m.rollout.versions)) for group in groups for m in group.members]
    return figures | {
        "rollout/num_versions_max": float(max(versions)),
        "packing/fill": packing_fill(record.batch, token_budget),
        "packing/num_microbatches": float(len(record.batch.ranks[0])),
        "packing/lockstep_slowdown": record.lockstep_slowdown,
        "time/wait_for_groups_s": record.wait_for_groups_s,
        "time/pack_s": record.pack_s,
        "time/wait_for_weights_s": record.until_live_s,
        "time/checkpoint_s": record.checkpoint_s,
        "time/checkpoint_write_s": record.checkpoint_write_s,
    }


def sampling_figures(stats: IntakeStats) -> dict[str, float]:
    """Metrics of all groups finished since the last step, zero-variance groups included: what the policy can do now."""
    groups = stats.groups
    if not groups:
        return {}
    found = reward_figures(groups)
    figures = {name: found[name] for name in _REWARD if name in found}
    figures |= {name.replace("reward/part/", "reward_part/"): v for name, v in found.items() if "/part/" in name}
    return figures | _renamed(length_figures(groups), _LENGTH) | _group_shares(groups)


def histograms(record: StepRecord) -> dict[str, np.ndarray]:
    """Distributions over the rollouts of the batch."""
    ages = [record.trained_version - group.admitted_version for group in record.groups for _ in group.members]
    return {
        "reward/histogram": rewards(record.groups),
        "length/completion_histogram": completion_lengths(record.groups),
        "staleness/histogram": np.array(ages),
    }


def _group_shares(groups: list[RolloutGroup]) -> dict[str, float]:
    flat = [values for values in (rewards([group]) for group in groups) if not has_reward_variance(values)]
    return {
        "group/all_correct_share": sum(float(values.max()) > 0 for values in flat) / len(groups),
        "group/all_wrong_share": sum(float(values.max()) <= 0 for values in flat) / len(groups),
    }


def _renamed(figures: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {new: figures[old] for old, new in names.items() if old in figures}
