"""Rows cut over context ranks: the plan, the attention it leads to, and the way there and back, without processes."""

import numpy as np
import pytest
import torch

from rlhpc.config.tables import TrainerConfig
from rlhpc.models.shape import ParallelLayout
from rlhpc.protocol.errors import ConfigError
from rlhpc.training.megatron.attention import (
    LocalRow,
    PackedCoreAttention,
    RowPlan,
    chunk_attention,
    core_attention,
    held_tokens,
    row_order,
)
from tests.unit.training.megatron.policy_ranks import mixed_row

CPU = torch.device("cpu")
SCALING = 0.3
# Lengths of the segments of rows that 1, 2, 3 and 4 ranks cut in equal chunks (of 24 tokens: 24, 6, 4, 3).
ROWS = [(24,), (1,) * 24, (6, 6, 6, 6), (5, 17, 1, 1), (3, 3, 3, 3, 3, 3, 3, 3), (1, 22, 1), (2, 9, 13)]


def row_layout(*, context: int = 1, tensor: int = 1) -> ParallelLayout:
    return ParallelLayout(
        tensor=tensor, context=context, data=1, pipeline=1, chunks=1, expert=1, is_sequence_parallel=tensor > 1
    )


def dense_attention(query, key, value, borders):
    """By a mask of the whole row, which the trainer never makes."""
    segment = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
    allowed = torch.from_numpy(segment[:, None] == segment[None]).tril()
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALING
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_together_attend_as_one_mask_would_have_it(lengths, num_ranks):
    borders = np.cumsum((0, *lengths), dtype=np.int32)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(24, 4, 8, generator=generator)
    keys_and_values = torch.randn(24, 2, 2, 8, generator=generator)
    found = torch.zeros_like(query)
    for rank in range(num_ranks):
        plan = RowPlan.of(borders, num_ranks, rank, CPU)
        tokens = torch.from_numpy(held_tokens(24, num_ranks, rank))
        parts = zip(query[tokens].chunk(2), plan.chunks, strict=True)
        found[tokens] += torch.cat([chunk_attention(part, keys_and_values, chunk, SCALING) for part, chunk in parts])
    expected = dense_attention(query, *keys_and_values.unbind(1), borders)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_chunk_continues_at_most_one_segment_and_keeps_the_borders_of_the_others():
    early, late = RowPlan.of(np.array([0, 5, 22, 23, 24], dtype=np.int32), 2, 0, CPU).chunks
    assert (early.key_start, early.key_end, early.num_continued) == (0, 6, 0)
    assert early.query_borders.tolist() == early.key_borders.tolist() == [0, 5, 6]
    assert (late.key_start, late.key_end, late.num_continued) == (5, 24, 4)
    assert late.query_borders.tolist() == [0, 4, 5, 6]
    assert late.key_borders.tolist() == [0, 17, 18, 19]
    assert (late.max_queries, late.max_keys) == (4, 17)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_laid_end_to_end_are_brought_back_into_the_order_of_the_row(num_ranks):
    parts = [held_tokens(24, num_ranks, rank) for rank in range(num_ranks)]
    assert np.concatenate(parts)[row_order(24, num_ranks, CPU).numpy()].tolist() == list(range(24))


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_every_wanted_token_is_predicted_once_by_the_token_before_it(context, tensor):
    row = mixed_row(3, 100, (5, 1, 9, 2))
    wanted = row.loss_mask & (np.arange(17) % 3 > 0)
    predicted = []
    for rank in range(context):
        local = LocalRow.of(row, wanted, row_layout(context=context, tensor=tensor), rank, CPU)
        num_padded = context * len(local.token_ids)
        assert num_padded % row_layout(context=context, tensor=tensor).row_multiple == 0
        tokens = held_tokens(num_padded, context, rank)
        for predictor, target in zip(local.predictors.tolist(), local.targets.tolist(), strict=True):
            token = tokens[predictor] + 1
            assert row.token_ids[token] == target
            assert row.token_ids[token - 1] == local.token_ids[predictor]
            assert row.position_ids[token - 1] == local.position_ids[predictor]
            predicted.append(int(token))
    assert sorted(predicted) == np.flatnonzero(wanted).tolist()


def test_padding_is_a_segment_of_its_own():
    row = mixed_row(3, 100, (5, 2))
    local = LocalRow.of(row, row.loss_mask, row_layout(tensor=4), 0, CPU)
    assert local.packed.borders.tolist() == [0, 5, 7, 8]
    assert local.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]


def test_transformer_engine_is_refused_where_it_is_not_installed():
    assert core_attention(TrainerConfig(token_budget=64)) is PackedCoreAttention
    with pytest.raises(ConfigError, match=r"trainer\.transformer_engine"):
        core_attention(TrainerConfig(token_budget=64, transformer_engine=True))
