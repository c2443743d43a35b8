"""Which samples an optimiser step sees, and in which order."""

from __future__ import annotations

import pytest
from group_builder import group, rollout, scored

from rlhpc.algorithms.estimators import grpo_no_std
from rlhpc.algorithms.samples import SampleMaker, optimiser_steps, split

SEED = (7, 3)  # of the run, and the step


@pytest.mark.parametrize(("size", "parts"), [(8, 4), (10, 4), (5, 5), (64, 3), (3, 1)])
def test_every_sample_is_in_one_minibatch_and_their_sizes_differ_by_one(size: int, parts: int) -> None:
    found = split(range(size), parts, SEED)
    assert sorted(sample for part in found for sample in part) == list(range(size))
    assert len(found) == parts
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert all(part == sorted(part) for part in found)


def test_they_are_dealt_out_at_random_and_alike_when_a_step_is_repeated() -> None:
    found = split(range(64), 4, SEED)
    assert found == split(range(64), 4, SEED)
    assert found != split(range(64), 4, (7, 4))
    assert found != split(range(64), 4, (8, 3))
    assert found[0] != list(range(16))


def test_one_minibatch_is_the_batch_as_it_is() -> None:
    assert split([5, 3, 9], 1, SEED) == [[5, 3, 9]]
    assert optimiser_steps(1, 1, SEED) == (0,)


def test_every_epoch_goes_through_all_of_them_in_another_order() -> None:
    order = optimiser_steps(8, 3, SEED)
    assert order == optimiser_steps(8, 3, SEED)
    epochs = [order[start : start + 8] for start in (0, 8, 16)]
    assert epochs[0] == tuple(range(8))
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len(set(epochs)) == 3


def test_advantages_are_those_of_the_batch_and_shares_those_of_the_minibatch() -> None:
    members = [scored(rollout(i, length=i + 1), float(i % 2)) for i in range(4)]
    maker = SampleMaker(grpo_no_std, aggregation="sequence", num_minibatches=2)
    parts = maker.minibatches([group(*members)], step=5)
    assert sorted(sample.sample_index for part in parts for sample in part) == [0, 1, 2, 3]
    for part in parts:
        total = sum(int(sample.loss_mask.sum()) for sample in part)
        for sample in part:
            assert sample.advantages[-1] == (0.5 if sample.sample_index % 2 else -0.5)
            assert sample.loss_weight == pytest.approx(total / (2 * (sample.sample_index + 1)))
