"""Matrices in four bits: bitsandbytes' NF4 with quantised scales (Dettmers et al. 2023, arXiv:2305.14314).

Input: a matrix.  Output: packed numbers and scales, and the matrix that they unpack to, with the same bits every time.
Trainer, engine and export make a frozen base from the same files by these, and so compute with the same weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def in_four_bits(weight: Tensor) -> tuple[Tensor, Any]:
    """A matrix of any dtype as packed numbers and their scales, on its device."""
    from bitsandbytes.functional import quantize_4bit  # of an extra

    packed, scales = quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True)
    return packed, scales


def unpacked(packed: Tensor, scales: Any) -> Tensor:
    """The matrix in the dtype it had."""
    from bitsandbytes.functional import dequantize_4bit  # of an extra

    whole: Tensor = dequantize_4bit(packed, scales)
    return whole
