"""Weights as what has changed, and buckets in spans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.protocol.errors import TornWeights
from rlhpc.protocol.types import TensorSpec
from rlhpc.weights.buckets import buckets_of, make_manifest
from rlhpc.weights.deltas import HEAD_BYTES, DeltaEncoder, HostImage, apply_delta, num_changes
from rlhpc.weights.memory import fill_block, filled_spans, num_spans

# ---------------------------------------------------------------------------------------------------------- delta codec
#
# Deltas are exact for any bits, and never longer than what they may be; no bytes make the decoder write elsewhere.


SHARE = 0.5
SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x3F80, 0x3F81, 0x0001, 0xFFFF]  # 0, ±∞, NaNs, 1 …


def block_of(words: list[int] | np.ndarray) -> torch.Tensor:
    """uint8, of a length that is a multiple of 16."""
    array = np.asarray(words, np.uint16)
    padded = np.concatenate([array, np.zeros(-len(array) % 8, np.uint16)])
    return torch.from_numpy(padded.view(np.uint8).copy())


def roundtrip(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Checks that encoder and decoder arrive at `new`; returns the delta."""
    image, held = old.clone(), old.clone()
    coded = DeltaEncoder(SHARE).encode(image, new)
    assert torch.equal(image, new)
    if coded is not None:
        assert coded.numel() % 16 == 0
        assert coded.numel() <= SHARE * new.numel() + HEAD_BYTES + 16
        apply_delta(coded, held)
        assert torch.equal(held, new)
        assert num_changes(coded) == int((old.numpy().view(np.uint16) != new.numpy().view(np.uint16)).sum())
    return coded


words = st.integers(0, 0xFFFF) | st.sampled_from(SPECIAL)


@settings(max_examples=200)
@given(
    st.lists(words, max_size=600),
    st.dictionaries(st.integers(0, 599), words | st.integers(-130, 130), max_size=40),
)
def test_whatever_changes_arrives_bit_for_bit(before: list[int], changes: dict[int, int]) -> None:
    after = list(before)
    for place, word in changes.items():
        if place < len(after):
            after[place] = word if word > 130 else (after[place] + word) % 0x10000
    roundtrip(block_of(before), block_of(after))


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_any_distance_between_changes_is_coded(gap: int) -> None:
    before = np.arange(gap + 400, dtype=np.uint64).astype(np.uint16)
    after = before.copy()
    after[[0, gap + 1, -1]] += 1
    coded = roundtrip(block_of(before), block_of(after))
    assert coded is not None
    assert coded.numel() <= HEAD_BYTES + 2 * 3 + (gap + 400) // 255 + 16


@pytest.mark.parametrize("step", [-32768, -128, -127, -1, 1, 127, 128, 32767, 32768])
@pytest.mark.parametrize("word", SPECIAL)
def test_any_step_from_any_number_is_exact(word: int, step: int) -> None:
    before = np.full(80, word, np.uint16)
    after = before.copy()
    after[7] = (word + step) % 0x10000
    assert roundtrip(block_of(before), block_of(after)) is not None


def test_nothing_changed_is_a_head() -> None:
    block = block_of(np.arange(10_000, dtype=np.uint64).astype(np.uint16))
    coded = roundtrip(block, block.clone())
    assert coded is not None
    assert coded.numel() == 32
    assert roundtrip(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)) is not None


def test_what_changes_everywhere_is_not_coded() -> None:
    before = np.zeros(4096, np.uint16)
    assert roundtrip(block_of(before), block_of(before + 1)) is None
    half = before.copy()
    half[::3] = 77
    assert roundtrip(block_of(before), block_of(half)) is None


