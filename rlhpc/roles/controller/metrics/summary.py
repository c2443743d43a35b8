"""The metrics of a whole run, written once at its end.

Input: the counters and the sealed segments.  Output: summary.json.  The reward curve is read from the segments and
nowhere else: a rollout counts for the version under which its group was admitted, whether or not it was trained on.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.buffer.segment_files import segments_that_are_left
from rlhpc.buffer.segment_reader import read_columns
from rlhpc.errors import SegmentError
from rlhpc.files import write_atomically
from rlhpc.ownership import Fence
from rlhpc.patience import patiently
from rlhpc.roles.controller.saved_state import Totals
from rlhpc.run_layout import RunLayout
from rlhpc.types import Verdict

log = logging.getLogger("rlhpc.summary")
_COLUMNS = (
    *("groups/group_id", "groups/admitted_version", "groups/group_size"),
    *("rollouts/group_id", "rollouts/reward", "rollouts/verdict"),
)


def reward_by_version(rollouts: Path, group_size: int) -> dict[int, tuple[float, int]]:
    """Return {admitted version: (mean reward, number of rollouts)} over all groups of which every member was scored.

    Dropped and leftover groups count as well: without zero-variance groups the curve would show which groups are
    trained on and not what the policy can do.  What cannot be read any more is left out, with a warning.
    """
    sums: dict[int, float] = defaultdict(float)
    counts: dict[int, int] = defaultdict(int)
    for path in segments_that_are_left(rollouts, partial(log.warning, "reward_by_version lacks a segment: %s")):
        try:
            columns = patiently(partial(read_columns, path, _COLUMNS), path)
        except SegmentError as error:  # of a run that has done all its steps: no other attempt could do more
            log.warning("reward_by_version lacks the groups of a segment: %s", error)
            continue
        is_judged = columns["rollouts/verdict"] != Verdict.VERIFIER_ERROR.value
        owner, reward = columns["rollouts/group_id"][is_judged], columns["rollouts/reward"][is_judged]
        sizes = np.maximum(columns["groups/group_size"], group_size)
        for group_id, version, size in zip(
            columns["groups/group_id"], columns["groups/admitted_version"].tolist(), sizes.tolist(), strict=True
        ):
            own = reward[owner == group_id]
            if len(own) == size:
                sums[version] += float(own.sum())
                counts[version] += size
    return {version: (sums[version] / counts[version], counts[version]) for version in sorted(sums)}


def tenth_means(curve: dict[int, tuple[float, int]], num_versions: int) -> tuple[float | None, float | None]:
    """Mean reward over the rollouts of the first and of the last tenth of versions; None if there are none."""
    tenth = max(1, num_versions // 10)
    return _mean(curve, 0, tenth), _mean(curve, num_versions - tenth, num_versions)


def summarise(
    layout: RunLayout, totals: Totals, staleness_bound: int, group_size: int, fence: Fence | None = None
) -> dict[str, Any]:
    """Write summary.json and return its content.  Raises OwnershipLost: only the owner may declare a run complete."""
    curve = reward_by_version(layout.rollouts, group_size)
    # A skipped step makes no version.
    first, last = tenth_means(curve, max(1, totals.steps - totals.skipped_steps))
    seconds = totals.training_s or 1.0
    summary = {
        "steps": totals.steps,
        "skipped_steps": totals.skipped_steps,
        "rollouts_trained": totals.rollouts_trained,
        "reward_first_tenth": first,
        "reward_last_tenth": last,
        "staleness_max": totals.staleness_max,
        "staleness_bound": staleness_bound,
        "rollouts_spanning_update": totals.rollouts_spanning_update / max(1, totals.rollouts_trained),
        "packing_fill": totals.packing_fill,
        "generator_tokens_per_s": totals.tokens_generated / seconds,
        "trainer_tokens_per_s": totals.tokens_trained / seconds,
        "generator_idle_ratio": totals.generator_idle_ratio,
        "trainer_idle_ratio": totals.trainer_idle_ratio,
        "groups_without_spread": totals.groups_without_spread,
        "groups_dropped": totals.groups_dropped,
        "leases_regranted": totals.leases_regranted,
        "tokens_lost": totals.tokens_lost,
        "training_s": totals.training_s,
        "wall_s": totals.wall_s,
        "reward_by_version": [[version, mean, count] for version, (mean, count) in curve.items()],
    }
    content = json.dumps(summary, indent=1).encode()
    if fence is not None:
        fence.write(layout.summary, content)
    else:
        write_atomically(layout.summary, content)
    return summary


def _mean(curve: dict[int, tuple[float, int]], start: int, end: int) -> float | None:
    inside = [(mean, count) for version, (mean, count) in curve.items() if start <= version < end]
    total = sum(count for _, count in inside)
    return sum(mean * count for mean, count in inside) / total if total else None
