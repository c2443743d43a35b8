"""Pack the samples of one minibatch into rows for each rank: plan them (planner.py), then lay them end to end.

Input: TrainingSample.  Output: PackedMinibatch.  A pure function of its arguments: no clock, no randomness, no state,
so that the same samples in the same order give the same batch after a restart.  No token is dropped, doubled or padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhpc.packing.cost import FlopCost
from rlhpc.packing.planner import Plan, plan
from rlhpc.types import PackedBatch, PackedMicrobatch, PackedMinibatch, TrainingSample


def pack(
    samples: Sequence[TrainingSample],
    *,
    token_budget: int,
    num_ranks: int,
    cost: FlopCost,
) -> PackedMinibatch:
    """Plan a minibatch and lay it out.

    Raises PackingError if a sample is longer than the budget; ValueError if there is no sample or one is malformed.
    """
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int64)
    planned = plan(lengths, token_budget=token_budget, num_ranks=num_ranks, cost=cost)
    return lay_out(samples, planned)


def lay_out(samples: Sequence[TrainingSample], plan: Plan) -> PackedMinibatch:
    """Build every rank's micro-batches.

    Raises ValueError if the plan is for another number of samples, or if a sample has fewer than two tokens, arrays of
    different lengths, or a first token, which nothing precedes, that counts in the loss.
    """
    if len(plan.indices) != len(samples):
        raise ValueError(f"a plan for {len(plan.indices)} samples and {len(samples)} samples")
    for sample in samples:
        _check(sample)
    ranks = tuple(
        tuple(_row([samples[i] for i in plan.row(rank, m)]) for m in range(plan.num_microbatches))
        for rank in range(plan.num_ranks)
    )
    return PackedMinibatch(
        ranks=ranks,
        # At least 1, since losses are divided by it: the loss of a batch without any is 0.
        num_loss_tokens=max(1, sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)),
        num_samples=len(samples),
    )


def joined(parts: Sequence[PackedMinibatch]) -> PackedMinibatch:
    """Parts of one optimiser step as one: every rank's rows of all of them, one part after the other."""
    num_loss_tokens = sum(int(np.count_nonzero(row.loss_mask)) for part in parts for row in part.rows)
    return PackedMinibatch(
        ranks=tuple(
            tuple(row for rows in of_rank for row in rows) for of_rank in zip(*(p.ranks for p in parts), strict=True)
        ),
        num_loss_tokens=max(1, num_loss_tokens),  # not the sum of theirs: a part without any says 1
        num_samples=sum(part.num_samples for part in parts),
    )


def unpack(minibatch: PackedMinibatch) -> list[PackedMicrobatch]:
    """Return every segment as a row of its own, rank by rank, without filler rows."""
    return [
        _segment(row, index) for row in minibatch.rows if not _is_filler(row) for index in range(len(row.loss_weights))
    ]


def packing_fill(batch: PackedBatch, token_budget: int) -> float:
    """Share of the budget of all rows that holds tokens of samples, 0–1."""
    rows = batch.rows
    return sum(len(row.token_ids) for row in rows if not _is_filler(row)) / (len(rows) * token_budget)


def tokens_trained(batch: PackedBatch) -> int:
    """Tokens of the samples of all minibatches, prompts included, counted once for each pass over them."""
    sizes = [
        sum(len(row.token_ids) for row in minibatch.rows if not _is_filler(row)) for minibatch in batch.minibatches
    ]
    return sum(sizes[place] for place in batch.order)


def lockstep_slowdown(plan: Plan, lengths: NDArray[Any], cost: FlopCost) -> float:
    """Time of a batch whose ranks wait for each other at every micro-batch, over that of a perfectly balanced one; ≥ 1.

    Σ_m max_r cost(r, m) · num_ranks / Σ cost, lengths [N] being those that were planned.
    """
    row_costs = plan.row_sums(cost(lengths))
    return float(row_costs.max(axis=0).sum() * plan.num_ranks / row_costs.sum())


def batch_slowdown(minibatches: Sequence[PackedMinibatch], cost: FlopCost) -> float:
    """lockstep_slowdown of a batch that is laid out already: ranks wait for each other in every minibatch."""
    slowest = mean = 0.0
    for minibatch in minibatches:
        row_costs = np.array([[cost(np.diff(row.cu_seqlens)).sum() for row in rows] for rows in minibatch.ranks])
        slowest += float(row_costs.max(axis=0).sum())
        mean += float(row_costs.sum()) / len(row_costs)
    return slowest / mean


def _check(sample: TrainingSample) -> None:
    arrays = (sample.loss_mask, sample.behaviour_logprobs, sample.advantages, sample.versions)
    name = f"sample {sample.sample_index} of group {sample.group_id}"
    if any(array.shape != sample.token_ids.shape for array in arrays):
        raise ValueError(f"{name}: arrays of shapes {[a.shape for a in arrays]} for {sample.token_ids.shape} tokens")
    if len(sample.token_ids) < 2:
        raise ValueError(f"{name}: {len(sample.token_ids)} tokens; a prompt token and a completion token at least")
    if sample.loss_mask[0]:
        raise ValueError(f"{name}: its first token counts in the loss, but has no log-probability")


def _row(samples: list[TrainingSample]) -> PackedMicrobatch:
    if not samples:
        return _FILLER
    lengths = np.array([len(sample.token_ids) for sample in samples])
    borders = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples])
    versions = np.concatenate([sample.versions for sample in samples])
    return PackedMicrobatch(
        token_ids=np.concatenate([sample.token_ids for sample in samples]),
        position_ids=np.arange(borders[-1], dtype=np.int32) - np.repeat(borders[:-1], lengths),
        cu_seqlens=borders,
        loss_mask=loss_mask,
        behaviour_logprobs=np.concatenate([sample.behaviour_logprobs for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        versions=np.where(loss_mask, versions, np.int32(-1)),
        loss_weights=np.array([sample.loss_weight for sample in samples], np.float32),
    )


def _segment(row: PackedMicrobatch, index: int) -> PackedMicrobatch:
    start, end = (int(border) for border in row.cu_seqlens[index : index + 2])
    return PackedMicrobatch(
        token_ids=row.token_ids[start:end],
        position_ids=row.position_ids[start:end],
        cu_seqlens=np.array([0, end - start], np.int32),
        loss_mask=row.loss_mask[start:end],
        behaviour_logprobs=row.behaviour_logprobs[start:end],
        advantages=row.advantages[start:end],
        versions=row.versions[start:end],
        loss_weights=row.loss_weights[index : index + 1],
    )


def _is_filler(row: PackedMicrobatch) -> bool:
    """A sample has a prompt token and a completion token at least, so a row of one token holds none."""
    return len(row.token_ids) == 1


# The row of a rank that has fewer samples than micro-batches: its forward and backward take part, its gradient is 0.
_FILLER = PackedMicrobatch(
    token_ids=np.zeros(1, np.int32),
    position_ids=np.zeros(1, np.int32),
    cu_seqlens=np.array([0, 1], np.int32),
    loss_mask=np.zeros(1, np.bool_),
    behaviour_logprobs=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int32),
    loss_weights=np.ones(1, np.float32),
)
