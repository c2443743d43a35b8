"""The version that was sent last, in host memory of the trainer: the base of the next delta.

Input: manifests and checksums of sent versions; output: blocks, and the identity by which both ends know that they have
the same bytes.  Guarantee: an identity is offered only while all its bytes are here.  Since receivers compare it with
what they have, deltas are correct across epochs and restarts, whatever the version numbers.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from rlhpc.errors import GroupFailed
from rlhpc.types import WeightManifest
from rlhpc.weights.broadcast_header import identity_of
from rlhpc.weights.buckets import DTYPE_BYTES, buckets_of, layout_digest, manifest_bytes, tensor_bytes
from rlhpc.weights.out_of_memory import room_for

log = logging.getLogger("rlhpc.weights")
NOTHING = 0  # identity of no bytes
MAX_SHARE = 0.5  # of a bucket's bytes: a bucket with a larger delta is sent whole


class HostImage:
    """The bytes of one version, bucket by bucket."""

    def __init__(self, full_every: int) -> None:
        """full_every: one in this many versions is sent whole."""
        self._full_every = full_every
        self._digest: int | None = None
        self._identity = NOTHING
        self._num_deltas = 0  # since a version was sent whole
        self._has_room = True
        self.blocks: list[Tensor] = []

    def offer(self, manifest: WeightManifest) -> int:
        """Identity of the base for a delta of this version; NOTHING if it has to be sent whole."""
        is_due = self._num_deltas + 1 >= self._full_every
        return NOTHING if is_due or self._digest != layout_digest(manifest) else self._identity

    def make_room(self, manifest: WeightManifest) -> bool:
        """Forget the version, keep memory for one of this manifest.  False: deltas would not help, or no room."""
        self.forget()
        digest = layout_digest(manifest)
        if self._digest == digest:
            return True
        if not self._has_room or not is_mostly_16_bit(manifest):
            return False
        self._digest, self.blocks = None, []
        try:
            with room_for(f"a copy of {manifest_bytes(manifest)} bytes for deltas in host memory"):
                self.blocks = [torch.zeros(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets_of(manifest)]
        except GroupFailed as error:
            log.warning("weights are sent whole: %s", error)
            self._has_room, self.blocks = False, []
            return False
        self._digest = digest
        return True

    def forget(self) -> None:
        """The blocks are being overwritten: until `became` they hold no version."""
        self._identity = NOTHING

    def became(self, manifest: WeightManifest, sums: list[int], *, by_delta: bool) -> None:
        """The blocks hold this version, with these checksums."""
        self._identity = identity_of(manifest, sums)
        self._num_deltas = self._num_deltas + 1 if by_delta else 0


def is_mostly_16_bit(manifest: WeightManifest) -> bool:
    """Of float32 numbers nearly all change in every step."""
    small = sum(tensor_bytes(spec) for spec in manifest.tensors if DTYPE_BYTES[spec.dtype] == 2)
    return 2 * small > sum(tensor_bytes(spec) for spec in manifest.tensors)
