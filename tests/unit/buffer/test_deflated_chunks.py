"""Chunks are what any zlib inflates to the shuffled bytes of their entries, whatever these are."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.segment_format import deflated_chunks
from rlhpc.buffer.segments import to_hdf5
from tests.unit.buffer.rollout_samples import make_group

KINDS = ("<i4", "<u4", "<i8", "<f4", "<f8", "u1", "<i1", "S16")


def columns(kind: str, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    drawn = np.frombuffer(rng.bytes(length * np.dtype(kind).itemsize), kind)
    small = rng.integers(0, 100, length).astype(kind)
    return [drawn, small, np.zeros(length, kind), np.ones(length).astype(kind)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "chunk"), [(1, 1), (5_000, 5_000), (5_000, 3_000), (70_000, 1 << 16)])
def test_a_column_is_inflated_to_its_shuffled_bytes_and_zeros_behind_them(kind: str, length: int, chunk: int) -> None:
    itemsize = np.dtype(kind).itemsize
    for values in columns(kind, length):
        found = [np.frombuffer(zlib.decompress(data), np.uint8) for data in deflated_chunks(values, chunk)]
        assert [len(each) for each in found] == [chunk * itemsize] * -(-length // chunk)
        whole = b"".join(each.reshape(itemsize, -1).T.tobytes() for each in found)
        assert whole[: values.nbytes] == values.tobytes()
        assert not any(whole[values.nbytes :])


def test_what_repeats_takes_little_room_and_what_does_not_hardly_more_than_it_is() -> None:
    for kind in KINDS:
        drawn, _, zeros, _ = columns(kind, 50_000)
        (of_zeros,), (of_drawn,) = deflated_chunks(zeros, 50_000), deflated_chunks(drawn, 50_000)
        assert len(of_zeros) < zeros.nbytes / 50
        assert len(of_drawn) < 1.06 * drawn.nbytes + 64  # zlib-ng's quickest level may add a twentieth


def test_versions_and_masks_of_a_segment_take_almost_no_room() -> None:
    groups = [ResolvedGroup(make_group(index, length=2000)) for index in range(8)]
    num_tokens = sum(len(member.rollout.token_ids) for each in groups for member in each.group.members)
    assert len(to_hdf5(groups, {})) < 8 * num_tokens + 40_000  # ids and log-probabilities alone are as many
