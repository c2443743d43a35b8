"""Arrays of long runs travel as their runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.transport.codec import FREE_BYTES, MAX_GROWTH, MAX_RUNS, Allowance, expand_runs, find_runs


@given(
    st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(2, 900)), min_size=1, max_size=MAX_RUNS),
    st.sampled_from(["<i4", "<i8"]),
)
def test_what_is_found_expands_to_the_same_array(runs: list[tuple[int, int]], code: str) -> None:
    array = np.repeat(np.array([value for value, _ in runs], code), [length for _, length in runs])
    found = find_runs(array)
    if array.nbytes < 1024:
        assert found is None
        return
    assert found is not None
    again = expand_runs(array.dtype, [code, len(array), *found], Allowance(0))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


def test_a_mask_is_one_run() -> None:
    mask = np.ones(4096, np.bool_)
    assert find_runs(mask) == ([True], [4096])
    assert expand_runs(mask.dtype, ["|b1", 4096, [True], [4096]], Allowance(0)).all()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4096, dtype=np.int32),
        np.zeros(4096, np.float32),
        np.zeros((64, 64), np.int32),
        np.zeros(8, np.int32),
        np.r_[[0, 0], np.arange(4096), [1, 1]].astype(np.int32),
    ],
    ids=["token ids", "floats", "two dimensions", "short", "runs at both ends only"],
)
def test_other_arrays_have_none(array: np.ndarray) -> None:
    assert find_runs(array) is None


@pytest.mark.parametrize(
    "wire",
    [
        ["<i8", 4096, [1], [4096]],
        ["<i4", 4096, [1], [4095]],
        ["<i4", 4096, [1, 2], [4096]],
        ["<i4", 4096, [1, 2], [4097, -1]],
        ["<i4", 4096, [1.0], [4096]],
        ["<i4", 4096, [True], [4096]],
        ["<i4", 4096, [], []],
        ["<i4", 8, [1], [8]],
        ["<i4", 1 << 40, [1], [1 << 40]],
        ["<i4", 4096, [1], [4096.0]],
        ["<i4", 4096, list(range(17)), [*([1] * 16), 4080]],
    ],
)
def test_anything_else_is_refused(wire: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"dtype|run"):
        expand_runs(np.dtype(np.int32), wire, Allowance(0))


def test_a_value_that_the_dtype_has_not_is_refused() -> None:
    with pytest.raises(OverflowError):
        expand_runs(np.dtype(np.int32), ["<i4", 4096, [2**31], [4096]], Allowance(0))


def test_the_runs_of_a_message_together_grow_to_no_more_than_its_bytes_allow() -> None:
    quarter, num_sent = FREE_BYTES // 16, 1_000  # elements of a quarter of what any message may grow to
    allowance = Allowance(num_sent)
    for _ in range(4):
        expand_runs(np.dtype(np.int32), ["<i4", quarter, [1], [quarter]], allowance)
    left = MAX_GROWTH * num_sent // 4
    with pytest.raises(ValueError, match="too many for the message"):
        expand_runs(np.dtype(np.int32), ["<i4", left + 1, [1], [left + 1]], allowance)
    expand_runs(np.dtype(np.int32), ["<i4", left, [1], [left]], allowance)