def test_one_number_in_a_hundred_takes_less_than_two_percent() -> None:
    """A step of Adam at a usual rate moves one bfloat16 in a hundred by one unit in its last place."""
    rng = np.random.default_rng(0)
    before = torch.from_numpy(rng.normal(0, 0.02, 1 << 20).astype(np.float32)).bfloat16().view(torch.uint8)
    after = before.clone().view(torch.int16)
    after[torch.from_numpy(rng.random(1 << 20) < 0.01)] += 1
    coded = roundtrip(before, after.view(torch.uint8))
    assert coded is not None
    assert coded.numel() < 0.0125 * before.numel()


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 60))
def test_bytes_that_are_no_delta_leave_the_block_as_it_is(noise: bytes, places: int) -> None:
    """Bytes before and behind the block are looked at, too."""
    memory = torch.arange(256, dtype=torch.uint8).repeat(2)
    block, untouched = memory[128:256], memory.clone()
    heads = [b"", np.array([places, places, 0], np.int64).tobytes(), np.array([-1, 2**62, 2**62], np.int64).tobytes()]
    for head in heads:
        coded = np.frombuffer(head + noise, np.uint8).copy()
        try:
            apply_delta(torch.from_numpy(coded), block)
        except TornWeights:
            assert torch.equal(memory, untouched)
        else:
            assert torch.equal(memory[:128], untouched[:128])
            assert torch.equal(memory[256:], untouched[256:])
            memory.copy_(untouched)


@pytest.mark.parametrize(
    ("head", "streams"),
    [
        ((1, 1, 0), [65, 1]),  # the 66th of 64 numbers
        ((1, 1, 0), [64, 1]),  # the one behind the last
        ((1, 1, 1), [0, 0, 5, 2]),  # a value more than is asked for
        ((2, 2, 0), [0, 0, 1, 0]),  # a value less
        ((1, 1, 0), [0, 255]),  # no zigzag
        ((1, 2, 0), [0, 0, 1]),  # two places, one change
        ((1, 2, 0), [0, 255, 1]),  # ends between two changes
    ],
)
def test_streams_that_do_not_fit_are_refused_whole(head: tuple[int, int, int], streams: list[int]) -> None:
    data = np.array(head, np.int64).tobytes() + bytes(streams)
    coded = torch.from_numpy(np.frombuffer(data + bytes(-len(data) % 16), np.uint8).copy())
    block = torch.arange(128, dtype=torch.uint8)
    before = block.clone()
    with pytest.raises(TornWeights):
        apply_delta(coded, block)
    assert torch.equal(block, before)


# ---------------------------------------------------------------------------------------------------------------- spans
#
# A bucket in spans is the bucket, whatever the sizes of its tensors.


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.sampled_from(sorted(DTYPES))), min_size=1, max_size=8),
    st.integers(1, 12),
)
def test_spans_in_a_row_are_the_block(sizes: list[tuple[int, str]], sixteenths: int) -> None:
    specs = [TensorSpec(f"w{index}", dtype, (size,)) for index, (size, dtype) in enumerate(sizes)]
    weights = [(spec.name, torch.arange(1, spec.shape[0] + 1).to(DTYPES[spec.dtype])) for spec in specs]
    (bucket,) = buckets_of(make_manifest(0, 1, specs, 1 << 20))
    block, span_bytes = torch.zeros(bucket.num_bytes, dtype=torch.uint8), 16 * sixteenths
    fill_block(bucket, iter(weights), block)

    def take(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    spans = list(filled_spans(bucket, iter(weights), span_bytes, take))
    assert torch.equal(torch.cat(spans), block)
    assert [span.numel() for span in spans[:-1]] == [span_bytes] * (len(spans) - 1)
    assert len(spans) == num_spans(bucket, span_bytes)


def test_where_there_is_no_room_for_an_image_versions_are_sent_whole_and_it_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifest, tries = make_manifest(1, 1, [TensorSpec("w", "bfloat16", (64,))], 1 << 20), list[object]()

    def zeros(*size: object, **kwargs: object) -> torch.Tensor:
        tries.append(size)
        raise MemoryError

    monkeypatch.setattr(torch, "zeros", zeros)
    image = HostImage(full_every=10)
    assert not image.make_room(manifest)
    assert not image.make_room(manifest)
    assert len(tries) == 1
    assert image.offer(manifest) == 0
    assert caplog.text.count("sent whole") == 1
