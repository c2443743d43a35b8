"""The types of messages."""

from __future__ import annotations

import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.protocol import types
from tests import build


@pytest.mark.parametrize("name", ["Int32", "UInt8", "Float32", "Bool"])
def test_an_array_type_is_written_out(name: str) -> None:
    """NumPy 2.5 made NDArray[…] the name of an alias, and no message with one could be sent."""
    assert typing.get_origin(getattr(types, name)) is np.ndarray
    assert "NDArray" not in vars(types)


def with_rows(*rows: list[int]) -> types.Rollout:
    token_ids = np.concatenate([np.array(row, np.int32) for row in rows])
    starts = np.cumsum([len(row) for row in rows[:-1]], dtype=np.int32)
    return build.rollout(token_ids=token_ids, row_starts=starts, length=len(token_ids))


def test_rows_partition_a_completion() -> None:
    rollout = with_rows([1, 2, 3], [4], [5, 6])
    assert [rollout.token_ids[row].tolist() for row in rollout.rows] == [[1, 2, 3], [4], [5, 6]]
    assert not rollout.row_fault
    assert build.rollout(length=5).rows == [slice(0, 5)]


@pytest.mark.parametrize("starts", [[0], [6], [7], [3, 3], [4, 2], [-1]])
def test_a_row_without_a_token_is_a_fault(starts: list[int]) -> None:
    rollout = build.rollout(length=6, row_starts=np.array(starts, np.int32))
    assert "of 6, and each must have a token" in rollout.row_fault


def test_a_beginning_that_rows_share_counts_once() -> None:
    rollout = with_rows([1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6], [7], [1, 2, 3, 4])
    assert rollout.num_shared == [0, 2, 3, 0, 4]
    assert rollout.num_distinct_tokens == 7  # 1 2 3 4, 5, 6, 7
    assert build.rollout(length=9).num_distinct_tokens == 9


def test_a_version_in_the_middle_row_is_seen() -> None:
    versions = np.array([3, 3, 5, 3], np.int32)
    assert not replace(with_rows([1, 2], [3], [4]), versions=versions).is_of_one_version
    assert with_rows([1, 2], [3], [4]).is_of_one_version


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), min_size=1, max_size=8))
def test_distinct_tokens_are_the_beginnings_that_any_row_has(rows: list[list[int]]) -> None:
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert with_rows(*rows).num_distinct_tokens == len(beginnings)


def test_a_group_counts_the_prompt_of_every_row() -> None:
    group = build.group()
    plain = group.num_tokens
    first = replace(group.members[0], rollout=replace(group.members[0].rollout, row_starts=np.array([1, 2], np.int32)))
    branched = replace(group, members=(first, *group.members[1:]))
    assert branched.num_tokens == plain + 2 * len(group.prompt.token_ids)
