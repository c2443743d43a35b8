"""Packed attention for any HF model that honours the attention interface.

Importing this module registers it under the name PACKED_ATTENTION; a SegmentPlan travels to every layer through the
model's keyword arguments.  Apart from packed_attention.py, since it loads all that transformers needs for models.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from rlhpc.training.packed_attention import packed_attention

PACKED_ATTENTION = "rlhpc_packed"


def _no_mask(*_: Any, **__: Any) -> None:
    """The plan replaces the mask: HF must not build a [T, T] mask."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
