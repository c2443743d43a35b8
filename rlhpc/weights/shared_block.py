"""A block of bytes shared by several processes of a machine.

On CUDA: device memory, which others open by its IPC handle.  On CPU: an unnamed file (memfd), which others open through
/proc and which vanishes with the last process that has it open, however that ends.  A handle is JSON; nothing is
pickled.
"""

from __future__ import annotations

import base64
import mmap
import os
from typing import Any

import torch
from torch import Tensor


def make_block(num_bytes: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Allocate uint8 [num_bytes] and return it with its handle.  The caller keeps the tensor while others use it.

    On CPU all its pages are mapped afterwards: the first touch of fresh memory is ten times slower than a copy.
    """
    if device.type == "cuda":
        # A separate storage: an IPC handle opens a whole allocation, and the caching allocator packs small ones.
        block = torch.empty(max(num_bytes, 2 << 20), dtype=torch.uint8, device=device)
        return block[:num_bytes], {"num_bytes": num_bytes, "cuda": _cuda_handle(block)}
    descriptor = os.memfd_create("rlhpc-weights")
    try:
        os.ftruncate(descriptor, max(num_bytes, 1))
        block = _mapped(descriptor, num_bytes).fill_(0)
    except BaseException:
        os.close(descriptor)
        raise
    return block, {"num_bytes": num_bytes, "file": f"/proc/{os.getpid()}/fd/{descriptor}", "descriptor": descriptor}


def open_block(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The same bytes in another process, uint8 [num_bytes].  Raises RuntimeError or OSError if the handle is stale."""
    num_bytes = int(handle["num_bytes"])
    if "file" in handle:
        descriptor = os.open(handle["file"], os.O_RDWR)
        try:
            return _mapped(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    fields = [base64.b64decode(field[1:]) if isinstance(field, str) else field for field in handle["cuda"]]
    fields[0] = device.index or 0  # the same GPU may have another index in this process
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def discard_block(handle: dict[str, Any]) -> None:
    """In the process that made a block: stop others from opening it.  Its tensors still keep the memory."""
    if "descriptor" in handle:
        os.close(handle["descriptor"])


def _cuda_handle(block: Tensor) -> list[Any]:
    """What torch.multiprocessing pickles for a CUDA storage, as JSON: bytes become "b" + base64.

    Fails under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose memory has no classic IPC handle.
    """
    storage: Any = block.untyped_storage()
    fields = storage._share_cuda_()
    return ["b" + base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    """Raises OSError or ValueError if there is no such memory."""
    return torch.frombuffer(mmap.mmap(descriptor, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]
