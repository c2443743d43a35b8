"""The metrics of a step, under the stable names of docs/metrics.md.

Input: StepRecord and the rollouts since the previous step.  Output: scalars.  No decisions are made from these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhpc.algorithms.diagnostics import (
    age_figures,
    completion_lengths,
    effective_sample_share,
    length_figures,
    reward_figures,
    rewards,
    staleness,
    staleness_figures,
)
from rlhpc.packing.layout import packing_fill
from rlhpc.rewards.failures import JUDGED, SECONDS
from rlhpc.roles.controller.rollout_sink import IntakeStats
from rlhpc.roles.controller.step_record import StepRecord
from rlhpc.types import RolloutGroup

# What the trainer reports, and its name in the table; every other name is the loss's own.
_REPORTED = {
    "loss": "trainer/loss",
    "grad_norm": "trainer/grad_norm",
    "entropy": "trainer/entropy",
    "learning_rate": "trainer/learning_rate",
    "step_s": "trainer/step_s",
    "wait_for_batch_s": "time/wait_for_batch_s",
    "clip_low": "policy/clip_low_share",
    "clip_high": "policy/clip_high_share",
    "ratio": "policy/ratio_mean",
    "importance_weight": "policy/importance_weight_mean",
    "importance_capped": "policy/importance_capped_share",
    "importance_masked": "policy/importance_masked_share",
    "mismatch_abs": "policy/mismatch_abs_mean",
}

_OF_DATASETS = {
    "reward/mean": "dataset_reward",
    "reward/correct_share": "dataset_correct_share",
    "length/completion_mean": "dataset_length",
    "length/truncated_share": "dataset_truncated_share",
}


def training_figures(record: StepRecord, token_budget: int) -> dict[str, float]:
    """Metrics of the batch and of the optimiser step; what a loss reports under a new name NAME is policy/NAME."""
    report = dict(record.report.metrics)
    squares = report.pop("importance_weight_squared", None)
    by_age = {name: report.pop(name) for name in list(report) if name.startswith("age_")}
    # A loss of the user's own names a family itself.
    names = {name: _REPORTED.get(name, name if "/" in name else f"policy/{name}") for name in report}
    figures = {names[name]: value for name, value in report.items()} | age_figures(by_age)
    if squares is not None:  # the report holds means: n of each cancels in the ratio
        figures["policy/ess"] = effective_sample_share(record.report.metrics, 1)
    return (
        figures
        | staleness_figures(record.groups, record.trained_version)
        | {
            "packing/fill": packing_fill(record.batch, token_budget),
            "packing/num_microbatches": float(sum(len(minibatch.ranks[0]) for minibatch in record.batch.minibatches)),
            "packing/lockstep_slowdown": record.lockstep_slowdown,
            "trainer/step_parts": float(record.batch.num_parts_before + 1),
            "time/wait_for_groups_s": record.wait_for_groups_s,
            "time/pack_s": record.pack_s,
            "time/wait_for_weights_s": record.until_live_s,
            "time/checkpoint_s": record.checkpoint_s,
            "time/checkpoint_write_s": record.checkpoint_write_s,
            "guard/action": float(record.guard.action),
            "guard/alarm_steps": float(record.guard.num_bad_steps),
        }
    )


def sampling_figures(stats: IntakeStats) -> dict[str, float]:
    """Metrics of all groups finished since the last step, zero-variance groups included: what the policy can do now."""
    shaped = {"reward/shaped_mean": float(np.mean(stats.shaped_rewards))} if stats.shaped_rewards else {}
    return reward_figures(stats.groups) | length_figures(stats.groups) | shaped


def verifier_figures(tasks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of each task: what failures.py counts, and the mean time of a completion."""
    found: dict[str, float] = {}
    for task, figures in tasks.items():
        found |= {f"verifier_{name}/{task}": value for name, value in figures.items() if name != SECONDS}
        found[f"verifier_mean_s/{task}"] = figures.get(SECONDS, 0.0) / max(1.0, figures.get(JUDGED, 0.0))
    return found


def dataset_figures(groups: Sequence[RolloutGroup], names: Sequence[str]) -> dict[str, float]:
    """The same of every dataset by its name, where there are several; none of one of which no group is finished."""
    figures: dict[str, float] = {}
    for place, name in enumerate(names if len(names) > 1 else ()):
        own = [group for group in groups if group.prompt.prompt_id % len(names) == place]
        found = reward_figures(own) | length_figures(own)
        shown = {f"{family}/{name}": found[metric] for metric, family in _OF_DATASETS.items() if metric in found}
        figures |= shown | {f"dataset_share/{name}": len(own) / len(groups)} if own else {}
    return figures


def histograms(record: StepRecord) -> dict[str, np.ndarray]:
    """Distributions over the rollouts of the batch."""
    return {
        "reward/histogram": rewards(record.groups),
        "length/completion_histogram": completion_lengths(record.groups),
        "staleness/histogram": staleness(record.groups, record.trained_version),
    }
