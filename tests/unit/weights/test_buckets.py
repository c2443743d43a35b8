from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.protocol.types import TensorSpec, WeightManifest
from rlhpc.weights.buckets import (
    ALIGNMENT_BYTES,
    buckets_of,
    layout_digest,
    make_manifest,
    manifest_bytes,
    plan_buckets,
    tensor_bytes,
)

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


def test_a_bucket_is_filled_before_the_next_is_begun() -> None:
    assert plan_buckets([spec(4), spec(4), spec(4)], 32) == (2, 3)


def test_a_tensor_larger_than_a_bucket_has_one_to_itself() -> None:
    assert plan_buckets([spec(4), spec(1000), spec(4)], 64) == (1, 2, 3)


def test_no_tensors_need_no_bucket() -> None:
    assert plan_buckets([], 64) == ()
    assert manifest_bytes(make_manifest(0, 0, [], 64)) == 0


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
