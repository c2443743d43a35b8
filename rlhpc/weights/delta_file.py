"""A delta as the content of a file: for whom it is, its checksum, and what has changed (delta_codec.py).

int64 [2]    identity of the version that it is coded against, checksum of the rest
uint8 [n]
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhpc.errors import TornWeights
from rlhpc.weights.broadcast_header import SIGN_SHIFT
from rlhpc.weights.checksum import checksum64
from rlhpc.weights.delta_codec import apply_delta

HEAD_BYTES = 16


def with_head(base: int, coded: Tensor) -> Tensor:
    """uint8 [n] → uint8 [16 + n]."""
    head = torch.tensor([base, checksum64(coded) - SIGN_SHIFT], dtype=torch.int64)
    return torch.cat([head.view(torch.uint8), coded])


def put_delta(content: Tensor, held: int | None, block: Tensor) -> None:
    """Make the block of version `held` the next one.  Raises TornWeights; then the block is as it was."""
    if content.numel() < HEAD_BYTES:
        raise TornWeights(f"a delta of {content.numel()} bytes has no head")
    base, published = content[:HEAD_BYTES].clone().view(torch.int64).tolist()
    if base != held:
        raise TornWeights(f"a delta for who holds {base:x}, and here is {held or 0:x}")
    coded = content[HEAD_BYTES:]
    if (got := checksum64(coded)) != (want := published + SIGN_SHIFT):
        raise TornWeights(f"a delta has checksum {got:016x}, not {want:016x}")
    apply_delta(coded, block)
