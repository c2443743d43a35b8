"""Delta coding of blocks of 16-bit numbers: encode the changes, and apply them to the old block, bit for bit.

Input: a block before and after.  Output: uint8 [n], a multiple of 16, or None if the delta would not be short.  Bits
are compared, so that NaN payloads, signed zeros and gaps between tensors are preserved; a float32 counts as two.
In a step of Adam at usual learning rates, one number in a hundred changes, by one unit in the last place; that takes
two bytes instead of the four for its position and value:

    int64 [3]     number of changes, of bytes of positions, of literal values
    uint16 [wide] literal values, where the difference is 0
    uint8 [skips] numbers to skip before the next change; 255: skip 255, and read on
    uint8 [n]     difference to the old value, 1 … 254 as zigzag (1 → −1, 2 → 1, 3 → −2, …), else 0

Guarantee: malformed input is rejected before the block is touched, whatever the bytes are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.base.native import compiled
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import WeightManifest
from rlhpc.weights.buckets import (
    DTYPE_BYTES,
    SIGN_SHIFT,
    Bucket,
    buckets_of,
    identity_of,
    layout_digest,
    manifest_bytes,
    tensor_bytes,
)
from rlhpc.weights.checksums import checksum64
from rlhpc.weights.group import SideGroup
from rlhpc.weights.memory import fill_block, room_for

# ----------------------------------------------------------------------------------------------------------- host image
#
# The version that was sent last, in host memory of the trainer: the base of the next delta.
#
# Input: manifests and checksums of sent versions; output: blocks, and the identity by which both ends know that they
# have the same bytes.  Guarantee: an identity is offered only while all its bytes are here.  Since receivers compare
# it with what they have, deltas are correct across epochs and restarts, whatever the version numbers.


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
    """True if most bytes are of 16-bit numbers: nearly all float32 numbers change in every step."""
    small = sum(tensor_bytes(spec) for spec in manifest.tensors if DTYPE_BYTES[spec.dtype] == 2)
    return 2 * small > sum(tensor_bytes(spec) for spec in manifest.tensors)


# ---------------------------------------------------------------------------------------------------------- delta codec


HEAD_BYTES = 24
ALIGNMENT_BYTES = 16
SKIP = 255
LARGEST = 254  # zigzag of a difference that fits a byte, 0 left out


class DeltaEncoder:
    """Encodes blocks one after the other; its memory is reused."""

    def __init__(self, max_share: float) -> None:
        """max_share: largest delta, as a share of the block's bytes; larger ones are not coded."""
        self._max_share = max_share
        self._streams: tuple[NDArray[Any], ...] = ()

    def encode(self, old: Tensor, new: Tensor) -> Tensor | None:
        """Code uint8 [n] `new` against `old`, on CPU, n a multiple of 16; `old` becomes `new` in any case.

        Returns None if too much has changed.
        """
        room = int(self._max_share * old.numel()) // 4  # of each stream: together they take four bytes a change
        if not self._streams or len(self._streams[0]) < room:
            self._streams = (np.empty(room, np.uint8), np.empty(room, np.uint8), np.empty(room, np.uint16))
        gaps, small, large = self._streams
        changes, skips, wide = _encode(_words(old), _words(new), gaps, small, large, room)
        if changes < 0:
            old.copy_(new)
            return None
        return _joined(self._streams, int(changes), int(skips), int(wide))


def apply_delta(coded: Tensor, block: Tensor) -> None:
    """Turn uint8 [n] `block` into the new version, in place.  Raises TornWeights; the block is then unchanged."""
    data: NDArray[Any] = coded.numpy()
    head = data[:HEAD_BYTES]
    counts = [int(count) for count in head.view(np.int64)] if head.size == HEAD_BYTES else [-1]
    if min(counts) < 0 or _padded_bytes(*counts) != data.size:
        raise TornWeights(f"a delta of {data.size} bytes does not have the length that it states")
    changes, skips, wide = counts
    start = HEAD_BYTES + 2 * wide
    streams = data[start : start + skips], data[start + skips : start + skips + changes]
    if not _apply(_words(block), *streams, data[HEAD_BYTES:start].view(np.uint16)):
        raise TornWeights(f"a delta of {changes} changes does not fit a block of {block.numel()} bytes")


def num_changes(coded: Tensor) -> int:
    """Number of 16-bit numbers that a delta changes."""
    return int(coded[:8].view(torch.int64).item())


def _joined(streams: tuple[NDArray[Any], ...], changes: int, skips: int, wide: int) -> Tensor:
    data = np.zeros(_padded_bytes(changes, skips, wide), np.uint8)
    data[:HEAD_BYTES].view(np.int64)[:] = changes, skips, wide
    start = HEAD_BYTES + 2 * wide
    data[HEAD_BYTES:start].view(np.uint16)[:] = streams[2][:wide]
    data[start : start + skips] = streams[0][:skips]
    data[start + skips : start + skips + changes] = streams[1][:changes]
    return torch.from_numpy(data)


