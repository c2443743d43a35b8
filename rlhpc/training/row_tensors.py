"""A packed micro-batch as tensors, and its predictable tokens: what every backend computes its loss from.

Input: PackedMicrobatch.  Output: tensors on a device.  T: tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhpc.contracts import TokenRow
from rlhpc.types import Int32, PackedMicrobatch


def on_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy an array to `device`, in the order of its current stream; the host does not wait for it.

    Through page-locked memory: a copy from other memory waits until the GPU has done everything before it, and the host
    could not prepare the next row meanwhile.  torch keeps the memory until the copy has ended.  The array itself is
    never shared: arrays of a message are read-only, which torch cannot express for tensors.
    """
    own = torch.from_numpy(array.copy())
    return own if device.type == "cpu" else own.pin_memory().to(device, non_blocking=True)


def all_but_first(microbatch: PackedMicrobatch) -> NDArray[np.bool_]:
    """bool [T]: tokens that have others before them in their segment."""
    wanted = np.ones(len(microbatch.token_ids), dtype=bool)
    wanted[microbatch.cu_seqlens[:-1]] = False
    return wanted


def plain_row(token_ids: Int32) -> PackedMicrobatch:
    """One sequence of which no token counts in a loss."""
    length = len(token_ids)
    return PackedMicrobatch(
        token_ids=token_ids,
        position_ids=np.arange(length, dtype=np.int32),
        cu_seqlens=np.array([0, length], np.int32),
        loss_mask=np.zeros(length, np.bool_),
        behaviour_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        loss_weights=np.ones(1, np.float32),
    )


def scattered(
    logprobs: Tensor, entropy: Tensor | None, places: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T] with these values, [N] each, at `places` and 0 elsewhere; and the sum of entropies, detached."""
    row = logprobs.new_zeros(num_tokens)
    if entropy is None:
        return row.index_copy(0, places, logprobs), row, row.new_zeros(())
    return row.index_copy(0, places, logprobs), row.index_copy(0, places, entropy), entropy.detach().sum()


def token_row(
    microbatch: PackedMicrobatch, entropy: Tensor, *, proximal: Tensor | None, reference: Tensor | None = None
) -> TokenRow:
    """What a loss gets, on the device of `entropy`, float32 [T]; see TokenRow, and TrainerBackend.step."""
    device = entropy.device
    loss_mask = on_device(microbatch.loss_mask, device)
    behaviour = on_device(microbatch.behaviour_logprobs, device)
    sequence = np.repeat(np.arange(len(microbatch.loss_weights)), np.diff(microbatch.cu_seqlens))
    return TokenRow(
        behaviour=behaviour,
        # current is 0 off the loss mask, so these must be too: exp(0 − (−100)) is inf, and inf · 0 is nan.
        proximal=behaviour if proximal is None else torch.where(loss_mask, proximal.to(device), 0.0),
        reference=behaviour if reference is None else torch.where(loss_mask, reference.to(device), 0.0),
        entropy=entropy,
        advantages=on_device(microbatch.advantages, device),
        loss_mask=loss_mask,
        versions=on_device(microbatch.versions, device),
        weights=on_device(microbatch.loss_weights[sequence], device),
        sequence=on_device(sequence, device),
        num_sequences=len(microbatch.loss_weights),
    )


def of_row(rows: Sequence[Tensor] | None, index: int) -> Tensor | None:
    """The row at this index; None if there are no rows."""
    return None if rows is None else rows[index]
