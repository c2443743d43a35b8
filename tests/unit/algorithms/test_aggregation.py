"""What counts alike in a loss, by enumeration over completions of different lengths."""

from __future__ import annotations

import numpy as np
import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms.estimators import grpo_no_std
from rlhpc.algorithms.packing import FlopCost, pack, unpack
from rlhpc.algorithms.samples import SampleMaker, loss_weights

COUNTS, PROMPTS, MAX_TOKENS = [2, 6, 0, 4, 8], [0, 0, 0, 1, 1], 16


def mean_by(how: str, losses: list[list[float]]) -> float:
    """The aggregate as its paper says it, over lists of losses of tokens."""
    used = [(losses[i], PROMPTS[i]) for i in range(len(COUNTS)) if COUNTS[i]]
    if how == "sequence":
        return float(np.mean([np.mean(values) for values, _ in used]))
    if how == "constant":
        return float(np.mean([sum(values) / MAX_TOKENS for values, _ in used]))
    if how == "prompt":
        prompts = {prompt for _, prompt in used}
        return float(np.mean([np.mean([x for values, p in used if p == prompt for x in values]) for prompt in prompts]))
    return float(np.mean([x for values, _ in used for x in values]))


@pytest.mark.parametrize("how", ["token", "sequence", "constant", "prompt"])
def test_the_weighted_sum_over_tokens_is_the_aggregate(how: str) -> None:
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=count).tolist() for count in COUNTS]
    weights = loss_weights(np.array(COUNTS, np.float64), np.array(PROMPTS), how, MAX_TOKENS)
    found = sum(weight * sum(values) for weight, values in zip(weights, losses, strict=True)) / sum(COUNTS)
    assert found == pytest.approx(mean_by(how, losses), rel=1e-12)
    assert weights[2] == 0 or how == "token"


def test_a_mean_over_tokens_changes_nothing() -> None:
    weights = loss_weights(np.array([3.0, 1.0]), np.array([0, 1]), "token", 8)
    assert weights.tolist() == [1, 1]


@pytest.mark.parametrize("how", ["token", "sequence", "constant", "prompt"])
def test_a_batch_without_loss_tokens_has_no_weights_and_no_nan(how: str) -> None:
    assert loss_weights(np.zeros(2), np.array([0, 1]), how, 8).tolist() == [0, 0]


def test_samples_carry_their_share() -> None:
    members = (scored(rollout(0, length=3), 1.0), scored(rollout(1, length=1), 0.0))
    [samples] = SampleMaker(grpo_no_std, aggregation="sequence").minibatches([group(*members)], 0)
    assert [sample.loss_weight for sample in samples] == pytest.approx([4 / 6, 4 / 2])


def test_the_share_of_a_sample_travels_with_its_segment() -> None:

    members = (scored(rollout(0, length=3), 1.0), scored(rollout(1, length=1), 0.0))
    [samples] = SampleMaker(grpo_no_std, aggregation="sequence").minibatches([group(*members)], 0)
    batch = pack(samples, token_budget=64, num_ranks=1, cost=FlopCost(1.0, 0.0))
    by_length = {int(row.loss_mask.sum()): float(row.loss_weights[0]) for row in unpack(batch)}
    assert by_length == pytest.approx({3: 4 / 6, 1: 4 / 2})
