"""Name a device, so that two processes can tell whether they use the same one.

Input: a torch device.  Output: "" for a CPU, else the UUID of a GPU, or the name of a GPU partition (MIG); behind it,
where NCCL_HOSTID is set, "@" and the host that this process is to NCCL (choice.py).
"""

from __future__ import annotations

import os

import torch

from rlhpc.weights.choice import CPU, HOST, MIG


def device_id(device: torch.device | str) -> str:
    """The name.  Initialises CUDA for a CUDA device."""
    device = torch.device(device)
    if device.type == "cpu":
        return CPU
    index = device.index if device.index is not None else torch.cuda.current_device()
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    word = words[index].strip() if index < len(words) else ""
    # Partitions of a GPU may report the UUID of the whole; their processes know them by name.
    name = word if word.startswith(MIG) else f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    host = os.environ.get("NCCL_HOSTID", "")
    return f"{name}{HOST}{host}" if host else name
