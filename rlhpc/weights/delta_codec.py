"""Delta coding of blocks of 16-bit numbers: encode the changes, and apply them to the old block, bit for bit.

Input: a block before and after.  Output: uint8 [n], a multiple of 16, or None if the delta would not be short.  Bits
are compared, so that NaN payloads, signed zeros and gaps between tensors are preserved; a float32 counts as two.
In a step of Adam at usual learning rates, one number in a hundred changes, by one unit in the last place; that takes
two bytes instead of the four for its position and value:

    int64 [3]     number of changes, of bytes of positions, of literal values
    uint16 [wide] literal values, where the difference is 0
    uint8 [skips] numbers to skip before the next change; 255: skip 255, and read on
    uint8 [n]     difference to the old value, 1 … 254 as zigzag (1 → −1, 2 → 1, 3 → −2, …), else 0

Guarantee: malformed input is rejected before the block is touched, whatever the bytes are.  Numba compiles at the first
call (rlhpc/compiled.py); importing it takes half a second, so other modules import this one lazily.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.compiled import compiled
from rlhpc.errors import TornWeights

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
