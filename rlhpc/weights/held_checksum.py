"""A checksum of all parameters that an engine holds, however it transformed the tensors that it received.

Input: tensors on any device.  Output: HeldChecksum.  The sum of all their memory as 64-bit words: independent of the
order of the tensors, so that the sums of an engine's workers can be added.  It detects every single changed bit but no
swapped words; the canary is for those.  One pass over the memory; only trailing bytes that do not fill a word are
copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlhpc.types import HeldChecksum

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
