"""Buckets, and the checksums of what is sent and of what is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.protocol.types import AdapterForm, HeldChecksum, TensorSpec, WeightManifest
from rlhpc.weights.buckets import (
    ALIGNMENT_BYTES,
    buckets_of,
    layout_digest,
    make_manifest,
    plan_buckets,
    tensor_bytes,
)
from rlhpc.weights.checksums import (
    NUM_LANES,
    ROW_BYTES,
    RunningChecksum,
    checksum64,
    checksum_of,
    joined,
    lanes_by_halves,
    lanes_in_order,
)

# -------------------------------------------------------------------------------------------------------------- buckets


SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text("abc.", min_size=1, max_size=5),
        st.sampled_from(["float32", "bfloat16", "float16"]),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
    ),
    max_size=20,
)


def spec(num_floats: int, name: str = "w") -> TensorSpec:
    return TensorSpec(name, "float32", (num_floats,))


@given(SPECS, st.integers(16, 400))
def test_buckets_hold_every_tensor_once_in_order_and_aligned(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = buckets_of(make_manifest(3, 1, specs, bucket_bytes))
    assert [tensor for bucket in buckets for tensor in bucket.tensors] == specs
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.tensors) == 1
        assert bucket.num_bytes % ALIGNMENT_BYTES == 0
        ends = [offset + tensor_bytes(t) for t, offset in zip(bucket.tensors, bucket.offsets, strict=True)]
        assert all(offset % ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
        assert all(end <= start for end, start in zip(ends, [*bucket.offsets[1:], bucket.num_bytes], strict=True))


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "ends"),
    [([4, 4, 4], 32, (2, 3)), ([4, 1000, 4], 64, (1, 2, 3)), ([], 64, ())],
    ids=["filled before the next", "one to itself", "none"],
)
def test_buckets_end_where_they_are_full(sizes: list[int], bucket_bytes: int, ends: tuple[int, ...]) -> None:
    assert plan_buckets([spec(size) for size in sizes], bucket_bytes) == ends


def test_a_dtype_that_does_not_travel_is_named() -> None:
    with pytest.raises(ValueError, match=r"w: dtype 'int8'.*float32"):
        plan_buckets([TensorSpec("w", "int8", (2,))], 64)


@pytest.mark.parametrize("ends", [(), (1,), (2, 1), (1, 1, 2), (0, 2), (3,)])
def test_bucket_ends_that_do_not_cover_the_tensors_are_refused(ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bucket ends"):
        buckets_of(WeightManifest(0, 0, (spec(1), spec(2)), ends))


def test_the_digest_tells_layouts_apart_but_not_versions() -> None:
    specs = [spec(4, "a"), spec(8, "b")]
    digest = layout_digest(make_manifest(1, 1, specs, 64))
    assert digest == layout_digest(make_manifest(2, 5, specs, 64))
    assert digest != layout_digest(make_manifest(1, 1, specs[::-1], 64))
    assert digest != layout_digest(make_manifest(1, 1, specs, 16))
    assert digest != layout_digest(make_manifest(1, 1, [spec(4, "a"), TensorSpec("b", "bfloat16", (8,))], 64))
    assert 0 <= digest < 1 << 63


@pytest.mark.parametrize("other", [None, AdapterForm(4, 0.5, "b"), AdapterForm(8, 1.0, "b"), AdapterForm(8, 0.5, "c")])
def test_the_digest_tells_what_the_same_tensors_mean(other: AdapterForm | None) -> None:
    specs, form = [spec(4, "a.lora_A.weight")], AdapterForm(8, 0.5, "b")
    digest = layout_digest(make_manifest(1, 1, specs, 64, form))
    assert digest == layout_digest(make_manifest(2, 1, specs, 64, form))
    assert digest != layout_digest(make_manifest(1, 1, specs, 64, other))


# ------------------------------------------------------------------------------------------------------------- checksum


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


def test_order_and_length_show_and_where_the_bytes_lie_does_not() -> None:
    row = 8 * NUM_LANES
    assert checksum64(torch.cat([DATA[row : 2 * row], DATA[:row], DATA[2 * row :]])) != SUM
    assert checksum64(torch.roll(DATA, 8)) != SUM
    assert len({checksum64(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}) == 40
    assert checksum64(torch.cat([torch.zeros(3, dtype=torch.uint8), DATA])[3:]) == SUM


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


# -------------------------------------------------------------------------------------------------------- held checksum
#
# The checksum of what an engine holds: every bit counts, the order of tensors and their strides do not.


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
