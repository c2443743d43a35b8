"""Layout of tensors in buckets.

Input: TensorSpec.  Output: WeightManifest.  Pure: publisher and receivers compute the same layout from the same
manifest.  Inside a bucket every tensor starts at a multiple of 16 bytes; the contents of gaps are undefined.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhpc.protocol.errors import TornWeights
from rlhpc.protocol.types import AdapterForm, TensorSpec, WeightManifest

# -------------------------------------------------------------------------------------------------------------- buckets


ALIGNMENT_BYTES = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive tensors that are sent as one block of bytes."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # bytes from the start of the block, one per tensor
    num_bytes: int  # of the block, a multiple of 16


def tensor_bytes(spec: TensorSpec) -> int:
    """Bytes of a contiguous tensor.  Raises ValueError for a dtype that cannot be sent."""
    if spec.dtype not in DTYPE_BYTES:
        raise ValueError(f"{spec.name}: dtype {spec.dtype!r} cannot be sent; legal: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[spec.dtype] * math.prod(spec.shape)


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[int, ...]:
    """Return the index after the last tensor of every bucket.

    A bucket is filled in order up to `bucket_bytes`; a tensor larger than that has a bucket to itself.
    """
    ends: list[int] = []
    filled = 0
    for index, spec in enumerate(specs):
        size = _aligned(tensor_bytes(spec))
        if filled and filled + size > bucket_bytes:
            ends.append(index)
            filled = 0
        filled += size
    if specs:
        ends.append(len(specs))
    return tuple(ends)


def make_manifest(
    policy_version: int,
    epoch: int,
    specs: Sequence[TensorSpec],
    bucket_bytes: int,
    adapter: AdapterForm | None = None,
) -> WeightManifest:
    """Describe a broadcast of all `specs`, in their order.  adapter: what they mean where they are adapters."""
    return WeightManifest(policy_version, epoch, tuple(specs), plan_buckets(specs, bucket_bytes), adapter)


def buckets_of(manifest: WeightManifest) -> tuple[Bucket, ...]:
    """Lay out every bucket of a manifest.  Raises ValueError if its bucket ends do not cover its tensors."""
    ends = manifest.bucket_ends
    if tuple(sorted(set(ends))) != ends or (ends[-1] if ends else 0) != len(manifest.tensors) or 0 in ends:
        raise ValueError(f"bucket ends {ends} do not divide {len(manifest.tensors)} tensors")
    starts = (0, *ends)[:-1]
    return tuple(_lay_out(manifest.tensors[start:end]) for start, end in zip(starts, ends, strict=True))


def manifest_bytes(manifest: WeightManifest) -> int:
    """Bytes of all blocks together."""
    return sum(bucket.num_bytes for bucket in buckets_of(manifest))


def layout_digest(manifest: WeightManifest) -> int:
    """63 bits that differ when names, dtypes, shapes, order, buckets or the form differ; the version does not count."""
    text = repr([(spec.name, spec.dtype, tuple(spec.shape)) for spec in manifest.tensors]) + repr(manifest.bucket_ends)
    if (form := manifest.adapter) is not None:  # as many adapters of another scale are other weights
        text += repr((form.rank, form.scale, form.base))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _lay_out(tensors: tuple[TensorSpec, ...]) -> Bucket:
    offsets: list[int] = []
    position = 0
    for spec in tensors:
        offsets.append(position)
        position += _aligned(tensor_bytes(spec))
    return Bucket(tensors, tuple(offsets), position)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# ----------------------------------------------------------------------------------------------------- broadcast header
#
# The header that receivers check before any tensor is used.
#
# Input: a WeightManifest.  Output: a few int64 that are sent before the buckets.


FORMAT = 0x726C6870630002  # "rlhpc" and a format number
SIGN_SHIFT = 1 << 63  # checksums are unsigned, int64 tensors are not
FIELDS = ("format", "epoch", "policy version", "number of bytes", "number of buckets", "layout digest")


def header_of(manifest: WeightManifest) -> list[int]:
    """Header of a broadcast: an int64 per field of FIELDS."""
    return [
        FORMAT,
        manifest.epoch,
        manifest.policy_version,
        manifest_bytes(manifest),
        len(manifest.bucket_ends),
        layout_digest(manifest),
    ]


def identity_of(manifest: WeightManifest, sums: list[int]) -> int:
    """63 bits, never 0, that identify the bytes of a whole version: its layout and the checksums of its buckets."""
    text = repr((layout_digest(manifest), sums))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1 | 1


def check_header(manifest: WeightManifest, received: list[int]) -> None:
    """Raises TornWeights naming the first field in which the sender's header differs from the manifest's."""
    for field, want, got in zip(FIELDS, header_of(manifest), received, strict=True):
        if want != got:
            name = f"version {manifest.policy_version}, epoch {manifest.epoch}"
            raise TornWeights(f"{name}: the sender's {field} is {got}, not {want}")


def check_sums(manifest: WeightManifest, published: list[int], computed: list[int]) -> None:
    """Raises TornWeights naming the first bucket whose checksum differs."""
    for index, (want, got) in enumerate(zip(published, computed, strict=True)):
        if want != got:
            raise TornWeights(
                f"version {manifest.policy_version}, epoch {manifest.epoch}: bucket {index} of {len(published)} has "
                f"checksum {got:016x}, not {want:016x}"
            )
