"""A delta as the content of a file: its base version, its checksum, and the changes (delta_codec.py).

int64 [2]    identity of the base version, checksum of the rest
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
    """Turn the block of version `held` into the next one.  Raises TornWeights; the block is then unchanged."""
    if content.numel() < HEAD_BYTES:
        raise TornWeights(f"a delta of {content.numel()} bytes has no head")
    base, published = content[:HEAD_BYTES].clone().view(torch.int64).tolist()
    if base != held:
        raise TornWeights(f"a delta based on {base:x}, but this receiver has {held or 0:x}")
    coded = content[HEAD_BYTES:]
    if (got := checksum64(coded)) != (want := published + SIGN_SHIFT):
        raise TornWeights(f"a delta has checksum {got:016x}, not {want:016x}")
    apply_delta(coded, block)
