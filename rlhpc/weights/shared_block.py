"""One block of bytes that several processes of a machine see.

On CUDA: device memory, opened elsewhere by its IPC handle.  On CPU: a file mapped by all; there for tests, and so that
the protocol above it runs the same lines on both.  A handle is JSON; nothing here is pickled.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def make_block(num_bytes: int, device: torch.device, directory: Path, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Allocate uint8 [num_bytes] and return it with its handle.  The caller keeps the tensor while others use it."""
    if device.type == "cuda":
        # A storage of its own: an IPC handle opens a whole allocation, and the caching allocator packs small ones.
        block = torch.empty(max(num_bytes, 2 << 20), dtype=torch.uint8, device=device)
        return block[:num_bytes], {"num_bytes": num_bytes, "cuda": _cuda_handle(block)}
    path = directory / f"{name}.block"
    path.unlink(missing_ok=True)
    return _mapped(path, num_bytes), {"num_bytes": num_bytes, "file": str(path)}


def open_block(handle: dict[str, Any], device: torch.device) -> Tensor:
    """The same bytes in another process, uint8 [num_bytes].  Raises RuntimeError if the handle is stale."""
    num_bytes = int(handle["num_bytes"])
    if "file" in handle:
        return _mapped(Path(handle["file"]), num_bytes)
    fields = [base64.b64decode(field[1:]) if isinstance(field, str) else field for field in handle["cuda"]]
    fields[0] = device.index or 0  # the same GPU may have another index in this process
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def discard_block(handle: dict[str, Any]) -> None:
    """Remove the file behind a CPU block; CUDA memory goes with its tensor."""
    if "file" in handle:
        Path(handle["file"]).unlink(missing_ok=True)


def _cuda_handle(block: Tensor) -> list[Any]:
    """What torch.multiprocessing pickles for a CUDA storage, as JSON: bytes become "b" + base64.

    Fails under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose memory has no classic IPC handle.
    """
    storage: Any = block.untyped_storage()
    fields = storage._share_cuda_()
    return ["b" + base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def _mapped(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
