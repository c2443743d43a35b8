"""A 64-bit checksum of a block of bytes, the same on CPU and CUDA.

Input: a flat uint8 tensor.  Output: an int.  Guards against broken transfers and files, not against forgery.
65,536 lanes of 64-bit words: Horner's rule with an odd factor in each lane, then the lanes are mixed with their number
and summed.  A flip of one bit always changes the result; swaps, shifts and longer damage go unnoticed with probability
2^-64, except that two flips of the highest bit in the same lane cancel.  Runs at about memory speed: on CPU one fused
pass per 512 KiB, whose lanes stay in the cache, compiled for large inputs; on a GPU, where a launch costs more than
such a pass, rows are folded in pairs: about ten launches per 64 MiB, and 50 % extra memory.  All give the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.base.native import compiled
from rlhpc.protocol.types import HeldChecksum

# ------------------------------------------------------------------------------------------------------- checksum lanes
#
# The lanes of a checksum, compiled: on data in the cache three times as fast as torch's int64 products.
#
# The first call loads numba, which takes half a second, and compiles once per installation.


def fold(words: Tensor, lanes: Tensor, factor: int) -> None:
    """int64 [n], int64 [NUM_LANES], on CPU: Horner's rule, row after row; `lanes` is overwritten."""
    _fold(words.numpy().view(np.uint64), lanes.numpy().view(np.uint64), np.uint64(factor % (1 << 64)))


def copy_and_fold(source: Tensor, target: Tensor, lanes: Tensor, factor: int) -> None:
    """Copy int64 [n] to int64 [n] on CPU, n a multiple of NUM_LANES, and fold it in the same pass."""
    words, copies = source.numpy().view(np.uint64), target.numpy().view(np.uint64)
    _copy_and_fold(words, copies, lanes.numpy().view(np.uint64), np.uint64(factor % (1 << 64)))


@compiled
def _fold(words: Any, lanes: Any, factor: Any) -> None:
    width = len(lanes)
    for start in range(0, len(words), width):
        row = words[start : start + width]
        for lane in range(len(row)):
            lanes[lane] = row[lane] + factor * lanes[lane]


@compiled
def _copy_and_fold(words: Any, copies: Any, lanes: Any, factor: Any) -> None:
    width = len(lanes)
    for start in range(0, len(words), width):
        row, copy = words[start : start + width], copies[start : start + width]
        for lane in range(width):
            word = row[lane]
            copy[lane] = word
            lanes[lane] = word + factor * lanes[lane]


# -------------------------------------------------------------------------------------------------------- held checksum
#
# A checksum of all parameters that an engine holds, however it transformed the tensors that it received.
#
# Input: tensors on any device.  Output: HeldChecksum.  The sum of all their memory as 64-bit words: independent of the
# order of the tensors, so that the sums of an engine's workers can be added.  It detects every single changed bit but
# no swapped words; the canary is for those.  One pass over the memory; only trailing bytes that do not fill a word are
# copied.


MASK = (1 << 64) - 1
WORD_BYTES = 8


def checksum_of(tensors: Iterable[Tensor]) -> tuple[int, dict[str, int]]:
    """Sum of the words modulo 2^64, and how many numbers of each dtype were summed.  Waits once for the device."""
    sums: list[Tensor] = []
    counts = Counter[str]()
    for tensor in tensors:
        counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        data = _in_memory_order(tensor).view(torch.uint8)
        num_whole = data.numel() // WORD_BYTES * WORD_BYTES
        sums.append(_words(data[:num_whole]).sum())
        if num_whole < data.numel():
            end = data[num_whole:]
            sums.append(_words(torch.nn.functional.pad(end, (0, WORD_BYTES - end.numel()))).sum())
    total = int(torch.stack(sums).sum().item()) if sums else 0
    return total & MASK, {name: count for name, count in sorted(counts.items()) if count}


def joined(parts: Sequence[tuple[int, dict[str, int]]], device: str) -> HeldChecksum:
    """The checksum of an engine with these workers."""
    counts = sum((Counter(part) for _, part in parts), Counter[str]())
    numbers = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return HeldChecksum(sum(value for value, _ in parts) & MASK, f"{device}, {len(parts)} workers, {numbers}")


def _words(data: Tensor) -> Tensor:
    """uint8 [8 n] → int64 [n]; a view where the address allows."""
    aligned = data.data_ptr() % WORD_BYTES == 0 and data.storage_offset() % WORD_BYTES == 0
    return (data if aligned else data.clone()).view(torch.int64)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor flattened: a view if it is in memory without gaps, in any order."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1)


# ------------------------------------------------------------------------------------------------------------- checksum


NUM_LANES = 1 << 16
ROW_BYTES = 8 * NUM_LANES
COMPILED_WORDS = 8 * NUM_LANES  # 4 MiB
MOST_ROWS = 128  # 64 MiB

