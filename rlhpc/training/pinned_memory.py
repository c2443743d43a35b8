"""Page-locked host memory of exactly the requested size, for direct copies from and to a GPU.

torch's own pinned memory is rounded up to powers of two, up to twice the requested size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pin(buffer: Tensor) -> int:
    """Pin a buffer of the host; return its address, for unpin()."""
    address = buffer.data_ptr()
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, buffer.numel() * buffer.element_size(), 0))  # type: ignore[no-untyped-call]
    return address


def unpin(address: int) -> None:
    """Undo pin(), before the buffer is freed."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
