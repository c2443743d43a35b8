"""The header that receivers check before any tensor is used.

Input: a WeightManifest.  Output: a few int64 that are sent before the buckets.
"""

from __future__ import annotations

import hashlib

from rlhpc.errors import TornWeights
from rlhpc.types import WeightManifest
from rlhpc.weights.buckets import layout_digest, manifest_bytes

FORMAT = 0x726C6870630002  # "rlhpc" and a format number
SIGN_SHIFT = 1 << 63  # checksums are unsigned, int64 tensors are not
FIELDS = ("format", "epoch", "policy version", "number of bytes", "number of buckets", "layout digest")


def header_of(manifest: WeightManifest) -> list[int]:
    """One int64 per field of FIELDS."""
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
