from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.weights.checksums import NUM_LANES, ROW_BYTES, RunningChecksum, checksum64, lanes_by_halves, lanes_in_order

LONG = 3 * 8 * NUM_LANES + 24  # three rows of lanes and a bit


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


DATA = noise(LONG)
SUM = checksum64(DATA)
PINNED = 0xD22B4888A479858F  # of the bytes 0 to 99


def changed(index: int, value: int) -> torch.Tensor:
    copy = DATA.clone()
    copy[index] = value
    return copy


@settings(max_examples=40, deadline=None)
@given(st.integers(0, LONG - 1), st.integers(0, 7))
def test_a_flip_of_one_bit_shows(index: int, bit: int) -> None:
    assert checksum64(changed(index, int(DATA[index]) ^ (1 << bit))) != SUM


@settings(max_examples=40, deadline=None)
@given(st.integers(0, LONG // 8 - 1), st.integers(0, LONG // 8 - 1))
def test_a_swap_of_two_words_shows(first: int, second: int) -> None:
    words = DATA.view(torch.int64).clone()
    words[first], words[second] = DATA.view(torch.int64)[second], DATA.view(torch.int64)[first]
    assert (checksum64(words.view(torch.uint8)) != SUM) == (not torch.equal(words.view(torch.uint8), DATA))


def test_a_swap_of_two_rows_of_lanes_shows() -> None:
    row = 8 * NUM_LANES
    swapped = torch.cat([DATA[row : 2 * row], DATA[:row], DATA[2 * row :]])
    assert checksum64(swapped) != SUM


def test_a_shift_shows() -> None:
    assert checksum64(torch.roll(DATA, 8)) != SUM


def test_length_counts_even_when_zeros_are_appended() -> None:
    sums = {checksum64(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}
    assert len(sums) == 40


def test_where_the_bytes_lie_does_not_count() -> None:
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), DATA])[3:]
    assert checksum64(shifted) == SUM


def test_it_is_the_same_for_ever() -> None:
    """Both ends may run on different processors."""
    assert checksum64(torch.arange(100, dtype=torch.uint8)) == PINNED
    assert 0 <= SUM < 1 << 64


def test_only_flat_bytes_are_taken() -> None:
    with pytest.raises(ValueError, match="flat bytes"):
        checksum64(torch.zeros(4))
    with pytest.raises(ValueError, match="flat bytes"):
        checksum64(torch.zeros(8, dtype=torch.uint8)[::2])


@pytest.mark.parametrize(
    "num_words", [0, 1, NUM_LANES - 1, NUM_LANES, 2 * NUM_LANES + 7, 7 * NUM_LANES, 13 * NUM_LANES + 1]
)
def test_few_launches_give_the_same_lanes(num_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhpc.weights.checksums.MOST_ROWS", 4)
    words = torch.randint(-(2**62), 2**62, (num_words,), generator=torch.Generator().manual_seed(num_words))
    lanes = torch.randint(-(2**62), 2**62, (NUM_LANES,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(lanes_by_halves(words, lanes.clone()), lanes_in_order(words, lanes.clone()))


@pytest.mark.parametrize("num_bytes", [0, 5, ROW_BYTES, 3 * ROW_BYTES + 11])
def test_piece_by_piece_is_all_at_once(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    running = RunningChecksum(data.device)
    for piece in torch.split(data, ROW_BYTES):
        running.add(piece)
    assert running.value() == checksum64(data)


@pytest.mark.parametrize("num_rows", [8, 11])
def test_what_is_copied_in_the_same_pass_has_the_checksum_that_it_has_alone(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    data = torch.randint(0, 256, (num_rows * ROW_BYTES + 5,), dtype=torch.uint8, generator=generator)
    copies = torch.zeros_like(data)
    running = RunningChecksum(data.device)
    for piece, target in zip(torch.split(data, 8 * ROW_BYTES), torch.split(copies, 8 * ROW_BYTES), strict=True):
        running.copy(piece, target)
    assert torch.equal(copies, data)
    assert running.value() == checksum64(data)


def test_a_piece_after_one_that_fills_no_row_is_refused() -> None:
    running = RunningChecksum(torch.device("cpu"))
    running.add(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not a multiple"):
        running.add(torch.zeros(8, dtype=torch.uint8))


class CountLaunches(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.aten.add.Tensor, torch.ops.aten.add.out)
        return func(*args, **(kwargs or {}))


def test_a_bucket_takes_dozens_of_launches_and_not_hundreds() -> None:
    """256 MiB, on a device that has no memory."""
    words = torch.empty(512 * NUM_LANES, dtype=torch.int64, device="meta")
    lanes = torch.empty(NUM_LANES, dtype=torch.int64, device="meta")
    with CountLaunches() as few:
        lanes_by_halves(words, lanes)
    with CountLaunches() as many:
        lanes_in_order(words, lanes)
    assert many.num == 512
    assert few.num < 40
