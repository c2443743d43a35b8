"""A bucket in spans is the bucket, whatever the sizes of its tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.protocol.types import TensorSpec
from rlhpc.weights.buckets import buckets_of, make_manifest
from rlhpc.weights.deltas import HostImage
from rlhpc.weights.memory import fill_block, filled_spans, num_spans

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