# Signed, since torch has no arithmetic on uint64; it wraps around as two's complement.
HORNER_FACTOR = 0xD1342543DE82EF95 - (1 << 64)  # odd: multiplication loses nothing
LANE_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio


def checksum64(data: Tensor) -> int:
    """Checksum of uint8 [n] (contiguous); its length counts.  Returns an int in [0, 2^64)."""
    running = RunningChecksum(data.device)
    running.add(data)
    return running.value()


class RunningChecksum:
    """The checksum of a block that arrives in pieces: each is read while it is still in the cache."""

    def __init__(self, device: torch.device) -> None:
        """device: where the pieces are."""
        self._lanes = torch.zeros(NUM_LANES, dtype=torch.int64, device=device)
        self._num_bytes = 0

    def add(self, piece: Tensor) -> None:
        """Add uint8 [n], contiguous.  n is a multiple of ROW_BYTES, except in the last piece."""
        if piece.dtype != torch.uint8 or piece.dim() != 1 or not piece.is_contiguous():
            raise ValueError(f"a checksum needs contiguous flat bytes, not {piece.dtype} {tuple(piece.shape)}")
        if self._num_bytes % ROW_BYTES:
            raise ValueError(f"a piece of {piece.numel()} bytes after {self._num_bytes}, not a multiple of {ROW_BYTES}")
        self._num_bytes += piece.numel()
        words = _as_words(piece)
        go_on = lanes_in_order if piece.device.type == "cpu" else lanes_by_halves
        self._lanes = go_on(words, self._lanes)

    def copy(self, piece: Tensor, target: Tensor) -> None:
        """Copy uint8 [n] to `target`, and add it as `add` does; on CPU in one pass if it is large."""
        is_much = piece.numel() % ROW_BYTES == 0 and piece.numel() >= 8 * COMPILED_WORDS
        if is_much and all(part.device.type == "cpu" and part.data_ptr() % 8 == 0 for part in (piece, target)):
            copy_and_fold(piece.view(torch.int64), target.view(torch.int64), self._lanes, HORNER_FACTOR)
            self._num_bytes += piece.numel()
            return
        target.copy_(piece)
        self.add(target)

    def value(self) -> int:
        """The checksum of all pieces concatenated, as of checksum64."""
        steps = torch.arange(NUM_LANES, dtype=torch.int64, device=self._lanes.device) * LANE_STEP
        total = int(_mix(self._lanes + steps).sum().item())
        return (total ^ (self._num_bytes * 0xBF58476D1CE4E5B9)) & MASK


def lanes_in_order(words: Tensor, lanes: Tensor) -> Tensor:
    """int64 [n], int64 [NUM_LANES] → int64 [NUM_LANES]: Horner's rule, row after row; `lanes` is overwritten."""
    if words.numel() >= COMPILED_WORDS and words.device.type == "cpu":
        fold(words, lanes, HORNER_FACTOR)
        return lanes
    for row in torch.split(words, NUM_LANES):
        head = lanes[: row.numel()]
        torch.add(row, head, alpha=HORNER_FACTOR, out=head)
    return lanes


def lanes_by_halves(words: Tensor, lanes: Tensor) -> Tensor:
    """lanes_in_order in few launches: adjacent rows are combined, then adjacent pairs, and so on."""
    num_whole = words.numel() // NUM_LANES
    rows = words[: num_whole * NUM_LANES].view(num_whole, NUM_LANES)
    while len(rows):
        count = min(MOST_ROWS, 1 << (len(rows).bit_length() - 1))  # a power of two
        lanes = torch.add(_joined(rows[:count]), lanes, alpha=_signed(pow(HORNER_FACTOR, count, 1 << 64)))
        rows = rows[count:]
    rest = words[num_whole * NUM_LANES :]
    head = lanes[: rest.numel()]
    torch.add(rest, head, alpha=HORNER_FACTOR, out=head)
    return lanes


def _joined(rows: Tensor) -> Tensor:
    """int64 [a power of two, NUM_LANES] → int64 [NUM_LANES]."""
    factor = HORNER_FACTOR
    while len(rows) > 1:
        rows = torch.add(rows[1::2], rows[0::2], alpha=factor)
        factor = _signed(pow(factor, 2, 1 << 64))
    return rows[0]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _as_words(data: Tensor) -> Tensor:
    """int64 [ceil(n / 8)], zeros appended; a view where address and length allow."""
    if data.numel() % 8 == 0 and data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    padded = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    return padded.view(torch.int64)


def _mix(lanes: Tensor) -> Tensor:
    """A bijection of 64-bit words that carries high bits down and low bits up (finaliser of MurmurHash3)."""
    for factor in (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)):
        lanes = lanes ^ ((lanes >> 33) & 0x7FFFFFFF)  # masked: torch shifts the sign in
        lanes = lanes * factor
    return lanes ^ ((lanes >> 33) & 0x7FFFFFFF)
