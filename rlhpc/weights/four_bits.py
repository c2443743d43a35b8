"""Matrices in four bits: bitsandbytes' NF4 with quantised scales (Dettmers et al. 2023, arXiv:2305.14314), and MXFP4,
in which gpt-oss is published (OCP Microscaling Formats, version 1.0, §5.3 and §6.3).

Input: a matrix.  Output: packed numbers and scales, and the matrix that they unpack to, with the same bits every time.
Trainer, engine and export make a frozen base from the same files by these, and so compute with the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign
SCALE_BIAS = 127


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


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack the matrices of experts, bfloat16 [E, columns, rows]: as gpt-oss has them without quantisation.

    blocks: uint8 [E, rows, columns / 32, 16], two numbers a byte, the lower four bits first; scales: uint8, exponents
    of 2 for 32 numbers each.
    """
    values = torch.tensor([*FP4, *(-each for each in FP4)], device=blocks.device)

    def of_expert(packed: Tensor, exponents: Tensor) -> Tensor:
        numbers = values[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
        exponents = exponents.int()[..., None] - SCALE_BIAS
        return torch.ldexp(numbers, exponents).to(torch.bfloat16).flatten(-2).t()

    return torch.stack([of_expert(*pair) for pair in zip(blocks, scales, strict=True)])
