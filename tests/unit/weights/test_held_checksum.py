"""The checksum of what an engine holds: every bit counts, the order of tensors and their strides do not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.protocol.types import HeldChecksum
from rlhpc.weights.checksums import checksum_of, joined

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


def tensor_of(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 50).to(dtype)


@given(st.integers(0, 2**32), st.sampled_from(DTYPES), st.integers(1, 41), st.data())
def test_any_bit_changes_it(seed: int, dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = tensor_of(seed, (size,), dtype)
    before, counts = checksum_of([tensor])
    memory = tensor.view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * memory.numel() - 1))
    memory[bit // 8] ^= 1 << bit % 8
    assert checksum_of([tensor])[0] != before
    assert counts == {str(dtype).removeprefix("torch."): size}


def test_neither_the_order_of_tensors_nor_that_of_their_dimensions_counts() -> None:
    tensors = [tensor_of(1, (6, 4)), tensor_of(2, (5, 2, 8)), tensor_of(3, (3,))]
    expected = checksum_of(tensors)
    assert checksum_of(reversed(tensors)) == expected
    assert checksum_of([tensors[0].t(), tensors[1].permute(2, 0, 1), tensors[2]]) == expected
    assert checksum_of([tensor_of(1, (6, 5))[:, :4].copy_(tensors[0]), *tensors[1:]])[1] == expected[1]


@pytest.mark.parametrize("start", range(5))
def test_where_in_memory_a_tensor_begins_does_not_count(start: int) -> None:
    values = tensor_of(4, (37,), torch.bfloat16)
    memory = torch.empty(64, dtype=torch.bfloat16)
    memory[start : start + 37] = values
    assert checksum_of([memory[start : start + 37]]) == checksum_of([values])


def test_the_sums_of_workers_are_added_and_their_layout_told() -> None:
    one, two = [tensor_of(5, (8,))], [tensor_of(6, (16,)), tensor_of(7, (4,), torch.bfloat16)]
    whole = joined([checksum_of([*one, *two])], "cpu")
    shared = joined([checksum_of(one), checksum_of(two)], "cpu")
    assert shared.value == whole.value
    assert shared.layout == "cpu, 2 workers, 4 bfloat16, 24 float32"
    assert joined([checksum_of([])], "cuda") == HeldChecksum(0, "cuda, 1 workers, ")
