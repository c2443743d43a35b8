"""Lay tensors into a block of bytes and read them back as views.

Input: (name, tensor) in manifest order.  Output: a flat uint8 buffer, filled bucket by bucket; the reverse copies
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlhpc.types import TensorSpec
from rlhpc.weights.buckets import Bucket, tensor_bytes

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def fill_block(bucket: Bucket, weights: Iterator[tuple[str, Tensor]], block: Tensor) -> None:
    """Copy the bucket's tensors, drawn from `weights`, into uint8 [bucket.num_bytes] on any device.

    Raises ValueError if `weights` yields anything but the bucket's tensors in their order (a bug of the exporter).
    """
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        _, tensor = next_weight(spec, weights)
        size = tensor_bytes(spec)
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        block[offset : offset + size].copy_(flat)


def filled_spans(
    bucket: Bucket, weights: Iterator[tuple[str, Tensor]], span_bytes: int, take: Callable[[int], Tensor]
) -> Iterator[Tensor]:
    """Yield the bucket's block in spans of `span_bytes` (the last is shorter; an empty bucket has one) as they fill.

    span_bytes: a multiple of 16.  take: returns memory for a span of that size.  Raises ValueError as fill_block does.
    """
    start, span = 0, take(min(span_bytes, bucket.num_bytes))
    for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        _, tensor = next_weight(spec, weights)
        flat, position = tensor.detach().contiguous().view(-1).view(torch.uint8), offset
        while flat.numel():
            if position >= start + span.numel():
                yield span
                start += span.numel()
                span = take(min(span_bytes, bucket.num_bytes - start))
            piece = flat[: start + span.numel() - position]
            span[position - start : position - start + piece.numel()].copy_(piece)
            flat, position = flat[piece.numel() :], position + piece.numel()
    yield span


def num_spans(bucket: Bucket, span_bytes: int) -> int:
    """How many spans filled_spans yields."""
    return max(1, -(-bucket.num_bytes // span_bytes))


def next_weight(spec: TensorSpec, weights: Iterator[tuple[str, Tensor]]) -> tuple[str, Tensor]:
    """Draw one tensor.  Raises ValueError if it is not the one specified."""
    name, tensor = next(weights, ("nothing more", None))
    if tensor is None or not is_as_specified(spec, name, tensor):
        found = name if tensor is None else f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        raise ValueError(f"the manifest expects {spec.name} {spec.dtype} {tuple(spec.shape)}, weights yielded {found}")
    return name, tensor


def tensors_in_block(bucket: Bucket, block: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the bucket's tensors in uint8 [bucket.num_bytes]; they keep the block alive."""
    return [
        (spec.name, block[offset : offset + tensor_bytes(spec)].view(DTYPES[spec.dtype]).view(spec.shape))
        for spec, offset in zip(bucket.tensors, bucket.offsets, strict=True)
    ]


def is_as_specified(spec: TensorSpec, name: str, tensor: Tensor) -> bool:
    """True if name, dtype and shape are the spec's."""
    return name == spec.name and tensor.dtype == DTYPES.get(spec.dtype) and tuple(tensor.shape) == tuple(spec.shape)


def exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Exhaust the iterator, so that a collective export on the trainer's side ends on all its ranks."""
    for _ in weights:
        pass
