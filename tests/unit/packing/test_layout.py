from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.algorithms.packing import (
    FlopCost,
    joined,
    lay_out,
    lockstep_slowdown,
    pack,
    packing_fill,
    plan,
    tokens_trained,
    unpack,
)
from rlhpc.protocol.errors import PackingError
from rlhpc.protocol.types import PackedBatch, PackedMinibatch, TrainingSample

COST = FlopCost(linear=100.0, quadratic=1.0)


def sample(index: int, num_prompt: int, num_completion: int) -> TrainingSample:
    """A sample whose every value is recognisable."""
    length = num_prompt + num_completion
    loss_mask = np.arange(length) >= num_prompt
    marks = 1000 * index + np.arange(length)
    return TrainingSample(
        group_id=index,
        sample_index=0,
        token_ids=marks.astype(np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=np.where(loss_mask, -marks / 7, 0).astype(np.float32),
        advantages=np.where(loss_mask, index + 0.5, 0).astype(np.float32),
        versions=np.where(loss_mask, index, -1).astype(np.int32),
    )


def packed(samples: list[TrainingSample], token_budget: int = 64, num_ranks: int = 3) -> PackedMinibatch:
    return pack(samples, token_budget=token_budget, num_ranks=num_ranks, cost=COST)


shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


@given(shapes, st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_no_token_is_dropped_doubled_or_changed(lengths: list[tuple[int, int]], num_ranks: int) -> None:
    samples = [sample(i, *shape) for i, shape in enumerate(lengths)]
    segments = {int(row.token_ids[0]) // 1000: row for row in unpack(packed(samples, num_ranks=num_ranks))}
    assert sorted(segments) == list(range(len(samples)))
    for index, original in enumerate(samples):
        for name in ("token_ids", "loss_mask", "behaviour_logprobs", "advantages", "versions"):
            np.testing.assert_array_equal(getattr(segments[index], name), getattr(original, name))


@given(shapes, st.integers(1, 5))
@settings(deadline=None, derandomize=True)
def test_every_row_keeps_the_promises_of_its_type(lengths: list[tuple[int, int]], num_ranks: int) -> None:
    batch = packed([sample(i, *shape) for i, shape in enumerate(lengths)], num_ranks=num_ranks)
    assert len({len(rows) for rows in batch.ranks}) == 1
    assert batch.num_samples == len(lengths)
    assert batch.num_loss_tokens == sum(completion for _, completion in lengths)
    assert batch.num_loss_tokens == sum(row.loss_mask.sum() for row in batch.rows)
    for row in batch.rows:
        size = len(row.token_ids)
        assert size <= 64
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == size
        assert not row.loss_mask[row.cu_seqlens[:-1]].any()
        assert (row.position_ids[row.cu_seqlens[:-1]] == 0).all()
        assert (np.diff(row.position_ids) == 1).sum() == size - (len(row.cu_seqlens) - 1)
        assert (row.versions[~row.loss_mask] == -1).all()
        dtypes = [getattr(row, name).dtype for name in row.__slots__]
        assert dtypes == [np.int32, np.int32, np.int32, np.bool_, np.float32, np.float32, np.int32, np.float32]
        assert len(row.loss_weights) == len(row.cu_seqlens) - 1


def test_a_rank_without_samples_gets_rows_of_one_token_that_count_for_nothing() -> None:
    batch = packed([sample(0, 2, 3)], num_ranks=4)
    filler = [row for row in batch.rows if len(row.token_ids) == 1]
    assert len(filler) == 3
    assert not any(row.loss_mask.any() for row in filler)
    assert batch.num_loss_tokens == 3
    assert len(unpack(batch)) == 1
    assert packing_fill(batch, 64) == 5 / (4 * 64)


def test_packing_twice_gives_the_same_batch() -> None:
    samples = [sample(i, 3 + i % 5, 2 + (7 * i) % 23) for i in range(30)]
    first, second = packed(samples), packed(samples)
    for one, other in zip(unpack(first), unpack(second), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_versions_of_tokens_the_policy_did_not_choose_are_hidden() -> None:
    tool = sample(1, 2, 4)
    tool.loss_mask[3] = False
    row = packed([tool], num_ranks=1).ranks[0][0]
    assert row.versions.tolist() == [-1, -1, 1, -1, 1, 1]


def test_parts_joined_count_what_the_whole_counts_though_one_has_nothing_to_learn_from() -> None:
    masked, *others = [sample(index, 3, 4 + index) for index in range(5)]
    masked.loss_mask[:] = False
    whole, parts = packed([masked, *others]), [packed([masked]), packed(others[:1]), packed(others[1:])]
    one = joined(parts)
    assert (one.num_loss_tokens, one.num_samples) == (whole.num_loss_tokens, whole.num_samples) == (26, 5)
    assert len(one.rows) == sum(len(part.rows) for part in parts)
    assert joined([packed([masked]), packed([masked])]).num_loss_tokens == 1  # which losses are divided by


def test_the_tokens_of_a_batch_are_those_of_its_samples_in_however_many_parts_it_was_trained() -> None:
    """Schedules over tokens go by them, and what was trained in parts is repeated as a whole."""
    samples = [sample(0, 4, 6), sample(1, 5, 7)]
    whole, parts = packed(samples), joined([packed([each]) for each in samples])
    assert [tokens_trained(PackedBatch(0, 0, (each,), (0, 0))) for each in (whole, parts)] == [44, 44]


def test_an_oversize_sample_is_refused() -> None:
    with pytest.raises(PackingError, match="sample 1 has 70 tokens"):
        packed([sample(0, 5, 5), sample(1, 35, 35)])


def test_a_sample_whose_first_token_counts_is_refused() -> None:
    broken = sample(5, 1, 3)
    broken.loss_mask[0] = True
    with pytest.raises(ValueError, match="sample 0 of group 5: its first token"):
        packed([broken])


def test_a_sample_with_arrays_of_different_lengths_is_refused() -> None:
    whole = sample(5, 1, 3)
    broken = TrainingSample(5, 0, whole.token_ids, whole.loss_mask, whole.advantages[:2], *(whole.advantages,) * 2)
    with pytest.raises(ValueError, match="sample 0 of group 5: arrays of shapes"):
        packed([broken])


def test_a_sample_of_one_token_is_refused_since_it_would_look_like_a_filler() -> None:
    with pytest.raises(ValueError, match="a prompt token and a completion token"):
        packed([sample(5, 1, 0)])


def test_a_plan_for_other_samples_is_refused() -> None:
    planned = plan(np.array([4, 5]), token_budget=10, num_ranks=1, cost=COST)
    with pytest.raises(ValueError, match="a plan for 2 samples and 1 samples"):
        lay_out([sample(0, 2, 2)], planned)


def test_slowdown_is_one_for_even_rows_and_counts_the_wait_for_uneven_ones() -> None:
    even = np.array([10, 10])
    linear = FlopCost(1.0, 0.0)
    assert lockstep_slowdown(plan(even, token_budget=10, num_ranks=2, cost=linear), even, linear) == 1.0
    uneven = np.array([10, 5])
    planned = plan(uneven, token_budget=10, num_ranks=2, cost=linear)
    assert lockstep_slowdown(planned, uneven, linear) == pytest.approx(10 * 2 / 15)
