"""The custom scalars dashboard: the most important curves, several per chart.

Input: metric names.  Output: TensorBoard's Layout message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent

# category → chart title → metrics
CHARTS: Mapping[str, Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "Reward": {
            "Reward": ("reward/mean", "reward/correct_share"),
            "Zero-variance groups, verifier errors": ("reward/zero_spread_share", "reward/verifier_error_share"),
            "Completion length": ("length/completion_mean", "length/completion_max"),
            "Truncated": ("length/truncated_share",),
            "Prompts": ("prompt/known_share", "prompt/solved_share", "prompt/hopeless_share", "prompt/pass_rate_mean"),
        },
        "Staleness": {
            "Versions behind": ("staleness/mean", "staleness/max", "staleness/bound", "staleness/token_mean"),
            "Rollouts that span an update": ("rollout/spanning_update_share",),
        },
        "Idle": {
            "Idle ratios": ("trainer/idle_ratio", "generator/idle_ratio"),
            "Waits": ("time/wait_for_batch_s", "time/wait_for_groups_s", "time/wait_for_weights_s"),
            "Groups": ("queue/slots_free", "queue/in_flight", "queue/finished", "queue/taken"),
        },
        "Policy": {
            "Loss": ("trainer/loss",),
            "Entropy": ("trainer/entropy",),
            "Gradient norm": ("trainer/grad_norm",),
            "Clipped": ("policy/clip_low_share", "policy/clip_high_share", "policy/importance_capped_share"),
            "KL": ("policy/kl_k1", "policy/kl_k3", "policy/mismatch_kl"),
            "KL from the reference": ("policy/kl_reference",),
            "Importance weights": ("policy/importance_weight_mean", "policy/ess"),
            "Masked": ("policy/importance_masked_share",),
        },
        "Age of tokens": {
            title: tuple(f"{name}/{age}" for age in range(5))
            for title, name in (
                ("Effective sample size", "age_ess"),
                ("KL from the sampler", "age_mismatch_kl"),
                ("Clipped", "age_clipped_share"),
                ("Share of the batch", "age_tokens_share"),
            )
        },
        "Throughput": {
            "Tokens per second": ("trainer/tokens_per_s", "generator/tokens_per_s"),
            "Step": ("time/step_s", "trainer/step_s"),
            "Weight update": ("weights/publish_s", "weights/receive_s", "weights/pause_s"),
            "Packing": ("packing/fill", "packing/lockstep_slowdown"),
            "Event loop lag": ("event_loop/lag_s",),
        },
    }
)


def dashboard() -> Layout:
    """Build the layout.  Tags are anchored: TensorBoard takes them for regular expressions."""
    return Layout(
        category=[
            Category(
                title=category,
                chart=[
                    Chart(title=title, multiline=MultilineChartContent(tag=[f"^{re.escape(name)}$" for name in names]))
                    for title, names in charts.items()
                ],
            )
            for category, charts in CHARTS.items()
        ]
    )