def _padded_bytes(changes: int, skips: int, wide: int) -> int:
    return -(-(HEAD_BYTES + 2 * wide + skips + changes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _words(block: Tensor) -> NDArray[np.uint16]:
    array: NDArray[np.uint8] = block.numpy()
    return array.view(np.uint16)


@compiled
def _encode(old: Any, new: Any, gaps: Any, small: Any, wide: Any, room: int) -> tuple[int, int, int]:
    """Returns the lengths of the streams, (-1, 0, 0) if one of them would be longer than `room`."""
    num_changes = num_skips = num_wide = 0
    next_place = 0  # after the last change
    old_words, new_words = old.view(np.uint64), new.view(np.uint64)
    for word in range(len(old_words)):
        if old_words[word] == new_words[word]:
            continue
        for place in range(4 * word, 4 * word + 4):
            if old[place] == new[place]:
                continue
            skip = place - next_place
            if num_changes >= room or num_wide >= room or num_skips + skip // SKIP + 1 > room:
                return -1, 0, 0
            for _ in range(skip // SKIP):
                gaps[num_skips] = SKIP
                num_skips += 1
            gaps[num_skips] = skip % SKIP
            num_skips += 1
            difference = np.int64(new[place]) - np.int64(old[place])
            zigzag = 2 * difference if difference > 0 else -2 * difference - 1
            if zigzag <= LARGEST:
                small[num_changes] = zigzag
            else:
                small[num_changes] = 0
                wide[num_wide] = new[place]
                num_wide += 1
            num_changes += 1
            next_place = place + 1
            old[place] = new[place]
    return num_changes, num_skips, num_wide


@compiled
def _apply(block: Any, gaps: Any, small: Any, wide: Any) -> bool:
    """False, and nothing is changed, if the streams do not fit each other and the block."""
    place, num_places, num_wide = 0, 0, 0
    for skip in gaps:
        place += skip
        if skip != SKIP:
            num_places += 1
            place += 1
    for step in small:
        num_wide += step == 0
        if step == SKIP:
            return False
    if place > len(block) or num_places != len(small) or num_wide != len(wide) or (len(gaps) and gaps[-1] == SKIP):
        return False
    place = change = num_wide = 0
    for skip in gaps:
        place += skip
        if skip == SKIP:
            continue
        step = np.int64(small[change])
        if step == 0:
            block[place] = wide[num_wide]
            num_wide += 1
        else:
            difference = step // 2 if step % 2 == 0 else -(step + 1) // 2
            block[place] = np.uint16(np.int64(block[place]) + difference)
        change += 1
        place += 1
    return True


# --------------------------------------------------------------------------------------------------------- group deltas
#
# Send a version as deltas over a process group: both ends.
#
# Input: blocks that hold the same version on all ranks; output: the next version in them.  For every bucket two
# broadcasts: int64 [2], bytes of the delta (0: too much has changed) and its checksum; then the delta, or the whole
# bucket.  A bucket is sent while the next is compared.


class OutOfStep(Exception):
    """This rank does not know what is broadcast next, and must leave the group."""


def send_deltas(
    group: SideGroup, buckets: tuple[Bucket, ...], weights: Iterator[tuple[str, Tensor]], image: list[Tensor]
) -> tuple[list[int], int]:
    """Broadcast the changes to the image, which becomes the new version.

    Returns the checksums of the whole buckets, and the bytes sent.  Raises GroupFailed.
    """

    encoder, sums, num_bytes = DeltaEncoder(MAX_SHARE), list[int](), 0
    largest = max((bucket.num_bytes for bucket in buckets), default=0)
    with room_for(f"a bucket of {largest} bytes on the trainer"):
        scratch = torch.zeros(largest, dtype=torch.uint8)
    arrivals: list[list[Callable[[], None]]] = []
    try:
        for bucket, block in zip(buckets, image, strict=True):
            fresh = scratch[: bucket.num_bytes]
            fill_block(bucket, weights, fresh)
            coded = encoder.encode(block, fresh)
            sent = block if coded is None else coded
            head = [0, 0] if coded is None else [coded.numel(), checksum64(coded) - SIGN_SHIFT]
            if len(arrivals) > 1:
                _finish(arrivals.pop(0))
            arrivals.append([group.begin_broadcast(torch.tensor(head)), group.begin_broadcast(sent)])
            num_bytes += sent.numel()
            sums.append(checksum64(block))
        for each in arrivals:
            _finish(each)
    finally:
        arrivals.clear()  # as in broadcast.py
    return sums, num_bytes


def _finish(waits: list[Callable[[], None]]) -> None:
    for wait in waits:
        wait()


class DeltaArrivals:
    """The receiving end, for one version."""

    def __init__(self, broadcast: Callable[[Tensor], None], largest: int) -> None:
        """broadcast: takes part in one.  largest: bytes of a bucket.  Raises GroupFailed: no room."""
        self._broadcast = broadcast
        with room_for("a delta"):
            self._memory = torch.empty(int(MAX_SHARE * largest) + 64, dtype=torch.uint8)

    def receive(self, block: Tensor) -> Callable[[], None]:
        """Receive one bucket.  Returns a function that updates the block (may raise TornWeights).

        A bucket that is sent whole is in the block already.  Raises OutOfStep.
        """
        head = torch.zeros(2, dtype=torch.int64)
        self._broadcast(head)
        size, want = int(head[0]), int(head[1]) + SIGN_SHIFT
        if not 0 <= size <= self._memory.numel():
            raise OutOfStep(f"a delta of {size} bytes for a bucket of {block.numel()}")
        coded = self._memory[:size]
        self._broadcast(coded if size else block)

        def put() -> None:

            if size and (got := checksum64(coded)) != want:
                raise TornWeights(f"a delta has checksum {got:016x}, not {want:016x}")
            if size:
                apply_delta(coded, block)

        return put
