"""Samples into the batch of one optimiser step.

Input: TrainingSample.  Output: PackedBatch.  A pure function of its arguments: no clock, no randomness, no state, so
that the same samples in the same order give the same batch after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhpc.packing.cost import FlopCost
from rlhpc.packing.layout import lay_out
from rlhpc.packing.planner import plan
from rlhpc.types import PackedBatch, TrainingSample


def pack(
    samples: Sequence[TrainingSample],
    *,
    token_budget: int,
    num_ranks: int,
    cost: FlopCost,
    step: int,
    policy_version: int,
) -> PackedBatch:
    """Plan and lay out.

    Raises PackingError if a sample is longer than the budget; ValueError if there is no sample or one is malformed.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    planned = plan(lengths, token_budget=token_budget, num_ranks=num_ranks, cost=cost)
    return lay_out(samples, planned, step=step, policy_version=policy_version)
